"""Files that are laid out first and filled then, and are there complete or not at all."""

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch

from ..checkpoint.folder import fsync_dir
from ..checkpoint.progress import Progress
from ..errors import CheckpointError
from .stored import StoredTensor


class TensorSlot(NamedTuple):
    """Where in a file a tensor's elements belong, row after row."""

    offset: int
    stored: StoredTensor


def write_tensors(file: Path, slots: Sequence[TensorSlot], progress: Progress) -> None:
    """Write tensors to their places in a file that has its full length already."""
    with file.open("r+b") as stream:
        # Hazard: a disk that is full when a mapped page is written ends the process. So the space is taken before.
        if size := file.stat().st_size:
            os.posix_fallocate(stream.fileno(), 0, size)
        for slot in slots:
            if slot.stored.nbytes:
                _write_tensor(stream.fileno(), slot, progress)
        os.fsync(stream.fileno())


def _write_tensor(descriptor: int, slot: TensorSlot, progress: Progress) -> None:
    stored, skipped = slot.stored, slot.offset % mmap.ALLOCATIONGRANULARITY
    window = mmap.mmap(descriptor, skipped + stored.nbytes, offset=slot.offset - skipped)
    flat = torch.frombuffer(window, dtype=torch.uint8, offset=skipped, count=stored.nbytes)
    target = flat.view(stored.dtype).view(stored.shape)
    for offsets, part in stored.iter_chunks():
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        target[box].copy_(part)
        window.madvise(mmap.MADV_DONTNEED)  # what was written is the system's now, and leaves our memory
        progress.advance(part.nbytes)


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """A hidden name to write to, which becomes `target` at the end, or goes away with what was written."""
    _reject_existing(target)
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is no directory: make it first")
    hidden = target.parent / f".{target.name}.converting-{uuid4().hex}"
    try:
        yield hidden
        _reject_existing(target)
        hidden.rename(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True) if hidden.is_dir() else hidden.unlink(missing_ok=True)


def _reject_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already. Remove it first, or give another name.")
