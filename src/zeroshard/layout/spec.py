"""What a layout needs to know of a parameter."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .chunks import storage_numel

ParamAttrs = tuple[tuple[str, float], ...]
"""Names and values."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as it was when the optimizer was built."""

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
        """Elements of memory between its first and its last: more than `numel` where the strides leave gaps."""
        return storage_numel(self.shape, self.stride)

    @cached_property
    def storage_bytes(self) -> int:
        return self.storage_numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Its elements lie in memory in their own order, without gaps."""
        steps, expected = [], 1
        for size in reversed(self.shape):
            steps.append(expected)
            expected *= size
        return all(size == 1 or it == step for size, it, step in zip(self.shape, self.stride, steps[::-1], strict=True))

    @property
    def label(self) -> str:
        """How errors call it."""
        return f"parameter {self.index}" + (f" ({self.name})" if self.name else "")

    def describe(self) -> str:
        """All that must be equal on every rank, in one line. Device numbers may differ, kinds may not."""
        kind = str(self.dtype).removeprefix("torch.")
        trains = "trainable" if self.trainable else "frozen"
        return (
            f"{self.label} in group {self.group}: shape {self.shape}, strides {self.stride}, "
            f"{kind} on {self.device.type}, {trains}"
        )


def make_param_specs(
    groups: Iterable[Mapping[str, Any]], *, first_index: int = 0, first_group: int = 0
) -> tuple[ParamSpec, ...]:
    """Number the parameters of `groups` in order, starting at the given index and group."""
    specs: list[ParamSpec] = []
    for number, group in enumerate(groups, first_group):
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            specs.append(_make_param_spec(first_index + len(specs), name, param, number))
    return tuple(specs)


def _make_param_spec(index: int, name: str | None, param: torch.Tensor, group: int) -> ParamSpec:
    # Sparse tensors have no strides; they are numbered like the others, so that a refusal can name them.
    stride = param.stride() if param.layout == torch.strided else ()
    shape, trains = tuple(param.shape), param.requires_grad
    return ParamSpec(index, name, shape, stride, param.dtype, param.device, group, trains, read_param_attrs(param))


def read_param_attrs(param: torch.Tensor) -> ParamAttrs:
    """Numbers and flags that its user has put on it, such as `param.lr_mul = 10.0`: an optimizer may look for them.

    Private names are those of frameworks, and other values may keep a model alive.
    """
    found = ((name, value) for name, value in vars(param).items() if type(value) in (bool, int, float))
    return tuple(sorted((name, value) for name, value in found if not name.startswith("_")))
