"""A training run to load into, what it looks like, and ways to spoil its checkpoints."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.checkpoints import Way, flat, net, train
from tests.support.oracle import assert_same
from zeroshard import CheckpointError, ZeroRedundancyOptimizer, checkpoint
from zeroshard.state.trees import map_tensors, snapshot


class Run:
    """A model, an optimizer and a scheduler after a few steps."""

    def __init__(
        self, seed: int = 0, way: Way | None = flat, *, steps: int = 2, model: nn.Module | None = None
    ) -> None:
        self.model: nn.Module = net(seed) if model is None else model
        self.optimizer: Optimizer
        if way is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        else:
            self.optimizer = way(self.model, None)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)
        for step in range(steps):
            train(self.model, self.optimizer, 1, first=step)
            self.scheduler.step()
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.sharded_state_dict()  # makes all state that a save would make

    def parts(self, *, scheduler: bool = True) -> dict[str, Any]:
        given = {"model": self.model, "optimizer": self.optimizer}
        return given | ({"scheduler": self.scheduler} if scheduler else {})

    def save(self, path: Path, step: int = 2, **options: Any) -> Path:
        return checkpoint.save(path, step=step, **self.parts(), **options).wait()

    def load(self, path: Path, **options: Any) -> checkpoint.Loaded:
        return checkpoint.load(path, **self.parts(), **options)

    def look(self) -> dict[str, Any]:
        """All there is to it, on all ranks. A collective call."""
        optimizer = self.optimizer
        sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
        found = optimizer.full_state_dict(to=0) if isinstance(optimizer, ZeroRedundancyOptimizer) else None
        found = found if sharded else optimizer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = {key: value for key, value in self.scheduler.state_dict().items() if not callable(value)}
        parts = {"model": dict(self.model.state_dict()), "optimizer": found, "groups": groups, "scheduler": scheduler}
        whole: dict[str, Any] = map_tensors(snapshot(parts), torch.Tensor.contiguous)
        return {**whole, "random": torch.get_rng_state()}


@contextmanager
def refused(
    run: Run, match: str, path: Path | None = None, *, error: type[Exception] = CheckpointError
) -> Iterator[None]:
    """What is inside raises, on this rank as on all, and changes neither the run nor the files below `path`."""
    before, files = run.look(), files_below(path)
    with pytest.raises(error, match=match):
        yield
    assert_same(run.look(), before, "what was running")
    assert files_below(path) == files


def files_below(path: Path | None) -> dict[str, int]:
    """Their sums, by name. The lock is no content."""
    if path is None:
        return {}
    dist.barrier()
    files = (it for it in path.rglob("*") if it.is_file() and it.name != ".lock")
    sums = {str(it.relative_to(path)): zlib.crc32(it.read_bytes()) for it in files}
    dist.barrier()  # nobody changes a file that another rank still looks at
    return sums


def on_rank_0(action: Callable[[], object]) -> None:
    """Once, and seen by all ranks afterwards."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


class Evil:
    """Runs code where it is unpickled: it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._marker}'",)


def edit_metadata(directory: Path, edit: Callable[[Any], object]) -> None:
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
