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
from .._logging import warn_at_caller
from ..engine.base import StateAllocator
from ..state.state_dict import StateDict, describe_options
from ..state.records import MASTER_KEY
from .metadata import Entry
from .fitting import OptimizerValidator
from .optimizer_adapter import OptimizerAdapter
from .owned import storage_key
from .saved_optimizer import PARAM_GROUPS, STATE, GroupOptions, SavedOptimizer, StateEntry


class OptimizerLoadPlan:
    def __init__(self, saved: SavedOptimizer, adapter: OptimizerAdapter, names: Sequence[str], *, strict: bool) -> None:
        """Raises if the saved optimizer does not fit."""
        self._saved, self.adapter, self._names = saved, adapter, names
        adapter.check_ready()
        fit = OptimizerValidator(saved, adapter, names)
        if strict:
            fit.check_names()
        found = {name: sorted(saved.state.get(name, ()), key=lambda it: str(it.key_path)) for name in names}
        self._entries_to_load = [(i, it) for i, name in enumerate(names) for it in found[name]]
        for index, it in self._entries_to_load:
            fit.check_shape(index, it)
        self._state_keys = fit.resolve_state_keys()
        self._entries_to_load = [(index, it) for index, it in self._entries_to_load if self._should_load(index, it)]
        self._param_groups = self._merge_groups()

    @cached_property
    def targets(self) -> dict[str, Any]:
        """What to read, and where to."""
        held = [(index, it) for index, it in self._entries_to_load if self.adapter.owns_state(index, it.key)]
        room = self.adapter.state_allocator({(index, it.allocator_key) for index, it in held}, self._param_shaped_keys)
        mine = {it.entry.key: _allocate_target(room, index, it) for index, it in held}
        return mine | {entry.key: entry.allocate() for entry in self._saved.non_param_entries}

    @cached_property
    def _param_shaped_keys(self) -> frozenset[Any]:
        """Keys of state that has the shape of its parameter."""
        tensors = [(index, it.key, it.entry.tensor) for index, it in self._entries_to_load if len(it.key_path) == 1]
        return self.adapter.param_shaped_keys((index, key, it.size) for index, key, it in tensors if it is not None)

    def validate(self, values: Mapping[str, Any]) -> None:
        """Raise if the running optimizer would refuse the dict. `values`: what is not a tensor is there already."""
        self.adapter.validate(lambda: self.build_state_dict(values))

    def load_in_place(self, read_state: Callable[[], Mapping[str, Any]]) -> None:
        """Read in place, and take what was read. On all ranks."""
        self.adapter.load_in_place(lambda: self.build_state_dict(read_state()), self._param_shaped_keys)

    def find_master_entry(self, name: str, param: torch.Tensor) -> Entry | None:
        """The saved master weights of a parameter, which may have other names in the model, too."""
        mine = name if name in self._saved.state else self._name_by_storage_key.get(storage_key(param), name)
        found = self._saved.state.get(mine, ())
        return next((it.entry for it in found if it.key_path == (MASTER_KEY,)), None)

    @cached_property
    def _name_by_storage_key(self) -> dict[object, str]:
        return {storage_key(param): name for param, name in zip(self.adapter.params, self._names, strict=True)}

    def build_state_dict(self, values: Mapping[str, Any]) -> StateDict:
        """In the order and the groups of the running optimizer, for it to load."""
        found: dict[int, Any] = {index: {} for index in range(len(self._names))}
        for index, it in self._entries_to_load:
            if it.entry.key in self.targets:
                set_element(found[index], it.key_path, values[it.entry.key])
        # As with a plain optimizer, a parameter without state in the checkpoint starts without.
        state = {index: self._order_state(index, it) for index, it in found.items() if it}
        new = [index for index, name in enumerate(self._names) if name not in self._saved.options]
        if new:  # what is missing in the checkpoint stays as it is
            present = self.adapter.local_state_dict()["state"]
            state.update({index: present[index] for index in new if present.get(index)})
        whole = {STATE: state, PARAM_GROUPS: self._param_groups}
        for entry in self._saved.non_param_entries:
            set_element(whole, entry.path[1:], values[entry.key])
        return self.adapter.to_loadable(whole)

    def _order_state(self, index: int, state: dict[Any, Any]) -> dict[Any, Any]:
        known = [key for key in self._state_keys.get(index, ()) if key in state]
        return {key: state[key] for key in [*known, *sorted(state.keys() - {*known}, key=str)]}

    def _merge_groups(self) -> list[dict[str, Any]]:
        """The running groups with saved options."""
        groups, number = [], 0
        for group in self.adapter.optimizer.param_groups:
            numbers = list(range(number, number + len(group["params"])))
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**kept, **self._saved_group_options(numbers), "params": numbers})
            number += len(numbers)
        self._warn_of_lost_group_differences(groups)
        return groups

    def _warn_of_lost_group_differences(self, merged: Sequence[dict[str, Any]]) -> None:
        """The first neighbours that differ here, and did not when they were saved. Rates may have met on their way."""
        for (one, ours), (other, theirs) in pairwise(enumerate(self.adapter.optimizer.param_groups)):
            keys = [key for key in ours.keys() & theirs.keys() if key not in ("params", "param_names", "lr")]
            lost = [key for key in sorted(keys) if _option_differs(ours[key], theirs[key])]
            lost = [key for key in lost if not _option_differs(merged[one].get(key), merged[other].get(key))]
            if lost:
                warn_at_caller(
                    f"groups {one} and {other} have different options here, and had the same when "
                    f"{self._saved.directory} was saved: {lost[0]} is {merged[one][lost[0]]!r} in both now. Set it "
                    "again after loading, if they shall differ."
                )
                return

    def _should_load(self, index: int, state_entry: StateEntry) -> bool:
        """All but master weights, which not every optimizer knows."""
        return state_entry.key_path != (MASTER_KEY,) or self.adapter.can_load_master_weights(
            self._state_keys.get(index, ())
        )

    def _saved_group_options(self, param_indices: Sequence[int]) -> GroupOptions:
        """Those that the group's parameters had, if they all had the same."""
        names = [self._names[number] for number in param_indices if self._names[number] in self._saved.options]
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


def _option_differs(one: Any, other: Any) -> bool:
    return describe_options({"it": one}) != describe_options({"it": other})


def _allocate_target(allocator: StateAllocator, index: int, state_entry: StateEntry) -> torch.Tensor | None:
    """Memory for what this rank holds of it; None if it is not a tensor."""
    saved = state_entry.entry.tensor
    return (
        None
        if saved is None
        else allocator(index, state_entry.allocator_key, tuple(saved.size), saved.properties.dtype)
    )
