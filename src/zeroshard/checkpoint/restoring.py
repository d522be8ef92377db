"""What a running optimizer takes from a saved one.

Names decide which state goes where, whatever the order, the groups and the ranks were when it was saved.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from ..errors import CheckpointError
from ..notices import warn_user
from ..runtime.step import Room
from ..state.compat import StateDict, describe_options
from ..state.records import MASTER
from .archive import Entry
from .fitting import Fit
from .optimizers import Running
from .owned import place_of
from .saved_optimizer import GROUPS, STATE, Options, SavedOptimizer, StateEntry


class Restoring:
    def __init__(self, saved: SavedOptimizer, running: Running, names: Sequence[str], *, strict: bool) -> None:
        """Raises if the saved optimizer does not fit."""
        self._saved, self.running, self._names = saved, running, names
        running.require_ready()
        fit = Fit(saved, running, names)
        if strict:
            fit.require_the_same_names()
        found = {name: sorted(saved.state.get(name, ()), key=lambda it: str(it.keys)) for name in names}
        self._wanted = [(i, it) for i, name in enumerate(names) for it in found[name]]
        for index, it in self._wanted:
            fit.check_shape(index, it)
        self._keys = fit.keys()
        self._wanted = [(index, it) for index, it in self._wanted if self._uses(index, it)]
        self._groups = self._merged_groups()

    @cached_property
    def targets(self) -> dict[str, Any]:
        """What to read, and where to."""
        held = [(index, it) for index, it in self._wanted if self.running.holds(index, it.key)]
        room = self.running.rooms({(index, it.mark) for index, it in held}, self._shaped)
        mine = {it.entry.key: _made(room, index, it) for index, it in held}
        return mine | {entry.key: entry.room() for entry in self._saved.others}

    @cached_property
    def _shaped(self) -> frozenset[Any]:
        """Keys of state that has the shape of its parameter."""
        tensors = [(index, it.key, it.entry.tensor) for index, it in self._wanted if len(it.keys) == 1]
        return self.running.shaped((index, key, it.size) for index, key, it in tensors if it is not None)

    def try_out(self, values: Mapping[str, Any]) -> None:
        """Raise if the running optimizer would refuse the dict. `values`: what is not a tensor is there already."""
        self.running.try_out(lambda: self.state_dict(values))

    def overwrite(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Read in place, and take what was read. On all ranks."""
        self.running.overwrite(lambda: self.state_dict(read()), self._shaped)

    def master(self, name: str, param: torch.Tensor) -> Entry | None:
        """The saved master weights of a parameter, which may have other names in the model, too."""
        mine = name if name in self._saved.state else self._names_by_place.get(place_of(param), name)
        found = self._saved.state.get(mine, ())
        return next((it.entry for it in found if it.keys == (MASTER,)), None)

    @cached_property
    def _names_by_place(self) -> dict[object, str]:
        return {place_of(param): name for param, name in zip(self.running.params, self._names, strict=True)}

    def state_dict(self, values: Mapping[str, Any]) -> StateDict:
        """In the order and the groups of the running optimizer, for it to load."""
        found: dict[int, Any] = {index: {} for index in range(len(self._names))}
        for index, it in self._wanted:
            if it.entry.key in self.targets:
                set_element(found[index], it.keys, values[it.entry.key])
        # As with a plain optimizer, a parameter without state in the checkpoint starts without.
        state = {index: self._in_order(index, it) for index, it in found.items() if it}
        new = [index for index, name in enumerate(self._names) if name not in self._saved.options]
        if new:  # what is missing in the checkpoint stays as it is
            present = self.running.part()["state"]
            state.update({index: present[index] for index in new if present.get(index)})
        whole = {STATE: state, GROUPS: self._groups}
        for entry in self._saved.others:
            set_element(whole, entry.path[1:], values[entry.key])
        return self.running.completed(whole)

    def _in_order(self, index: int, found: dict[Any, Any]) -> dict[Any, Any]:
        known = [key for key in self._keys.get(index, ()) if key in found]
        return {key: found[key] for key in [*known, *sorted(found.keys() - {*known}, key=str)]}

    def _merged_groups(self) -> list[dict[str, Any]]:
        """The running groups with saved options."""
        groups, number = [], 0
        for group in self.running.optimizer.param_groups:
            numbers = list(range(number, number + len(group["params"])))
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**kept, **self._options_of(numbers), "params": numbers})
            number += len(numbers)
        self._warn_of_what_becomes_the_same(groups)
        return groups

    def _warn_of_what_becomes_the_same(self, merged: Sequence[dict[str, Any]]) -> None:
        """The first neighbours that differ here, and did not when they were saved. Rates may have met on their way."""
        for (one, ours), (other, theirs) in pairwise(enumerate(self.running.optimizer.param_groups)):
            keys = [key for key in ours.keys() & theirs.keys() if key not in ("params", "param_names", "lr")]
            lost = [key for key in sorted(keys) if _differ(ours[key], theirs[key])]
            lost = [key for key in lost if not _differ(merged[one].get(key), merged[other].get(key))]
            if lost:
                warn_user(
                    f"groups {one} and {other} have different options here, and had the same when "
                    f"{self._saved.directory} was saved: {lost[0]} is {merged[one][lost[0]]!r} in both now. Set it "
                    "again after loading, if they shall differ."
                )
                return

    def _uses(self, index: int, it: StateEntry) -> bool:
        """All but master weights, which not every optimizer knows."""
        return it.keys != (MASTER,) or self.running.knows_masters(self._keys.get(index, ()))

    def _options_of(self, numbers: Sequence[int]) -> Options:
        """Those that the group's parameters had, if they all had the same."""
        names = [self._names[number] for number in numbers if self._names[number] in self._saved.options]
        if not names:
            return {}
        first = self._saved.options[names[0]]
        told = describe_options(first)
        for name in names[1:]:
            other = self._saved.options[name]
            if other is not first and describe_options(other) != told:
                raise CheckpointError(
                    f"{names[0]} and {name} are in one group here, but had different options when "
                    f"{self._saved.directory} was saved: {told} and {describe_options(other)}"
                )
        return first


def _differ(one: Any, other: Any) -> bool:
    return describe_options({"it": one}) != describe_options({"it": other})


def _made(room: Room, index: int, it: StateEntry) -> torch.Tensor | None:
    """Memory for what this rank holds of it; None if it is not a tensor."""
    saved = it.entry.tensor
    return None if saved is None else room(index, it.mark, tuple(saved.size), saved.properties.dtype)
