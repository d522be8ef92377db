"""Ways to train one model that all make the same of the same data, and groups of fewer ranks than there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, shard

WIDTH = 6
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
Way = Callable[[nn.Module, dist.ProcessGroup | None], ZeroRedundancyOptimizer]


class Net(nn.Module):
    """Several shapes, a transposed parameter, a buffer, and one that never gets a gradient."""

    def __init__(self, *, odd: bool = True) -> None:
        """`odd`: a parameter has no dimensions, and one is transposed, which FSDP2 does not support."""
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
    """Parameters cut over several buckets."""
    config = ZeroConfig(partition=FlatShards(bucket_bytes=160))
    return shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def one_bucket(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    return shard(model, torch.optim.AdamW, process_group=group, **ADAMW)


def whole(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=WholeParams())
    return shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def dropin(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    """Trained without DDP: data are equal on all ranks, and so are gradients."""
    return ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, process_group=group, **ADAMW)


WAYS: list[Way] = [flat, one_bucket, whole, dropin]


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def train(model: nn.Module, optimizer: Optimizer, steps: int, *, first: int = 0) -> None:
    """On the same data on all ranks: means over a power of two of them are exact."""
    device = next(model.parameters()).device
    for number in range(first, first + steps):
        draw = torch.Generator().manual_seed(number)
        out = model(torch.randn(4, 5, generator=draw).to(device))
        torch.autograd.backward((out - torch.randn(4, 3, generator=draw).to(device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first ranks, and None on the others. Called on all ranks."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


def by_name(optimizer: Optimizer, saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state of a plain dict, by names of parameters."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[id(params[number])]: state for number, state in saved["state"].items()}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit; state that says no more than that nothing happened yet may be missing."""
    for name in found.keys() | expected.keys():
        ours, theirs = found.get(name, {}), expected.get(name, {})
        if not ours or not theirs:
            assert all(not torch.as_tensor(value).any() for value in {**ours, **theirs}.values()), name
            continue
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), (name, key)
