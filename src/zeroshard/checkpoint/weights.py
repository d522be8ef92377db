"""A model in a checkpoint: what one that is running takes from it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ..errors import CheckpointError
from .archive import Archive, Entry
from .changing import is_empty, loads_its_own_way
from .contents import MODEL
from .naming import listed, refuse_other_names
from .owned import Owned, place_of
from .restoring import Restoring


class Weights:
    """A running model, and where the values of a saved one belong."""

    def __init__(self, archive: Archive, model: torch.nn.Module, optimizer: Optimizer | None, *, strict: bool) -> None:
        """Raises if the saved model is another one."""
        self._archive, self._model = archive, model
        self._owned = Owned(optimizer)
        self._mine = get_model_state_dict(model)
        self._refuse_meta()
        self.in_place = not loads_its_own_way(model) and self._is_the_models_memory()
        """Values are read to where they belong; else to new memory, for the model to load in its own way."""
        if strict:
            self._require_the_same_names()
        self._wanted = [entry for entry in self._entries() if entry.path[1] in self._mine]
        for entry in self._wanted:
            self._check_shape(entry, self._mine[entry.path[1]])
        self._sources: dict[str, str] = {}
        """What is read in the place of values that are less precise, by their keys."""
        self._rounded: set[int] = set()
        """Parameters of which only the more precise copy is read."""
        self._renewed: set[int] = set()
        """Parameters whose more precise copy is not in the checkpoint, and is made of them."""

    def targets(self, restoring: Restoring | None) -> dict[str, Any]:
        """What to read, and where to, together with what an optimizer takes."""
        return dict(self._target(entry, self._mine[entry.path[1]], restoring) for entry in self._wanted)

    def by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As the model has them, of values by keys of the archive, which takes containers apart."""
        found: dict[str, Any] = {}
        for entry in self._wanted:
            set_element(found, entry.path[1:], values[self._sources.get(entry.key, entry.key)])
        return found

    @torch.no_grad()
    def spread(self) -> Callable[[], None]:
        """Bring what was read in place to everyone; returns how to wait for that. On all ranks."""
        tensors = [value for value in self._mine.values() if isinstance(value, torch.Tensor)]
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        if not self._owned:
            return lambda: None
        for index in self._rounded:
            copy = self._owned.engine.precise_part(index)
            assert copy is not None
            self._owned.engine.part(index).local.copy_(copy.local)
        self.renew_copies()
        return self._owned.engine.spread()

    @torch.no_grad()
    def renew_copies(self) -> None:
        """Nothing is left in them of what was there before."""
        for index in self._renewed:
            copy = self._owned.engine.precise_part(index)
            assert copy is not None
            copy.local.copy_(self._owned.engine.part(index).local)

    def _refuse_meta(self) -> None:
        empty = [name for name, value in self._mine.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if empty:
            raise CheckpointError(
                f"the model has no memory for {listed(empty)}: call model.to_empty(device=...) before loading"
            )

    def _entries(self) -> list[Entry]:
        return [entry for entry in self._archive.below(MODEL) if entry.path[1:]]

    def _is_the_models_memory(self) -> bool:
        own = {place_of(it) for it in (*self._model.parameters(), *self._model.buffers())}
        return all(place_of(value) in own for value in self._mine.values())

    def _require_the_same_names(self) -> None:
        theirs = {str(entry.path[1]): None for entry in self._entries()}
        missing = [name for name in self._mine if name not in theirs and not is_empty(self._mine[name])]
        unexpected = [name for name in theirs if name not in self._mine]
        refuse_other_names(f"{self._archive.directory} has another model", missing, unexpected)

    def _target(self, entry: Entry, mine: Any, restoring: Restoring | None) -> tuple[str, Any]:
        if not isinstance(mine, torch.Tensor):
            return entry.key, entry.room()
        index = self._owned.find(mine)
        if self.in_place and index is not None:
            return self._part(entry, mine, index, restoring)
        if index is not None and self._needs_copy(entry, mine, index, restoring):
            self._renewed.add(index)
        master = self._master(entry, mine, restoring)
        if master is not None and entry.tensor is not None and entry.tensor.properties.dtype != mine.dtype:
            self._sources[entry.key] = master.key
        room = mine if self.in_place else torch.empty_like(mine, requires_grad=False)
        return self._sources.get(entry.key, entry.key), room

    def _part(
        self, entry: Entry, mine: torch.Tensor, index: int, restoring: Restoring | None
    ) -> tuple[str, torch.Tensor]:
        """This rank's part of a parameter, read from the most precise copy there is to the most precise one here."""
        assert entry.tensor is not None
        engine = self._owned.engine
        part, copy = engine.part(index), engine.precise_part(index)
        saved = self._master(entry, mine, restoring)
        is_rounded = entry.tensor.properties.dtype != part.dtype
        if copy is not None and saved is None:
            (self._rounded if is_rounded else self._renewed).add(index)
            return entry.key, copy if is_rounded else part
        return (saved.key, part) if copy is None and saved is not None and is_rounded else (entry.key, part)

    def _needs_copy(self, entry: Entry, mine: torch.Tensor, index: int, restoring: Restoring | None) -> bool:
        return self._owned.engine.precise_part(index) is not None and self._master(entry, mine, restoring) is None

    def _master(self, entry: Entry, mine: torch.Tensor, restoring: Restoring | None) -> Entry | None:
        """The saved master weights, if they are more precise than what the saved model has itself."""
        found = None if restoring is None else restoring.master(str(entry.path[1]), mine)
        if found is None or found.tensor is None or entry.tensor is None or found.tensor.size != entry.tensor.size:
            return None
        return found if found.tensor.properties.dtype.itemsize > entry.tensor.properties.dtype.itemsize else None

    def _check_shape(self, entry: Entry, mine: Any) -> None:
        if not isinstance(mine, torch.Tensor) and (entry.tensor is None or len(entry.path) > 2):
            return  # what a module adds to its dict may be of any form
        theirs = None if entry.tensor is None else tuple(entry.tensor.size)
        if not isinstance(mine, torch.Tensor) or theirs != tuple(mine.shape):
            here = f"shape {tuple(mine.shape)}" if isinstance(mine, torch.Tensor) else f"a {type(mine).__name__}"
            raise CheckpointError(
                f"'{entry.key}' in {self._archive.directory} has "
                f"{'no shape' if theirs is None else f'shape {theirs}'}, but the model's has {here}: it is a "
                "checkpoint of another model"
            )
