"""Whether a saved optimizer is one for the running one: of the same parameters, shapes and class."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..state.state_dict import describe_options
from ..state.records import MASTER_KEY
from ..state.tensor_utils import is_wrapper_subclass
from .metadata import Entry
from .expecting import probe_expected_state
from .names import raise_if_names_differ
from .optimizer_adapter import OptimizerAdapter
from .saved_optimizer import GroupOptions, SavedOptimizer, StateEntry

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
