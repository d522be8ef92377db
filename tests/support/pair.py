"""DDP with the plain optimizer beside a sharded model: equal at the start, another input on each rank."""

import copy
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support.oracle import assert_same
from tests.support.overlap import mlp, regression
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard

TINY = FlatShards(bucket_bytes=200)
"""About one layer of `mlp` in a bucket."""


def average(parts: list[Tensor]) -> Tensor:
    """The sum of all ranks' parts, each divided first as DDP does it, in the order of ranks, and in float32 where they
    are less precise."""
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    first, *others = [part.to(exact) * (1 / len(parts)) for part in parts]
    for part in others:
        first = first + part
    return first


def from_all_ranks(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def in_rank_order(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """A hook for DDP: with it there is one right answer at any number of ranks, and it can be compared bit by bit."""
    done: Future[Tensor] = Future()
    buffer = bucket.buffer()
    done.set_result(buffer.copy_(average(from_all_ranks(buffer))))
    return done


class Side(NamedTuple):
    net: nn.Module
    """What the forward pass goes through."""
    model: nn.Module
    optimizer: Any


Handed = Callable[[nn.Module], Any]
Loss = Callable[[nn.Module, int], Tensor]


class Pair:
    """Trains both, and compares them after each step. `handed` says what the optimizers get of the model,
    `hook` how DDP averages, `where` which ranks share."""

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        make: Callable[[], nn.Module] = mlp,
        handed: Handed = nn.Module.named_parameters,
        config: ZeroConfig | None = None,
        loss: Loss = regression,
        find_unused: bool = False,
        hook: Callable[[Any, GradBucket], Future[Tensor]] = in_rank_order,
        where: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.plain_model, self.model = _seeded(make), _seeded(make)
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=find_unused)
        self.ddp.register_comm_hook(None, hook)
        if "fused" not in options and "foreach" in inspect.signature(factory).parameters:
            options.setdefault("foreach", True)  # fused kernels, the default here, may round in another way
        self.plain: Any = factory(handed(self.plain_model), **copy.deepcopy(options))
        self.zero: ShardedOptimizer = shard(
            self.model, factory, params=handed(self.model), config=config, **where, **options
        )
        self.loss, self.steps = loss, 0

    @property
    def sides(self) -> list[Side]:
        return [Side(self.model, self.model, self.zero), Side(self.ddp, self.plain_model, self.plain)]

    def train(self, steps: int = 1, before_step: Callable[[Side], object] = lambda _: None) -> None:
        for _ in range(steps):
            self.backward()
            for side in self.sides:
                before_step(side)
                side.optimizer.step()
                side.model.zero_grad()
            self.steps += 1
            self.check()

    def backward(self) -> None:
        for side in self.sides:
            torch.autograd.backward(self.loss(side.net, self.steps))

    def check(self) -> None:
        assert_same(self.model.state_dict(), self.plain_model.state_dict(), f"the model after step {self.steps}")

    def check_state(self) -> None:
        """The consolidated state is the plain one's."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(found, self.plain.state_dict(), "the state dict")


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()
