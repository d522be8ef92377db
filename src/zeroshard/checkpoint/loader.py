"""`load`: validate everything on all ranks first, then read values into the model and the optimizer.

Order of a load:

1. Verify metadata and checksums; compare names, shapes and optimizer classes; plan all reads. Nothing changes yet.
2. Load what runs user code and may fail (scheduler, custom `load_state_dict`), from new memory and with rollback.
3. Read everything else in place, without a second copy of model or optimizer state. Only an I/O error can fail here.

All ranks agree before each step: either all load, or none does.
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
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from .._formatting import format_error, format_names
from .._logging import log_rank, warn_at_caller
from .._torch_compat import set_element
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..engine.inner import OPTIMIZER_KEY
from ..engine.param_store import StateAllocator
from ..errors import CheckpointError
from ..profiling import Phase, label_phase
from ..state.state_dict import MASTER_KEY, StateDict, describe_options
from ..state.tensor_utils import is_wrapper_subclass
from .directory import CheckpointDir, Manifest, read_manifest
from .metadata import CheckpointMetadata, Entry, is_dcp_checkpoint
from .names import raise_if_names_differ, resolve_param_names
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
# The optimizer in a checkpoint, by parameter names.


PARAM_GROUPS, STATE = "param_groups", "state"

GroupOptions = dict[str, Any]


class StateEntry(NamedTuple):
    """A value in the state of a parameter."""

    key_path: tuple[Any, ...]
    """Keys inside the parameter's state; several for nested state."""
    entry: Entry

    @property
    def key(self) -> Any:
        """The state key; None for nested state, whose keys have no meaning of their own."""
        return self.key_path[0] if len(self.key_path) == 1 else None

    @property
    def allocator_key(self) -> Any:
        """The state key; the key path for nested state."""
        return self.key_path[0] if len(self.key_path) == 1 else self.key_path


def param_group_entries(metadata: CheckpointMetadata) -> list[Entry]:
    """Return the entries of the param groups. They are small and read before anything else."""
    return [entry for entry in metadata.under(OPTIM) if optimizer_section(entry) == PARAM_GROUPS]


class SavedOptimizer:
    """The optimizer in a checkpoint, by parameter names.

    `non_param_entries` belong to no parameter: state shared by all, and entries that a class adds to its
    state dict.
    """

    def __init__(
        self, metadata: CheckpointMetadata, values: Mapping[str, Any], class_names: Sequence[str] = ()
    ) -> None:
        """`values`: the values of `param_group_entries`, by entry key. `class_names`: from the manifest."""
        self.directory, self._class_names = metadata.directory, class_names
        try:
            self.options = _parse_options(param_group_entries(metadata), values)
            state_entries = [entry for entry in metadata.under(OPTIM) if optimizer_section(entry) == STATE]
            self.state = _parse_state(state_entries, self.options)
            self.non_param_entries = _find_non_param_entries(
                metadata.under(OPTIM), self.state.keys() - self.options.keys()
            )
        except Exception as error:
            raise CheckpointError(
                f"the optimizer state in {self.directory} is not in torch's format: {format_error(error)}. "
                "Save it with checkpoint.save(), or with dcp.save() and torch's state dict helpers."
            ) from error

    def class_name_of(self, name: str) -> str | None:
        """Return the name of the class that updated a parameter, or None if the checkpoint does not say.

        With several classes, the options of each group name its rule: the class, or a function that constructs it.
        """
        if len(self._class_names) == 1:
            return self._class_names[0]
        rule_name = str(self.options.get(name, {}).get(OPTIMIZER_KEY)).partition(" ")[0]  # equal names are numbered
        return rule_name if rule_name in self._class_names else None


def optimizer_section(entry: Entry) -> str:
    """Return "state", "param_groups" or another key of the optimizer's dict; in DCP's flat format, a dotted prefix."""
    return str(entry.path[1]).partition(".")[0] if len(entry.path) > 1 else ""


def _parse_options(entries: Sequence[Entry], values: Mapping[str, Any]) -> dict[str, GroupOptions]:
    """Return the group options of each parameter by name.

    They are stored as a list of groups, or in DCP's flat format as `param_groups.<name>.<option>`.
    """
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
    state: dict[str, list[StateEntry]] = defaultdict(list)
    for entry in entries:
        if entry.path[1] == STATE:
            name, key_path = str(entry.path[2]), entry.path[3:]
        else:
            name, key_path = _split_name(str(entry.path[1]).removeprefix(f"{STATE}."), param_names)
        state[name].append(StateEntry(key_path, entry))
    return dict(state)


def _find_non_param_entries(entries: Sequence[Entry], unknown_names: Set[str]) -> list[Entry]:
    """Return entries that belong to no parameter. `unknown_names`: names in the state that no group has."""
    shared = [entry for entry in entries if entry.path[1] == STATE and str(entry.path[2]) in unknown_names]
    sections = [(entry, optimizer_section(entry)) for entry in entries]
    return shared + [entry for entry, section in sections if section and section not in (STATE, PARAM_GROUPS)]


def _split_name(text: str, param_names: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Split `<name>.<key>` or `<name>.<key>.<key>`, where the name may contain dots, into name and key path."""
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
# Does the saved optimizer match the running one?


_SCHEDULER_OPTION = "initial_lr"


class OptimizerValidator:
    """Compares parameters, shapes and class of a saved optimizer with the running one; raises `CheckpointError`."""

    def __init__(self, saved: SavedOptimizer, adapter: OptimizerAdapter, names: Sequence[str], *, strict: bool) -> None:
        self._saved, self._adapter, self._names, self._strict = saved, adapter, names, strict
        self._params = adapter.params

    def check_names(self) -> None:
        missing = [name for name in self._names if name not in self._saved.options]
        unexpected = sorted(self._saved.options.keys() - set(self._names))
        raise_if_names_differ(f"the optimizer in {self._saved.directory} has other parameters", missing, unexpected)

    def check_shape(self, index: int, state_entry: StateEntry) -> None:
        saved, expected = state_entry.entry.tensor, tuple(self._params[index].shape)
        if saved is None or len(state_entry.key_path) > 1 or not self._adapter.is_param_shaped(index, state_entry.key):
            return
        if tuple(saved.size) != expected:
            self._raise_shape_mismatch(index, state_entry.entry, expected)

    def _raise_shape_mismatch(self, index: int, entry: Entry, expected: tuple[int, ...]) -> NoReturn:
        saved = None if entry.tensor is None else tuple(entry.tensor.size)
        raise CheckpointError(
            f"'{entry.key}' in {self._saved.directory} belongs to another model: expected shape {expected} for "
            f"{self._names[index]}, got {saved}. Load a checkpoint of this model."
        )

    def resolve_state_keys(self) -> dict[int, list[Any]]:
        """Return the state keys of each parameter in the order in which the optimizer creates them.

        Checkpoints do not keep that order. Raises if state is missing that the optimizer's next step would need.
        """
        state_keys: dict[int, list[Any]] = {}
        groups = [group for group in self._adapter.optimizer.param_groups for _ in group["params"]]
        probed: dict[Any, dict[Any, Any]] = {}
        for index, name in enumerate(self._names):
            current = {key: value for key, value in groups[index].items() if key != "params"}
            saved = self._saved.options.get(name)
            if saved is None:
                continue
            merged = {**current, **saved}
            inner = self._adapter.inner_optimizer_of(index)
            probe_key = (inner, describe_options(merged), tuple(self._params[index].shape))
            if probe_key not in probed:
                probed[probe_key] = probe_expected_state(inner, merged, self._params[index])
            self._check_optimizer_class(index, probed[probe_key], current, saved)
            state_keys[index] = list(probed[probe_key])
        return state_keys

    def _check_optimizer_class(
        self, index: int, expected: dict[Any, Any], current_options: GroupOptions, saved_options: GroupOptions
    ) -> None:
        inner = self._adapter.inner_optimizer_of(index)
        saved_state = self._saved.state.get(self._names[index], ())
        # Master weights are zeroshard's own: no optimizer class creates them.
        entries = {item.key_path[0]: item.entry for item in saved_state if item.key_path != (MASTER_KEY,)}
        if entries and expected:
            is_other_class = bool(expected.keys() - entries.keys())
        else:
            unknown = saved_options.keys() - current_options.keys() - {_SCHEDULER_OPTION}
            is_other_class = bool(inner.defaults.keys() - saved_options.keys()) and bool(unknown)
        saved_class, current_class = self._saved.class_name_of(self._names[index]), type(inner).__name__
        if is_other_class or (self._strict and saved_class not in (None, current_class)):
            message = (
                f"{self._saved.directory} has state of {saved_class or 'another optimizer class'} for "
                f"{self._names[index]}, but this optimizer uses {current_class}"
            )
            if not is_other_class:
                raise CheckpointError(
                    f"{message}. Use {saved_class}, or pass strict=False to load state of a class with the same keys."
                )
            keys, saved_keys = (
                format_names(sorted(map(str, names))) or "none"
                for names in ((expected, entries) if entries and expected else (inner.defaults, saved_options))
            )
            raise CheckpointError(
                f"{message}, with other state (expected {keys}; got {saved_keys}). Use the saved optimizer class, or "
                "leave out optimizer= to load only the model."
            )
        for key in expected.keys() & entries.keys():
            value, saved = expected[key], entries[key].tensor
            if is_wrapper_subclass(value):  # saved as several tensors
                continue
            if isinstance(value, torch.Tensor) and saved is not None and value.shape != saved.size:
                self._raise_shape_mismatch(index, entries[key], tuple(value.shape))


# ---------------------------------------------------------------------------------------------------------------------
# What the running optimizer loads from a saved one.


class OptimizerLoadPlan:
    """Maps saved state to the running optimizer by parameter names.

    Order of parameters, groups and world size may differ from those of the save.
    """

    def __init__(self, saved: SavedOptimizer, adapter: OptimizerAdapter, names: Sequence[str], *, strict: bool) -> None:
        """Validate the saved optimizer. Raises `CheckpointError` if it does not match the running one."""
        self._saved, self.adapter, self._names = saved, adapter, names
        adapter.check_ready()
        validator = OptimizerValidator(saved, adapter, names, strict=strict)
        if strict:
            validator.check_names()
        by_name = {name: sorted(saved.state.get(name, ()), key=lambda item: str(item.key_path)) for name in names}
        self._entries_to_load = [(index, item) for index, name in enumerate(names) for item in by_name[name]]
        for index, item in self._entries_to_load:
            validator.check_shape(index, item)
        self._state_keys = validator.resolve_state_keys()
        self._entries_to_load = [pair for pair in self._entries_to_load if self._should_load(*pair)]
        self._param_groups = self._merge_groups()

    @cached_property
    def targets(self) -> dict[str, Any]:
        """What this rank reads: tensors to read into, by entry key; None for values that are not tensors."""
        owned = [(index, item) for index, item in self._entries_to_load if self.adapter.owns_state(index, item.key)]
        allocator = self.adapter.state_allocator(
            {(index, item.allocator_key) for index, item in owned}, self._param_shaped_keys
        )
        targets = {item.entry.key: _allocate_target(allocator, index, item) for index, item in owned}
        return targets | {entry.key: entry.allocate() for entry in self._saved.non_param_entries}

    @cached_property
    def _param_shaped_keys(self) -> frozenset[Any]:
        """Keys of state tensors that have the shape of their parameter."""
        tensors = [
            (index, item.key, item.entry.tensor) for index, item in self._entries_to_load if len(item.key_path) == 1
        ]
        return self.adapter.param_shaped_keys(
            (index, key, tensor.size) for index, key, tensor in tensors if tensor is not None
        )

    def validate(self, values: Mapping[str, Any]) -> None:
        """Raise if the optimizer would reject the state dict. In `values`, tensors need not be filled yet."""
        self.adapter.validate(lambda: self.build_state_dict(values))

    def load_in_place(self, read_state: Callable[[], Mapping[str, Any]]) -> None:
        """Call `read_state`, which fills the targets, and load them. Call on all ranks."""
        self.adapter.load_in_place(lambda: self.build_state_dict(read_state()), self._param_shaped_keys)

    def find_master_entry(self, name: str, param: torch.Tensor) -> Entry | None:
        """Return the saved master weights of a parameter. A tied parameter is also found by its other names."""
        saved_name = name if name in self._saved.state else self._name_by_storage_key.get(storage_key(param), name)
        saved_state = self._saved.state.get(saved_name, ())
        return next((item.entry for item in saved_state if item.key_path == (MASTER_KEY,)), None)

    @cached_property
    def _name_by_storage_key(self) -> dict[object, str]:
        return {storage_key(param): name for param, name in zip(self.adapter.params, self._names, strict=True)}

    def build_state_dict(self, values: Mapping[str, Any]) -> StateDict:
        """Return the state dict to load, in the order and the groups of the running optimizer."""
        by_index: dict[int, Any] = {index: {} for index in range(len(self._names))}
        for index, item in self._entries_to_load:
            if item.entry.key in self.targets:
                set_element(by_index[index], item.key_path, values[item.entry.key])
        # As in torch, a parameter without state in the checkpoint starts without state.
        state = {index: self._order_state(index, param_state) for index, param_state in by_index.items() if param_state}
        missing = [index for index, name in enumerate(self._names) if name not in self._saved.options]
        if missing:  # parameters that are not in the checkpoint keep their state
            current = self.adapter.local_state_dict()["state"]
            state.update({index: current[index] for index in missing if current.get(index)})
        state_dict = {STATE: state, PARAM_GROUPS: self._param_groups}
        for entry in self._saved.non_param_entries:
            set_element(state_dict, entry.path[1:], values[entry.key])
        return self.adapter.to_loadable(state_dict)

    def _order_state(self, index: int, state: dict[Any, Any]) -> dict[Any, Any]:
        expected = [key for key in self._state_keys.get(index, ()) if key in state]
        return {key: state[key] for key in [*expected, *sorted(state.keys() - {*expected}, key=str)]}

    def _merge_groups(self) -> list[dict[str, Any]]:
        """Return the running optimizer's groups with the saved options."""
        groups, first = [], 0
        for group in self.adapter.optimizer.param_groups:
            indices = list(range(first, first + len(group["params"])))
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, **self._saved_group_options(indices), "params": indices})
            first += len(indices)
        self._warn_of_lost_group_differences(groups)
        return groups

    def _warn_of_lost_group_differences(self, merged: Sequence[dict[str, Any]]) -> None:
        """Warn if two adjacent groups differ in an option that was the same for both when saved.

        Learning rates are not compared: a schedule may have made them equal.
        """
        for (i, group), (j, next_group) in pairwise(enumerate(self.adapter.optimizer.param_groups)):
            keys = [key for key in group.keys() & next_group.keys() if key not in ("params", "param_names", "lr")]
            lost = [key for key in sorted(keys) if _option_differs(group[key], next_group[key])]
            lost = [key for key in lost if not _option_differs(merged[i].get(key), merged[j].get(key))]
            if lost:
                warn_at_caller(
                    f"parameter groups {i} and {j} had different values of '{lost[0]}', but {self._saved.directory} "
                    f"sets both to {merged[i][lost[0]]!r}. Set it again after load() if they should differ."
                )
                return

    def _should_load(self, index: int, state_entry: StateEntry) -> bool:
        """Return whether to load a value: all but master weights that the optimizer does not use."""
        return state_entry.key_path != (MASTER_KEY,) or self.adapter.can_load_master_weights(
            self._state_keys.get(index, ())
        )

    def _saved_group_options(self, param_indices: Sequence[int]) -> GroupOptions:
        """Return the options that the group's parameters were saved with. Raises if these differ."""
        names = [self._names[index] for index in param_indices if self._names[index] in self._saved.options]
        if not names:
            return {}
        options = self._saved.options[names[0]]
        description = describe_options(options)
        for name in names[1:]:
            other = self._saved.options[name]
            if other is not options and describe_options(other) != description:
                raise CheckpointError(
                    f"{names[0]} and {name} are in one parameter group, but {self._saved.directory} has different "
                    f"options for them: {description} and {describe_options(other)}. Put them into separate groups."
                )
        return options


def _option_differs(a: Any, b: Any) -> bool:
    return describe_options({"option": a}) != describe_options({"option": b})


def _allocate_target(allocator: StateAllocator, index: int, state_entry: StateEntry) -> torch.Tensor | None:
    """Allocate memory for this rank's part of a state tensor; None if the value is not a tensor."""
    saved = state_entry.entry.tensor
    return (
        None
        if saved is None
        else allocator(index, state_entry.allocator_key, tuple(saved.size), saved.properties.dtype)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the running model loads from a saved one.


class ModelLoadPlan:
    """Maps the saved values of a model to the running model.

    A sharded parameter is read from the most precise saved copy (fp32 master weights, if there are any) into the most
    precise copy here. Each rank reads only the shards that it owns; `broadcast_params` distributes them.
    """

    def __init__(
        self, metadata: CheckpointMetadata, model: torch.nn.Module, optimizer: Optimizer | None, *, strict: bool
    ) -> None:
        """Validate the saved model. Raises `CheckpointError` if names or shapes differ from the running one."""
        self._metadata, self._model = metadata, model
        self._sharded_params = ShardedParams(optimizer)
        self._model_state = get_model_state_dict(model)
        self._check_no_meta_tensors()
        self.can_load_in_place = not has_custom_load(model) and self._can_write_through_state_dict()
        """Whether values are read directly into the model; otherwise into new memory, for its `load_state_dict`."""
        if strict:
            self._check_names()
        self._entries_to_load = [entry for entry in self._model_entries() if entry.path[1] in self._model_state]
        for entry in self._entries_to_load:
            self._check_shape(entry, self._model_state[entry.path[1]])
        self._source_keys: dict[str, str] = {}
        """Key of the saved master weights that replace a less precise parameter, by the parameter's key."""
        self._params_from_masters: set[int] = set()
        """Parameters that are read into their master weights, and then rounded."""
        self._masters_from_params: set[int] = set()
        """Parameters without saved master weights: these are copied from the parameter after the read."""

    def make_targets(self, optimizer_plan: OptimizerLoadPlan | None) -> dict[str, Any]:
        """Return what this rank reads: tensors to read into, by entry key; None for values that are not tensors."""
        return dict(
            self._make_target(entry, self._model_state[entry.path[1]], optimizer_plan)
            for entry in self._entries_to_load
        )

    def build_state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's state dict. `values`: by entry key; DCP stores nested containers flat."""
        state_dict: dict[str, Any] = {}
        for entry in self._entries_to_load:
            set_element(state_dict, entry.path[1:], values[self._source_keys.get(entry.key, entry.key)])
        return state_dict

    @torch.no_grad()
    def broadcast_params(self) -> Callable[[], None]:
        """Start to broadcast the shards that were read in place; return a function that waits. Call on all ranks."""
        tensors = [value for value in self._model_state.values() if isinstance(value, torch.Tensor)]
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        if not self._sharded_params:
            return lambda: None
        for index in self._params_from_masters:
            master = self._sharded_params.engine.params.master_shard_tensor(index)
            assert master is not None
            self._sharded_params.engine.params.shard_tensor(index).local.copy_(master.local)
        self.refresh_masters()
        param_sync = self._sharded_params.engine.param_sync
        param_sync.start_all()
        return param_sync.finish

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Overwrite master weights that are not in the checkpoint with the loaded parameters."""
        for index in self._masters_from_params:
            master = self._sharded_params.engine.params.master_shard_tensor(index)
            assert master is not None
            master.local.copy_(self._sharded_params.engine.params.shard_tensor(index).local)

    def _check_no_meta_tensors(self) -> None:
        meta = [name for name, value in self._model_state.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if meta:
            raise CheckpointError(
                f"expected a model with memory, got meta tensors: {format_names(meta)}. Call "
                "model.to_empty(device=...) before load()."
            )

    def _model_entries(self) -> list[Entry]:
        return [entry for entry in self._metadata.under(MODEL) if entry.path[1:]]

    def _can_write_through_state_dict(self) -> bool:
        own = {storage_key(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        return all(storage_key(value) in own for value in self._model_state.values())

    def _check_names(self) -> None:
        saved = {str(entry.path[1]): None for entry in self._model_entries()}
        missing = [
            name for name in self._model_state if name not in saved and not is_empty_container(self._model_state[name])
        ]
        unexpected = [name for name in saved if name not in self._model_state]
        raise_if_names_differ(f"{self._metadata.directory} belongs to another model", missing, unexpected)

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
        target = current if self.can_load_in_place else torch.empty_like(current, requires_grad=False)
        return self._source_keys.get(entry.key, entry.key), target

    def _make_shard_target(
        self, entry: Entry, current: torch.Tensor, index: int, optimizer_plan: OptimizerLoadPlan | None
    ) -> tuple[str, torch.Tensor]:
        """Return the entry key to read this rank's shard from, and the tensor to read it into."""
        assert entry.tensor is not None
        engine = self._sharded_params.engine
        shard, master = engine.params.shard_tensor(index), engine.params.master_shard_tensor(index)
        saved_master = self._find_master_entry(entry, current, optimizer_plan)
        is_rounded = entry.tensor.properties.dtype != shard.dtype
        if master is not None and saved_master is None:
            (self._params_from_masters if is_rounded else self._masters_from_params).add(index)
            return entry.key, master if is_rounded else shard
        if master is None and saved_master is not None and is_rounded:
            return saved_master.key, shard
        return entry.key, shard

    def _needs_master_refresh(
        self, entry: Entry, current: torch.Tensor, index: int, optimizer_plan: OptimizerLoadPlan | None
    ) -> bool:
        return (
            self._sharded_params.engine.params.master_shard_tensor(index) is not None
            and self._find_master_entry(entry, current, optimizer_plan) is None
        )

    def _find_master_entry(
        self, entry: Entry, current: torch.Tensor, optimizer_plan: OptimizerLoadPlan | None
    ) -> Entry | None:
        """Return the saved master weights if they are more precise than the saved parameter, else None."""
        master = None if optimizer_plan is None else optimizer_plan.find_master_entry(str(entry.path[1]), current)
        if master is None or master.tensor is None or entry.tensor is None or master.tensor.size != entry.tensor.size:
            return None
        return master if master.tensor.properties.dtype.itemsize > entry.tensor.properties.dtype.itemsize else None

    def _check_shape(self, entry: Entry, current: Any) -> None:
        if not isinstance(current, torch.Tensor) and (entry.tensor is None or len(entry.path) > 2):
            return  # extra state of a module may have any form
        saved = None if entry.tensor is None else tuple(entry.tensor.size)
        if not isinstance(current, torch.Tensor) or saved != tuple(current.shape):
            expected = (
                f"shape {tuple(current.shape)}" if isinstance(current, torch.Tensor) else f"a {type(current).__name__}"
            )
            raise CheckpointError(
                f"'{entry.key}' in {self._metadata.directory} belongs to another model: expected {expected}, got "
                f"{'no tensor' if saved is None else f'shape {saved}'}. Load a checkpoint of this model."
            )


# ---------------------------------------------------------------------------------------------------------------------
# load.


T = TypeVar("T")


@dataclass(frozen=True)
class LoadResult:
    """Result of `load`, which also fills model, optimizer and scheduler."""

    path: Path
    """Directory of the checkpoint."""
    step: int | None
    """The saved step; None if `save` did not write the checkpoint."""
    world_size: int | None
    """Number of ranks that saved the checkpoint; None if `save` did not write it."""
    extra: Any
    """What this rank passed to `save` as `extra`; None if the world size has changed."""
    extra_by_rank: dict[int, Any]
    """`extra` of all ranks that saved the checkpoint."""


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

    Call on all ranks of `process_group`.

    World size, partitioner and bucket size may differ from those of the save. Checkpoints that FSDP2 or plain torch
    saved with `torch.distributed.checkpoint` under the same names load, too. Either all ranks load or nothing changes,
    unless an I/O error occurs after validation. No code in the files is executed.

    Args:
        path: A folder that `save` wrote to, or the directory of one checkpoint.
        model: The model to load into; its parameters keep their dtypes.
        optimizer: A sharded optimizer, a plain one, or one over FSDP2's parameters.
        scheduler: Any object with `load_state_dict()`.
        strict: Raise if names or optimizer classes differ. With False, missing values stay unchanged and unexpected
            ones are ignored.
        progress: True shows a progress line on rank 0. None shows it if stderr is a terminal and the load takes more
            than a second. A function is called on each rank with the bytes it has verified and read, and the total
            known so far.
        process_group: The ranks that load; default: those of a sharded `optimizer`, else all.

    Returns:
        The step, and the `extra` that the ranks saved.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or belongs to another model or optimizer.
        ConfigError: An argument is invalid.
        RankMismatchError: The ranks passed different arguments.
    """
    comm = Comm(choose_group(process_group, optimizer))
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    must_match = [f"path {path}", f"strict={strict}"]
    must_match += [f"{name} {'not ' if value is None else ''}given" for name, value in components.items()]
    with errors_as_checkpoint_error(path):
        prepare_all(comm, "checkpoint.load", lambda: _prepare_load(comm, components, progress, must_match))
        directory = run_on_rank0(comm, "checkpoint.load: finding the checkpoint", lambda: find_checkpoint(Path(path)))
        counter = Progress(f"loading {directory.name}", progress, comm.group.rank)
        with gc_paused():
            result = _Loader(comm, directory, counter, strict=strict).run(model, optimizer, scheduler)
        log_rank(logging.DEBUG, comm.group.rank, "loaded %s; this rank read %d bytes", directory, counter.done_bytes)
        return result


def _prepare_load(comm: Comm, components: dict[str, Any], progress: Any, must_match: list[str]) -> Prepared[None]:
    check_components(components, "load_state_dict", progress)
    wait_for_pending_saves()
    check_optimizer_ranks(components["optimizer"], comm.group, "checkpoint.load")
    return Prepared(None, must_match)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the newest checkpoint in a folder, or None."""
    return CheckpointDir(path).latest()


class _LoadPlan(NamedTuple):
    """The validated load of one rank: small values, which have been read, and the reads of tensors."""

    per_rank: dict[int, Any]
    """RNG states and `extra` by rank."""
    scheduler_state: Any
    optimizer_plan: OptimizerLoadPlan | None
    model_plan: ModelLoadPlan | None
    optimizer_reads: ReadPlan
    model_reads: ReadPlan


class _Loader:
    """One load. All ranks create it and call `run`."""

    def __init__(self, comm: Comm, directory: Path, progress: Progress, *, strict: bool) -> None:
        self._comm, self._directory, self._progress, self._strict = comm, directory, progress, strict
        with label_phase(Phase.LOAD_VALIDATE):
            self._metadata, self._manifest = prepare_all(comm, "checkpoint.load", self._open)
            prepare_all(comm, "checkpoint.load: verifying checksums", self._verify_checksums)

    def run(self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any) -> LoadResult:
        with label_phase(Phase.LOAD_VALIDATE):
            plan = prepare_all(self._comm, "checkpoint.load", lambda: self._prepare(model, optimizer, scheduler))
        with transaction() as undo:
            if scheduler is not None and plan.scheduler_state is not None:
                self._run_on_all(lambda: load_scheduler(scheduler, plan.scheduler_state, undo))
            if plan.optimizer_plan is not None and not plan.optimizer_plan.adapter.can_load_in_place:
                self._load_out_of_place(plan.optimizer_plan, self._execute_reads(plan.optimizer_reads), undo)
            if model is not None and plan.model_plan is not None and not plan.model_plan.can_load_in_place:
                model_state = plan.model_plan.build_state_dict(self._execute_reads(plan.model_reads))
                self._run_on_all(lambda: load_model(model, model_state, undo, strict=self._strict))
                plan.model_plan.refresh_masters()
            self._load_in_place(plan)
        return self._finish(plan.per_rank)

    def _load_out_of_place(self, optimizer_plan: OptimizerLoadPlan, values: dict[str, Any], undo: ExitStack) -> None:
        # Three rounds: a rank that fails in one of the first two must not miss the collective calls of the next.
        state = self._run_on_all(lambda: optimizer_plan.build_state_dict(values))
        snapshot = self._run_on_all(optimizer_plan.adapter.snapshot)
        self._run_on_all(lambda: optimizer_plan.adapter.load(state, snapshot, undo))

    def _load_in_place(self, plan: _LoadPlan) -> None:
        with errors_as_partial_load(), ExitStack() as in_flight:
            if plan.model_plan is not None and plan.model_plan.can_load_in_place:
                self._execute_reads(plan.model_reads)
                in_flight.callback(plan.model_plan.broadcast_params())
            optimizer_plan = plan.optimizer_plan
            if optimizer_plan is not None and optimizer_plan.adapter.can_load_in_place:
                optimizer_plan.load_in_place(lambda: self._execute_reads(plan.optimizer_reads))

    def _open(self) -> Prepared[tuple[CheckpointMetadata, Manifest | None]]:
        metadata, manifest = CheckpointMetadata(self._directory), read_manifest(self._directory)
        if self._comm.group.rank == 0:
            metadata.check_files()
        if manifest is not None:
            manifest.check_covers(self._directory, metadata.min_file_sizes())
        return Prepared((metadata, manifest), [f"{len(metadata.entries)} entries in {self._directory}"])

    def _verify_checksums(self) -> Prepared[None]:
        """Verify this rank's share of the files."""
        if self._manifest is not None:
            file_slice = slice(self._comm.group.rank, None, self._comm.group.size)
            self._manifest.verify_checksums(self._directory, file_slice, self._progress)
        return Prepared(None)

    def _execute_reads(self, read_plan: ReadPlan) -> dict[str, Any]:
        with label_phase(Phase.LOAD_READ):
            return self._run_on_all(lambda: read_plan.execute(self._progress))

    def _run_on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on all ranks and return its result; all raise if it fails on one."""
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
        """Read the small values, validate everything and plan all reads."""
        small_values = read_values(self._metadata, self._small_targets(optimizer, scheduler))
        model_plan = None if model is None else ModelLoadPlan(self._metadata, model, optimizer, strict=self._strict)
        optimizer_plan = None if optimizer is None else self._plan_optimizer_load(small_values, model, optimizer)
        scheduler_state = None if scheduler is None else self._unpack_scheduler_state(small_values)
        optimizer_reads = ReadPlan(self._metadata, {} if optimizer_plan is None else optimizer_plan.targets)
        model_reads = ReadPlan(self._metadata, {} if model_plan is None else model_plan.make_targets(optimizer_plan))
        if optimizer_plan is not None:
            optimizer_plan.validate(optimizer_reads.values)
        in_place_flags = [
            loader.can_load_in_place for loader in (model_plan, optimizer_plan and optimizer_plan.adapter) if loader
        ]
        must_match = [f"read {'in place' if in_place else 'into new memory'}" for in_place in in_place_flags]
        plan = _LoadPlan(
            per_rank=self._unpack_per_rank(small_values),
            scheduler_state=scheduler_state,
            optimizer_plan=optimizer_plan,
            model_plan=model_plan,
            optimizer_reads=optimizer_reads,
            model_reads=model_reads,
        )
        return Prepared(plan, must_match)

    def _plan_optimizer_load(
        self, small_values: dict[str, Any], model: torch.nn.Module | None, optimizer: Optimizer
    ) -> OptimizerLoadPlan | None:
        if not self._has_section(OPTIM, "optimizer"):
            return None
        class_names = () if self._manifest is None else self._manifest.optimizers
        saved = SavedOptimizer(self._metadata, small_values, class_names)
        return OptimizerLoadPlan(
            saved, make_adapter(optimizer), resolve_param_names(optimizer, model), strict=self._strict
        )

    def _unpack_scheduler_state(self, small_values: dict[str, Any]) -> Any:
        if not self._has_section(SCHEDULER, "scheduler"):
            return None
        key = self._metadata.under(SCHEDULER)[0].key
        return from_byte_tensor(small_values[key], key, self._directory)

    def _has_section(self, section: str, description: str) -> bool:
        exists = bool(self._metadata.under(section))
        if not exists and self._strict:
            raise CheckpointError(
                f"{self._directory} contains no {description}. Leave out {description}=, or pass strict=False."
            )
        return exists

    def _unpack_per_rank(self, small_values: dict[str, Any]) -> dict[int, Any]:
        """Return RNG states and `extra` by rank; empty if `save` did not write the checkpoint."""
        if self._manifest is None:
            return {}
        per_rank = {}
        for entry in self._metadata.under(RANKS):
            values = from_byte_tensor(small_values[entry.key], entry.key, self._directory)
            try:
                check_rng_states(values["random"])
                per_rank[int(entry.path[1])] = {"random": values["random"], "extra": values["extra"]}
            except Exception as error:
                raise CheckpointError(f"'{entry.key}' in {self._directory} cannot be read: {error!r}") from error
        return per_rank

    def _finish(self, per_rank: dict[int, Any]) -> LoadResult:
        """Restore the RNG states, unless the world size has changed, and return the result."""
        rank, size = self._comm.group.rank, self._comm.group.size
        extras = {saved_rank: values["extra"] for saved_rank, values in sorted(per_rank.items())}
        step, world_size = (self._manifest.step, self._manifest.world_size) if self._manifest else (None, None)
        if list(extras) == list(range(size)):
            set_rng_states(per_rank[rank]["random"])
            return LoadResult(self._directory, step, world_size, extras[rank], extras)
        if extras:
            has_extra = any(extra is not None for extra in extras.values())
            warn_at_caller(
                f"{self._directory} was saved by {len(extras)} ranks and is loaded by {size}: random number generator "
                "states are not restored. Seed each rank again if it draws random numbers."
                + (" What the ranks saved as `extra` is in extra_by_rank." if has_extra else "")
            )
        return LoadResult(self._directory, step, world_size, None, extras)


@contextmanager
def errors_as_partial_load() -> Iterator[None]:
    """Say in errors that model and optimizer are partially loaded."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{error}. The model and the optimizer are only partially loaded: load a checkpoint before you continue."
        ) from error


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection: a load creates many small objects, and each full collection takes about 0.2 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the newest one in it. Raises `CheckpointError` if there is none."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Check the path.")
    if not path.is_dir():
        raise CheckpointError(
            f"expected a checkpoint directory, got the file {path}. Load it with torch.load(..., weights_only=True) "
            "and load_state_dict()."
        )
    if is_dcp_checkpoint(path):
        return path
    newest = CheckpointDir(path).latest()
    if newest is None:
        raise CheckpointError(f"{path} contains no checkpoint. Pass a folder that checkpoint.save() wrote to.")
    return newest
