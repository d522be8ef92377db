"""Loading: look at everything, agree that all ranks could read it, and only then change anything.

Values are then read straight to where they belong, so that no memory is needed for a second model or optimizer. What
runs code of others while it loads, which may fail, gets its values in memory of its own, and comes first.
"""

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from .._logging import log_rank, warn_at_caller
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..engine.base import StateAllocator
from ..errors import CheckpointError
from ..profiling import Phase
from ..state.state_dict import MASTER_KEY, StateDict, describe_options
from ..state.tensor_utils import is_wrapper_subclass
from .directory import CheckpointDir, Manifest, read_manifest
from .metadata import CheckpointMetadata, Entry, is_dcp_checkpoint
from .names import format_names, raise_if_names_differ, resolve_param_names
from .optimizer_adapter import (
    OptimizerAdapter,
    has_custom_load,
    is_empty_container,
    load_model,
    load_scheduler,
    make_adapter,
    probe_expected_state,
    transaction,
)
from .progress import Progress, ProgressFn, check_components, errors_as_checkpoint_error, run_on_rank0
from .reader import ReadPlan, read_values
from .saver import (
    MODEL,
    OPTIM,
    RANKS,
    SCHEDULER,
    ShardedParams,
    check_optimizer_ranks,
    check_rng_states,
    choose_group,
    from_byte_tensor,
    set_rng_states,
    storage_key,
    wait_for_pending_saves,
)

# ---------------------------------------------------------------------------------------------------------------------
# What an archive says of its optimizer, by names of parameters.


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


# ---------------------------------------------------------------------------------------------------------------------
# Whether a saved optimizer is one for the running one: of the same parameters, shapes and class.


_SCHEDULER_OPTION = "initial_lr"


class OptimizerValidator:
    """Raises where it is not."""

    def __init__(self, saved: SavedOptimizer, adapter: OptimizerAdapter, names: Sequence[str]) -> None:
        self._saved, self._adapter, self._names = saved, adapter, names
        self._params = adapter.params

    def check_names(self) -> None:
        missing = [name for name in self._names if name not in self._saved.options]
        unexpected = sorted(self._saved.options.keys() - set(self._names))
        raise_if_names_differ(f"the optimizer in {self._saved.directory} is of other parameters", missing, unexpected)

    def check_shape(self, index: int, state_entry: StateEntry) -> None:
        saved, expected = state_entry.entry.tensor, tuple(self._params[index].shape)
        if saved is None or len(state_entry.key_path) > 1 or not self._adapter.is_param_shaped(index, state_entry.key):
            return
        if tuple(saved.size) != expected:
            self._raise_shape_mismatch(index, state_entry.entry, expected)

    def _raise_shape_mismatch(self, index: int, entry: Entry, expected: tuple[int, ...]) -> NoReturn:
        found = None if entry.tensor is None else tuple(entry.tensor.size)
        raise CheckpointError(
            f"'{entry.key}' in {self._saved.directory} has shape {found}, but that of the parameter "
            f"{self._names[index]} has {expected}: it is a checkpoint of another model"
        )

    def resolve_state_keys(self) -> dict[int, list[Any]]:
        """Of each parameter's state, in the order in which the optimizer makes it: archives have none.

        The optimizer finds what it will look for: else its next step would fail, or do something else.
        """
        keys: dict[int, list[Any]] = {}
        options = [group for group in self._adapter.optimizer.param_groups for _ in group["params"]]
        known: dict[Any, dict[Any, Any]] = {}
        for index, name in enumerate(self._names):
            present = {key: value for key, value in options[index].items() if key != "params"}
            saved = self._saved.options.get(name)
            if saved is None:
                continue
            merged = {**present, **saved}
            kind = self._adapter.inner_optimizer_of(index)
            mark = (kind, describe_options(merged), tuple(self._params[index].shape))
            if mark not in known:
                known[mark] = probe_expected_state(kind, merged, self._params[index])
            self._check_optimizer_class(index, known[mark], present, saved)
            keys[index] = list(known[mark])
        return keys

    def _check_optimizer_class(
        self, index: int, expected: dict[Any, Any], current_options: GroupOptions, saved_options: GroupOptions
    ) -> None:
        kind = self._adapter.inner_optimizer_of(index)
        found = self._saved.state.get(self._names[index], ())
        entries = {it.key_path[0]: it.entry for it in found if it.key_path != (MASTER_KEY,)}  # no class makes those
        if entries and expected:
            strange = bool(expected.keys() - entries.keys())
        else:
            unknown = saved_options.keys() - current_options.keys() - {_SCHEDULER_OPTION}
            strange = bool(kind.defaults.keys() - saved_options.keys()) and bool(unknown)
        if strange:
            raise CheckpointError(
                f"the state of {self._names[index]} in {self._saved.directory} is of another optimizer class: "
                f"it has {sorted(map(str, entries)) or 'no state'} and the options {sorted(saved_options)}, but "
                f"{type(kind).__qualname__} keeps {sorted(map(str, expected)) or 'no state'}, with the options "
                f"{sorted(kind.defaults)}"
            )
        for key in expected.keys() & entries.keys():
            mine, theirs = expected[key], entries[key].tensor
            if is_wrapper_subclass(mine):  # saved in several tensors
                continue
            if isinstance(mine, torch.Tensor) and theirs is not None and mine.shape != theirs.size:
                self._raise_shape_mismatch(index, entries[key], tuple(mine.shape))


# ---------------------------------------------------------------------------------------------------------------------
# What a running optimizer takes from a saved one.
#
# Names decide which state goes where, whatever the order, the groups and the ranks were when it was saved.


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


# ---------------------------------------------------------------------------------------------------------------------
# A model in a checkpoint: what one that is running takes from it.


class ModelLoadPlan:
    """A running model, and where the values of a saved one belong."""

    def __init__(
        self, metadata: CheckpointMetadata, model: torch.nn.Module, optimizer: Optimizer | None, *, strict: bool
    ) -> None:
        """Raises if the saved model is another one."""
        self._metadata, self._model = metadata, model
        self._sharded_params = ShardedParams(optimizer)
        self._model_state = get_model_state_dict(model)
        self._check_no_meta_tensors()
        self.can_load_in_place = not has_custom_load(model) and self._can_write_through_state_dict()
        """Values are read to where they belong; else to new memory, for the model to load in its own way."""
        if strict:
            self._check_names()
        self._entries_to_load = [entry for entry in self._model_entries() if entry.path[1] in self._model_state]
        for entry in self._entries_to_load:
            self._check_shape(entry, self._model_state[entry.path[1]])
        self._source_keys: dict[str, str] = {}
        """What is read in the place of values that are less precise, by their keys."""
        self._params_from_masters: set[int] = set()
        """Parameters of which only the more precise copy is read."""
        self._masters_from_params: set[int] = set()
        """Parameters whose more precise copy is not in the checkpoint, and is made of them."""

    def make_targets(self, optimizer_plan: OptimizerLoadPlan | None) -> dict[str, Any]:
        """What to read, and where to, together with what an optimizer takes."""
        return dict(
            self._make_target(entry, self._model_state[entry.path[1]], optimizer_plan)
            for entry in self._entries_to_load
        )

    def build_state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As the model has them, of values by keys of the archive, which takes containers apart."""
        found: dict[str, Any] = {}
        for entry in self._entries_to_load:
            set_element(found, entry.path[1:], values[self._source_keys.get(entry.key, entry.key)])
        return found

    @torch.no_grad()
    def broadcast_params(self) -> Callable[[], None]:
        """Bring what was read in place to everyone; returns how to wait for that. On all ranks."""
        tensors = [value for value in self._model_state.values() if isinstance(value, torch.Tensor)]
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        if not self._sharded_params:
            return lambda: None
        for index in self._params_from_masters:
            copy = self._sharded_params.engine.master_shard_tensor(index)
            assert copy is not None
            self._sharded_params.engine.shard_tensor(index).local.copy_(copy.local)
        self.refresh_masters()
        return self._sharded_params.engine.broadcast_params()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Nothing is left in them of what was there before."""
        for index in self._masters_from_params:
            copy = self._sharded_params.engine.master_shard_tensor(index)
            assert copy is not None
            copy.local.copy_(self._sharded_params.engine.shard_tensor(index).local)

    def _check_no_meta_tensors(self) -> None:
        empty = [name for name, value in self._model_state.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if empty:
            raise CheckpointError(
                f"the model has no memory for {format_names(empty)}: call model.to_empty(device=...) before loading"
            )

    def _model_entries(self) -> list[Entry]:
        return [entry for entry in self._metadata.under(MODEL) if entry.path[1:]]

    def _can_write_through_state_dict(self) -> bool:
        own = {storage_key(it) for it in (*self._model.parameters(), *self._model.buffers())}
        return all(storage_key(value) in own for value in self._model_state.values())

    def _check_names(self) -> None:
        theirs = {str(entry.path[1]): None for entry in self._model_entries()}
        missing = [
            name for name in self._model_state if name not in theirs and not is_empty_container(self._model_state[name])
        ]
        unexpected = [name for name in theirs if name not in self._model_state]
        raise_if_names_differ(f"{self._metadata.directory} has another model", missing, unexpected)

    def _make_target(self, entry: Entry, current: Any, optimizer_plan: OptimizerLoadPlan | None) -> tuple[str, Any]:
        if not isinstance(current, torch.Tensor):
            return entry.key, entry.allocate()
        index = self._sharded_params.find_index(current)
        if self.can_load_in_place and index is not None:
            return self._make_shard_target(entry, current, index, optimizer_plan)
        if index is not None and self._needs_master_refresh(entry, current, index, optimizer_plan):
            self._masters_from_params.add(index)
        master = self._find_master_entry(entry, current, optimizer_plan)
        if master is not None and entry.tensor is not None and entry.tensor.properties.dtype != current.dtype:
            self._source_keys[entry.key] = master.key
        room = current if self.can_load_in_place else torch.empty_like(current, requires_grad=False)
        return self._source_keys.get(entry.key, entry.key), room

    def _make_shard_target(
        self, entry: Entry, current: torch.Tensor, index: int, optimizer_plan: OptimizerLoadPlan | None
    ) -> tuple[str, torch.Tensor]:
        """This rank's part of a parameter, read from the most precise copy there is to the most precise one here."""
        assert entry.tensor is not None
        engine = self._sharded_params.engine
        part, copy = engine.shard_tensor(index), engine.master_shard_tensor(index)
        saved = self._find_master_entry(entry, current, optimizer_plan)
        is_rounded = entry.tensor.properties.dtype != part.dtype
        if copy is not None and saved is None:
            (self._params_from_masters if is_rounded else self._masters_from_params).add(index)
            return entry.key, copy if is_rounded else part
        return (saved.key, part) if copy is None and saved is not None and is_rounded else (entry.key, part)

    def _needs_master_refresh(
        self, entry: Entry, current: torch.Tensor, index: int, optimizer_plan: OptimizerLoadPlan | None
    ) -> bool:
        return (
            self._sharded_params.engine.master_shard_tensor(index) is not None
            and self._find_master_entry(entry, current, optimizer_plan) is None
        )

    def _find_master_entry(
        self, entry: Entry, current: torch.Tensor, optimizer_plan: OptimizerLoadPlan | None
    ) -> Entry | None:
        """The saved master weights, if they are more precise than what the saved model has itself."""
        found = None if optimizer_plan is None else optimizer_plan.find_master_entry(str(entry.path[1]), current)
        if found is None or found.tensor is None or entry.tensor is None or found.tensor.size != entry.tensor.size:
            return None
        return found if found.tensor.properties.dtype.itemsize > entry.tensor.properties.dtype.itemsize else None

    def _check_shape(self, entry: Entry, current: Any) -> None:
        if not isinstance(current, torch.Tensor) and (entry.tensor is None or len(entry.path) > 2):
            return  # what a module adds to its dict may be of any form
        theirs = None if entry.tensor is None else tuple(entry.tensor.size)
        if not isinstance(current, torch.Tensor) or theirs != tuple(current.shape):
            here = (
                f"shape {tuple(current.shape)}" if isinstance(current, torch.Tensor) else f"a {type(current).__name__}"
            )
            raise CheckpointError(
                f"'{entry.key}' in {self._metadata.directory} has "
                f"{'no shape' if theirs is None else f'shape {theirs}'}, but the model's has {here}: it is a "
                "checkpoint of another model"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Loading: look at everything, agree that all ranks could read it, and only then change anything.
#
# Values are then read straight to where they belong, so that no memory is needed for a second model or optimizer. What
# runs code of others while it loads, which may fail, gets its values in memory of its own, and comes first.


T = TypeVar("T")


@dataclass(frozen=True)
class LoadResult:
    """What came back beside the model, the optimizer and the scheduler."""

    path: Path
    step: int | None
    """None if the checkpoint is not one of `save`."""
    world_size: int | None
    """How many ranks saved it."""
    extra: Any
    """What this rank gave to `save`; None if there were other ranks then."""
    extra_by_rank: dict[int, Any]
    """What all ranks gave."""


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    strict: bool = True,
    progress: bool | ProgressFn | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadResult:
    """Load the latest checkpoint in the folder `path`, or the one in the directory `path`.

    Called on all ranks of `process_group`.

    Any number of ranks, partition and bucket size will do, and directories that FSDP2 and plain torch have saved with
    `torch.distributed.checkpoint` under the same names. Either all ranks load it or nothing changes, unless a disk
    fails after everything was looked at. Nothing in the files is run as code.

    Args:
        path: a folder that `save` wrote to, or a directory with one checkpoint.
        model: the model to load into; its parameters keep their dtypes.
        optimizer: one of ours, a plain one, or one over FSDP2's parameters.
        scheduler: anything with `load_state_dict()`.
        strict: else what is missing stays as it is, and what is too much is left out.
        progress: show a line on rank 0; by default if somebody sits at the terminal and it takes a while. Or what is
            to be called on each rank with the bytes that it has checked and read, and those that there are so far.
        process_group: the ranks that load together; by default those of a sharded `optimizer`, else all.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    facts = [f"path {path}", f"strict={strict}"]
    facts += [f"{name} {'not ' if it is None else ''}given" for name, it in given.items()]
    with errors_as_checkpoint_error(path):
        prepare_all(comm, "checkpoint.load", lambda: _prepare_load(comm, given, progress, facts))
        directory = run_on_rank0(comm, "checkpoint.load: looking for it", lambda: find_checkpoint(Path(path)))
        shown = Progress(f"loading {directory.name}", progress, comm.group.rank)
        with gc_paused():
            loaded = _Loader(comm, directory, shown, strict=strict).run(model, optimizer, scheduler)
        log_rank(
            logging.DEBUG, comm.group.rank, "loaded %s, of which this rank read %d bytes", directory, shown.done_bytes
        )
        return loaded


def _prepare_load(comm: Comm, components: dict[str, Any], progress: Any, must_match: list[str]) -> Prepared[None]:
    check_components(components, "load_state_dict", progress)
    wait_for_pending_saves()
    check_optimizer_ranks(components["optimizer"], comm.group, "checkpoint.load")
    return Prepared(None, must_match)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest checkpoint in a folder, if there is one."""
    return CheckpointDir(path).latest()


class _LoadPlan(NamedTuple):
    """What a rank has made of the small values, and what it wants of the large ones."""

    per_rank: dict[int, Any]
    scheduler_state: Any
    optimizer_plan: OptimizerLoadPlan | None
    model_plan: ModelLoadPlan | None
    optimizer_reads: ReadPlan
    model_reads: ReadPlan
    """Of the model."""


class _Loader:
    def __init__(self, comm: Comm, directory: Path, progress: Progress, *, strict: bool) -> None:
        self._comm, self._directory, self._progress, self._strict = comm, directory, progress, strict
        with comm.profiler.phase(Phase.LOAD_VALIDATE):
            self._metadata, self._manifest = prepare_all(comm, "checkpoint.load", self._open)
            prepare_all(comm, "checkpoint.load: check sums", self._verify_checksums)

    def run(self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any) -> LoadResult:
        with self._comm.profiler.phase(Phase.LOAD_VALIDATE):
            prepared = prepare_all(self._comm, "checkpoint.load", lambda: self._prepare(model, optimizer, scheduler))
        with transaction() as undo:
            if scheduler is not None and prepared.scheduler_state is not None:
                self._run_on_all(lambda: load_scheduler(scheduler, prepared.scheduler_state, undo))
            if prepared.optimizer_plan is not None and not prepared.optimizer_plan.adapter.can_load_in_place:
                self._load_out_of_place(prepared.optimizer_plan, self._execute_reads(prepared.optimizer_reads), undo)
            if model is not None and prepared.model_plan is not None and not prepared.model_plan.can_load_in_place:
                weights = prepared.model_plan.build_state_dict(self._execute_reads(prepared.model_reads))
                self._run_on_all(lambda: load_model(model, weights, undo, strict=self._strict))
                prepared.model_plan.refresh_masters()
            self._load_in_place(prepared)
        return self._finish(prepared.per_rank)

    def _load_out_of_place(self, optimizer_plan: OptimizerLoadPlan, values: dict[str, Any], undo: ExitStack) -> None:
        state = self._run_on_all(lambda: optimizer_plan.build_state_dict(values))
        before = self._run_on_all(
            optimizer_plan.adapter.snapshot
        )  # apart: who fails here must not miss a collective call
        self._run_on_all(lambda: optimizer_plan.adapter.load(state, before, undo))

    def _load_in_place(self, plan: _LoadPlan) -> None:
        with errors_as_partial_load(), ExitStack() as arriving:
            if plan.model_plan is not None and plan.model_plan.can_load_in_place:
                self._execute_reads(plan.model_reads)
                arriving.callback(plan.model_plan.broadcast_params())
            restoring = plan.optimizer_plan
            if restoring is not None and restoring.adapter.can_load_in_place:
                restoring.load_in_place(lambda: self._execute_reads(plan.optimizer_reads))

    def _open(self) -> Prepared[tuple[CheckpointMetadata, Manifest | None]]:
        archive, manifest = CheckpointMetadata(self._directory), read_manifest(self._directory)
        if self._comm.group.rank == 0:
            archive.check_files()
        if manifest is not None:
            manifest.check_covers(self._directory, archive.min_file_sizes())
        return Prepared((archive, manifest), [f"{len(archive.entries)} entries in {self._directory}"])

    def _verify_checksums(self) -> Prepared[None]:
        """Ranks look at files in turns."""
        if self._manifest is not None:
            share = slice(self._comm.group.rank, None, self._comm.group.size)
            self._manifest.verify_checksums(self._directory, share, self._progress)
        return Prepared(None)

    def _execute_reads(self, read_plan: ReadPlan) -> dict[str, Any]:
        with self._comm.profiler.phase(Phase.LOAD_READ):
            return self._run_on_all(lambda: read_plan.execute(self._progress))

    def _run_on_all(self, action: Callable[[], T]) -> T:
        """What it returns, once it has succeeded on all ranks."""
        return prepare_all(self._comm, "checkpoint.load", lambda: Prepared(action()))

    def _small_targets(self, optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
        entries = [] if self._manifest is None else self._metadata.under(RANKS)
        if optimizer is not None:
            entries += param_group_entries(self._metadata)
        if scheduler is not None:
            entries += self._metadata.under(SCHEDULER)
        return {entry.key: entry.allocate() for entry in entries}

    def _prepare(
        self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any
    ) -> Prepared[_LoadPlan]:
        small = read_values(self._metadata, self._small_targets(optimizer, scheduler))
        weights = None if model is None else ModelLoadPlan(self._metadata, model, optimizer, strict=self._strict)
        restoring = None if optimizer is None else self._plan_optimizer_load(small, model, optimizer)
        schedule = None if scheduler is None else self._unpack_scheduler_state(small)
        state = ReadPlan(self._metadata, {} if restoring is None else restoring.targets)
        values = ReadPlan(self._metadata, {} if weights is None else weights.make_targets(restoring))
        if restoring is not None:
            restoring.validate(state.values)
        ways = [part.can_load_in_place for part in (weights, restoring and restoring.adapter) if part]
        facts = [f"read {'in place' if in_place else 'beside'}" for in_place in ways]
        return Prepared(_LoadPlan(self._unpack_per_rank(small), schedule, restoring, weights, state, values), facts)

    def _plan_optimizer_load(
        self, small_values: dict[str, Any], model: torch.nn.Module | None, optimizer: Optimizer
    ) -> OptimizerLoadPlan | None:
        if not self._has_section(OPTIM, "optimizer"):
            return None
        saved = SavedOptimizer(self._metadata, small_values)
        return OptimizerLoadPlan(
            saved, make_adapter(optimizer), resolve_param_names(optimizer, model), strict=self._strict
        )

    def _unpack_scheduler_state(self, small_values: dict[str, Any]) -> Any:
        if not self._has_section(SCHEDULER, "scheduler"):
            return None
        key = self._metadata.under(SCHEDULER)[0].key
        return from_byte_tensor(small_values[key], key, self._directory)

    def _has_section(self, section: str, description: str) -> bool:
        found = bool(self._metadata.under(section))
        if not found and self._strict:
            raise CheckpointError(f"{self._directory} has no {description} in it. strict=False loads what there is.")
        return found

    def _unpack_per_rank(self, small_values: dict[str, Any]) -> dict[int, Any]:
        """What each rank has for itself; nothing if `save` did not write it."""
        if self._manifest is None:
            return {}
        found = {}
        for entry in self._metadata.under(RANKS):
            part = from_byte_tensor(small_values[entry.key], entry.key, self._directory)
            try:
                check_rng_states(part["random"])
                found[int(entry.path[1])] = {"random": part["random"], "extra": part["extra"]}
            except Exception as error:
                raise CheckpointError(f"'{entry.key}' in {self._directory} cannot be read: {error!r}") from error
        return found

    def _finish(self, per_rank: dict[int, Any]) -> LoadResult:
        """Random states and `extra` belong to a rank: where there were other ranks they are nobody's."""
        rank, size = self._comm.group.rank, self._comm.group.size
        extras = {number: part["extra"] for number, part in sorted(per_rank.items())}
        step, world = (self._manifest.step, self._manifest.world_size) if self._manifest else (None, None)
        if list(extras) == list(range(size)):
            set_rng_states(per_rank[rank]["random"])
            return LoadResult(self._directory, step, world, extras[rank], extras)
        if extras:
            warn_at_caller(
                f"{self._directory} was saved by {len(extras)} ranks and is loaded by {size}: random states stay "
                "as they are, and what ranks gave as extra is in extra_by_rank"
            )
        return LoadResult(self._directory, step, world, None, extras)


@contextmanager
def errors_as_partial_load() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{error}. The model and the optimizer are loaded in parts now: load a checkpoint before you go on."
        ) from error


@contextmanager
def gc_paused() -> Iterator[None]:
    """Thousands of small objects come, and would have all that the process has looked through, each time for 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def find_checkpoint(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file: load it with torch.load(..., weights_only=True) and load_state_dict()"
        )
    if is_dcp_checkpoint(path):
        return path
    found = CheckpointDir(path).latest()
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint in it")
    return found
