"""What an archive says of its optimizer, by names of parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .metadata import CheckpointMetadata, Entry
from .contents import OPTIM

PARAM_GROUPS, STATE = "param_groups", "state"

GroupOptions = dict[str, Any]


class StateEntry(NamedTuple):
    """A value in the state of a parameter."""

    key_path: tuple[Any, ...]
    """More than one for nested state."""
    entry: Entry

    @property
    def key(self) -> Any:
        """Its own; none for what is nested, whatever its name is there."""
        return self.key_path[0] if len(self.key_path) == 1 else None

    @property
    def allocator_key(self) -> Any:
        """Its own key, or all of them."""
        return self.key_path[0] if len(self.key_path) == 1 else self.key_path


def param_group_entries(metadata: CheckpointMetadata) -> list[Entry]:
    """The entries of an optimizer's groups, which are small."""
    return [entry for entry in metadata.under(OPTIM) if _section(entry) == PARAM_GROUPS]


class SavedOptimizer:
    """What an archive says of its optimizer, by names of parameters.

    `others` belong to no parameter: state that all share, and what a class adds to its dict.
    """

    def __init__(self, metadata: CheckpointMetadata, values: Mapping[str, Any]) -> None:
        """`values`: of `groups_in`."""
        self.directory = metadata.directory
        try:
            self.options = _parse_options(param_group_entries(metadata), values)
            state = [entry for entry in metadata.under(OPTIM) if _section(entry) == STATE]
            self.state = _parse_state(state, self.options)
            self.non_param_entries = _find_non_param_entries(
                metadata.under(OPTIM), self.state.keys() - self.options.keys()
            )
        except Exception as error:
            raise CheckpointError(
                f"the optimizer in {self.directory} is not in torch's format: {type(error).__name__}: {error}"
            ) from error


def _section(entry: Entry) -> str:
    """The state, or the groups: torch has two ways to write them, one with names that have dots."""
    return str(entry.path[1]).partition(".")[0] if len(entry.path) > 1 else ""


def _parse_options(entries: Sequence[Entry], values: Mapping[str, Any]) -> dict[str, GroupOptions]:
    """Written as a list of groups, or in the flat form as `param_groups.<name>.<option>`."""
    groups: dict[Any, GroupOptions] = defaultdict(dict)
    flat: dict[str, GroupOptions] = defaultdict(dict)
    for entry in entries:
        if entry.path[1] == PARAM_GROUPS:
            set_nested(groups[entry.path[2]], entry.path[3:], values[entry.key])
        else:
            name, _, option = str(entry.path[1]).removeprefix(f"{PARAM_GROUPS}.").rpartition(".")
            flat[name][option] = values[entry.key]
    for group in groups.values():
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        flat.update(dict.fromkeys(group.get("params", ()), options))
    return dict(flat)


def _parse_state(entries: Sequence[Entry], param_names: Mapping[str, Any]) -> dict[str, list[StateEntry]]:
    found: dict[str, list[StateEntry]] = defaultdict(list)
    for entry in entries:
        if entry.path[1] == STATE:
            name, keys = str(entry.path[2]), entry.path[3:]
        else:
            name, keys = _split_name(str(entry.path[1]).removeprefix(f"{STATE}."), param_names)
        found[name].append(StateEntry(keys, entry))
    return dict(found)


def _find_non_param_entries(entries: Sequence[Entry], unknown_names: Set[str]) -> list[Entry]:
    """`strangers`: names in the state that are no parameter's."""
    shared = [entry for entry in entries if entry.path[1] == STATE and str(entry.path[2]) in unknown_names]
    return shared + [entry for entry in entries if _section(entry) not in (STATE, PARAM_GROUPS) and len(entry.path) > 1]


def _split_name(text: str, param_names: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`<name>.<key>` or `<name>.<key>.<key>`: a name may have dots."""
    parts = text.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:length])) in param_names:
            return name, tuple(parts[length:])
    return text.rpartition(".")[0], (parts[-1],)


def set_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
