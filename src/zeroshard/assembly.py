"""From what the user gave to an engine that runs it. Everything here is local to the rank and changes no parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch

from .comm.collectives import Comm
from .config import ZeroConfig
from .errors import ConfigError
from .layout.layout import Layout
from .layout.partition import FlatShards, Partitioner, WholeParams
from .layout.specs import ParamSpec, read_specs
from .notices import warn_user
from .params import check_specs
from .policies import Reduce
from .runtime.flat import FlatEngine
from .runtime.inner import ParamGroup, Recipe
from .runtime.selftest import Traits, examine, is_separable
from .runtime.step import Engine
from .runtime.store import FlatStore, LooseStore
from .runtime.whole import WholeEngine
from .state.compat import describe_groups


@dataclass(frozen=True)
class Assembly:
    """The choices that stay, and how they turn groups of parameters into a layout and an engine."""

    comm: Comm
    config: ZeroConfig
    recipe: Recipe
    bucket_view: bool = False
    """Whole parameters shall live in flat buffers."""
    overlap: bool = False
    """DDP shall drive the steps."""
    reduces: bool = False
    """Gradients are to be reduced to their owners, so that parameters lie in buckets in any case."""
    order: Mapping[int, int] = field(default_factory=dict)
    """Places of parameters in the model, by id, if that is known."""

    @cached_property
    def traits(self) -> Traits:
        """What the self-test finds."""
        return examine(self.recipe)

    @cached_property
    def separable(self) -> bool:
        """The optimizer updates flat pieces of a parameter as it would update the whole."""
        return not self.traits.couples_params and is_separable(self.recipe)

    @cached_property
    def partition(self) -> Partitioner:
        if self.config.partition is not None:
            return self.config.partition
        return FlatShards() if self.reduces and self.separable else WholeParams()

    @property
    def flat(self) -> bool:
        """Ranks own slices of buckets."""
        return self.reduces or isinstance(self.partition, FlatShards)

    def extend(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> Layout:
        """`layout` with the groups from `first_group` on, once they are found fit to be sharded."""
        specs = read_specs(groups[first_group:], first_index=len(layout.params), first_group=first_group)
        mixed = self.config.mixed_dtypes or self.reduces
        check_specs([*layout.params, *specs], all_params(groups), mixed_dtypes=mixed)
        for device in {spec.device for spec in specs}:
            if not self.comm.group.carries(device):
                raise ConfigError(f"the backend of the process group cannot carry parameters on {device}")
        return self.partition.extend(layout, self._in_order_of_use(specs, groups) if self.flat else specs)

    def _in_order_of_use(self, specs: Sequence[ParamSpec], groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """As a forward pass is expected to use them: in the order of the model or, where that is not known, all groups
        side by side. With one group behind the other, a bucket of all biases would be full, and let others go, last."""
        if not self.order:
            return _side_by_side(specs)
        params, last = all_params(groups), len(self.order)
        return sorted(specs, key=lambda spec: self.order.get(id(params[spec.index]), last))

    def engine(self, layout: Layout, groups: Sequence[ParamGroup]) -> Engine:
        """An engine for this rank, which is to `extend` to `layout` next."""
        engine = self._engine()
        engine.prepare(layout, groups)
        self.check(engine)
        return engine

    def warn_of_whole_params(self) -> None:
        """Say so where parameters would be cut if the optimizer allowed it. After one was made, and so can be made."""
        if self.reduces and self.config.partition is None and not self.separable:
            warn_user(
                f"{self.recipe.name} looks at whole parameters, so each is updated by one rank: shards are as "
                "balanced as the sizes of parameters allow, and gradients travel after the backward pass"
            )

    def check(self, engine: Engine) -> None:
        """Refuse options of an optimizer that cannot be right when it is sharded."""
        _refuse_differentiable(engine.inner.optimizer.param_groups)

    def check_options(self) -> None:
        """Refuse an optimizer that cannot be right when it is sharded, and options that do not go together."""
        if self.traits.couples_params:
            raise ConfigError(
                f"{self.recipe.name} cannot be sharded: its update of one parameter depends on the others, "
                "which live on other ranks"
            )
        _refuse_differentiable([self.recipe.defaults, *self.recipe.groups])
        if isinstance(self.partition, FlatShards) and not self.separable:
            self._require_that_it_can_be_made()
            raise ConfigError(
                f"FlatShards() cannot be used with {self.recipe.name}: a self-test found that it updates a parameter "
                "in another way when it is cut into pieces. Use WholeParams()."
            )
        if self.overlap and self.flat:
            raise ConfigError("overlap_with_ddp=True deals out whole parameters: with FlatShards() use ddp_hook()")
        if self.config.masters is not None and not self.flat:
            raise ConfigError("MasterWeights(...) needs partition=FlatShards()")
        self._refuse_what_would_be_ignored()

    def _require_that_it_can_be_made(self) -> None:
        """A self-test of an optimizer that cannot, since its arguments are wrong, says nothing: raise its own error."""
        self.recipe.build(set(map(id, all_params(self.recipe.groups))))

    def _refuse_what_would_be_ignored(self) -> None:
        if self.config.overlap_gather and not self.reduces:
            raise ConfigError("overlap_gather=True needs to see the model: use zeroshard.shard(model, ...)")
        if not self.config.sync_buffers and not self.reduces:
            raise ConfigError("sync_buffers=False is for zeroshard.shard; DDP has broadcast_buffers=False")
        if self.config.reduce != Reduce() and not self.flat:
            raise ConfigError("Reduce(...) needs partition=FlatShards() and ddp_hook(): else DDP reduces gradients")

    def facts(self, layout: Layout, groups: Sequence[ParamGroup]) -> list[str]:
        """What must be equal on all ranks, most telling first, each in a line of its own."""
        return [
            f"optimizer class {self.recipe.name}",
            *self.config.describe(),
            f"parameters_as_bucket_view={self.bucket_view}",
            f"overlap_with_ddp={self.overlap}",
            *(spec.describe() for spec in layout.params),
            "no further parameter",
            *describe_groups(groups),
            f"layout {layout.digest}",
        ]

    def _engine(self) -> Engine:
        if self.flat:
            cut = isinstance(self.partition, FlatShards)
            return FlatEngine(self.comm, self.recipe, self.traits, self.config.masters, cut=cut)
        store = FlatStore() if self.bucket_view and not self.overlap else LooseStore()
        return WholeEngine(self.comm, self.recipe, store, moves_all=self.traits.moves_without_grads)


def _side_by_side(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """First those at the head of each group, at last those at its end."""
    members = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    place = {it.index: (number + 0.5) / len(group) for group in members for number, it in enumerate(group)}
    return sorted(specs, key=lambda spec: place[spec.index])


def _refuse_differentiable(groups: Sequence[ParamGroup]) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")


def count_params(groups: Sequence[ParamGroup]) -> str:
    """How many there are, in words."""
    params, several = len(all_params(groups)), "s" if len(groups) > 1 else ""
    return f"{params} parameters in {len(groups)} group{several}"


def all_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
