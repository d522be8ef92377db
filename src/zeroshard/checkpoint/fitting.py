"""Whether a saved optimizer is one for the running one: of the same parameters, shapes and class."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..state.compat import describe_options
from ..state.records import MASTER
from ..state.wrapped import is_wrapped
from .archive import Entry
from .expecting import expected_state
from .naming import refuse_other_names
from .optimizers import Running
from .saved_optimizer import Options, SavedOptimizer, StateEntry

_BY_SCHEDULERS = "initial_lr"


class Fit:
    """Raises where it is not."""

    def __init__(self, saved: SavedOptimizer, running: Running, names: Sequence[str]) -> None:
        self._saved, self._running, self._names = saved, running, names
        self._params = running.params

    def require_the_same_names(self) -> None:
        missing = [name for name in self._names if name not in self._saved.options]
        unexpected = sorted(self._saved.options.keys() - set(self._names))
        refuse_other_names(f"the optimizer in {self._saved.directory} is of other parameters", missing, unexpected)

    def check_shape(self, index: int, it: StateEntry) -> None:
        saved, expected = it.entry.tensor, tuple(self._params[index].shape)
        if saved is None or len(it.keys) > 1 or not self._running.is_shaped(index, it.key):
            return
        if tuple(saved.size) != expected:
            self._refuse_shape(index, it.entry, expected)

    def _refuse_shape(self, index: int, entry: Entry, expected: tuple[int, ...]) -> NoReturn:
        found = None if entry.tensor is None else tuple(entry.tensor.size)
        raise CheckpointError(
            f"'{entry.key}' in {self._saved.directory} has shape {found}, but that of the parameter "
            f"{self._names[index]} has {expected}: it is a checkpoint of another model"
        )

    def keys(self) -> dict[int, list[Any]]:
        """Of each parameter's state, in the order in which the optimizer makes it: archives have none.

        The optimizer finds what it will look for: else its next step would fail, or do something else.
        """
        keys: dict[int, list[Any]] = {}
        options = [group for group in self._running.optimizer.param_groups for _ in group["params"]]
        known: dict[Any, dict[Any, Any]] = {}
        for index, name in enumerate(self._names):
            present = {key: value for key, value in options[index].items() if key != "params"}
            saved = self._saved.options.get(name)
            if saved is None:
                continue
            merged = {**present, **saved}
            kind = self._running.kind_of(index)
            mark = (kind, describe_options(merged), tuple(self._params[index].shape))
            if mark not in known:
                known[mark] = expected_state(kind, merged, self._params[index])
            self._check_kind(index, known[mark], present, saved)
            keys[index] = list(known[mark])
        return keys

    def _check_kind(self, index: int, expected: dict[Any, Any], present: Options, saved: Options) -> None:
        kind = self._running.kind_of(index)
        found = self._saved.state.get(self._names[index], ())
        entries = {it.keys[0]: it.entry for it in found if it.keys != (MASTER,)}  # no class makes those
        if entries and expected:
            strange = bool(expected.keys() - entries.keys())
        else:
            unknown = saved.keys() - present.keys() - {_BY_SCHEDULERS}
            strange = bool(kind.defaults.keys() - saved.keys()) and bool(unknown)
        if strange:
            raise CheckpointError(
                f"the state of {self._names[index]} in {self._saved.directory} is of another optimizer class: "
                f"it has {sorted(map(str, entries)) or 'no state'} and the options {sorted(saved)}, but "
                f"{type(kind).__qualname__} keeps {sorted(map(str, expected)) or 'no state'}, with the options "
                f"{sorted(kind.defaults)}"
            )
        for key in expected.keys() & entries.keys():
            mine, theirs = expected[key], entries[key].tensor
            if is_wrapped(mine):  # saved in several tensors
                continue
            if isinstance(mine, torch.Tensor) and theirs is not None and mine.shape != theirs.size:
                self._refuse_shape(index, entries[key], tuple(mine.shape))
