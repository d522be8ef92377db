"""Loading: read everything into memory of its own, agree that all ranks could, and only then change anything."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ..comm.agreement import Proposal, agreed
from ..comm.collectives import Comm
from ..comm.group import group_or_alone
from ..errors import CheckpointError
from ..notices import warn_user
from .archive import Archive, Entry, is_archive
from .changing import all_or_nothing, is_empty, load_model, load_optimizer, load_scheduler, may_fail
from .contents import MODEL, OPTIM, RANKS, SCHEDULER, check_random_states, set_random_states, unpacked
from .folder import Folder
from .manifest import Manifest, read_manifest
from .naming import listed, names_of
from .restoring import Restoring, SavedOptimizer, groups_in
from .together import on_first, told_alike


@dataclass(frozen=True)
class Loaded:
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
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load the latest checkpoint in the folder `path`, or the one in the directory `path`. Called on all ranks.

    Any number of ranks, partition and bucket size will do, and directories that FSDP2 and plain torch have saved with
    `torch.distributed.checkpoint` under the same names. Either all ranks load it or nothing changes. Nothing in the
    files is run as code.

    Args:
        path: a folder that `save` wrote to, or a directory with one checkpoint.
        model: the model to load into; its parameters keep their dtypes.
        optimizer: one of ours, a plain one, or one over FSDP2's parameters.
        scheduler: anything with `load_state_dict()`.
        strict: else what is missing stays as it is, and what is too much is left out.
        process_group: the ranks that load together; by default all.
    """
    comm = Comm(group_or_alone(process_group))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    facts = [f"path {path}", f"strict={strict}"]
    facts += [f"{name} {'not ' if it is None else ''}given" for name, it in given.items()]
    with told_alike(path):
        agreed(comm, "checkpoint.load", lambda: Proposal(None, facts))
        directory = on_first(comm, "checkpoint.load: looking for it", lambda: find(Path(path)))
        return _Loading(comm, directory, strict=strict).run(model, optimizer, scheduler)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest checkpoint in a folder, if there is one."""
    return Folder(path).latest()


class _Prepared(NamedTuple):
    """What a rank has made of the small values, and what it wants of the large ones."""

    by_rank: dict[int, Any]
    scheduler: Any
    restoring: Restoring | None
    weights: dict[str, Any]
    """New memory for the model's, by keys of the archive."""
    state: dict[str, Any]
    """New memory for the optimizer's."""


class _Loading:
    def __init__(self, comm: Comm, directory: Path, *, strict: bool) -> None:
        self._comm, self._directory, self._strict = comm, directory, strict
        self._archive, self._manifest = agreed(comm, "checkpoint.load", self._open)
        agreed(comm, "checkpoint.load: check sums", self._check_sums)

    def run(self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any) -> Loaded:
        small = self._read(self._small_targets(optimizer, scheduler))

        def propose() -> Proposal[_Prepared]:
            return Proposal(self._prepare(small, model, optimizer, scheduler))

        prepared = agreed(self._comm, "checkpoint.load", propose)
        values = self._read({**prepared.weights, **prepared.state})
        with all_or_nothing() as undo:
            if scheduler is not None and prepared.scheduler is not None:
                self._change(lambda: load_scheduler(scheduler, prepared.scheduler, undo))
            if optimizer is not None and prepared.restoring is not None:
                state = prepared.restoring.state_dict({key: values[key] for key in prepared.state})
                self._change(lambda: load_optimizer(optimizer, state, undo, may_be_undone=may_fail(model)))
            if model is not None:
                weights = self._by_name({key: values[key] for key in prepared.weights})
                self._change(lambda: load_model(model, weights, undo, strict=self._strict))
        return self._finish(prepared.by_rank)

    def _open(self) -> Proposal[tuple[Archive, Manifest | None]]:
        archive, manifest = Archive(self._directory), read_manifest(self._directory)
        if self._comm.group.rank == 0:
            archive.check_files()
        return Proposal((archive, manifest), [f"{len(archive.entries)} entries in {self._directory}"])

    def _check_sums(self) -> Proposal[None]:
        """Ranks look at files in turns."""
        if self._manifest is not None:
            self._manifest.check_sums(self._directory, slice(self._comm.group.rank, None, self._comm.group.size))
        return Proposal(None)

    def _read(self, targets: dict[str, Any]) -> dict[str, Any]:
        return self._archive.read(targets, self._comm.group)

    def _change(self, action: Callable[[], None]) -> None:
        def propose() -> Proposal[None]:
            action()
            return Proposal(None)

        agreed(self._comm, "checkpoint.load", propose)

    def _small_targets(self, optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
        entries = [] if self._manifest is None else self._archive.below(RANKS)
        if optimizer is not None:
            entries += groups_in(self._archive)
        if scheduler is not None:
            entries += self._archive.below(SCHEDULER)
        return agreed(self._comm, "checkpoint.load", lambda: Proposal({entry.key: entry.room() for entry in entries}))

    def _prepare(
        self, small: dict[str, Any], model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any
    ) -> _Prepared:
        weights = {} if model is None else self._model_targets(model)
        restoring = None if optimizer is None else self._restoring(small, model, optimizer)
        state = {} if restoring is None else restoring.targets()
        schedule = None if scheduler is None else self._scheduler_state(small)
        return _Prepared(self._by_rank(small), schedule, restoring, weights, state)

    def _restoring(
        self, small: dict[str, Any], model: torch.nn.Module | None, optimizer: Optimizer
    ) -> Restoring | None:
        if not self._is_there(OPTIM, "optimizer"):
            return None
        saved = SavedOptimizer(self._archive, small)
        return Restoring(saved, optimizer, names_of(optimizer, model), strict=self._strict)

    def _scheduler_state(self, small: dict[str, Any]) -> Any:
        if not self._is_there(SCHEDULER, "scheduler"):
            return None
        key = self._archive.below(SCHEDULER)[0].key
        return unpacked(small[key], key, self._directory)

    def _is_there(self, part: str, what: str) -> bool:
        found = bool(self._archive.below(part))
        if not found and self._strict:
            raise CheckpointError(f"{self._directory} has no {what} in it. strict=False loads what there is.")
        return found

    def _by_rank(self, small: dict[str, Any]) -> dict[int, Any]:
        """What each rank has for itself; nothing if `save` did not write it."""
        if self._manifest is None:
            return {}
        found = {}
        for entry in self._archive.below(RANKS):
            part = unpacked(small[entry.key], entry.key, self._directory)
            try:
                check_random_states(part["random"])
                found[int(entry.path[1])] = {"random": part["random"], "extra": part["extra"]}
            except Exception as error:
                raise CheckpointError(f"'{entry.key}' in {self._directory} cannot be read: {error!r}") from error
        return found

    def _model_targets(self, model: torch.nn.Module) -> dict[str, Any]:
        """New memory for what the model has, by keys of the archive."""
        entries = self._archive.below(MODEL)
        mine, theirs = get_model_state_dict(model), {str(entry.path[1]): None for entry in entries if entry.path[1:]}
        missing = [name for name in mine if name not in theirs and not is_empty(mine[name])]
        unexpected = [name for name in theirs if name not in mine]
        if self._strict and (missing or unexpected):
            raise CheckpointError(
                f"{self._directory} has another model. "
                + (f"Missing there: {listed(missing)}. " if missing else "")
                + (f"Only there: {listed(unexpected)}. " if unexpected else "")
                + "strict=False loads what both have."
            )
        return {
            entry.key: self._model_target(entry, mine[name]) for entry in entries if (name := entry.path[1]) in mine
        }

    def _model_target(self, entry: Entry, mine: Any) -> Any:
        if not isinstance(mine, torch.Tensor) and (entry.tensor is None or len(entry.path) > 2):
            return entry.room()  # what a module adds to its dict may be of any form
        theirs = None if entry.tensor is None else tuple(entry.tensor.size)
        if not isinstance(mine, torch.Tensor) or theirs != tuple(mine.shape):
            here = f"shape {tuple(mine.shape)}" if isinstance(mine, torch.Tensor) else f"a {type(mine).__name__}"
            raise CheckpointError(
                f"'{entry.key}' in {self._directory} has {'no shape' if theirs is None else f'shape {theirs}'}, but "
                f"the model's has {here}: it is a checkpoint of another model"
            )
        return torch.empty_like(mine, requires_grad=False)

    def _by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As the model has them, of values by keys of the archive, which takes containers apart."""
        found: dict[str, Any] = {}
        for entry in self._archive.below(MODEL):
            if entry.key in values:
                set_element(found, entry.path[1:], values[entry.key])
        return found

    def _finish(self, by_rank: dict[int, Any]) -> Loaded:
        """Random states and `extra` belong to a rank: where there were other ranks they are nobody's."""
        rank, size = self._comm.group.rank, self._comm.group.size
        extras = {number: part["extra"] for number, part in sorted(by_rank.items())}
        step, world = (self._manifest.step, self._manifest.world_size) if self._manifest else (None, None)
        if list(extras) == list(range(size)):
            set_random_states(by_rank[rank]["random"])
            return Loaded(self._directory, step, world, extras[rank], extras)
        if extras:
            warn_user(
                f"{self._directory} was saved by {len(extras)} ranks and is loaded by {size}: random states stay "
                "as they are, and what ranks gave as extra is in extra_by_rank"
            )
        return Loaded(self._directory, step, world, None, extras)


def find(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file: load it with torch.load(..., weights_only=True) and load_state_dict()"
        )
    if is_archive(path):
        return path
    found = Folder(path).latest()
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint in it")
    return found
