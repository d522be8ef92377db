"""From kinds of optimizers and the user's choices to a layout. Pure: no parameter is touched, nobody is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .config import ZeroConfig
from .errors import ConfigError
from .layout.balance import Balance, compute_balance
from .layout.grain import ShardGranularity
from .layout.layout import Layout
from .layout.partition import CostFn, FlatShards, MixedPartitioner, Partitioner, WholeParams
from .layout.spec import ParamSpec
from .engine.inner import ParamGroup
from .engine.parts import OptimizerSpec
from .engine.work import convert_cost_to_flops, numel_cost
from ._types import MIB

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
