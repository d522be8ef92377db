"""From kinds of optimizers and the user's choices to a layout. Pure: no parameter is touched, nobody is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .config import ZeroConfig
from .errors import ConfigError
from .layout.balance import Balance, balance
from .layout.grain import Grain
from .layout.layout import Layout
from .layout.partition import Cost, FlatShards, Partitioner, SideBySide, WholeParams
from .layout.specs import ParamSpec
from .runtime.inner import ParamGroup
from .runtime.parts import Kind
from .runtime.work import by_elements, in_operations
from .units import MIB

OFFLOAD_BUCKET = 128 * MIB
"""What comes to the device at once, unless its user has chosen: also where one rank alone would take larger ones."""


@dataclass(frozen=True)
class Division:
    """How parameters are divided among ranks.

    Methods take `kinds`: for each group of parameters, the number of its kind.
    """

    config: ZeroConfig
    kinds: Sequence[Kind]
    """Of optimizers."""
    reduces: bool = False
    """Gradients are to be reduced to their owners, so that parameters lie in buckets in any case."""
    offloads: bool = False
    """State rests in host memory."""

    @cached_property
    def partitions(self) -> list[Partitioner]:
        """How the parameters of each kind are divided."""
        return [self._partition(kind) for kind in self.kinds]

    def _partition(self, kind: Kind) -> Partitioner:
        suited = FlatShards() if self.reduces and kind.cutting else WholeParams()
        shared = self.config.partition
        if len(self.kinds) > 1 and isinstance(shared, FlatShards) and not kind.cutting:
            shared = None  # it is for those that can be cut
        chosen = kind.partition or shared or suited
        if isinstance(chosen, FlatShards) and chosen.grain is None and kind.cutting:
            return replace(chosen, **kind.cutting.grain._asdict())
        return chosen

    @cached_property
    def flat(self) -> bool:
        """Ranks own slices of buckets."""
        return self.reduces or any(isinstance(partition, FlatShards) for partition in self.partitions)

    def check_kinds(self) -> None:
        """Refuse optimizers that cannot be right when they are sharded in this way."""
        for kind, partition in zip(self.kinds, self.partitions, strict=True):
            self._check_kind(kind, partition)

    def _check_kind(self, kind: Kind, partition: Partitioner) -> None:
        if kind.traits.couples_params:
            raise ConfigError(
                f"{kind.name} cannot be sharded: its update of one parameter depends on the others, "
                "which live on other ranks. Take one that updates each parameter by itself, or train without sharding."
            )
        self._refuse_other_gradients(kind)
        refuse_differentiable([kind.recipe.defaults, *kind.recipe.groups])
        if isinstance(partition, FlatShards):
            _require_grain(kind, partition)
        if len(self.kinds) > 1 and kind.traits.keeps_more:
            raise ConfigError(
                f"{kind.name} cannot be one of several classes: it has state that belongs to no parameter, so that "
                "the state of all could not be told apart. Make an optimizer of its own for its part of the model."
            )

    def _refuse_other_gradients(self, kind: Kind) -> None:
        """Those that it needs and does not get."""
        if kind.traits.needs == "sparse" and self.reduces:
            raise ConfigError(
                f"{kind.name} takes sparse gradients only, and shard() averages dense ones. Use an optimizer for dense "
                "gradients, or ZeroRedundancyOptimizer with DistributedDataParallel."
            )
        if kind.traits.needs == "graph" and self.flat:
            raise ConfigError(
                f"{kind.name} differentiates gradients once more, and those that were averaged over ranks have no "
                "graph. Use an optimizer that needs no Hessian, or train without sharding."
            )

    def is_cut(self, kind: int) -> bool:
        """Whether ranks own pieces of parameters of a kind."""
        return isinstance(self.partitions[kind], FlatShards)

    def divide(self, layout: Layout, specs: Sequence[ParamSpec], kinds: Sequence[int]) -> Layout:
        """`layout` with new parameters. Where they are put into buckets they are given in the order of their use."""
        partition = self._in_buckets(kinds, [*layout.params, *specs]) if self.flat else self.partitions[0]
        return partition.extend(layout, specs)

    def balance(self, layout: Layout, kinds: Sequence[int]) -> Balance:
        """Of trained elements, and of what it takes to update them."""
        costs = self._costs(kinds, layout.params)
        return balance(layout, lambda spec: costs[spec.group](spec))

    def _in_buckets(self, kinds: Sequence[int], specs: Sequence[ParamSpec]) -> Partitioner:
        foreign = [it for it in self.partitions if type(it) not in (FlatShards, WholeParams)]
        if foreign:
            return foreign[0]
        costs = self._costs(kinds, specs)
        whole = {number: cost for number, cost in enumerate(costs) if not self.is_cut(kinds[number])}
        return SideBySide(whole, self._bucket_bytes(), self._grains(kinds))

    def _grains(self, kinds: Sequence[int]) -> dict[int, Grain]:
        """Of each group that is cut, by its kind."""
        cut = {n: it for n, kind in enumerate(kinds) if isinstance(it := self.partitions[kind], FlatShards)}
        return {number: partition.grain or Grain() for number, partition in cut.items()}

    def _bucket_bytes(self) -> int | None:
        """Parameters of all kinds that can be cut share buckets."""
        cut = [it for it in (self.config.partition, *self.partitions) if isinstance(it, FlatShards)]
        sizes = sorted({it.bucket_bytes for it in cut if it.bucket_bytes is not None})
        if len(sizes) > 1:
            raise ConfigError(f"all rules share buckets, which have one size: give one bucket_bytes, not {sizes}")
        return sizes[0] if sizes else (OFFLOAD_BUCKET if self.offloads else None)

    def _costs(self, kinds: Sequence[int], specs: Sequence[ParamSpec]) -> list[Cost]:
        """For each group, by its kind: what it takes a rank to update a parameter of it."""
        counted: list[Cost] = [by_elements if self.is_cut(kind) else self.kinds[kind].work for kind in kinds]
        partitions = [self.partitions[kind] for kind in kinds]
        own = [it.cost if isinstance(it, WholeParams) else None for it in partitions]
        if len(self.kinds) == 1:
            return [mine or it for mine, it in zip(own, counted, strict=True)]
        return [
            in_operations(mine, [spec for spec in specs if own[spec.group] is mine], counted) if mine else it
            for mine, it in zip(own, counted, strict=True)
        ]


def _require_grain(kind: Kind, flat: FlatShards) -> None:
    """Refuse to cut parameters more finely than the optimizer allows."""
    if kind.cutting is None:
        kind.require_that_it_can_be_made()
        raise ConfigError(
            f"FlatShards() cannot be used with {kind.name}: a self-test found that it updates a parameter "
            "in another way when it is cut into pieces. Use WholeParams()."
        )
    needed = kind.cutting.grain
    if flat.grain is not None and not flat.grain.suits(needed):
        raise ConfigError(
            f"{flat} cuts too finely for {kind.name}: a self-test found that it needs pieces of a multiple of "
            f"{needed.align} elements, at least {needed.least}. Leave align and least out, or take "
            f"align={needed.align} and least={needed.least}."
        )


def refuse_differentiable(groups: Sequence[ParamGroup]) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")
