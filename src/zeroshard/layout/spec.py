"""ParamSpec: what a layout knows about a parameter (shape, strides, dtype, group), without its tensor."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .chunks import storage_numel

ParamAttrs = tuple[tuple[str, float], ...]
"""Names and values of the attributes that a user set on a parameter."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, as it was when the optimizer was built."""

    index: int
    name: str | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: int
    trainable: bool
    attrs: ParamAttrs = ()

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def storage_numel(self) -> int:
        """Memory elements from the first to the last element: more than `numel` where the strides leave gaps."""
        return storage_numel(self.shape, self.stride)

    @cached_property
    def storage_bytes(self) -> int:
        return self.storage_numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in row-major order, without gaps."""
        contiguous, numel = [], 1
        for size in reversed(self.shape):
            contiguous.append(numel)
            numel *= size
        dims = zip(self.shape, self.stride, reversed(contiguous), strict=True)
        return all(size == 1 or step == expected for size, step, expected in dims)

    @property
    def label(self) -> str:
        """The name of the parameter in error messages."""
        return f"parameter {self.index}" + (f" ({self.name})" if self.name else "")

    def describe(self) -> str:
        """Return one line that must be equal on all ranks. Device indices may differ, device types may not."""
        dtype = str(self.dtype).removeprefix("torch.")
        state = "trainable" if self.trainable else "frozen"
        return (
            f"{self.label} in group {self.group}: shape {self.shape}, strides {self.stride}, "
            f"{dtype} on {self.device.type}, {state}"
        )


def make_param_specs(
    groups: Iterable[Mapping[str, Any]], *, first_index: int = 0, first_group: int = 0
) -> tuple[ParamSpec, ...]:
    """Return the specs of all parameters of `groups`, numbered in order from `first_index` and `first_group`."""
    specs: list[ParamSpec] = []
    for group_index, group in enumerate(groups, first_group):
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            specs.append(_make_param_spec(first_index + len(specs), name, param, group_index))
    return tuple(specs)


def _make_param_spec(index: int, name: str | None, param: torch.Tensor, group: int) -> ParamSpec:
    # Sparse tensors have no strides. They get an index like the others, so that the error that rejects them has a name.
    stride = param.stride() if param.layout == torch.strided else ()
    shape, trainable = tuple(param.shape), param.requires_grad
    return ParamSpec(index, name, shape, stride, param.dtype, param.device, group, trainable, read_param_attrs(param))


def read_param_attrs(param: torch.Tensor) -> ParamAttrs:
    """Return the numbers and flags that the user set on a parameter, such as `param.lr_mul = 10.0`.

    An optimizer may read them. Names with an underscore belong to frameworks, and other values may keep a model alive.
    """
    numbers = ((name, value) for name, value in vars(param).items() if type(value) in (bool, int, float))
    return tuple(sorted((name, value) for name, value in numbers if not name.startswith("_")))
