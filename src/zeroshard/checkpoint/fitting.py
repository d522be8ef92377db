"""Whether a saved optimizer is one for the running one: of the same parameters, shapes and class."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..optimizer import ZeroRedundancyOptimizer
from ..state.compat import describe_options
from ..state.wrapped import is_wrapped
from .archive import Entry
from .expecting import expected_state, kinds_of
from .naming import refuse_other_names
from .saved_optimizer import Options, SavedOptimizer, StateEntry

_BY_SCHEDULERS = "initial_lr"


class Fit:
    """Raises where it is not."""

    def __init__(self, saved: SavedOptimizer, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._saved, self._optimizer, self._names = saved, optimizer, names
        self._kinds = kinds_of(optimizer)
        self._params = [param for group in optimizer.param_groups for param in group["params"]]

    def require_the_same_names(self) -> None:
        missing = [name for name in self._names if name not in self._saved.options]
        unexpected = sorted(self._saved.options.keys() - set(self._names))
        refuse_other_names(f"the optimizer in {self._saved.directory} is of other parameters", missing, unexpected)

    def check_shape(self, index: int, it: StateEntry) -> None:
        param, saved = self._params[index], it.entry.tensor
        if saved is None or not isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return
        shaped = len(it.keys) == 1 and it.keys[0] in self._optimizer.engine.param_shaped(index)
        if shaped and tuple(saved.size) != tuple(param.shape):
            self._refuse_shape(index, it.entry, tuple(param.shape))

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
        options = [group for group in self._optimizer.param_groups for _ in group["params"]]
        known: dict[Any, dict[Any, Any]] = {}
        for index, name in enumerate(self._names):
            running = {key: value for key, value in options[index].items() if key != "params"}
            saved = self._saved.options.get(name)
            if saved is None:
                continue
            merged = {**running, **saved}
            mark = (self._kinds[index], describe_options(merged), tuple(self._params[index].shape))
            if mark not in known:
                known[mark] = expected_state(self._kinds[index], merged, self._params[index])
            self._check_kind(index, known[mark], running, saved)
            keys[index] = list(known[mark])
        return keys

    def _check_kind(self, index: int, expected: dict[Any, Any], running: Options, saved: Options) -> None:
        kind, defaults = type(self._kinds[index]).__qualname__, self._kinds[index].defaults
        entries = {it.keys[0]: it.entry for it in self._saved.state.get(self._names[index], ())}
        if entries and expected:
            strange = bool(expected.keys() - entries.keys())
        else:
            strange = bool(defaults.keys() - saved.keys()) and bool(saved.keys() - running.keys() - {_BY_SCHEDULERS})
        if strange:
            raise CheckpointError(
                f"the state of {self._names[index]} in {self._saved.directory} is of another optimizer class: "
                f"it has {sorted(map(str, entries)) or 'no state'} and the options {sorted(saved)}, but "
                f"{kind} keeps {sorted(map(str, expected)) or 'no state'}, with the options "
                f"{sorted(defaults)}"
            )
        for key in expected.keys() & entries.keys():
            mine, theirs = expected[key], entries[key].tensor
            if is_wrapped(mine):  # saved in several tensors
                continue
            if isinstance(mine, torch.Tensor) and theirs is not None and mine.shape != theirs.size:
                self._refuse_shape(index, entries[key], tuple(mine.shape))
