"""One kind of optimizer: what is known of it, and what this rank holds for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ..layout.layout import Layout, ParamShard
from ..layout.partition import Partitioner
from ..layout.spec import ParamSpec
from ..state.state_dict import SavedState
from ..state.records import StateShard
from .._types import Rank
from .state import ShardedState
from .probe import SplitRule, probe_split_rule
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup
from .masters import ShardStorage
from .rooms import StateKeys
from .flat_params import FlatParam, FlatParams
from .selftest import OptimizerTraits, probe_traits
from .work import FlopCost

ShardStateAllocatorFn = Callable[[ParamShard, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory for state of a piece: of a key, a shape and a dtype."""


class OptimizerSpec:
    """A class with the user's options for it, and what the self-test finds."""

    def __init__(self, name: str, factory: OptimizerFactory, partitioner: Partitioner | None = None) -> None:
        """`partition`: what its user wants for it alone."""
        self.name, self.factory, self.partitioner = name, factory, partitioner

    @cached_property
    def traits(self) -> OptimizerTraits:
        return probe_traits(self.factory)

    @cached_property
    def split_rule(self) -> SplitRule | None:
        """How it updates pieces of a parameter as it would update the whole; None if it does not."""
        return None if self.traits.couples_params else probe_split_rule(self.factory)

    @cached_property
    def step_cost(self) -> FlopCost:
        """What it takes to update a parameter as a whole."""
        return FlopCost(self.factory)

    def check_constructible(self) -> None:
        """A self-test of an optimizer that cannot, since its arguments are wrong, says nothing: raise its own error."""
        self.factory.build({id(param) for group in self.factory.groups for param in group["params"]})


class OptimizerShard:
    """The parameters of one kind: the inner optimizer, the segments that it updates, their state."""

    inner: LocalOptimizer

    def __init__(self, rank: Rank, spec: OptimizerSpec, storage: ShardStorage, *, splits_params: bool) -> None:
        self.name, self.traits, self._factory = spec.name, spec.traits, spec.factory
        self.group_ids: list[int] = []
        """Of its groups."""
        cutting = spec.split_rule if splits_params else None
        joins = cutting is not None and cutting.granularity.is_elementwise
        self.flat_params = FlatParams(
            rank, storage.view, can_join_shards=joins, param_shaped_keys=spec.traits.param_shaped_keys
        )
        self.sharded_state = ShardedState(
            self.flat_params, storage, spec.factory, frozenset() if cutting is None else cutting.shared_inner_names
        )

    def __iter__(self) -> Iterator[FlatParam]:
        return iter(self.flat_params)

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup], group_ids: Sequence[int]) -> None:
        """Have all groups with these numbers."""
        known, self.group_ids = len(self.group_ids), list(group_ids)
        mine = [groups[number] for number in group_ids]
        self.flat_params.extend(layout, self.group_ids)
        own = self.flat_params.make_inner_groups(mine)
        if not known:
            self.inner = replace(self._factory, groups=own).build(self.flat_params.param_ids())
            return
        self.inner.add_groups(mine[:known], own[known:], self.flat_params.param_ids())

    def rollback(self, layout: Layout, first_group: int) -> None:
        """Undo `prepare`, also one that failed halfway, for the groups from a number on."""
        self.group_ids = [number for number in self.group_ids if number < first_group]
        self.inner.drop_groups(len(self.group_ids))
        self.flat_params.rollback(layout, len(self.group_ids))

    def split_by_mask(self, mask: bytes) -> None:
        self.flat_params.split_by_mask(mask, self.inner.optimizer)

    def sync_user_edits(self) -> None:
        """Take over what was done to `optimizer.state` since the last step."""
        self.sharded_state.sync_user_edits(self.inner.optimizer)
        self.sharded_state.rejoin_stateless(self.inner.optimizer)

    def state_shards(self, specs: Sequence[ParamSpec]) -> list[StateShard]:
        return self.sharded_state.state_shards(self.inner.optimizer, specs)

    def state_allocator(
        self, layout: Layout, state_keys: StateKeys, param_shaped_keys: frozenset[Any], *, in_place: bool
    ) -> ShardStateAllocatorFn:
        return self.sharded_state.state_allocator(
            self.inner.optimizer, layout, state_keys, param_shaped_keys, in_place=in_place
        )

    def load_state(self, saved: SavedState, specs: Sequence[ParamSpec], *, assign: bool) -> Callable[[], None]:
        """Take this rank's part of it; returns how to undo it."""
        return self.sharded_state.load(
            self.inner.optimizer, saved.select_groups(self.group_ids, specs), specs, assign=assign
        )
