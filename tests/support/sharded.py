"""A model sharded by `zeroshard.shard`, beside an equal one under DDP with the plain optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support.overlap import Loss, mlp, regression
from zeroshard import FlatShards, KeepFull, KeepShard, ShardedOptimizer, ZeroConfig, shard
from zeroshard.policies import Retention

TINY = FlatShards(bucket_bytes=200)
"""Less than two layers of `mlp` fit into a bucket."""

ZERO2 = ZeroConfig(partition=TINY)
ZERO1 = ZeroConfig(partition=TINY, retention=KeepFull())
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}

both_stages = pytest.mark.parametrize("config", [ZERO2, ZERO1], ids=["zero2", "zero1"])
some_configs = pytest.mark.parametrize(
    "config",
    [ZERO2, ZERO1, ZeroConfig(), replace(ZERO2, overlap_gather=True)],
    ids=["zero2", "zero1", "one-bucket", "overlap"],
)


def all_configs() -> Iterator[ZeroConfig]:
    """Every retention, size of buckets and way back of parameters."""
    stages: list[Retention] = [KeepShard(), KeepFull()]
    for retention, partition, overlap in product(stages, (TINY, FlatShards()), (False, True)):
        yield ZeroConfig(partition=partition, retention=retention, overlap_gather=overlap)


@dataclass(frozen=True)
class Side:
    """A model, its optimizer, and how to keep gradients local."""

    model: nn.Module
    optimizer: Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]

    def backward(self, number: int, loss: Loss = regression) -> None:
        torch.autograd.backward(loss(self.model, number))

    def backward_locally(self, number: int, loss: Loss = regression) -> None:
        with self.no_sync():
            self.backward(number, loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate(self, number: int, loss: Loss = regression) -> None:
        self.backward(number, loss)
        self.update()


Iteration = Callable[[Side, int], None]


class ShardTwins:
    """Both get the same inputs, other ones on each rank. The sharded model starts from other values on each rank.

    `plain_model` makes another model for DDP, `handed` says what of them the optimizers get, `where` which ranks share.
    """

    def __init__(
        self,
        config: ZeroConfig | None = ZERO2,
        model: Callable[[], nn.Module] = mlp,
        optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        plain_model: Callable[[], nn.Module] | None = None,
        handed: Callable[[nn.Module], Any] | None = None,
        find_unused: bool = False,
        group: dist.ProcessGroup | None = None,
        where: Mapping[str, Any] = MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        defaults = defaults or ADAMW
        self.config, self.passes, self._find_unused, self._group = config or ZeroConfig(), 0, find_unused, group
        self.plain_model, self.model = seeded(plain_model or model, 0), seeded(model, dist.get_rank(group))
        self.wrap_plain()
        params = handed(self.model) if handed else None
        self.plain = optimizer_class((handed or nn.Module.parameters)(self.plain_model), **defaults)
        self.zero: ShardedOptimizer = shard(
            self.model, optimizer_class, params=params, process_group=group, config=config, **where, **defaults
        )

    def wrap_plain(self) -> None:
        """A new DDP: it must be wrapped anew when other parameters train."""
        self.ddp = DistributedDataParallel(
            self.plain_model, process_group=self._group, find_unused_parameters=self._find_unused
        )

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sharded one, then the plain one."""
        ours = Side(self.model, self.zero, self.zero.no_sync)
        return ours, Side(self.ddp, self.plain, self.ddp.no_sync)

    def train(self, steps: int, loss: Loss = regression) -> None:
        self.run(steps, lambda side, number: side.iterate(number, loss))

    def run(self, steps: int, iteration: Iteration) -> None:
        """Iterations of both. They are compared after each, or, if that would end the overlap, after the last."""
        for _ in range(steps):
            for side in self.sides:
                iteration(side, self.passes)
            self.passes += 1
            if not self.config.overlap_gather:
                self.compare()
        self.compare()

    def compare(self, *, exactly: bool = True) -> None:
        """`exactly`: as exactly as can be, see `assert_equal_sums`."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            where = f"{name} after pass {self.passes} with {self.config}"
            assert_equal_sums(ours, theirs, where, exactly=exactly)


def assert_equal_sums(found: torch.Tensor, expected: torch.Tensor, where: str, *, exactly: bool = True) -> None:
    """Bitwise up to two ranks, unless the caller knows why not.

    Beyond that a sum of gradients depends on the order, and gloo adds them in another one than that of ranks: one
    rounding of float32 (6e-8 of the summands) in gradients, a little more in what AdamW makes of small ones.
    """
    assert found.dtype == expected.dtype
    if exactly and dist.get_world_size() <= 2:
        assert torch.equal(found, expected), f"{where}: differs by {(found - expected).abs().max().item()}"
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")


def seeded(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [value.detach().clone() for value in model.state_dict().values()]


def all_equal(lists: list[list[torch.Tensor]]) -> bool:
    first, *others = lists
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
