"""Saving: everything beside, onto the disk, then visible at once; on all ranks or on none."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..comm.consensus import Prepared, prepare_all
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..profiling import Phase
from .._logging import log_rank, warn_at_caller
from .metadata import CheckpointMetadata
from .contents import build_state_dict
from .folder import CheckpointDir, write_and_fsync
from .directory import MANIFEST_FILE, Manifest
from .owned import check_optimizer_ranks, check_state_on_all_owners, choose_group
from .progress import Progress, ProgressFn
from .staging import copy_to_host
from .together import check_components, errors_as_checkpoint_error, run_on_rank0
from .writing import write_shards

_pending_saves: list["SaveHandle"] = []
"""The last save in the background, to whatever folder: one at a time, so that their messages do not meet either."""


class SaveHandle:
    """A save in the background, which `async_save` returns."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._finished = threading.Event()
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._is_failure_reported = False

    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that this rank has written, and those that it writes in all, once that is known."""
        return self._progress.done_bytes, self._progress.total_bytes

    def wait(self) -> Path:
        """The directory of the checkpoint, once it is complete. Raises what failed, on all ranks."""
        self._finished.wait()
        if self._failure is not None:
            self._is_failure_reported = True
            raise self._failure
        assert self._path is not None
        return self._path

    def _wait_until_done(self) -> None:
        """It is over, in whatever way."""
        self._finished.wait()

    def _wait_and_raise_unreported(self) -> None:
        """For the next save. Raises what failed if nobody has heard of it."""
        self._finished.wait()
        if not self._is_failure_reported:
            self.wait()

    def _run(self, write_checkpoint: Callable[[], Path]) -> None:
        try:
            self._path = write_checkpoint()
        except BaseException as error:
            self._failure = error
        self._finished.set()

    def _run_in_background(self, write_checkpoint: Callable[[], Path], rank: int) -> None:
        self._run(write_checkpoint)
        if self._failure is not None:  # it may be the last thing that this process does
            log_rank(logging.ERROR, rank, "a checkpoint was not saved: %s", self._failure)


def save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    progress: bool | ProgressFn | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint into the folder `path`. Called on all ranks of `process_group`; all succeed or all raise.

    Each rank writes its own parts and nothing is gathered. The checkpoint appears as `path/step-...` when it is
    complete and on the disk; until then the one before is the latest.

    Args:
        path: a folder for the checkpoints of one job.
        step: the number of the step, which names the checkpoint.
        model: the model, also one that DDP wraps or FSDP2 has sharded.
        optimizer: one of ours, a plain one, or one over FSDP2's parameters.
        scheduler: anything with `state_dict()`.
        extra: what else this rank wants back, of tensors, numbers, strings and plain containers: its position in the
            data, for example. Random states of torch and Python are saved for each rank in any case.
        keep: how many checkpoints stay; None for all.
        progress: show a line on rank 0; by default if somebody sits at the terminal and it takes a while. Or what is
            to be called on each rank with the bytes that it has written and those that it writes in all.
        process_group: the ranks that save together; by default those of a sharded `optimizer`, else all.

    Returns:
        The directory of the checkpoint.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, given, extra, False, _shown(step, progress, comm))
    return request.write(comm, request.collect(comm))


def async_save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    progress: bool | ProgressFn | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Copy a checkpoint to host memory and write it in the background, while training continues.

    Called on all ranks of `process_group`, with the arguments of `save`. The next save waits for this one. Wait for the
    last one before the process group is destroyed.

    Returns:
        A handle. Its `wait()` returns the directory of the checkpoint, or raises what failed. If nobody waits, the next
        save raises it.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, given, extra, True, _shown(step, progress, comm))
    return request.start(comm, request.collect(comm))


def _shown(step: int, progress: bool | ProgressFn | None, comm: Comm) -> Progress:
    return Progress(f"saving step {step}", progress, comm.group.rank)


@dataclass(frozen=True)
class _SaveRequest:
    path: str | os.PathLike[str]
    step: int
    keep: int | None
    components: dict[str, Any]
    extra: Any
    is_async: bool
    progress: Progress

    def collect(self, comm: Comm) -> dict[str, Any]:
        """What this rank saves, once all ranks agree."""
        with errors_as_checkpoint_error(self.path), comm.profiler.phase(Phase.SAVE_COLLECT):
            contents = prepare_all(comm, "checkpoint.save", lambda: self._propose(comm))
            check_state_on_all_owners(self.components["optimizer"], comm)
        return contents

    def _propose(self, comm: Comm) -> Prepared[dict[str, Any]]:
        check_components(self.components, "state_dict", self.progress.show)
        _finish_pending_saves()
        _check_step_and_keep(self.step, self.keep)
        _check_numpy(comm)
        facts = [f"path {Path(self.path)}", f"step {self.step}", f"keep={self.keep}"]
        facts.append(f"checkpoint.{'async_save' if self.is_async else 'save'}")
        facts += [f"{name} {'not ' if it is None else ''}given" for name, it in self.components.items()]
        check_optimizer_ranks(self.components["optimizer"], comm.group, "checkpoint.save")
        contents = build_state_dict(comm.group.rank, **self.components, extra=self.extra)
        return Prepared(copy_to_host(contents) if self.is_async else contents, facts)

    def start(self, comm: Comm, state_dict: dict[str, Any]) -> SaveHandle:
        saving = SaveHandle(self.progress)
        companion = Comm(comm.group.dedicated_gloo_group())
        _pending_saves.append(saving)
        job = (lambda: self.write(companion, state_dict), comm.group.rank)
        threading.Thread(target=saving._run_in_background, args=job, name="zeroshard-save", daemon=False).start()
        return saving

    def write(self, comm: Comm, contents: dict[str, Any]) -> Path:
        folder = CheckpointDir(self.path)
        with errors_as_checkpoint_error(folder.path), ExitStack() as held:

            def begin() -> Path:
                held.enter_context(folder.lock())
                directory = folder.create_staging_dir(self.step)
                held.callback(folder.discard, directory)  # does nothing once it is published
                return directory

            def publish() -> Path:
                manifest = Manifest(self.step, comm.group.size, sums, time.time(), torch.__version__)
                write_and_fsync(directory / MANIFEST_FILE, manifest.to_json())
                CheckpointMetadata(directory).check_files()  # one that cannot be loaded must not push others out
                final = folder.publish(directory, self.step)
                prune()
                return final

            def prune() -> None:
                try:
                    folder.prune(self.keep)
                except OSError as error:
                    warn_at_caller(f"older checkpoints in {folder.path} could not be removed: {error}")

            directory = run_on_rank0(comm, "checkpoint.save: beginning", begin)
            with comm.profiler.phase(Phase.SAVE_WRITE):
                sums = write_shards(comm, directory, contents, self.progress)
            with comm.profiler.phase(Phase.SAVE_PUBLISH):
                final = run_on_rank0(comm, "checkpoint.save: publishing", publish)
            log_rank(
                logging.DEBUG,
                comm.group.rank,
                "saved %s, of which this rank wrote %d bytes",
                final,
                self.progress.done_bytes,
            )
            return final


def _check_step_and_keep(step: int, keep: int | None) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be a number of steps, not {step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep must be at least 1, or None to keep all checkpoints, not {keep!r}")


def _check_numpy(comm: Comm) -> None:
    """By which torch's checkpoints exchange their plans. Without it a rank would fail while others wait for it."""
    if comm.group.size > 1 and find_spec("numpy") is None:
        raise ConfigError("saving on several ranks takes numpy, which torch.distributed.checkpoint uses: install it")


def _finish_pending_saves() -> None:
    while _pending_saves:
        _pending_saves.pop()._wait_and_raise_unreported()


def wait_for_pending_saves() -> None:
    """What was saved in the background is there, or has failed, which the next save tells."""
    for saving in _pending_saves:
        saving._wait_until_done()
