"""Saving: everything beside, onto the disk, then visible at once; on all ranks or on none."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack

from ..comm.agreement import Proposal, agreed
from ..comm.collectives import Comm
from ..comm.group import group_or_alone
from ..errors import CheckpointError, ConfigError
from .archive import ranks_for_dcp, reasons
from .contents import collect, staged
from .folder import Folder, write
from .manifest import MANIFEST, Manifest, SummingFiles
from .together import on_first, told_alike

_log = logging.getLogger(__name__)

_under_way: list["Saving"] = []
"""The last save in the background, to whatever folder: one at a time, so that their messages do not meet either."""


class Saving:
    """A save that is done, or goes on in the background."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Path:
        """The directory of the checkpoint, once it is complete. Raises what failed, on all ranks."""
        self._over.wait()
        if self._failure is not None:
            self._told = True
            raise self._failure
        assert self._path is not None
        return self._path

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

    def run_behind(self, write_it: Callable[[], Path]) -> None:
        self.run(write_it)
        if self._failure is not None:  # it may be the last thing that this process does
            _log.error("a checkpoint was not saved: %s", self._failure)


def save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    async_: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Save a checkpoint into the folder `path`. Called on all ranks; all succeed or all raise.

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
        async_: copy what is to be saved to host memory, and write in the background until `wait()` of the result. What
            fails there is raised by that, or by the next save. Wait before the process group is destroyed.
        process_group: the ranks that save together; by default all.
    """
    comm = Comm(group_or_alone(process_group))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _Request(path, step, keep, given, extra, async_)
    with told_alike(path):
        contents = agreed(comm, "checkpoint.save", lambda: request.propose(comm))
    return request.start(comm, contents)


@dataclass(frozen=True)
class _Request:
    path: str | os.PathLike[str]
    step: int
    keep: int | None
    given: dict[str, Any]
    extra: Any
    behind: bool

    def propose(self, comm: Comm) -> Proposal[dict[str, Any]]:
        _finish_earlier()
        _check(self.step, self.keep)
        facts = [f"path {Path(self.path)}", f"step {self.step}", f"keep={self.keep}, async_={self.behind}"]
        facts += [f"{name} {'not ' if it is None else ''}given" for name, it in self.given.items()]
        contents = collect(comm.group.rank, **self.given, extra=self.extra)
        return Proposal(staged(contents) if self.behind else contents, facts)

    def start(self, comm: Comm, contents: dict[str, Any]) -> Saving:
        folder, saving = Folder(self.path), Saving()
        if not self.behind:
            saving.run(lambda: _write(comm, folder, self.step, self.keep, contents))
            saving.wait()
            return saving
        companion = Comm(comm.group.apart())
        _under_way.append(saving)
        job = (lambda: _write(companion, folder, self.step, self.keep, contents),)
        threading.Thread(target=saving.run_behind, args=job, daemon=False).start()
        return saving


def _check(step: int, keep: int | None) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be a number of steps, not {step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep must be at least 1, or None to keep all checkpoints, not {keep!r}")


def _finish_earlier() -> None:
    while _under_way:
        _under_way.pop().make_way()


def _write(comm: Comm, folder: Folder, step: int, keep: int | None, contents: dict[str, Any]) -> Path:
    with told_alike(folder.path), ExitStack() as held:

        def begin() -> Path:
            held.enter_context(folder.locked())
            directory = folder.begin(step)
            held.callback(folder.abandon, directory)  # does nothing once it is published
            return directory

        def publish() -> Path:
            manifest = Manifest(step, comm.group.size, sums, time.time(), torch.__version__)
            write(directory / MANIFEST, manifest.text())
            final = folder.publish(directory, step)
            folder.prune(keep)
            return final

        directory = on_first(comm, "checkpoint.save: beginning", begin)
        sums = _write_parts(comm, directory, contents)
        return on_first(comm, "checkpoint.save: publishing", publish)


class _Planner(DefaultSavePlanner):
    """DCP copies what is a part of a larger storage, and keeps the copies until all is written. Slices of buckets are
    such parts; as tensors of their own, over the same memory, they are written as they lie."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu" and data.numel():
            with suppress(BufferError, RuntimeError):  # some dtypes and views cannot, and are copied
                return from_dlpack(data.detach())
        return data


def _write_parts(comm: Comm, directory: Path, contents: dict[str, Any]) -> dict[str, int]:
    """The check sums of all files, whichever rank has written them."""
    files = SummingFiles()
    writer = FileSystemWriter(str(directory), sync_files=True, single_file_per_rank=True)
    writer.fs = files
    try:
        with ranks_for_dcp(comm.group) as ranks:
            save_parts(contents, storage_writer=writer, planner=_Planner(), **ranks)
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint could not be written to {directory.parent}: {reasons(error)}") from error
    mine = json.dumps(files.sums)
    shares = [mine] if comm.group.size == 1 else comm.share(mine)
    return {name: value for share in shares for name, value in json.loads(share).items()}
