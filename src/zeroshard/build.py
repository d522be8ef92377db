"""From what the user gave to an engine that runs it. Everything here is local to the rank, and no value changes."""

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
# From kinds of optimizers and the user's choices to a layout. Pure: no parameter is touched, nobody is asked.


OFFLOAD_BUCKET_BYTES = 128 * MIB
"""What comes to the device at once, unless its user has chosen: also where one rank alone would take larger ones."""


@dataclass(frozen=True)
class Partitioning:
    """How parameters are divided among ranks.

    Methods take `kinds`: for each group of parameters, the number of its kind.
    """

    config: ZeroConfig
    optimizer_specs: Sequence[OptimizerSpec]
    """Of optimizers."""
    reduces_grads: bool = False
    """Gradients are to be reduced to their owners, so that parameters lie in buckets in any case."""
    is_offloaded: bool = False
    """State rests in host memory."""

    @cached_property
    def partitioners(self) -> list[Partitioner]:
        """How the parameters of each kind are divided."""
        return [self._resolve_partitioner(kind) for kind in self.optimizer_specs]

    def _resolve_partitioner(self, optimizer_spec: OptimizerSpec) -> Partitioner:
        suited = FlatShards() if self.reduces_grads and optimizer_spec.split_rule else WholeParams()
        shared = self.config.partition
        if len(self.optimizer_specs) > 1 and isinstance(shared, FlatShards) and not optimizer_spec.split_rule:
            shared = None  # it is for those that can be cut
        chosen = optimizer_spec.partitioner or shared or suited
        if isinstance(chosen, FlatShards) and chosen.granularity is None and optimizer_spec.split_rule:
            return replace(chosen, **optimizer_spec.split_rule.granularity._asdict())
        return chosen

    @cached_property
    def is_flat(self) -> bool:
        """Ranks own slices of buckets."""
        return self.reduces_grads or any(isinstance(partition, FlatShards) for partition in self.partitioners)

    def validate_optimizer_specs(self) -> None:
        """Refuse optimizers that cannot be right when they are sharded in this way."""
        for kind, partition in zip(self.optimizer_specs, self.partitioners, strict=True):
            self._validate_optimizer_spec(kind, partition)

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
                "so that "
                "the state of all could not be told apart. Make an optimizer of its own for its part of the model."
            )

    def _validate_required_grads(self, optimizer_spec: OptimizerSpec) -> None:
        """Those that it needs and does not get."""
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
        """Whether ranks own pieces of parameters of a kind."""
        return isinstance(self.partitioners[spec_id], FlatShards)

    def extend_layout(self, layout: Layout, specs: Sequence[ParamSpec], spec_ids: Sequence[int]) -> Layout:
        """`layout` with new parameters. Where they are put into buckets they are given in the order of their use."""
        partition = (
            self._make_bucket_partitioner(spec_ids, [*layout.params, *specs]) if self.is_flat else self.partitioners[0]
        )
        return partition.extend(layout, specs)

    def compute_balance(self, layout: Layout, spec_ids: Sequence[int]) -> Balance:
        """Of trained elements, and of what it takes to update them."""
        costs = self._costs(spec_ids, layout.params)
        return compute_balance(layout, lambda spec: costs[spec.group](spec))

    def _make_bucket_partitioner(self, spec_ids: Sequence[int], specs: Sequence[ParamSpec]) -> Partitioner:
        foreign = [it for it in self.partitioners if type(it) not in (FlatShards, WholeParams)]
        if foreign:
            return foreign[0]
        costs = self._costs(spec_ids, specs)
        whole = {number: cost for number, cost in enumerate(costs) if not self.is_split(spec_ids[number])}
        return MixedPartitioner(whole, self._bucket_bytes(), self._granularities(spec_ids))

    def _granularities(self, spec_ids: Sequence[int]) -> dict[int, ShardGranularity]:
        """Of each group that is cut, by its kind."""
        cut = {n: it for n, kind in enumerate(spec_ids) if isinstance(it := self.partitioners[kind], FlatShards)}
        return {number: partition.granularity or ShardGranularity() for number, partition in cut.items()}

    def _bucket_bytes(self) -> int | None:
        """Parameters of all kinds that can be cut share buckets."""
        cut = [it for it in (self.config.partition, *self.partitioners) if isinstance(it, FlatShards)]
        sizes = sorted({it.bucket_bytes for it in cut if it.bucket_bytes is not None})
        if len(sizes) > 1:
            raise ConfigError(f"all rules share buckets, which have one size: give one bucket_bytes, not {sizes}")
        return sizes[0] if sizes else (OFFLOAD_BUCKET_BYTES if self.is_offloaded else None)

    def _costs(self, spec_ids: Sequence[int], specs: Sequence[ParamSpec]) -> list[CostFn]:
        """For each group, by its kind: what it takes a rank to update a parameter of it."""
        counted: list[CostFn] = [
            numel_cost if self.is_split(kind) else self.optimizer_specs[kind].step_cost for kind in spec_ids
        ]
        partitions = [self.partitioners[kind] for kind in spec_ids]
        own = [it.cost if isinstance(it, WholeParams) else None for it in partitions]
        if len(self.optimizer_specs) == 1:
            return [mine or it for mine, it in zip(own, counted, strict=True)]
        return [
            convert_cost_to_flops(mine, [spec for spec in specs if own[spec.group] is mine], counted) if mine else it
            for mine, it in zip(own, counted, strict=True)
        ]


def _validate_granularity(optimizer_spec: OptimizerSpec, flat_shards: FlatShards) -> None:
    """Refuse to cut parameters more finely than the optimizer allows."""
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
            f"multiple of {needed.align} elements, at least {needed.min_numel}. Leave align and least out, or take "
            f"align={needed.align} and min_numel={needed.min_numel}."
        )


def reject_differentiable(groups: Sequence[ParamGroup]) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")


# ---------------------------------------------------------------------------------------------------------------------
# From what the user gave to an engine that runs it. Everything here is local to the rank, and no value changes.


@dataclass(frozen=True)
class EngineBuilder:
    """The choices that stay, and how they turn groups of parameters into a layout and an engine."""

    comm: Comm
    config: ZeroConfig
    optimizer_specs: Sequence[OptimizerSpec]
    """Of optimizers. Where there are several, each group names its own."""
    parameters_as_bucket_view: bool = False
    """Whole parameters shall live in flat buffers."""
    overlap_with_ddp: bool = False
    """DDP shall drive the steps."""
    reduces_grads: bool = False
    """Gradients are to be reduced to their owners, so that parameters lie in buckets in any case."""
    param_order: Mapping[int, int] = field(default_factory=dict)
    """Places of parameters in the model, by id, if that is known."""

    @cached_property
    def partitioning(self) -> Partitioning:
        """Who owns what."""
        return Partitioning(
            self.config, self.optimizer_specs, reduces_grads=self.reduces_grads, is_offloaded=self._is_offloaded
        )

    def _spec_ids(self, groups: Sequence[ParamGroup]) -> list[int]:
        """The number of each group's kind."""
        return [0] * len(groups) if len(self.optimizer_specs) == 1 else [self._spec_id(group) for group in groups]

    def _spec_id(self, group: ParamGroup) -> int:
        names = [kind.name for kind in self.optimizer_specs]
        if group.get(OPTIMIZER_KEY) not in names:
            raise ConfigError(
                f"this optimizer has several classes, so that a group must name its own: {OPTIMIZER_KEY!r} is to be "
                f"one of {names}, not {group.get(OPTIMIZER_KEY)!r}"
            )
        return names.index(group[OPTIMIZER_KEY])

    def extend_layout(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> Layout:
        """`layout` with the groups from `first_group` on, once they are found fit to be sharded."""
        specs = make_param_specs(groups[first_group:], first_index=len(layout.params), first_group=first_group)
        mixed = self.config.allow_mixed_dtypes or self.reduces_grads
        known = len(layout.params)
        check_specs([*layout.params, *specs], collect_params(groups), allow_mixed_dtypes=mixed, num_checked=known)
        for device in {spec.device for spec in specs}:
            if not self.comm.group.supports_device(device):
                raise ConfigError(f"the backend of the process group cannot carry parameters on {device}")
        ordered = self._sort_by_use(specs, groups) if self.partitioning.is_flat else specs
        return self.partitioning.extend_layout(layout, ordered, self._spec_ids(groups))

    def compute_balance(self, layout: Layout, groups: Sequence[ParamGroup]) -> Balance:
        """Of trained elements, and of what it takes to update them."""
        return self.partitioning.compute_balance(layout, self._spec_ids(groups))

    def _sort_by_use(self, specs: Sequence[ParamSpec], groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """As a forward pass is expected to use them: in the order of the model or, where that is not known, all groups
        side by side. With one group behind the other, a bucket of all biases would be full, and let others go, last."""
        if not self.param_order:
            return _interleave_groups(specs)
        params, last = collect_params(groups), len(self.param_order)
        return sorted(specs, key=lambda spec: self.param_order.get(id(params[spec.index]), last))

    def make_engine(self) -> Engine:
        """One for this rank, which is to `prepare` next."""
        engine = self._make_bare_engine()
        engine.checks = StepChecks(self.comm, self.config.consistency_check, self.config.nonfinite)
        return engine

    def prepare_engine(self, engine: Engine, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """It is to `extend` to `layout` next, or to take back what it has got ready for that."""
        engine.prepare(layout, groups)
        self._validate_inner_optimizers(engine)
        engine.move_params(layout, groups)  # not before: what this rank refuses by itself leaves them where they are

    def warn_if_not_splittable(self) -> None:
        """Say so where parameters would be cut if the optimizer allowed it. After one was made, and so can be made."""
        (kind, *others) = self.optimizer_specs
        if self.reduces_grads and self.config.partition is None and not others and not kind.split_rule:
            warn_at_caller(
                f"{kind.name} looks at whole parameters, so each is updated by one rank: shards are as "
                "balanced as the sizes of parameters allow"
            )

    @cached_property
    def _is_offloaded(self) -> bool:
        groups = [group for kind in self.optimizer_specs for group in kind.factory.groups]
        return self.config.offload is not None and any(
            is_offload_device(param.device) for param in collect_params(groups)
        )

    def warn_if_offload_unused(self) -> None:
        """Say so where it has no effect."""
        if self.config.offload is not None and not self._is_offloaded:
            warn_at_caller(
                "CPUOffload(...) has no effect: no parameter is on a GPU, so that state is in host memory anyway"
            )

    def _validate_inner_optimizers(self, engine: Engine) -> None:
        """Refuse options of an optimizer that cannot be right when it is sharded."""
        if self._is_offloaded and any(member.has_mode("train") for member in engine.inner.local_optimizers):
            raise ConfigError(
                "optimizers with train() and eval() cannot be used with CPUOffload(...): what they exchange with the "
                "parameters would be in host memory"
            )
        reject_differentiable(
            [group for member in engine.inner.local_optimizers for group in member.optimizer.param_groups]
        )

    def validate_options(self) -> None:
        """Refuse an optimizer that cannot be right when it is sharded, and options that do not go together."""
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
        looking = {"Drift": self.config.consistency_check, "NonFinite": self.config.nonfinite}
        for name in (name for name, it in looking.items() if it is not None and self.overlap_with_ddp):
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
        """What must be equal on all ranks, most telling first, each in a line of its own."""
        return [
            *(f"optimizer class {kind.name}" for kind in self.optimizer_specs),
            *self.config.describe(),
            f"parameters_as_bucket_view={self.parameters_as_bucket_view}",
            f"overlap_with_ddp={self.overlap_with_ddp}",
            *self.must_match_for_new_groups(Layout.empty(layout.world_size), layout, groups),
        ]

    def must_match_for_new_groups(
        self, base_layout: Layout, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0
    ) -> list[str]:
        """The same of what `layout` has beyond `base`: the groups from `first_group` on."""
        return [
            *(spec.describe() for spec in layout.params[len(base_layout.params) :]),
            "no further parameter",
            *describe_groups(groups[first_group:], first=first_group),
            f"layout {layout.digest}",
        ]

    def _make_bare_engine(self) -> Engine:
        if self.partitioning.is_flat:
            shares = [
                OptimizerSharding(kind, self.partitioning.is_split(number))
                for number, kind in enumerate(self.optimizer_specs)
            ]
            return FlatShardEngine(
                self.comm, shares, self.config._master_policy, self.config.offload if self._is_offloaded else None
            )
        store = (
            FlatParamBuffers(by_owner=True)
            if self.parameters_as_bucket_view and not self.overlap_with_ddp
            else UnflattenedParams()
        )
        return WholeParamEngine(self.comm, self.optimizer_specs[0], store)


def _interleave_groups(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """First those at the head of each group, at last those at its end."""
    members = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    place = {it.index: (number + 0.5) / len(group) for group in members for number, it in enumerate(group)}
    return sorted(specs, key=lambda spec: place[spec.index])


def format_param_count(groups: Sequence[ParamGroup]) -> str:
    """How many there are, in words."""
    params, several = len(collect_params(groups)), "s" if len(groups) > 1 else ""
    return f"{params} parameters in {len(groups)} group{several}"


def collect_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
