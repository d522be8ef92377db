"""One kind of optimizer: what is known of it, and what this rank holds for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ..layout.layout import Layout, Piece
from ..layout.partition import Partitioner
from ..layout.specs import ParamSpec
from ..state.compat import SavedState
from ..state.records import StateRecord
from ..units import Rank
from .cut_state import CutState
from .cutting import Cutting, how_to_cut
from .inner import ParamGroup, Recipe, ShardOptimizer
from .masters import ShardMemory
from .rooms import Wanted
from .segments import Holdings, Segment
from .selftest import Traits, examine
from .work import CountedWork

PieceRoom = Callable[[Piece, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory for state of a piece: of a key, a shape and a dtype."""


class Kind:
    """A class with the user's options for it, and what the self-test finds."""

    def __init__(self, name: str, recipe: Recipe, partition: Partitioner | None = None) -> None:
        """`partition`: what its user wants for it alone."""
        self.name, self.recipe, self.partition = name, recipe, partition

    @cached_property
    def traits(self) -> Traits:
        return examine(self.recipe)

    @cached_property
    def cutting(self) -> Cutting | None:
        """How it updates pieces of a parameter as it would update the whole; None if it does not."""
        return None if self.traits.couples_params else how_to_cut(self.recipe)

    @cached_property
    def work(self) -> CountedWork:
        """What it takes to update a parameter as a whole."""
        return CountedWork(self.recipe)

    def require_that_it_can_be_made(self) -> None:
        """A self-test of an optimizer that cannot, since its arguments are wrong, says nothing: raise its own error."""
        self.recipe.build({id(param) for group in self.recipe.groups for param in group["params"]})


class Part:
    """The parameters of one kind: the inner optimizer, the segments that it updates, their state."""

    inner: ShardOptimizer

    def __init__(self, rank: Rank, kind: Kind, memory: ShardMemory, *, cut: bool) -> None:
        self.name, self.traits, self._recipe = kind.name, kind.traits, kind.recipe
        self.numbers: list[int] = []
        """Of its groups."""
        cutting = kind.cutting if cut else None
        joins = cutting is not None and cutting.grain.is_fine
        self.holdings = Holdings(rank, memory.view, joins=joins, param_shaped=kind.traits.param_shaped)
        self.states = CutState(self.holdings, memory, kind.recipe, frozenset() if cutting is None else cutting.common)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.holdings)

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup], numbers: Sequence[int]) -> None:
        """Have all groups with these numbers."""
        known, self.numbers = len(self.numbers), list(numbers)
        mine = [groups[number] for number in numbers]
        self.holdings.extend(layout, self.numbers)
        own = self.holdings.inner_groups(mine)
        if not known:
            self.inner = replace(self._recipe, groups=own).build(self.holdings.ids())
            return
        self.inner.add_groups(mine[:known], own[known:], self.holdings.ids())

    def take_back(self, layout: Layout, first_group: int) -> None:
        """Undo `prepare`, also one that failed halfway, for the groups from a number on."""
        self.numbers = [number for number in self.numbers if number < first_group]
        self.inner.drop_groups(len(self.numbers))
        self.holdings.take_back(layout, len(self.numbers))

    def split(self, present: bytes) -> None:
        self.holdings.split(present, self.inner.optimizer)

    def take_edits(self) -> None:
        """Take over what was done to `optimizer.state` since the last step."""
        self.states.take_edits(self.inner.optimizer)
        self.states.join_dropped(self.inner.optimizer)

    def records(self, specs: Sequence[ParamSpec]) -> list[StateRecord]:
        return self.states.records(self.inner.optimizer, specs)

    def rooms(self, layout: Layout, wanted: Wanted, param_shaped: frozenset[Any], *, in_place: bool) -> PieceRoom:
        return self.states.rooms(self.inner.optimizer, layout, wanted, param_shaped, in_place=in_place)

    def load(self, saved: SavedState, specs: Sequence[ParamSpec], *, adopt: bool) -> Callable[[], None]:
        """Take this rank's part of it; returns how to undo it."""
        return self.states.load(self.inner.optimizer, saved.of_groups(self.numbers, specs), specs, adopt=adopt)
