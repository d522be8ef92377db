"""Two equal models under DDP: one with the unsharded optimizer, one whose optimizer steps inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zeroshard import ZeroRedundancyOptimizer
from zeroshard.adapters.ddp import CommHook
from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

WIDTH = 6
BUCKET_MB = 0.0003  # about one layer of `mlp`


@dataclass(frozen=True)
class Setup:
    """How DDP and the hook are set up."""

    interleaved: bool = False
    shard_buckets: bool = False
    bucket_view: bool = False
    static_graph: bool = False
    find_unused: bool = False
    hook: CommHook = allreduce_hook
    group: dist.ProcessGroup | None = None

    @property
    def warmup(self) -> int:
        return 3 if self.static_graph else 2

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model,
            process_group=self.group,
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=self.bucket_view,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
        )

    def connect(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
        make = hook_with_zero_step_interleaved if self.interleaved else hook_with_zero_step
        ddp.register_comm_hook(self.group, make(self.hook, ddp, zero, shard_buckets=self.shard_buckets))


def setups(**fixed: Any) -> Iterator[Setup]:
    """All combinations of what is not fixed."""
    free = [name for name in ("interleaved", "shard_buckets", "bucket_view", "static_graph") if name not in fixed]
    for values in product((False, True), repeat=len(free)):
        chosen: dict[str, Any] = dict(zip(free, values, strict=True))
        yield Setup(**chosen, **fixed)


ReadParams = Callable[[nn.Module], Any]
Loss = Callable[[nn.Module, int], torch.Tensor]


class DdpTwins:
    """Trains both, pass by pass, on the same inputs, and compares them after each."""

    def __init__(
        self,
        setup: Setup,
        model: Callable[[], nn.Module],
        optimizer_class: Callable[..., Optimizer],
        *,
        read: ReadParams = lambda model: model.parameters(),
        overlapped_class: Callable[..., Optimizer] | None = None,
        **defaults: Any,
    ) -> None:
        self.setup, self.passes = setup, 0
        self.plain_ddp, self.ddp = (setup.wrap(_seeded(model)) for _ in range(2))
        self.plain = optimizer_class(read(self.plain_ddp.module), **defaults)
        self.zero = ZeroRedundancyOptimizer(
            read(self.ddp.module),
            overlapped_class or optimizer_class,
            process_group=setup.group,
            overlap_with_ddp=True,
            **defaults,
        )
        self.plain_ddp.register_comm_hook(setup.group, setup.hook)
        setup.connect(self.ddp, self.zero)

    def train(self, passes: int, loss: Loss | None = None, *, local: bool = False) -> None:
        """`local`: without gradient synchronisation, so that gradients add up and nothing is updated."""
        for _ in range(passes):
            self.train_plain(loss, local=local)
            self.train_overlapped(loss, local=local)
            self.passes += not local
            self.compare()

    def train_plain(self, loss: Loss | None = None, *, local: bool = False) -> None:
        with self.plain_ddp.no_sync() if local else nullcontext():
            torch.autograd.backward((loss or regression)(self.plain_ddp, self.passes))
        if not local:
            if self.passes >= self.setup.warmup:
                self.plain.step()
            self.plain.zero_grad()

    def train_overlapped(self, loss: Loss | None = None, *, local: bool = False) -> None:
        with self.ddp.no_sync() if local else nullcontext():
            torch.autograd.backward((loss or regression)(self.ddp, self.passes))
        if not local:
            self.zero.zero_grad()

    def return_to_plain(self) -> None:
        """Put the overlapped one where the plain one is."""
        self.zero.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(self.ddp.parameters(), self.plain_ddp.parameters(), strict=True):
                ours.copy_(theirs)
        self.zero.load_state_dict(self.plain.state_dict())

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.ddp.named_parameters(), self.plain_ddp.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} differs after pass {self.passes} with {self.setup}"


def _seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def mlp(layers: int = 5) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def batch(number: int) -> torch.Tensor:
    """An input that differs from pass to pass and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def regression(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(number)) - batch(number + 500)).square().mean()
    return loss


class Branches(nn.Module):
    """One layer that only odd ranks use, one that no rank ever uses, one that none uses in even passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.never, self.sometimes, self.final = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.first(x)
        if dist.get_rank() % 2:
            x = self.odd(x)
        if number % 2:
            x = self.sometimes(x)
        output: torch.Tensor = self.final(x)
        return output


def through_branches(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number), number).square().mean()
    return loss
