"""What is to be trained, how: all that estimates of every way of training have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..config import ZeroConfig, reject_config_options
from ..dividing import Partitioning
from ..errors import ConfigError
from ..layout.spec import ParamSpec
from ..rules import ParamRule, assign_params_to_rules, make_class_names
from ..engine.fused import can_choose_impl
from ..engine.inner import OptimizerConstructor, OptimizerFactory
from ..engine.parts import OptimizerSpec
from .meter import StateMeter, TensorMeta
from .shapes import ModelShape, ParamShape, make_param_specs
from .usage import Network

UpdatedTensor = tuple[ParamSpec, tuple[int, ...]]
"""One that an optimizer updates: a parameter that it is, or is a part of, and its shape."""


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its optimizers, and where it is trained."""

    model: ModelShape
    optimizer_class: OptimizerConstructor | Sequence[ParamRule]
    options: dict[str, Any]
    config: ZeroConfig
    device: torch.device
    network: Network
    activations: int = 0
    shard_group_size: int | None = None

    def validate(self) -> None:
        """Raise what making the optimizer would raise."""
        if self.shard_group_size is not None and (type(self.shard_group_size) is not int or self.shard_group_size < 1):
            raise ConfigError(
                f"plan(shard_group_size=...) takes a number of ranks from 1 on, not {self.shard_group_size!r}"
            )
        if self.shard_group_size is None and self.network.within is not None:
            raise ConfigError(
                "a bandwidth inside of rows was given, and no rows: say with shard_group_size how long they are"
            )
        for kind in self.optimizer_specs:
            reject_config_options(kind.factory.optimizer_class, kind.factory.defaults)
            kind.check_constructible()
        self.partitioning.validate_optimizer_specs()

    @cached_property
    def params_by_optimizer(self) -> list[list[ParamShape]]:
        """Parameters by the class that updates them."""
        if not self._rules:
            return [list(self.model.params)]
        by_name = {it.name: it for it in self.model.params}
        chosen = assign_params_to_rules([(it.name, it.to_meta_param()) for it in self.model.params], self._rules)
        return [[by_name[name] for name, _ in group] for group in chosen]

    @cached_property
    def optimizer_specs(self) -> list[OptimizerSpec]:
        if not self._rules:
            recipe = _make_factory(self.optimizer_class, self.params_by_optimizer[0], self.options)
            return [OptimizerSpec(recipe.name, recipe)]
        return [
            OptimizerSpec(name, _make_factory(rule.optimizer_class, group, rule.options), rule.partition)
            for name, rule, group in zip(
                make_class_names(self._rules), self._rules, self.params_by_optimizer, strict=True
            )
        ]

    @property
    def _rules(self) -> list[ParamRule]:
        """Empty if there is one class for all."""
        return list(self.optimizer_class) if isinstance(self.optimizer_class, (list, tuple)) else []

    @cached_property
    def optimizer_name(self) -> str:
        return " + ".join(kind.name for kind in self.optimizer_specs)

    @cached_property
    def partitioning(self) -> Partitioning:
        return Partitioning(self.config, self.optimizer_specs, reduces_grads=True, is_offloaded=self.is_offloaded)

    @cached_property
    def param_specs(self) -> list[ParamSpec]:
        return make_param_specs(self.params_by_optimizer, self.device)

    def shard_group_size_for(self, ranks: int) -> int:
        """How many of so many ranks share the state."""
        row = self.shard_group_size or ranks
        if ranks % row:
            raise ConfigError(f"shard_group_size={row} does not divide {ranks} ranks: plan for multiples of {row}")
        return row

    def network_for(self, ranks: int) -> Network:
        """That among so many ranks, which may be those of one row."""
        return self.network.shard_group_network if ranks == self.shard_group_size else self.network

    @property
    def is_offloaded(self) -> bool:
        return self.config.offload is not None and self.device.type != "cpu"

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What parameters of a dtype are updated in."""
        masters = self.config._master_policy
        return masters.dtype if masters is not None and masters.covers(dtype) else dtype

    def state_bytes(self, spec: ParamSpec, shape: tuple[int, ...]) -> int:
        """Of a tensor of that shape that is, or is a part of, a parameter."""
        return self._meters[spec.group].state_bytes(shape, self.update_dtype(spec.dtype)) if spec.trainable else 0

    def temporary_bytes(self, tensors: Sequence[UpdatedTensor], *, use_fused: bool) -> int:
        """Of a step on these. `fuses`: the fused implementation is taken where there is one."""
        found = 0
        for number, (kind, meter) in enumerate(zip(self.optimizer_specs, self._meters, strict=True)):
            shapes: list[TensorMeta] = [
                (shape, self.update_dtype(spec.dtype))
                for spec, shape in tensors
                if spec.group == number and spec.trainable
            ]
            fused = use_fused and self.device.type != "cpu" and can_choose_impl(kind.factory, "fused")
            if shapes and not fused and not kind.factory.defaults.get("fused"):
                found = max(found, meter.temporary_bytes(shapes))
        return found

    @cached_property
    def _meters(self) -> list[StateMeter]:
        return [StateMeter(_without_fused_kernels(self.device, kind.factory)) for kind in self.optimizer_specs]


def _make_factory(
    optimizer_class: Any, param_shapes: Sequence[ParamShape], options: dict[str, Any]
) -> OptimizerFactory:
    """One whose parameters the self-test can ask for dimensions and dtypes, on the CPU, and that take no memory."""
    params = [torch.empty((), dtype=it.dtype).expand(it.shape).requires_grad_(it.trainable) for it in param_shapes]
    return OptimizerFactory(optimizer_class, [{"params": params}], True, options)


def _without_fused_kernels(device: torch.device, factory: OptimizerFactory) -> OptimizerFactory:
    """What torch takes on that device by default: all tensors at once, where its class knows how to.

    Fused kernels are for tensors with memory; what is kept is the same.
    """
    defaults = {key: value for key, value in factory.defaults.items() if key != "fused"}
    if device.type != "cpu" and can_choose_impl(factory, "foreach"):
        defaults["foreach"] = True
    return replace(factory, defaults=defaults)
