"""A model in a checkpoint: what one that is running takes from it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ..errors import CheckpointError
from .metadata import CheckpointMetadata, Entry
from .changing import has_custom_load, is_empty_container
from .contents import MODEL
from .names import format_names, raise_if_names_differ
from .owned import ShardedParams, storage_key
from .restoring import OptimizerLoadPlan


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
