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

from ..comm.agreement import Proposal, agreed
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..labels import Label
from ..notices import log, warn_user
from .archive import Archive
from .contents import collect
from .folder import Folder, write
from .manifest import MANIFEST, Manifest
from .owned import choose_group, require_equal_state, require_its_ranks
from .progress import Progress, Report
from .staging import staged
from .together import check_given, on_first, told_alike
from .writing import write_parts

_under_way: list["Saving"] = []
"""The last save in the background, to whatever folder: one at a time, so that their messages do not meet either."""


class Saving:
    """A save in the background, which `async_save` returns."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._over = threading.Event()
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        return self._over.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that this rank has written, and those that it writes in all, once that is known."""
        return self._progress.done, self._progress.total

    def wait(self) -> Path:
        """The directory of the checkpoint, once it is complete. Raises what failed, on all ranks."""
        self._over.wait()
        if self._failure is not None:
            self._told = True
            raise self._failure
        assert self._path is not None
        return self._path

    def settle(self) -> None:
        """It is over, in whatever way."""
        self._over.wait()

    def make_way(self) -> None:
        """For the next save. Raises what failed if nobody has heard of it."""
        self._over.wait()
        if not self._told:
            self.wait()

    def run(self, write_it: Callable[[], Path]) -> None:
        try:
            self._path = write_it()
        except BaseException as error:
            self._failure = error
        self._over.set()

    def run_behind(self, write_it: Callable[[], Path], rank: int) -> None:
        self.run(write_it)
        if self._failure is not None:  # it may be the last thing that this process does
            log(logging.ERROR, rank, "a checkpoint was not saved: %s", self._failure)


def save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    progress: bool | Report | None = None,
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
    request = _Request(path, step, keep, given, extra, False, _shown(step, progress, comm))
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
    progress: bool | Report | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Copy a checkpoint to host memory and write it in the background, while training continues.

    Called on all ranks of `process_group`, with the arguments of `save`. The next save waits for this one. Wait for the
    last one before the process group is destroyed.

    Returns:
        A handle. Its `wait()` returns the directory of the checkpoint, or raises what failed. If nobody waits, the next
        save raises it.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _Request(path, step, keep, given, extra, True, _shown(step, progress, comm))
    return request.start(comm, request.collect(comm))


def _shown(step: int, progress: bool | Report | None, comm: Comm) -> Progress:
    return Progress(f"saving step {step}", progress, comm.group.rank)


@dataclass(frozen=True)
class _Request:
    path: str | os.PathLike[str]
    step: int
    keep: int | None
    given: dict[str, Any]
    extra: Any
    behind: bool
    progress: Progress

    def collect(self, comm: Comm) -> dict[str, Any]:
        """What this rank saves, once all ranks agree."""
        with told_alike(self.path), comm.clock.part(Label.SAVE_COLLECT):
            contents = agreed(comm, "checkpoint.save", lambda: self._propose(comm))
            require_equal_state(self.given["optimizer"], comm)
        return contents

    def _propose(self, comm: Comm) -> Proposal[dict[str, Any]]:
        check_given(self.given, "state_dict", self.progress.show)
        _finish_earlier()
        _check(self.step, self.keep)
        _require_numpy(comm)
        facts = [f"path {Path(self.path)}", f"step {self.step}", f"keep={self.keep}"]
        facts.append(f"checkpoint.{'async_save' if self.behind else 'save'}")
        facts += [f"{name} {'not ' if it is None else ''}given" for name, it in self.given.items()]
        require_its_ranks(self.given["optimizer"], comm.group, "checkpoint.save")
        contents = collect(comm.group.rank, **self.given, extra=self.extra)
        return Proposal(staged(contents) if self.behind else contents, facts)

    def start(self, comm: Comm, contents: dict[str, Any]) -> Saving:
        saving = Saving(self.progress)
        companion = Comm(comm.group.apart())
        _under_way.append(saving)
        job = (lambda: self.write(companion, contents), comm.group.rank)
        threading.Thread(target=saving.run_behind, args=job, name="zeroshard-save", daemon=False).start()
        return saving

    def write(self, comm: Comm, contents: dict[str, Any]) -> Path:
        folder = Folder(self.path)
        with told_alike(folder.path), ExitStack() as held:

            def begin() -> Path:
                held.enter_context(folder.locked())
                directory = folder.begin(self.step)
                held.callback(folder.abandon, directory)  # does nothing once it is published
                return directory

            def publish() -> Path:
                manifest = Manifest(self.step, comm.group.size, sums, time.time(), torch.__version__)
                write(directory / MANIFEST, manifest.text())
                Archive(directory).check_files()  # one that cannot be loaded must not push others out
                final = folder.publish(directory, self.step)
                prune()
                return final

            def prune() -> None:
                try:
                    folder.prune(self.keep)
                except OSError as error:
                    warn_user(f"older checkpoints in {folder.path} could not be removed: {error}")

            directory = on_first(comm, "checkpoint.save: beginning", begin)
            with comm.clock.part(Label.SAVE_WRITE):
                sums = write_parts(comm, directory, contents, self.progress)
            with comm.clock.part(Label.SAVE_PUBLISH):
                final = on_first(comm, "checkpoint.save: publishing", publish)
            log(
                logging.DEBUG, comm.group.rank, "saved %s, of which this rank wrote %d bytes", final, self.progress.done
            )
            return final


def _check(step: int, keep: int | None) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be a number of steps, not {step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep must be at least 1, or None to keep all checkpoints, not {keep!r}")


def _require_numpy(comm: Comm) -> None:
    """By which torch's checkpoints exchange their plans. Without it a rank would fail while others wait for it."""
    if comm.group.size > 1 and find_spec("numpy") is None:
        raise ConfigError("saving on several ranks takes numpy, which torch.distributed.checkpoint uses: install it")


def _finish_earlier() -> None:
    while _under_way:
        _under_way.pop().make_way()


def wait_for_earlier_saves() -> None:
    """What was saved in the background is there, or has failed, which the next save tells."""
    for saving in _under_way:
        saving.settle()
