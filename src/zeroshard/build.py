"""`EngineBuilder`: from the user's parameters and options to a layout and an engine.

`Partitioning` resolves which partitioner each optimizer gets; `EngineBuilder` validates the options and constructs the
engine. Everything here is local to the rank: nothing is sent, and no parameter value changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch

from ._logging import warn_at_caller
from ._types import MIB
from .comm.collectives import Comm
from .config import ZeroConfig
from .engine.base import Engine
from .engine.checks import StepChecks
from .engine.flat_engine import FlatShardEngine, OptimizerSharding
from .engine.inner import OPTIMIZER_KEY, ParamGroup
from .engine.offload import is_offload_device
from .engine.optimizer_shard import OptimizerSpec
from .engine.param_store import FlatParamBuffers, UnflattenedParams
from .engine.probe import convert_cost_to_flops, numel_cost
from .engine.whole_engine import WholeParamEngine
from .errors import ConfigError
from .layout.layout import Layout
from .layout.partition import (
    Balance,
    CostFn,
    FlatShards,
    MixedPartitioner,
    Partitioner,
    ShardGranularity,
    WholeParams,
    compute_balance,
)
from .layout.spec import ParamSpec, make_param_specs
from .params import check_specs
from .state.state_dict import describe_groups

# ---------------------------------------------------------------------------------------------------------------------
# Partitioning: from optimizer specs and options to a layout. Pure: no parameter is touched, nothing is sent.


OFFLOAD_BUCKET_BYTES = 128 * MIB
"""Default bucket size with CPU offload: bounds what is copied to the device at once, also with a single rank."""


@dataclass(frozen=True)
class Partitioning:
    """How parameters are assigned to ranks.

    Methods take `spec_ids`: for each parameter group, the index of its optimizer in `optimizer_specs`.
    """

    config: ZeroConfig
    optimizer_specs: Sequence[OptimizerSpec]
    reduces_grads: bool = False
    """Gradients are reduced to their owners, so parameters always live in buckets."""
    is_offloaded: bool = False
    """Optimizer state is kept in host memory."""

    @cached_property
    def partitioners(self) -> list[Partitioner]:
        """The partitioner of each optimizer."""
        return [self._resolve_partitioner(spec) for spec in self.optimizer_specs]

    def _resolve_partitioner(self, optimizer_spec: OptimizerSpec) -> Partitioner:
        default = FlatShards() if self.reduces_grads and optimizer_spec.split_rule else WholeParams()
        configured = self.config.partition
        if len(self.optimizer_specs) > 1 and isinstance(configured, FlatShards) and not optimizer_spec.split_rule:
            configured = None  # applies only to the optimizers that can update parts of a parameter
        partitioner = optimizer_spec.partitioner or configured or default
        if isinstance(partitioner, FlatShards) and partitioner.granularity is None and optimizer_spec.split_rule:
            return replace(partitioner, **optimizer_spec.split_rule.granularity._asdict())
        return partitioner

    @cached_property
    def is_flat(self) -> bool:
        """Whether parameters live in flat buckets."""
        return self.reduces_grads or any(isinstance(partitioner, FlatShards) for partitioner in self.partitioners)

    def validate_optimizer_specs(self) -> None:
        """Raise `ConfigError` for optimizers that would compute wrong results when sharded this way."""
        for spec, partitioner in zip(self.optimizer_specs, self.partitioners, strict=True):
            self._validate_optimizer_spec(spec, partitioner)

    def _validate_optimizer_spec(self, optimizer_spec: OptimizerSpec, partitioner: Partitioner) -> None:
        if optimizer_spec.traits.couples_params:
            raise ConfigError(
                f"{optimizer_spec.name} cannot be sharded: its update of one parameter depends on the others, "
                "which live on other ranks. Take one that updates each parameter by itself, or train without sharding."
            )
        self._validate_required_grads(optimizer_spec)
        reject_differentiable([optimizer_spec.factory.defaults, *optimizer_spec.factory.groups])
        if isinstance(partitioner, FlatShards):
            _validate_granularity(optimizer_spec, partitioner)
        if len(self.optimizer_specs) > 1 and optimizer_spec.traits.has_shared_state:
            raise ConfigError(
                f"{optimizer_spec.name} cannot be one of several classes: it has state that belongs to no parameter, "
                "so the state of the classes could not be told apart. Make an optimizer of its own for its part of the "
                "model."
            )

    def _validate_required_grads(self, optimizer_spec: OptimizerSpec) -> None:
        """Raise if the optimizer needs gradients that it would not get: sparse ones, or ones with a graph."""
        if optimizer_spec.traits.required_grads == "sparse" and self.reduces_grads:
            raise ConfigError(
                f"{optimizer_spec.name} takes sparse gradients only, and shard() averages dense ones. Use an "
                "optimizer for dense gradients, or ZeroRedundancyOptimizer with DistributedDataParallel."
            )
        if optimizer_spec.traits.required_grads == "graph" and self.is_flat:
            raise ConfigError(
                f"{optimizer_spec.name} differentiates gradients once more, and those that were averaged over ranks "
                "have no graph. Use an optimizer that needs no Hessian, or train without sharding."
            )

    def is_split(self, spec_id: int) -> bool:
        """Whether the parameters of an optimizer are split across ranks."""
        return isinstance(self.partitioners[spec_id], FlatShards)

    def extend_layout(self, layout: Layout, specs: Sequence[ParamSpec], spec_ids: Sequence[int]) -> Layout:
        """Return `layout` extended by new parameters, which must be in order of use if they live in buckets."""
        partitioner = (
            self._make_bucket_partitioner(spec_ids, [*layout.params, *specs]) if self.is_flat else self.partitioners[0]
        )
        return partitioner.extend(layout, specs)

    def compute_balance(self, layout: Layout, spec_ids: Sequence[int]) -> Balance:
        """Return how evenly trainable elements and the cost of updating them are distributed over ranks."""
        costs = self._costs(spec_ids, layout.params)
        return compute_balance(layout, lambda spec: costs[spec.group](spec))

    def _make_bucket_partitioner(self, spec_ids: Sequence[int], specs: Sequence[ParamSpec]) -> Partitioner:
        for partitioner in self.partitioners:
            if type(partitioner) not in (FlatShards, WholeParams):  # user-defined
                return partitioner
        costs = self._costs(spec_ids, specs)
        cost_of_whole_group = {group: cost for group, cost in enumerate(costs) if not self.is_split(spec_ids[group])}
        return MixedPartitioner(cost_of_whole_group, self._bucket_bytes(), self._granularities(spec_ids))

    def _granularities(self, spec_ids: Sequence[int]) -> dict[int, ShardGranularity]:
        """Return the granularity of each group whose parameters are split."""
        flat_shards = {
            group: partitioner
            for group, spec_id in enumerate(spec_ids)
            if isinstance(partitioner := self.partitioners[spec_id], FlatShards)
        }
        return {group: partitioner.granularity or ShardGranularity() for group, partitioner in flat_shards.items()}

    def _bucket_bytes(self) -> int | None:
        """Return the one bucket size: the parameters of all optimizers share buckets."""
        partitioners = (self.config.partition, *self.partitioners)
        flat_shards = [partitioner for partitioner in partitioners if isinstance(partitioner, FlatShards)]
        sizes = sorted({flat.bucket_bytes for flat in flat_shards if flat.bucket_bytes is not None})
        if len(sizes) > 1:
            raise ConfigError(f"all rules share buckets, which have one size: give one bucket_bytes, not {sizes}")
        return sizes[0] if sizes else (OFFLOAD_BUCKET_BYTES if self.is_offloaded else None)

    def _costs(self, spec_ids: Sequence[int], specs: Sequence[ParamSpec]) -> list[CostFn]:
        """Return, for each group, the cost function of updating one of its parameters.

        With several optimizers, user-defined costs are converted to FLOPs to make them comparable.
        """
        default_costs: list[CostFn] = [
            numel_cost if self.is_split(spec_id) else self.optimizer_specs[spec_id].step_cost for spec_id in spec_ids
        ]
        partitioners = [self.partitioners[spec_id] for spec_id in spec_ids]
        user_costs = [
            partitioner.cost if isinstance(partitioner, WholeParams) else None for partitioner in partitioners
        ]
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


def _validate_granularity(optimizer_spec: OptimizerSpec, flat_shards: FlatShards) -> None:
    """Raise if parameters would be split more finely than the optimizer allows."""
    if optimizer_spec.split_rule is None:
        optimizer_spec.check_constructible()
        raise ConfigError(
            f"FlatShards() cannot be used with {optimizer_spec.name}: a self-test found that it updates a parameter "
            "in another way when it is cut into pieces. Use WholeParams()."
        )
    needed = optimizer_spec.split_rule.granularity
    if flat_shards.granularity is not None and not flat_shards.granularity.satisfies(needed):
        raise ConfigError(
            f"{flat_shards} cuts too finely for {optimizer_spec.name}: a self-test found that it needs pieces of a "
            f"multiple of {needed.align} elements, at least {needed.min_numel}. Leave align and min_numel out, or take "
            f"align={needed.align} and min_numel={needed.min_numel}."
        )


def reject_differentiable(groups: Sequence[ParamGroup]) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")


# ---------------------------------------------------------------------------------------------------------------------
# Engine builder.


@dataclass(frozen=True)
class EngineBuilder:
    """Validates the user's options and turns parameter groups into a layout and an engine."""

    comm: Comm
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

    @cached_property
    def partitioning(self) -> Partitioning:
        """How parameters are assigned to ranks."""
        return Partitioning(
            self.config, self.optimizer_specs, reduces_grads=self.reduces_grads, is_offloaded=self._is_offloaded
        )

    def _spec_ids(self, groups: Sequence[ParamGroup]) -> list[int]:
        """Return the index of each group's optimizer in `optimizer_specs`."""
        return [0] * len(groups) if len(self.optimizer_specs) == 1 else [self._spec_id(group) for group in groups]

    def _spec_id(self, group: ParamGroup) -> int:
        names = [spec.name for spec in self.optimizer_specs]
        if group.get(OPTIMIZER_KEY) not in names:
            raise ConfigError(
                f"this optimizer has several classes, so that a group must name its own: {OPTIMIZER_KEY!r} is to be "
                f"one of {names}, not {group.get(OPTIMIZER_KEY)!r}"
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
        for device in {spec.device for spec in specs}:
            if not self.comm.group.supports_device(device):
                raise ConfigError(f"the backend of the process group cannot carry parameters on {device}")
        ordered = self._sort_by_use(specs, groups) if self.partitioning.is_flat else specs
        return self.partitioning.extend_layout(layout, ordered, self._spec_ids(groups))

    def compute_balance(self, layout: Layout, groups: Sequence[ParamGroup]) -> Balance:
        """Return how evenly trainable elements and the cost of updating them are distributed over ranks."""
        return self.partitioning.compute_balance(layout, self._spec_ids(groups))

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
        engine = self._make_bare_engine()
        engine.checks = StepChecks(self.comm, self.config.consistency_check, self.config.nonfinite)
        return engine

    def prepare_engine(self, engine: Engine, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Prepare `engine` for `layout`. Call its `extend` or `rollback` next."""
        engine.prepare(layout, groups)
        self._validate_inner_optimizers(engine)
        engine.move_params(layout, groups)  # last: after a validation error parameters keep their memory

    def warn_if_not_splittable(self) -> None:
        """Warn if `shard` falls back to whole parameters because the optimizer does not allow splitting them.

        Call it after the optimizer was constructed: one that cannot be constructed raises its own error.
        """
        (spec, *others) = self.optimizer_specs
        if self.reduces_grads and self.config.partition is None and not others and not spec.split_rule:
            warn_at_caller(
                f"{spec.name} looks at whole parameters, so each is updated by one rank: shards are as "
                "balanced as the sizes of parameters allow"
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
                "CPUOffload(...) has no effect: no parameter is on a GPU, so that state is in host memory anyway"
            )

    def _validate_inner_optimizers(self, engine: Engine) -> None:
        """Raise for options of the constructed optimizers that cannot be sharded."""
        if self._is_offloaded and any(member.has_mode("train") for member in engine.inner.local_optimizers):
            raise ConfigError(
                "optimizers with train() and eval() cannot be used with CPUOffload(...): what they exchange with the "
                "parameters would be in host memory"
            )
        reject_differentiable(
            [group for member in engine.inner.local_optimizers for group in member.optimizer.param_groups]
        )

    def validate_options(self) -> None:
        """Raise `ConfigError` for optimizers that cannot be sharded and for incompatible options."""
        self.partitioning.validate_optimizer_specs()
        if self.overlap_with_ddp and self.partitioning.is_flat:
            raise ConfigError("overlap_with_ddp=True deals out whole parameters: with FlatShards() use ddp_hook()")
        if self.overlap_with_ddp and self.config.peer_checkpoint is not None:
            raise ConfigError(
                "PeerCheckpoint(...) needs step() to be called, and with overlap_with_ddp=True a hook steps"
            )
        for name in ("master_dtype", "offload"):
            if getattr(self.config, name) is not None and not self.partitioning.is_flat:
                raise ConfigError(f"ZeroConfig({name}=...) needs partition=FlatShards()")
        checks = {"ConsistencyCheck": self.config.consistency_check, "NonFiniteGrads": self.config.nonfinite}
        for name in (name for name, check in checks.items() if check is not None and self.overlap_with_ddp):
            raise ConfigError(f"{name}(...) cannot be used with overlap_with_ddp=True: DDP's hook makes the steps")
        self._reject_ignored_options()

    def _reject_ignored_options(self) -> None:
        if self.config.stage == 2 and not self.reduces_grads:
            raise ConfigError(
                "ZeroRedundancyOptimizer is ZeRO-1: DDP keeps whole gradients, so ZeroConfig(stage=2) has no effect. "
                "Use zeroshard.shard(model, ...) for ZeRO-2."
            )
        if self.config.overlap_param_gather and not self.reduces_grads:
            raise ConfigError("overlap_param_gather=True needs to see the model: use zeroshard.shard(model, ...)")
        if not self.config.broadcast_buffers and not self.reduces_grads:
            raise ConfigError("broadcast_buffers=False is for zeroshard.shard; DDP has broadcast_buffers=False")
        for name in ("reduce_dtype", "deterministic_reduce"):
            if getattr(self.config, name) and not self.partitioning.is_flat:
                raise ConfigError(
                    f"ZeroConfig({name}=...) needs partition=FlatShards() and ddp_hook(): by default DDP reduces"
                )

    def must_match_across_ranks(self, layout: Layout, groups: Sequence[ParamGroup]) -> list[str]:
        """Return everything that must be equal on all ranks, one line each, most informative first."""
        return [
            *(f"optimizer class {spec.name}" for spec in self.optimizer_specs),
            *self.config.describe(),
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

    def _make_bare_engine(self) -> Engine:
        if self.partitioning.is_flat:
            shardings = [
                OptimizerSharding(spec, self.partitioning.is_split(spec_id))
                for spec_id, spec in enumerate(self.optimizer_specs)
            ]
            return FlatShardEngine(
                self.comm, shardings, self.config._master_policy, self.config.offload if self._is_offloaded else None
            )
        store = (
            FlatParamBuffers(by_owner=True)
            if self.parameters_as_bucket_view and not self.overlap_with_ddp
            else UnflattenedParams()
        )
        return WholeParamEngine(self.comm, self.optimizer_specs[0], store)


def _interleave_groups(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Sort parameters by their relative position in their group: the heads of all groups first, the ends last."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    position = {spec.index: (i + 0.5) / len(group) for group in groups for i, spec in enumerate(group)}
    return sorted(specs, key=lambda spec: position[spec.index])


def format_param_count(groups: Sequence[ParamGroup]) -> str:
    """Return the number of parameters and groups as text."""
    count, plural = len(collect_params(groups)), "s" if len(groups) > 1 else ""
    return f"{count} parameters in {len(groups)} group{plural}"


def collect_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
