"""A model as far as memory is concerned: names, shapes and dtypes of its parameters."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..errors import ConfigError
from ..layout.spec import ParamSpec

_BLOCK_PREFIX = re.compile(r"^(?:\w+\.)*?(?:\w+_)?\d+(?=\.)")
"""The beginning of a name up to its first number, as in `h.3.` and `encoder_layer_3.`: one of a list of blocks."""


@dataclass(frozen=True)
class ParamShape:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to_meta_param(self) -> torch.nn.Parameter:
        """A parameter of this shape, without memory."""
        return torch.nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.trainable)


@dataclass(frozen=True)
class ModelShape:
    """Parameters in the order of the model, and the bytes of its buffers."""

    name: str
    params: tuple[ParamShape, ...]
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.params:
            raise ConfigError(f"{self.name} has no parameters of floating-point numbers: there is nothing to train")

    @classmethod
    def from_module(cls, module: torch.nn.Module, name: str | None = None) -> "ModelShape":
        """That of a module, which may be on the meta device."""
        params = [
            ParamShape(label, tuple(it.shape), it.dtype, it.requires_grad) for label, it in module.named_parameters()
        ]
        buffers = sum(it.nbytes for it in module.buffers())
        return cls(name or type(module).__name__, tuple(params), buffers)

    def cast(self, dtype: torch.dtype) -> "ModelShape":
        """With all floating-point parameters in another dtype."""
        cast = [replace(it, dtype=dtype) if it.dtype.is_floating_point else it for it in self.params]
        return replace(self, params=tuple(cast))

    @property
    def numel(self) -> int:
        return sum(it.numel for it in self.params)

    @property
    def trainable_params(self) -> list[ParamShape]:
        return [it for it in self.params if it.trainable]

    @cached_property
    def blocks(self) -> list[list[ParamShape]]:
        """Parameters whose names begin with the same number in a list, such as `layers.3.`; first those of none."""
        found: dict[str, list[ParamShape]] = defaultdict(list, {"": []})
        for it in self.params:
            match = _BLOCK_PREFIX.match(it.name)
            found[match.group() if match else ""].append(it)
        return list(found.values())


def make_param_specs(groups: Iterable[Iterable[ParamShape]], device: torch.device) -> list[ParamSpec]:
    """As a layout knows them, dense, numbered group after group."""
    members = [(number, it) for number, group in enumerate(groups) for it in group]
    return [
        ParamSpec(index, it.name, it.shape, _contiguous_strides(it.shape), it.dtype, device, number, it.trainable)
        for index, (number, it) in enumerate(members)
    ]


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
