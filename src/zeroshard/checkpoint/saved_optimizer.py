"""What an archive says of its optimizer, by names of parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .archive import Archive, Entry
from .contents import OPTIM

GROUPS, STATE = "param_groups", "state"

Options = dict[str, Any]


class StateEntry(NamedTuple):
    """A value in the state of a parameter."""

    keys: tuple[Any, ...]
    """More than one for nested state."""
    entry: Entry

    @property
    def key(self) -> Any:
        """Its own; none for what is nested, whatever its name is there."""
        return self.keys[0] if len(self.keys) == 1 else None

    @property
    def mark(self) -> Any:
        """Its own key, or all of them."""
        return self.keys[0] if len(self.keys) == 1 else self.keys


def groups_in(archive: Archive) -> list[Entry]:
    """The entries of an optimizer's groups, which are small."""
    return [entry for entry in archive.below(OPTIM) if _part(entry) == GROUPS]


class SavedOptimizer:
    """What an archive says of its optimizer, by names of parameters.

    `others` belong to no parameter: state that all share, and what a class adds to its dict.
    """

    def __init__(self, archive: Archive, values: Mapping[str, Any]) -> None:
        """`values`: of `groups_in`."""
        self.directory = archive.directory
        try:
            self.options = _options_by_name(groups_in(archive), values)
            state = [entry for entry in archive.below(OPTIM) if _part(entry) == STATE]
            self.state = _state_by_name(state, self.options)
            self.others = _others(archive.below(OPTIM), self.state.keys() - self.options.keys())
        except Exception as error:
            raise CheckpointError(
                f"the optimizer in {self.directory} is not in torch's format: {type(error).__name__}: {error}"
            ) from error


def _part(entry: Entry) -> str:
    """The state, or the groups: torch has two ways to write them, one with names that have dots."""
    return str(entry.path[1]).partition(".")[0] if len(entry.path) > 1 else ""


def _options_by_name(entries: Sequence[Entry], values: Mapping[str, Any]) -> dict[str, Options]:
    """Written as a list of groups, or in the flat form as `param_groups.<name>.<option>`."""
    groups: dict[Any, Options] = defaultdict(dict)
    flat: dict[str, Options] = defaultdict(dict)
    for entry in entries:
        if entry.path[1] == GROUPS:
            put(groups[entry.path[2]], entry.path[3:], values[entry.key])
        else:
            name, _, option = str(entry.path[1]).removeprefix(f"{GROUPS}.").rpartition(".")
            flat[name][option] = values[entry.key]
    for group in groups.values():
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        flat.update(dict.fromkeys(group.get("params", ()), options))
    return dict(flat)


def _state_by_name(entries: Sequence[Entry], names: Mapping[str, Any]) -> dict[str, list[StateEntry]]:
    found: dict[str, list[StateEntry]] = defaultdict(list)
    for entry in entries:
        if entry.path[1] == STATE:
            name, keys = str(entry.path[2]), entry.path[3:]
        else:
            name, keys = _split(str(entry.path[1]).removeprefix(f"{STATE}."), names)
        found[name].append(StateEntry(keys, entry))
    return dict(found)


def _others(entries: Sequence[Entry], strangers: Set[str]) -> list[Entry]:
    """`strangers`: names in the state that are no parameter's."""
    shared = [entry for entry in entries if entry.path[1] == STATE and str(entry.path[2]) in strangers]
    return shared + [entry for entry in entries if _part(entry) not in (STATE, GROUPS) and len(entry.path) > 1]


def _split(text: str, names: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`<name>.<key>` or `<name>.<key>.<key>`: a name may have dots."""
    parts = text.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:length])) in names:
            return name, tuple(parts[length:])
    return text.rpartition(".")[0], (parts[-1],)


def put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
