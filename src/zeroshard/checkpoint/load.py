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

from ..comm.consensus import Prepared, prepare_all
from ..comm.collectives import Comm
from ..errors import CheckpointError
from ..profiling import Phase
from .._logging import log_rank, warn_at_caller
from .metadata import CheckpointMetadata, is_dcp_checkpoint
from .changing import load_model, load_scheduler, transaction
from .contents import OPTIM, RANKS, SCHEDULER, check_rng_states, from_byte_tensor, set_rng_states
from .folder import CheckpointDir
from .directory import Manifest, read_manifest
from .names import resolve_param_names
from .optimizer_adapter import make_adapter
from .owned import check_optimizer_ranks, choose_group
from .progress import Progress, ProgressFn
from .reader import ReadPlan, read_values
from .restoring import OptimizerLoadPlan
from .saved_optimizer import SavedOptimizer, param_group_entries
from .save import wait_for_pending_saves
from .together import check_components, errors_as_checkpoint_error, run_on_rank0
from .weights import ModelLoadPlan

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
