"""Loading: look at everything, agree that all ranks could read it, and only then change anything.

Values are then read straight to where they belong, so that no memory is needed for a second model or optimizer. What
runs code of others while it loads, which may fail, gets its values in memory of its own, and comes first.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..comm.agreement import Proposal, agreed
from ..comm.collectives import Comm
from ..errors import CheckpointError
from ..labels import Label
from ..notices import log, warn_user
from .archive import Archive, is_archive
from .changing import all_or_nothing, load_model, load_scheduler
from .contents import OPTIM, RANKS, SCHEDULER, check_random_states, set_random_states, unpacked
from .folder import Folder
from .manifest import Manifest, read_manifest
from .naming import names_of
from .optimizers import running
from .owned import choose_group, require_its_ranks
from .progress import Progress, Report
from .reading import Reading, read
from .restoring import Restoring
from .saved_optimizer import SavedOptimizer, groups_in
from .saving import wait_for_earlier_saves
from .together import check_given, on_first, told_alike
from .weights import Weights

T = TypeVar("T")


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
    progress: bool | Report | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
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
    with told_alike(path):
        agreed(comm, "checkpoint.load", lambda: _begun(comm, given, progress, facts))
        directory = on_first(comm, "checkpoint.load: looking for it", lambda: find(Path(path)))
        shown = Progress(f"loading {directory.name}", progress, comm.group.rank)
        with no_garbage_collection():
            loaded = _Loading(comm, directory, shown, strict=strict).run(model, optimizer, scheduler)
        log(logging.DEBUG, comm.group.rank, "loaded %s, of which this rank read %d bytes", directory, shown.done)
        return loaded


def _begun(comm: Comm, given: dict[str, Any], progress: Any, facts: list[str]) -> Proposal[None]:
    check_given(given, "load_state_dict", progress)
    wait_for_earlier_saves()
    require_its_ranks(given["optimizer"], comm.group, "checkpoint.load")
    return Proposal(None, facts)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest checkpoint in a folder, if there is one."""
    return Folder(path).latest()


class _Prepared(NamedTuple):
    """What a rank has made of the small values, and what it wants of the large ones."""

    by_rank: dict[int, Any]
    scheduler: Any
    restoring: Restoring | None
    weights: Weights | None
    state: Reading
    values: Reading
    """Of the model."""


class _Loading:
    def __init__(self, comm: Comm, directory: Path, progress: Progress, *, strict: bool) -> None:
        self._comm, self._directory, self._progress, self._strict = comm, directory, progress, strict
        with comm.clock.part(Label.LOAD_LOOK):
            self._archive, self._manifest = agreed(comm, "checkpoint.load", self._open)
            agreed(comm, "checkpoint.load: check sums", self._check_sums)

    def run(self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any) -> Loaded:
        with self._comm.clock.part(Label.LOAD_LOOK):
            prepared = agreed(self._comm, "checkpoint.load", lambda: self._prepare(model, optimizer, scheduler))
        with all_or_nothing() as undo:
            if scheduler is not None and prepared.scheduler is not None:
                self._all(lambda: load_scheduler(scheduler, prepared.scheduler, undo))
            if prepared.restoring is not None and not prepared.restoring.running.in_place:
                self._load_beside(prepared.restoring, self._read(prepared.state), undo)
            if model is not None and prepared.weights is not None and not prepared.weights.in_place:
                weights = prepared.weights.by_name(self._read(prepared.values))
                self._all(lambda: load_model(model, weights, undo, strict=self._strict))
                prepared.weights.renew_copies()
            self._overwrite(prepared)
        return self._finish(prepared.by_rank)

    def _load_beside(self, restoring: Restoring, values: dict[str, Any], undo: ExitStack) -> None:
        state = self._all(lambda: restoring.state_dict(values))
        before = self._all(restoring.running.for_undo)  # apart: who fails here must not miss a collective call
        self._all(lambda: restoring.running.load(state, before, undo))

    def _overwrite(self, prepared: _Prepared) -> None:
        with told_as_a_mixture(), ExitStack() as arriving:
            if prepared.weights is not None and prepared.weights.in_place:
                self._read(prepared.values)
                arriving.callback(prepared.weights.spread())
            restoring = prepared.restoring
            if restoring is not None and restoring.running.in_place:
                restoring.overwrite(lambda: self._read(prepared.state))

    def _open(self) -> Proposal[tuple[Archive, Manifest | None]]:
        archive, manifest = Archive(self._directory), read_manifest(self._directory)
        if self._comm.group.rank == 0:
            archive.check_files()
        if manifest is not None:
            manifest.require_all(self._directory, archive.files())
        return Proposal((archive, manifest), [f"{len(archive.entries)} entries in {self._directory}"])

    def _check_sums(self) -> Proposal[None]:
        """Ranks look at files in turns."""
        if self._manifest is not None:
            share = slice(self._comm.group.rank, None, self._comm.group.size)
            self._manifest.check_sums(self._directory, share, self._progress)
        return Proposal(None)

    def _read(self, prepared: Reading) -> dict[str, Any]:
        with self._comm.clock.part(Label.LOAD_READ):
            return self._all(lambda: prepared.run(self._progress))

    def _all(self, action: Callable[[], T]) -> T:
        """What it returns, once it has succeeded on all ranks."""
        return agreed(self._comm, "checkpoint.load", lambda: Proposal(action()))

    def _small_targets(self, optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
        entries = [] if self._manifest is None else self._archive.below(RANKS)
        if optimizer is not None:
            entries += groups_in(self._archive)
        if scheduler is not None:
            entries += self._archive.below(SCHEDULER)
        return {entry.key: entry.room() for entry in entries}

    def _prepare(
        self, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any
    ) -> Proposal[_Prepared]:
        small = read(self._archive, self._small_targets(optimizer, scheduler))
        weights = None if model is None else Weights(self._archive, model, optimizer, strict=self._strict)
        restoring = None if optimizer is None else self._restoring(small, model, optimizer)
        schedule = None if scheduler is None else self._scheduler_state(small)
        state = Reading(self._archive, {} if restoring is None else restoring.targets)
        values = Reading(self._archive, {} if weights is None else weights.targets(restoring))
        if restoring is not None:
            restoring.try_out(state.found)
        ways = [part.in_place for part in (weights, restoring and restoring.running) if part]
        facts = [f"read {'in place' if in_place else 'beside'}" for in_place in ways]
        return Proposal(_Prepared(self._by_rank(small), schedule, restoring, weights, state, values), facts)

    def _restoring(
        self, small: dict[str, Any], model: torch.nn.Module | None, optimizer: Optimizer
    ) -> Restoring | None:
        if not self._is_there(OPTIM, "optimizer"):
            return None
        saved = SavedOptimizer(self._archive, small)
        return Restoring(saved, running(optimizer), names_of(optimizer, model), strict=self._strict)

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


@contextmanager
def told_as_a_mixture() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{error}. The model and the optimizer are loaded in parts now: load a checkpoint before you go on."
        ) from error


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Thousands of small objects come, and would have all that the process has looked through, each time for 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
