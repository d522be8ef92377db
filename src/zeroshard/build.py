"""From the user's arguments to a layout and a complete engine.

`DropInArguments` and `ShardArguments` parse what the user passed and make an `EngineBuilder`. `Partitioning` resolves
which partitioner each optimizer gets; `EngineBuilder` validates the options and constructs the engine. All of that is
local to the rank and changes no parameter value. `build_engine` does it on all ranks, and commits if all succeed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ._formatting import format_count
from ._logging import show_warnings, warn_at_caller
from ._types import MIB
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all, rollback_on_error
from .comm.mesh import ShardGroupSize, make_comm
from .comm.process_group import Group
from .config import ZeroConfig, reject_config_options
from .engine.base import Engine
from .engine.checks import GradConsistencyCheck, ReplicaGuard, StepChecks
from .engine.ddp import resolve_optimizer_class
from .engine.flat_shards import FlatShardState, FlatShardStore, OptimizerSharding
from .engine.grad_reducer import GradReducer
from .engine.grad_source import LocalGrads, ParamGrads
from .engine.grad_stage import GradStage, Stage1, Stage2
from .engine.inner import OPTIMIZER_KEY, OptimizerConstructor, OptimizerFactory, ParamGroup, enable_fused
from .engine.module_hooks import abandon_prefetches, describe_for_broadcast
from .engine.offload import is_offload_device
from .engine.optimizer_shard import OptimizerSpec
from .engine.param_memory import FlatParamBuffers, UnflattenedParams
from .engine.param_sync import ParamAllGather, ParamBroadcast
from .engine.probe import convert_cost_to_flops, numel_cost
from .engine.whole_params import WholeParamState, WholeParamStore
from .errors import ConfigError, LayoutError
from .layout.layout import Layout
from .layout.partition import (
    Balance,
    CostFn,
    FlatShards,
    MixedPartitioner,
    Partitioner,
    PartitionStrategy,
    ShardGranularity,
    WholeParams,
    as_strategy,
    compute_balance,
)
from .layout.spec import ParamSpec, make_param_specs
from .params import ParsedParams, check_specs, parse_params, reject_dtensor
from .profiling import StepProfiler
from .rules import ParamRule, assign_params_to_rules, make_class_names
from .state.state_dict import describe_groups

# ---------------------------------------------------------------------------------------------------------------------
# Partitioning: from optimizer specs and options to a layout. No parameter is touched, nothing is sent.


OFFLOAD_BUCKET_BYTES = 128 * MIB
"""Default bucket size with CPU offload: bounds what is copied to the device at once, also with a single rank."""


@dataclass(frozen=True)
class Partitioning:
    """How parameters are assigned to ranks.

    Methods take `optimizer_of_group`: for each parameter group, the index of its optimizer in `optimizer_specs`.
    """

    config: ZeroConfig
    optimizer_specs: Sequence[OptimizerSpec]
    reduces_grads: bool = False
    """Gradients are reduced to their owners, so parameters always live in buckets."""
    is_offloaded: bool = False
    """Optimizer state is kept in host memory."""

    @cached_property
    def partitioners(self) -> list[PartitionStrategy]:
        """The partitioner of each optimizer."""
        return [self._resolve_partitioner(spec) for spec in self.optimizer_specs]

    @cached_property
    def _configured(self) -> PartitionStrategy | None:
        return None if self.config.partition is None else as_strategy(self.config.partition)

    def _resolve_partitioner(self, optimizer_spec: OptimizerSpec) -> PartitionStrategy:
        # `split_rule` is a probe of the optimizer class: ask for it only where parameters may be split.
        default = FlatShards() if self.reduces_grads and optimizer_spec.split_rule else WholeParams()
        configured, has_several = self._configured, len(self.optimizer_specs) > 1
        if has_several and configured is not None and configured.splits_params and not optimizer_spec.split_rule:
            configured = None  # applies only to the optimizers that can update parts of a parameter
        partitioner = optimizer_spec.partitioner or configured or default
        if partitioner.splits_params and partitioner.granularity is None and optimizer_spec.split_rule:
            return partitioner.with_granularity(optimizer_spec.split_rule.granularity)
        return partitioner

    @cached_property
    def is_flat(self) -> bool:
        """Whether parameters live in flat buckets."""
        return self.reduces_grads or any(partitioner.splits_params for partitioner in self.partitioners)

    def validate_optimizer_specs(self) -> None:
        """Raise `ConfigError` for optimizers that would compute wrong results when sharded this way."""
        for spec, partitioner in zip(self.optimizer_specs, self.partitioners, strict=True):
            self._validate_optimizer_spec(spec, partitioner)

    def _validate_optimizer_spec(self, optimizer_spec: OptimizerSpec, partitioner: PartitionStrategy) -> None:
        if optimizer_spec.traits.couples_params:
            raise ConfigError(
                f"{optimizer_spec.name} cannot be sharded: its update of one parameter depends on other parameters, "
                "which live on other ranks. Use an optimizer that updates each parameter independently, or train "
                "without sharding."
            )
        self._validate_required_grads(optimizer_spec)
        reject_differentiable([optimizer_spec.factory.defaults, *optimizer_spec.factory.groups])
        if partitioner.splits_params:
            _validate_granularity(optimizer_spec, partitioner)
        if len(self.optimizer_specs) > 1 and optimizer_spec.traits.has_shared_state:
            raise ConfigError(
                f"{optimizer_spec.name} cannot be combined with other optimizer classes: it keeps state that belongs "
                "to no parameter. Make a separate optimizer for its part of the model."
            )

    def _validate_required_grads(self, optimizer_spec: OptimizerSpec) -> None:
        """Raise if the optimizer needs gradients that it would not get: sparse ones, or ones with a graph."""
        if optimizer_spec.traits.required_grads == "sparse" and self.reduces_grads:
            raise ConfigError(
                f"{optimizer_spec.name} accepts only sparse gradients, but shard() reduces dense ones. Use an "
                "optimizer for dense gradients, or ZeroRedundancyOptimizer with DistributedDataParallel."
            )
        if optimizer_spec.traits.required_grads == "graph" and self.is_flat:
            raise ConfigError(
                f"{optimizer_spec.name} differentiates gradients, but reduced gradients have no graph. Use an "
                "optimizer that needs no Hessian, or train without sharding."
            )

    def is_split(self, optimizer_index: int) -> bool:
        """Whether the parameters of an optimizer are split across ranks."""
        return self.partitioners[optimizer_index].splits_params

    def extend_layout(self, layout: Layout, specs: Sequence[ParamSpec], optimizer_of_group: Sequence[int]) -> Layout:
        """Return `layout` extended by new parameters, which must be in order of use if they live in buckets."""
        partitioner = (
            self._make_bucket_partitioner(optimizer_of_group, [*layout.params, *specs])
            if self.is_flat
            else self.partitioners[0]
        )
        return partitioner.extend(layout, specs)

    def compute_balance(self, layout: Layout, optimizer_of_group: Sequence[int]) -> Balance:
        """Return how evenly trainable elements and the cost of updating them are distributed over ranks."""
        costs = self._costs(optimizer_of_group, layout.params)
        return compute_balance(layout, lambda spec: costs[spec.group](spec))

    def _make_bucket_partitioner(self, optimizer_of_group: Sequence[int], specs: Sequence[ParamSpec]) -> Partitioner:
        for partitioner in self.partitioners:
            if partitioner.is_custom:
                return partitioner
        costs = self._costs(optimizer_of_group, specs)
        cost_of_whole_group = {
            group: cost for group, cost in enumerate(costs) if not self.is_split(optimizer_of_group[group])
        }
        return MixedPartitioner(cost_of_whole_group, self._bucket_bytes(), self._granularities(optimizer_of_group))

    def _granularities(self, optimizer_of_group: Sequence[int]) -> dict[int, ShardGranularity]:
        """Return the granularity of each group whose parameters are split."""
        return {
            group: self.partitioners[optimizer_index].granularity or ShardGranularity()
            for group, optimizer_index in enumerate(optimizer_of_group)
            if self.is_split(optimizer_index)
        }

    def _bucket_bytes(self) -> int | None:
        """Return the one bucket size: the parameters of all optimizers share buckets."""
        partitioners = self.partitioners if self._configured is None else [self._configured, *self.partitioners]
        sizes = sorted({size for partitioner in partitioners if (size := partitioner.bucket_bytes) is not None})
        if len(sizes) > 1:
            raise ConfigError(
                f"all rules share buckets, so bucket_bytes must be the same in each: got {sizes}. Set one value."
            )
        return sizes[0] if sizes else (OFFLOAD_BUCKET_BYTES if self.is_offloaded else None)

    def _costs(self, optimizer_of_group: Sequence[int], specs: Sequence[ParamSpec]) -> list[CostFn]:
        """Return, for each group, the cost function of updating one of its parameters.

        With several optimizers, user-defined costs are converted to FLOPs to make them comparable.
        """
        default_costs: list[CostFn] = [
            numel_cost if self.is_split(optimizer_index) else self.optimizer_specs[optimizer_index].step_cost
            for optimizer_index in optimizer_of_group
        ]
        user_costs = [self.partitioners[optimizer_index].cost for optimizer_index in optimizer_of_group]
        if len(self.optimizer_specs) == 1:
            return [user_cost or default for user_cost, default in zip(user_costs, default_costs, strict=True)]
        return [
            convert_cost_to_flops(
                user_cost, [spec for spec in specs if user_costs[spec.group] is user_cost], default_costs
            )
            if user_cost
            else default
            for user_cost, default in zip(user_costs, default_costs, strict=True)
        ]


def _validate_granularity(optimizer_spec: OptimizerSpec, partitioner: PartitionStrategy) -> None:
    """Raise if parameters would be split more finely than the optimizer allows."""
    if optimizer_spec.split_rule is None:
        optimizer_spec.check_constructible()
        raise ConfigError(
            f"FlatShards() cannot be used with {optimizer_spec.name}: a self-test found that its update changes when "
            "a parameter is split. Use WholeParams()."
        )
    needed = optimizer_spec.split_rule.granularity
    if partitioner.granularity is not None and not partitioner.granularity.satisfies(needed):
        raise ConfigError(
            f"{partitioner} splits parameters too finely for {optimizer_spec.name}: a self-test found that it needs "
            f"pieces of a multiple of {needed.align} elements, at least {needed.min_numel}. Omit align and "
            f"min_numel, or set align={needed.align} and min_numel={needed.min_numel}."
        )


def reject_differentiable(groups: Sequence[ParamGroup]) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            "differentiable=True cannot be sharded: the graph of a step would span all ranks. Remove the option."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Engine builder.


@dataclass(frozen=True)
class EngineBuilder:
    """Validates the user's options and turns parameter groups into a layout and an engine."""

    comm: Comm
    profiler: StepProfiler
    config: ZeroConfig
    optimizer_specs: Sequence[OptimizerSpec]
    """With several, each parameter group names its own under `OPTIMIZER_KEY`."""
    parameters_as_bucket_view: bool = False
    """Keep whole parameters as views of flat buffers."""
    overlap_with_ddp: bool = False
    """A DDP communication hook drives the steps."""
    reduces_grads: bool = False
    """Gradients are reduced to their owners, so parameters always live in buckets."""
    param_order: Mapping[int, int] = field(default_factory=dict)
    """Position of each parameter in the model, by id; empty if the model is not known."""

    def prepare(self, groups: Sequence[ParamGroup]) -> tuple[Layout, Engine]:
        """Validate options and prepare an engine for `groups`. Call `engine.extend` next, or roll its memory back."""
        self.validate_options()
        layout = self.extend_layout(Layout.empty(self.comm.group.size), groups)
        engine = self.make_engine()
        with rollback_on_error(engine.params.memory.rollback):
            self.prepare_engine(engine, layout, groups)
            self.warn_if_not_splittable()
            self.warn_if_offload_unused()
            engine.params.inner.pull_options(groups)
        return layout, engine

    def build_with_owners(self, partitioner: Partitioner, groups: Sequence[ParamGroup]) -> Engine:
        """Build an engine whose owners `partitioner` decides, for DDP overlap. Only valid before there is any state."""
        layout = partitioner.extend(Layout.empty(self.comm.group.size), make_param_specs(groups))
        engine = self.make_engine()
        self.prepare_engine(engine, layout, groups)
        engine.extend(layout, groups)
        return engine

    def prepare_new_groups(
        self, engine: Engine, groups: Sequence[ParamGroup], first_group: int, undo: Callable[[], None]
    ) -> Prepared[Layout]:
        """Prepare `engine` for the groups from `first_group` on. Call `engine.extend` once all ranks have succeeded."""
        layout = self.extend_layout(engine.layout, groups, first_group)
        self.prepare_engine(engine, layout, groups)
        engine.params.inner.pull_added_options(groups, first_group)
        must_match = self.must_match_for_new_groups(engine.layout, layout, groups, first_group)
        # Ranks agreed on the existing groups, but their options may have changed since.
        return Prepared(
            layout, must_match, undo, format_param_count(groups), engine.params.groups.consensus_options(groups)
        )

    @cached_property
    def partitioning(self) -> Partitioning:
        """How parameters are assigned to ranks."""
        return Partitioning(
            self.config, self.optimizer_specs, reduces_grads=self.reduces_grads, is_offloaded=self._is_offloaded
        )

    def _optimizers_of_groups(self, groups: Sequence[ParamGroup]) -> list[int]:
        """Return the index of each group's optimizer in `optimizer_specs`."""
        return (
            [0] * len(groups) if len(self.optimizer_specs) == 1 else [self._optimizer_index(group) for group in groups]
        )

    def _optimizer_index(self, group: ParamGroup) -> int:
        names = [spec.name for spec in self.optimizer_specs]
        if group.get(OPTIMIZER_KEY) not in names:
            raise ConfigError(
                f"this optimizer was built from several rules: set group[{OPTIMIZER_KEY!r}] to one of {names}, got "
                f"{group.get(OPTIMIZER_KEY)!r}"
            )
        return names.index(group[OPTIMIZER_KEY])

    def extend_layout(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> Layout:
        """Validate the groups from `first_group` on and return `layout` extended by their parameters."""
        specs = make_param_specs(groups[first_group:], first_index=len(layout.params), first_group=first_group)
        check_specs(
            [*layout.params, *specs],
            collect_params(groups),
            allow_mixed_dtypes=self.config.allow_mixed_dtypes or self.reduces_grads,
            num_checked=len(layout.params),
        )
        on_meta = next((spec for spec in specs if spec.device.type == "meta"), None)
        if on_meta is not None:
            raise ConfigError(
                f"{on_meta.label} is on the meta device, so it has no values. Materialize and initialize the model "
                "first, for example with model.to_empty(device=...)."
            )
        for device in {spec.device for spec in specs}:
            if not self.comm.group.supports_device(device):
                raise ConfigError(
                    f"the process group's backend does not support {device}, where some parameters are. Move the "
                    "model, or initialize the process group with a backend for that device."
                )
        ordered = self._sort_by_use(specs, groups) if self.partitioning.is_flat else specs
        extended = self.partitioning.extend_layout(layout, ordered, self._optimizers_of_groups(groups))
        added = {spec.index for spec in extended.params[len(layout.params) :]}
        missing = next((spec for spec in specs if spec.index not in added), None)
        if missing is not None:
            raise LayoutError(
                f"{type(self.config.partition).__name__}.extend() returned a layout of {len(extended.params)} "
                f"parameters, expected {len(layout.params) + len(specs)}: {missing.label} is missing. It must add all "
                "parameters that it was called with."
            )
        return extended

    def compute_balance(self, layout: Layout, groups: Sequence[ParamGroup]) -> Balance:
        """Return how evenly trainable elements and the cost of updating them are distributed over ranks."""
        return self.partitioning.compute_balance(layout, self._optimizers_of_groups(groups))

    def _sort_by_use(self, specs: Sequence[ParamSpec], groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """Sort parameters by their expected order of use in the forward pass.

        That is the order of the model or, if it is not known, all groups interleaved. With one group after the other,
        a bucket of all biases would become ready last and hold back the buckets behind it.
        """
        if not self.param_order:
            return _interleave_groups(specs)
        params, end = collect_params(groups), len(self.param_order)
        return sorted(specs, key=lambda spec: self.param_order.get(id(params[spec.index]), end))

    def make_engine(self) -> Engine:
        """Return a new engine for this rank. Call `prepare_engine` on it next."""
        checks = StepChecks(self.comm, self.profiler, self.config.consistency_check, self.config.nonfinite)
        grad_consistency, replica_guard = GradConsistencyCheck(self.comm), ReplicaGuard(self.comm)
        if not self.partitioning.is_flat:
            whole_store = self._make_whole_store()
            return Engine(
                self.comm,
                ParamGrads(self.comm, grad_consistency),
                whole_store,
                WholeParamState(self.comm.group.rank, whole_store),
                ParamBroadcast(self.comm, self.profiler, whole_store),
                profiler=self.profiler,
                checks=checks,
                grad_consistency=grad_consistency,
                replica_guard=replica_guard,
            )
        store = self._make_flat_store()
        return Engine(
            self.comm,
            self.make_reducer(Stage1() if self.config.stage == 1 else Stage2())
            if self.reduces_grads
            else LocalGrads(self.comm, self.config._master_policy),
            store,
            FlatShardState(self.comm.group, store, replica_guard),
            ParamAllGather(self.comm, self.profiler, store, should_wait=not self.config.overlap_param_gather),
            profiler=self.profiler,
            checks=checks,
            grad_consistency=grad_consistency,
            replica_guard=replica_guard,
        )

    def make_reducer(self, stage: GradStage) -> GradReducer:
        """Return a new gradient reducer, for `Engine.set_grad_source` if the engine has another source so far."""
        return GradReducer(self.comm, self.profiler, stage, self.config._reduce_policy, self.config._master_policy)

    def _make_whole_store(self) -> WholeParamStore:
        has_buffers = self.parameters_as_bucket_view and not self.overlap_with_ddp
        memory = FlatParamBuffers(by_owner=True) if has_buffers else UnflattenedParams()
        return WholeParamStore(self.comm, self.profiler, self.optimizer_specs[0], memory)

    def _make_flat_store(self) -> FlatShardStore:
        shardings = [
            OptimizerSharding(spec, self.partitioning.is_split(optimizer_index))
            for optimizer_index, spec in enumerate(self.optimizer_specs)
        ]
        offload = self.config.offload if self._is_offloaded else None
        return FlatShardStore(self.comm, self.profiler, shardings, self.config._master_policy, offload)

    def prepare_engine(self, engine: Engine, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Prepare `engine` for `layout`. Call `engine.extend` or `engine.params.rollback` next."""
        engine.params.prepare(layout, groups)
        self._validate_inner_optimizers(engine)
        engine.params.move_params(layout, groups)  # last: whole parameters keep their memory after a validation error

    def warn_if_not_splittable(self) -> None:
        """Warn if `shard` falls back to whole parameters because the optimizer does not allow splitting them.

        Call it after the optimizer was constructed: one that cannot be constructed raises its own error.
        """
        (spec, *others) = self.optimizer_specs
        if self.reduces_grads and self.config.partition is None and not others and not spec.split_rule:
            warn_at_caller(
                f"{spec.name} needs whole parameters, so each parameter is updated by a single rank and shards are "
                "only as balanced as parameter sizes allow"
            )

    @cached_property
    def _is_offloaded(self) -> bool:
        groups = [group for spec in self.optimizer_specs for group in spec.factory.groups]
        return self.config.offload is not None and any(
            is_offload_device(param.device) for param in collect_params(groups)
        )

    def warn_if_offload_unused(self) -> None:
        """Warn if `CPUOffload` is configured but no parameter is on an accelerator."""
        if self.config.offload is not None and not self._is_offloaded:
            warn_at_caller(
                "CPUOffload(...) has no effect: no parameter is on a GPU, so optimizer state is in host memory anyway"
            )

    def _validate_inner_optimizers(self, engine: Engine) -> None:
        """Raise for options of the constructed optimizers that cannot be sharded."""
        if self._is_offloaded and any(
            local_optimizer.has_mode("train") for local_optimizer in engine.params.inner.local_optimizers
        ):
            raise ConfigError(
                "CPUOffload(...) cannot be used with an optimizer that has train() and eval(): they swap parameters "
                "with state, which would be in host memory. Remove offload=."
            )
        reject_differentiable(
            [
                group
                for local_optimizer in engine.params.inner.local_optimizers
                for group in local_optimizer.optimizer.param_groups
            ]
        )

    def validate_options(self) -> None:
        """Raise `ConfigError` for optimizers that cannot be sharded and for incompatible options."""
        self.partitioning.validate_optimizer_specs()
        if self.overlap_with_ddp and self.partitioning.is_flat:
            raise ConfigError(
                "overlap_with_ddp=True assigns whole parameters to ranks and cannot be used with FlatShards(). Use "
                "ddp_hook() with FlatShards(), or remove partition=."
            )
        if self.overlap_with_ddp and self.config.peer_checkpoint is not None:
            raise ConfigError(
                "PeerCheckpoint(...) cannot be used with overlap_with_ddp=True, where step() is never called. "
                "Remove one of them."
            )
        for name in ("master_dtype", "offload"):
            if getattr(self.config, name) is not None and not self.partitioning.is_flat:
                raise ConfigError(f"ZeroConfig({name}=...) needs partition=FlatShards()")
        checks = {"ConsistencyCheck": self.config.consistency_check, "NonFiniteGrads": self.config.nonfinite}
        for name in (name for name, check in checks.items() if check is not None and self.overlap_with_ddp):
            raise ConfigError(
                f"{name}(...) cannot be used with overlap_with_ddp=True, where step() is never called. Remove one of "
                "them."
            )
        self._reject_ignored_options()

    def _reject_ignored_options(self) -> None:
        if self.config.stage == 2 and not self.reduces_grads:
            raise ConfigError(
                "ZeroRedundancyOptimizer cannot use stage=2, because DDP keeps full gradients. For ZeRO-2, remove "
                "DistributedDataParallel and call zeroshard.shard(model, ...). To keep DDP, remove stage=2."
            )
        if self.config.overlap_param_gather and not self.reduces_grads:
            raise ConfigError("overlap_param_gather=True needs the model. Use zeroshard.shard(model, ...).")
        if not self.config.broadcast_buffers and not self.reduces_grads:
            raise ConfigError(
                "ZeroConfig(broadcast_buffers=False) is for zeroshard.shard(). Pass broadcast_buffers=False to "
                "DistributedDataParallel instead."
            )
        for name in ("reduce_dtype", "deterministic_reduce"):
            if getattr(self.config, name) and not self.partitioning.is_flat:
                raise ConfigError(
                    f"ZeroConfig({name}=...) needs partition=FlatShards() and ddp_hook(): otherwise DDP reduces "
                    "gradients"
                )

    def must_match_across_ranks(self, layout: Layout, groups: Sequence[ParamGroup]) -> list[str]:
        """Return everything that must be equal on all ranks, one line each, most informative first."""
        return [
            *(f"optimizer class {spec.name}" for spec in self.optimizer_specs),
            *self.config._describe(),
            f"parameters_as_bucket_view={self.parameters_as_bucket_view}",
            f"overlap_with_ddp={self.overlap_with_ddp}",
            *self.must_match_for_new_groups(Layout.empty(layout.world_size), layout, groups),
        ]

    def must_match_for_new_groups(
        self, base_layout: Layout, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0
    ) -> list[str]:
        """Return the same for what `layout` adds to `base_layout`: the groups from `first_group` on."""
        return [
            *(spec.describe() for spec in layout.params[len(base_layout.params) :]),
            "no further parameter",
            *describe_groups(groups[first_group:], first=first_group),
            f"layout {layout.digest}",
        ]


def _interleave_groups(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Sort parameters by their relative position in their group: the heads of all groups first, the ends last."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    position = {spec.index: (i + 0.5) / len(group) for group in groups for i, spec in enumerate(group)}
    return sorted(specs, key=lambda spec: position[spec.index])


def format_param_count(groups: Sequence[ParamGroup]) -> str:
    """Return the number of parameters and groups as text."""
    return f"{format_count(len(collect_params(groups)), 'parameter')} in {format_count(len(groups), 'group')}"


def collect_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]


# ---------------------------------------------------------------------------------------------------------------------
# The user's arguments.


class OptimizerArguments(ABC):
    """The arguments of a user-facing optimizer. All methods but `make_comm` run inside `prepare_all` and may raise."""

    call: ClassVar[str]
    """What the user calls, for error messages."""
    default_stage: ClassVar[Literal[1, 2]]

    def __init__(self, optimizer_class: Any, config: ZeroConfig | None, defaults: dict[str, Any]) -> None:
        self.optimizer_class, self.defaults = optimizer_class, defaults
        self._config = ZeroConfig() if config is None else config

    @property
    def config(self) -> ZeroConfig:
        """The config with its stage filled in."""
        if not isinstance(self._config, ZeroConfig):
            raise TypeError(
                f"expected config to be a ZeroConfig, got {type(self._config).__name__}. Pass "
                "config=zeroshard.ZeroConfig(...)."
            )
        return replace(self._config, stage=self._config.stage or self.default_stage)

    @abstractmethod
    def make_comm(self, profiler: StepProfiler) -> Comm: ...

    @abstractmethod
    def parse_params(self) -> ParsedParams: ...

    @abstractmethod
    def make_builder(
        self, comm: Comm, profiler: StepProfiler, groups: list[ParamGroup], parsed: ParsedParams
    ) -> EngineBuilder:
        """Return a builder for `groups`, which are the parsed groups as `torch.optim.Optimizer` completed them."""

    def describe_model(self, comm: Comm, groups: list[ParamGroup]) -> list[str]:  # noqa: ARG002
        """Describe what must be equal on all ranks and is in no group. Nothing if the model is not known."""
        return []


class DropInArguments(OptimizerArguments):
    """The arguments of `ZeroRedundancyOptimizer`."""

    call = "ZeroRedundancyOptimizer()"
    default_stage = 1

    def __init__(
        self,
        params: Any,
        optimizer_class: OptimizerConstructor,
        process_group: dist.ProcessGroup | None,
        *,
        parameters_as_bucket_view: bool,
        overlap_with_ddp: bool,
        config: ZeroConfig | None,
        defaults: dict[str, Any],
    ) -> None:
        super().__init__(optimizer_class, config, defaults)
        self._params, self._process_group = params, process_group
        self._parameters_as_bucket_view, self._overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp

    def make_comm(self, profiler: StepProfiler) -> Comm:
        return Comm(Group(self._process_group), profiler=profiler)

    def parse_params(self) -> ParsedParams:
        return parse_params(self._params)

    def make_builder(
        self, comm: Comm, profiler: StepProfiler, groups: list[ParamGroup], parsed: ParsedParams
    ) -> EngineBuilder:
        optimizer_class = self.optimizer_class
        if callable(optimizer_class):
            optimizer_class = resolve_optimizer_class(optimizer_class, overlap=self._overlap_with_ddp)
        return EngineBuilder(
            comm,
            profiler,
            self.config,
            [make_optimizer_spec(optimizer_class, groups, parsed, self.defaults)],
            parameters_as_bucket_view=self._parameters_as_bucket_view,
            overlap_with_ddp=self._overlap_with_ddp,
        )


class ShardArguments(OptimizerArguments):
    """The arguments of `shard`."""

    call = "zeroshard.shard()"
    default_stage = 2

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_class: OptimizerConstructor | Sequence[ParamRule],
        *,
        params: Any,
        process_group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        shard_group_size: ShardGroupSize | None,
        config: ZeroConfig | None,
        defaults: dict[str, Any],
    ) -> None:
        super().__init__(optimizer_class, config, defaults)
        self._model, self._params = model, params
        self._process_group, self._mesh, self._shard_group_size = process_group, mesh, shard_group_size
        is_rule_list = isinstance(optimizer_class, (list, tuple)) and bool(optimizer_class)
        self._rules: list[ParamRule] = list(optimizer_class) if is_rule_list else []  # type: ignore[arg-type]

    def make_comm(self, profiler: StepProfiler) -> Comm:
        return make_comm(self._process_group, self._mesh, self._shard_group_size, profiler)

    def parse_params(self) -> ParsedParams:
        if isinstance(self._model, DistributedDataParallel):
            raise ConfigError(
                "shard() averages gradients itself: pass the model without DistributedDataParallel. To keep DDP, use "
                "ZeroRedundancyOptimizer(model.parameters(), ...)."
            )
        if isinstance(self._model, torch.nn.Module):
            abandon_prefetches(self._model)
        if self._rules and self._params is not None:
            raise ConfigError(
                "shard() got both params= and rules, which select among all parameters of the model. Pass one of them."
            )
        if not self._rules:
            return parse_params(self._named_params()) if self._params is None else self._parse_given_params()
        _validate_rules(self._rules)
        params_per_rule = assign_params_to_rules(
            parse_params(self._named_params(include_duplicates=True)).groups[0]["params"], self._rules
        )
        return ParsedParams(
            [
                {"params": rule_params, OPTIMIZER_KEY: name}
                for rule_params, name in zip(params_per_rule, make_class_names(self._rules), strict=True)
            ],
            is_bare_sequence=True,
        )

    def _parse_given_params(self) -> ParsedParams:
        """Parse `params=`. Some may be outside the model (those of a loss function), but not all of them."""
        parsed = parse_params(self._params)
        model_ids = {id(param) for _, param in self._named_params()}
        entries = [entry for group in parsed.groups for entry in group["params"]]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        # `Optimizer.__init__` explains tensors that are not leaves.
        if tensors and all(tensor.is_leaf and id(tensor) not in model_ids for tensor in tensors):
            raise ConfigError(
                f"params= contains {format_count(len(tensors), 'parameter')}, none of them from the model "
                f"({type(self._model).__name__}), so shard() would not train it. Pass parameters of this model, or "
                "leave params= out to train all of them."
            )
        return parsed

    def _named_params(self, *, include_duplicates: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the model's parameters, with `include_duplicates` once for each name of a tied weight."""
        if not isinstance(self._model, torch.nn.Module):
            raise TypeError(
                f"expected shard(model, ...) with a torch.nn.Module, got {type(self._model).__name__}. Pass the "
                "model first, and parameter groups as params=."
            )
        return self._model.named_parameters(remove_duplicate=not include_duplicates)

    def make_builder(
        self, comm: Comm, profiler: StepProfiler, groups: list[ParamGroup], parsed: ParsedParams
    ) -> EngineBuilder:
        specs = self._make_optimizer_specs(groups, parsed)
        for name, tensor in self._unmanaged_tensors(groups).items():
            reject_dtensor(name, tensor)
        return EngineBuilder(
            comm,
            profiler,
            self.config,
            specs,
            reduces_grads=True,
            param_order={id(param): position for position, param in enumerate(self._model.parameters())},
        )

    def describe_model(self, comm: Comm, groups: list[ParamGroup]) -> list[str]:
        return describe_for_broadcast(comm.data_parallel, self._unmanaged_tensors(groups))

    def _unmanaged_tensors(self, groups: list[ParamGroup]) -> dict[str, torch.Tensor]:
        """Return the model's buffers and its parameters that are in no group, by name."""
        managed_ids = {id(param) for group in groups for param in group["params"]}
        unmanaged = {name: param for name, param in self._model.named_parameters() if id(param) not in managed_ids}
        return unmanaged | {f"buffer {name}": buffer for name, buffer in self._model.named_buffers()}

    def _make_optimizer_specs(self, groups: list[ParamGroup], parsed: ParsedParams) -> list[OptimizerSpec]:
        """Return one spec per inner optimizer to construct."""
        if not self._rules:
            spec = make_optimizer_spec(self.optimizer_class, groups, parsed, self.defaults)
            return [OptimizerSpec(spec.name, enable_fused(spec.factory))]
        if self.defaults:
            raise ConfigError(
                f"options of an optimizer belong to its rule: write ParamRule(..., {next(iter(self.defaults))}=...) "
                f"instead of shard(..., {next(iter(self.defaults))}=...)"
            )
        return [
            OptimizerSpec(
                group[OPTIMIZER_KEY],
                enable_fused(OptimizerFactory(rule.optimizer_class, [group], True, rule.options)),
                rule.partition,
            )
            for rule, group in zip(self._rules, groups, strict=True)
        ]


def _validate_rules(rules: Sequence[ParamRule]) -> None:
    invalid = [rule for rule in rules if not isinstance(rule, ParamRule)]
    if invalid:
        raise TypeError(f"expected a list of ParamRule objects, got {invalid[0]!r} in it")
    for rule in rules:
        reject_config_options(rule.optimizer_class, rule.options)


def make_optimizer_spec(
    optimizer_class: Any, groups: list[ParamGroup], parsed: ParsedParams, defaults: dict[str, Any]
) -> OptimizerSpec:
    """Return the spec of a single optimizer class for all groups."""
    if not callable(optimizer_class):
        name = type(optimizer_class).__name__
        if isinstance(optimizer_class, Optimizer):
            raise TypeError(
                f"expected optimizer_class to be a class such as torch.optim.AdamW, got an instance of {name}. "
                f"Pass the class, and its options as keyword arguments: {name}, lr=..."
            )
        raise TypeError(
            f"expected optimizer_class to be a class such as torch.optim.AdamW, got {name}. Pass the class, and its "
            "options as keyword arguments. To use several classes, pass a non-empty list of ParamRule objects to "
            "zeroshard.shard()."
        )
    reject_config_options(optimizer_class, defaults)
    factory = OptimizerFactory(optimizer_class, groups, parsed.is_bare_sequence, defaults)
    return OptimizerSpec(factory.name, factory)


# ---------------------------------------------------------------------------------------------------------------------
# All ranks.


def build_engine(
    optimizer: Optimizer, arguments: OptimizerArguments, comm: Comm, profiler: StepProfiler
) -> tuple[EngineBuilder, Engine]:
    """Initialize `optimizer` as a `torch.optim.Optimizer`, and build its engine. Call on all ranks.

    Raises on all ranks if that fails on one, or if their arguments differ.
    """
    if comm.data_parallel.group.rank == 0:
        show_warnings()

    def prepare() -> Prepared[tuple[EngineBuilder, Engine, Layout]]:
        arguments.config  # noqa: B018 (raises if it is not a ZeroConfig)
        parsed = arguments.parse_params()
        Optimizer.__init__(optimizer, parsed.groups, {})
        builder = arguments.make_builder(comm, profiler, optimizer.param_groups, parsed)
        layout, engine = builder.prepare(optimizer.param_groups)
        with rollback_on_error(engine.params.memory.rollback):
            must_match = [
                *builder.must_match_across_ranks(layout, optimizer.param_groups),
                *arguments.describe_model(comm, optimizer.param_groups),
            ]
            inner_optimizers = engine.params.inner.local_optimizers
            optimizer.defaults = inner_optimizers[0].optimizer.defaults if len(inner_optimizers) == 1 else {}
        summary = format_param_count(optimizer.param_groups)
        return Prepared((builder, engine, layout), must_match, engine.params.memory.rollback, summary)

    builder, engine, layout = prepare_all(comm, arguments.call, prepare)
    engine.extend(layout, optimizer.param_groups)
    return builder, engine
