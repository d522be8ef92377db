"""What is to be trained, how: all that estimates of every way of training have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..config import ZeroConfig, refuse_policies
from ..dividing import Division
from ..errors import ConfigError
from ..layout.specs import ParamSpec
from ..rules import Rule, class_names, divide
from ..runtime.fused import leaves_open
from ..runtime.inner import Factory, Recipe
from ..runtime.parts import Kind
from .meter import Meter, Shape
from .shapes import ModelShape, ParamShape, specs_of
from .usage import Network

Tensor = tuple[ParamSpec, tuple[int, ...]]
"""One that an optimizer updates: a parameter that it is, or is a part of, and its shape."""


@dataclass(frozen=True)
class Training:
    """A model, its optimizers, and where it is trained."""

    model: ModelShape
    optimizer_class: Factory | Sequence[Rule]
    options: dict[str, Any]
    config: ZeroConfig
    device: torch.device
    network: Network
    activations: int = 0
    shard_within: int | None = None

    def check(self) -> None:
        """Raise what making the optimizer would raise."""
        if self.shard_within is not None and (type(self.shard_within) is not int or self.shard_within < 1):
            raise ConfigError(f"plan(shard_within=...) takes a number of ranks from 1 on, not {self.shard_within!r}")
        if self.shard_within is None and self.network.within is not None:
            raise ConfigError(
                "a bandwidth inside of rows was given, and no rows: say with shard_within how long they are"
            )
        for kind in self.kinds:
            refuse_policies(kind.recipe.factory, kind.recipe.defaults)
            kind.require_that_it_can_be_made()
        self.division.check_kinds()

    @cached_property
    def groups(self) -> list[list[ParamShape]]:
        """Parameters by the class that updates them."""
        if not self._rules:
            return [list(self.model.params)]
        by_name = {it.name: it for it in self.model.params}
        chosen = divide([(it.name, it.stand_in()) for it in self.model.params], self._rules)
        return [[by_name[name] for name, _ in group] for group in chosen]

    @cached_property
    def kinds(self) -> list[Kind]:
        if not self._rules:
            recipe = _recipe(self.optimizer_class, self.groups[0], self.options)
            return [Kind(recipe.name, recipe)]
        return [
            Kind(name, _recipe(rule.optimizer_class, group, rule.options), rule.partition)
            for name, rule, group in zip(class_names(self._rules), self._rules, self.groups, strict=True)
        ]

    @property
    def _rules(self) -> list[Rule]:
        """Empty if there is one class for all."""
        return list(self.optimizer_class) if isinstance(self.optimizer_class, (list, tuple)) else []

    @cached_property
    def name(self) -> str:
        return " + ".join(kind.name for kind in self.kinds)

    @cached_property
    def division(self) -> Division:
        return Division(self.config, self.kinds, reduces=True, offloads=self.offloads)

    @cached_property
    def specs(self) -> list[ParamSpec]:
        return specs_of(self.groups, self.device)

    def row_of(self, ranks: int) -> int:
        """How many of so many ranks share the state."""
        row = self.shard_within or ranks
        if ranks % row:
            raise ConfigError(f"shard_within={row} does not divide {ranks} ranks: plan for multiples of {row}")
        return row

    def network_of(self, ranks: int) -> Network:
        """That among so many ranks, which may be those of one row."""
        return self.network.of_a_row if ranks == self.shard_within else self.network

    @property
    def offloads(self) -> bool:
        return self.config.offload is not None and self.device.type != "cpu"

    def dtype_of_update(self, dtype: torch.dtype) -> torch.dtype:
        """What parameters of a dtype are updated in."""
        masters = self.config._master_policy
        return masters.dtype if masters is not None and masters.covers(dtype) else dtype

    def state(self, spec: ParamSpec, shape: tuple[int, ...]) -> int:
        """Of a tensor of that shape that is, or is a part of, a parameter."""
        return self._meters[spec.group].state(shape, self.dtype_of_update(spec.dtype)) if spec.trainable else 0

    def temporaries(self, tensors: Sequence[Tensor], *, fuses: bool) -> int:
        """Of a step on these. `fuses`: the fused implementation is taken where there is one."""
        found = 0
        for number, (kind, meter) in enumerate(zip(self.kinds, self._meters, strict=True)):
            shapes: list[Shape] = [
                (shape, self.dtype_of_update(spec.dtype))
                for spec, shape in tensors
                if spec.group == number and spec.trainable
            ]
            fused = fuses and self.device.type != "cpu" and leaves_open(kind.recipe, "fused")
            if shapes and not fused and not kind.recipe.defaults.get("fused"):
                found = max(found, meter.temporaries(shapes))
        return found

    @cached_property
    def _meters(self) -> list[Meter]:
        return [Meter(_without_kernels(self.device, kind.recipe)) for kind in self.kinds]


def _recipe(factory: Any, group: Sequence[ParamShape], options: dict[str, Any]) -> Recipe:
    """One whose parameters the self-test can ask for dimensions and dtypes, on the CPU, and that take no memory."""
    params = [torch.empty((), dtype=it.dtype).expand(it.shape).requires_grad_(it.trainable) for it in group]
    return Recipe(factory, [{"params": params}], True, options)


def _without_kernels(device: torch.device, recipe: Recipe) -> Recipe:
    """What torch takes on that device by default: all tensors at once, where its class knows how to.

    Fused kernels are for tensors with memory; what is kept is the same.
    """
    defaults = {key: value for key, value in recipe.defaults.items() if key != "fused"}
    if device.type != "cpu" and leaves_open(recipe, "foreach"):
        defaults["foreach"] = True
    return replace(recipe, defaults=defaults)
