"""Parameter specs without parameters."""

from itertools import accumulate

import torch

from zeroshard.layout.specs import ParamSpec


def spec(
    index: int = 0,
    shape: tuple[int, ...] = (4,),
    *,
    stride: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    group: int = 0,
    trainable: bool = True,
    name: str | None = None,
) -> ParamSpec:
    """A parameter as an optimizer would see it; contiguous unless told otherwise."""
    if stride is None:
        inner = [max(1, size) for size in shape[:0:-1]]
        stride = tuple(accumulate(inner, lambda a, b: a * b, initial=1))[::-1] if shape else ()
    return ParamSpec(index, name, shape, stride, dtype, torch.device(device), group, trainable)


def specs(sizes: list[int], *, group: int = 0, first: int = 0, trainable: bool = True) -> list[ParamSpec]:
    """Flat parameters of these sizes."""
    return [spec(first + i, (size,), group=group, trainable=trainable) for i, size in enumerate(sizes)]
