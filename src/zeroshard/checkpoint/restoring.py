"""An optimizer in a checkpoint: what one that is running needs of it, and makes of that.

Names decide which state goes where, whatever the order, the groups and the ranks were when it was saved.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..optimizer import ZeroRedundancyOptimizer
from ..state.compat import StateDict, describe_options
from .archive import Archive, Entry
from .contents import OPTIM, part_of
from .expecting import expected_state, kind_of
from .naming import listed

_GROUPS, _STATE = "param_groups", "state"
_BY_SCHEDULERS = "initial_lr"

Options = dict[str, Any]


class StateEntry(NamedTuple):
    """A value in the state of a parameter."""

    keys: tuple[Any, ...]
    """More than one for nested state."""
    entry: Entry


def groups_in(archive: Archive) -> list[Entry]:
    """The entries of an optimizer's groups, which are small."""
    return [entry for entry in archive.below(OPTIM) if _part(entry) == _GROUPS]


class SavedOptimizer:
    """What an archive says of its optimizer, by names of parameters.

    `others` belong to no parameter: state that all share, and what a class adds to its dict.
    """

    def __init__(self, archive: Archive, values: Mapping[str, Any]) -> None:
        """`values`: of `groups_in`."""
        self.directory = archive.directory
        try:
            self.options = _options_by_name(groups_in(archive), values)
            state = [entry for entry in archive.below(OPTIM) if _part(entry) == _STATE]
            self.state = _state_by_name(state, self.options)
            self.others = _others(archive.below(OPTIM), self.state.keys() - self.options.keys())
        except Exception as error:
            raise CheckpointError(
                f"the optimizer in {self.directory} is not in torch's format: {type(error).__name__}: {error}"
            ) from error


class Restoring:
    """A running optimizer, and what it takes from a saved one."""

    def __init__(self, saved: SavedOptimizer, optimizer: Optimizer, names: Sequence[str], *, strict: bool) -> None:
        self._saved, self._optimizer, self._names = saved, optimizer, names
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        if strict:
            self._require_the_same_names()
        self._wanted = [(i, it) for i, name in enumerate(names) for it in saved.state.get(name, ())]
        for index, it in self._wanted:
            self._check_shape(index, it)
        self._keys: dict[int, list[Any]] = {}
        """Of each parameter's state, in the order in which the optimizer makes it: archives have none."""
        self._require_the_same_kind()
        self._groups = self._merged_groups()

    def targets(self) -> dict[str, Any]:
        """What to read, and where to."""
        mine = {it.entry.key: self._room(index, it) for index, it in self._wanted if self._holds(index, it)}
        return mine | {entry.key: entry.room() for entry in self._saved.others}

    def state_dict(self, values: Mapping[str, Any]) -> StateDict:
        """In the order and the groups of the running optimizer, for it to load."""
        state: dict[int, Any] = {index: {} for index in range(len(self._names))}
        for index, it in self._wanted:
            if it.entry.key in values:
                _put(state[index], it.keys, values[it.entry.key])
        state = {index: self._in_order(index, found) for index, found in state.items()}
        new = [index for index, name in enumerate(self._names) if name not in self._saved.options]
        if new:  # what is missing in the checkpoint stays as it is
            running = part_of(self._optimizer)["state"]
            state.update({index: running[index] for index in new if index in running})
        ours = isinstance(self._optimizer, ZeroRedundancyOptimizer)
        whole = {_STATE: state if ours else {i: it for i, it in state.items() if it}, _GROUPS: self._groups}
        for entry in self._saved.others:
            _put(whole, entry.path[1:], values[entry.key])
        return whole

    def _in_order(self, index: int, found: dict[Any, Any]) -> dict[Any, Any]:
        known = [key for key in self._keys.get(index, ()) if key in found]
        return {key: found[key] for key in [*known, *sorted(found.keys() - {*known}, key=str)]}

    def _merged_groups(self) -> list[dict[str, Any]]:
        """The running groups with saved options."""
        groups, number = [], 0
        for group in self._optimizer.param_groups:
            numbers = list(range(number, number + len(group["params"])))
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**kept, **self._options_of(numbers), "params": numbers})
            number += len(numbers)
        return groups

    def _require_the_same_names(self) -> None:
        missing = [name for name in self._names if name not in self._saved.options]
        unexpected = sorted(self._saved.options.keys() - set(self._names))
        if missing or unexpected:
            raise CheckpointError(
                f"the optimizer in {self._saved.directory} is of other parameters. "
                + (f"Missing there: {listed(missing)}. " if missing else "")
                + (f"Only there: {listed(unexpected)}. " if unexpected else "")
                + "strict=False loads what both have."
            )

    def _check_shape(self, index: int, it: StateEntry) -> None:
        param, saved = self._params[index], it.entry.tensor
        if saved is None or not isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return
        shaped = len(it.keys) == 1 and self._optimizer.has_shape_of_param(it.keys[0])
        if shaped and tuple(saved.size) != tuple(param.shape):
            self._refuse_shape(index, it.entry, tuple(param.shape))

    def _refuse_shape(self, index: int, entry: Entry, expected: tuple[int, ...]) -> NoReturn:
        found = None if entry.tensor is None else tuple(entry.tensor.size)
        raise CheckpointError(
            f"'{entry.key}' in {self._saved.directory} has shape {found}, but that of the parameter "
            f"{self._names[index]} has {expected}: it is a checkpoint of another model"
        )

    def _require_the_same_kind(self) -> None:
        """The optimizer finds what it will look for: else its next step would fail, or do something else."""
        options = [group for group in self._optimizer.param_groups for _ in group["params"]]
        known: dict[Any, dict[Any, Any]] = {}
        for index, name in enumerate(self._names):
            running = {key: value for key, value in options[index].items() if key != "params"}
            saved = self._saved.options.get(name)
            if saved is None:
                continue
            merged = {**running, **saved}
            mark = (describe_options(merged), tuple(self._params[index].shape))
            if mark not in known:
                known[mark] = expected_state(self._optimizer, merged, self._params[index])
            self._check_kind(index, known[mark], running, saved)
            self._keys[index] = list(known[mark])

    def _check_kind(self, index: int, expected: dict[Any, Any], running: Options, saved: Options) -> None:
        entries = {it.keys[0]: it.entry for it in self._saved.state.get(self._names[index], ())}
        if entries and expected:
            strange = bool(expected.keys() - entries.keys())
        else:
            strange = bool(self._optimizer.defaults.keys() - saved.keys()) and bool(
                saved.keys() - running.keys() - {_BY_SCHEDULERS}
            )
        if strange:
            raise CheckpointError(
                f"the state of {self._names[index]} in {self._saved.directory} is of another optimizer class: "
                f"it has {sorted(map(str, entries)) or 'no state'} and the options {sorted(saved)}, but "
                f"{self._kind} keeps {sorted(map(str, expected)) or 'no state'}, with the options "
                f"{sorted(self._optimizer.defaults)}"
            )
        for key in expected.keys() & entries.keys():
            mine, theirs = expected[key], entries[key].tensor
            if isinstance(mine, torch.Tensor) and theirs is not None and mine.shape != theirs.size:
                self._refuse_shape(index, entries[key], tuple(mine.shape))

    @property
    def _kind(self) -> str:
        return kind_of(self._optimizer).__qualname__

    def _holds(self, index: int, it: StateEntry) -> bool:
        """Whether this rank needs it."""
        if not isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return True
        return self._optimizer.engine.holds(index, it.keys[-1])

    def _room(self, index: int, it: StateEntry) -> torch.Tensor | None:
        """New memory for it; None for what is not a tensor."""
        saved, param = it.entry.tensor, self._params[index]
        if saved is None:
            return None
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return self._optimizer.engine.room(index, it.keys[-1], tuple(saved.size), saved.properties.dtype)
        if saved.size == param.shape and param.numel() > 1:  # divided and laid out alike
            return torch.empty_like(param, dtype=saved.properties.dtype, requires_grad=False)
        return it.entry.room()

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


def _part(entry: Entry) -> str:
    """The state, or the groups: torch has two ways to write them, one with names that have dots."""
    return str(entry.path[1]).partition(".")[0] if len(entry.path) > 1 else ""


def _options_by_name(entries: Sequence[Entry], values: Mapping[str, Any]) -> dict[str, Options]:
    """Written as a list of groups, or in the flat form as `param_groups.<name>.<option>`."""
    groups: dict[Any, Options] = defaultdict(dict)
    flat: dict[str, Options] = defaultdict(dict)
    for entry in entries:
        if entry.path[1] == _GROUPS:
            _put(groups[entry.path[2]], entry.path[3:], values[entry.key])
        else:
            name, _, option = str(entry.path[1]).removeprefix(f"{_GROUPS}.").rpartition(".")
            flat[name][option] = values[entry.key]
    for group in groups.values():
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        flat.update(dict.fromkeys(group.get("params", ()), options))
    return dict(flat)


def _state_by_name(entries: Sequence[Entry], names: Mapping[str, Any]) -> dict[str, list[StateEntry]]:
    found: dict[str, list[StateEntry]] = defaultdict(list)
    for entry in entries:
        if entry.path[1] == _STATE:
            name, keys = str(entry.path[2]), entry.path[3:]
        else:
            name, keys = _split(str(entry.path[1]).removeprefix(f"{_STATE}."), names)
        found[name].append(StateEntry(keys, entry))
    return dict(found)


def _others(entries: Sequence[Entry], strangers: Set[str]) -> list[Entry]:
    """`strangers`: names in the state that are no parameter's."""
    shared = [entry for entry in entries if entry.path[1] == _STATE and str(entry.path[2]) in strangers]
    return shared + [entry for entry in entries if _part(entry) not in (_STATE, _GROUPS) and len(entry.path) > 1]


def _split(text: str, names: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`<name>.<key>` or `<name>.<key>.<key>`: a name may have dots."""
    parts = text.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:length])) in names:
            return name, tuple(parts[length:])
    return text.rpartition(".")[0], (parts[-1],)


def _put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
