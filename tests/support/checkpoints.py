"""Training runs to save and load, and ways to damage their checkpoints."""

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.oracles import assert_same
from zeroshard import CheckpointError, FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.state.tensor_utils import map_tensors, snapshot_to_host

# ---- Models and optimizers that are saved

WIDTH = 6
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
MakeOptimizer = Callable[[nn.Module, dist.ProcessGroup | None], ZeroRedundancyOptimizer]


class Net(nn.Module):
    """Parameters of several shapes, one transposed and one without gradients, and a buffer."""

    def __init__(self, *, odd: bool = True) -> None:
        """`odd`: include a scalar and a transposed parameter, which FSDP2 does not support."""
        super().__init__()
        self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.mix = nn.Parameter(torch.randn(4, WIDTH).t() if odd else torch.randn(WIDTH, 4))
        self.kernel = nn.Conv1d(2, 3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5) if odd else torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.randn(7))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden: Tensor = torch.tanh(self.enter(x)) @ self.mix @ self.mix.t() * self.scale
        out: Tensor = self.leave(hidden) + self.kernel(x[:, :4].reshape(-1, 2, 2)).mean((1, 2))[:, None]
        return out


def net(seed: int = 0, *, odd: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(odd=odd)


def flat(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    """Parameters split over several buckets."""
    config = ZeroConfig(partition=FlatShards(bucket_bytes=160))
    return shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def one_bucket(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    return shard(model, torch.optim.AdamW, process_group=group, **ADAMW)


def whole(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=WholeParams())
    return shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def dropin(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    """Trained without DDP: data, and therefore gradients, are equal on all ranks."""
    return ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, process_group=group, **ADAMW)


OPTIMIZER_FACTORIES: list[MakeOptimizer] = [flat, one_bucket, whole, dropin]


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def train(model: nn.Module, optimizer: Optimizer, steps: int, *, first: int = 0) -> None:
    """Train on the same data on all ranks: averages over a power of two of ranks are exact."""
    device = next(model.parameters()).device
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        out = model(torch.randn(4, 5, generator=generator).to(device))
        torch.autograd.backward((out - torch.randn(4, 3, generator=generator).to(device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def unwrap_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def first_ranks(count: int) -> dist.ProcessGroup | None:
    """Return a group of the first ranks, and None on the others. Call on all ranks."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


def state_by_name(optimizer: Optimizer, saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state of a plain state dict by parameter name."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[id(params[number])]: state for number, state in saved["state"].items()}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare state bitwise. State that is still all zeros may be missing on one side."""
    for name in found.keys() | expected.keys():
        ours, theirs = found.get(name, {}), expected.get(name, {})
        if not ours or not theirs:
            assert all(not torch.as_tensor(value).any() for value in {**ours, **theirs}.values()), name
            continue
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            our_value, their_value = torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])
            assert torch.equal(our_value, their_value), f"{name}.{key}: {our_value} instead of {their_value}"


# ---- Training runs to save and load, and damage to checkpoints


def save(path: Path | str, *, in_background: bool, **options: Any) -> Path:
    """Save synchronously, or in the background and wait."""
    return checkpoint.async_save(path, **options).wait() if in_background else checkpoint.save(path, **options)


class TrainingRun:
    """A model, an optimizer and a scheduler after a few steps."""

    def __init__(
        self,
        seed: int = 0,
        make_optimizer: MakeOptimizer | None = flat,
        *,
        steps: int = 2,
        model: nn.Module | None = None,
    ) -> None:
        self.model: nn.Module = net(seed) if model is None else model
        self.optimizer: Optimizer
        if make_optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        else:
            self.optimizer = make_optimizer(self.model, None)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)
        for step in range(steps):
            train(self.model, self.optimizer, 1, first=step)
            self.scheduler.step()

    def parts(self, *, scheduler: bool = True) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return parts | ({"scheduler": self.scheduler} if scheduler else {})

    def save(self, path: Path, step: int = 2, *, in_background: bool = False, **options: Any) -> Path:
        return save(path, step=step, in_background=in_background, **self.parts(), **options)

    def load(self, path: Path, **options: Any) -> checkpoint.LoadResult:
        return checkpoint.load(path, **self.parts(), **options)

    def capture(self) -> dict[str, Any]:
        """Return copies of model, optimizer, scheduler and random state. Call on all ranks."""
        optimizer = self.optimizer
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
        state = optimizer.full_state_dict(to=0) if isinstance(optimizer, ZeroRedundancyOptimizer) else None
        state = state if is_sharded else optimizer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = {key: value for key, value in self.scheduler.state_dict().items() if not callable(value)}
        parts = {"model": dict(self.model.state_dict()), "optimizer": state, "groups": groups, "scheduler": scheduler}
        copies: dict[str, Any] = map_tensors(snapshot_to_host(parts), torch.Tensor.contiguous)
        return {**copies, "random": torch.get_rng_state()}


@contextmanager
def assert_rejected(
    run: TrainingRun, match: str, path: Path | None = None, *, error: type[Exception] = CheckpointError
) -> Iterator[None]:
    """Check that the body raises `error` and changes neither the run nor the files under `path`. Enter on all ranks."""
    before, checksums = run.capture(), file_checksums(path)
    with pytest.raises(error, match=match):
        yield
    assert_same(run.capture(), before, "the run")
    assert file_checksums(path) == checksums


def file_checksums(path: Path | None) -> dict[str, int]:
    """Return checksums of the files under `path`, without the lock file. Call on all ranks."""
    if path is None:
        return {}
    dist.barrier()
    files = (entry for entry in path.rglob("*") if entry.is_file() and entry.name != ".lock")
    checksums = {str(file.relative_to(path)): zlib.crc32(file.read_bytes()) for file in files}
    dist.barrier()  # no rank changes a file that another one still reads
    return checksums


def on_rank_0(action: Callable[[], object]) -> None:
    """Run `action` on rank 0 while the others wait. Call on all ranks."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


class Evil:
    """Executes code when unpickled: creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._marker}'",)


def edit_metadata(directory: Path, edit: Callable[[Any], object]) -> None:
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
