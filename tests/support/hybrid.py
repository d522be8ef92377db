"""Ranks in rows that share the state and columns that hold the same, beside DDP that adds up in the same order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.optim import Optimizer

from tests.support.overlap import batch, mlp
from tests.support.pair import Pair, from_all_ranks
from tests.support.sharded import ZERO2, all_equal, seeded, values_of
from zeroshard import ShardedOptimizer, shard

Grid = tuple[int, int]
"""How many rows, and how many ranks share in each."""


def grids(world_size: int) -> list[Grid]:
    """From all share to none does."""
    return [(world_size // within, within) for within in range(world_size, 0, -1) if world_size % within == 0]


def rows_of(grid: Grid) -> list[list[int]]:
    rows: list[list[int]] = torch.arange(grid[0] * grid[1]).view(grid).tolist()
    return rows


def meshed(grid: Grid) -> dict[str, Any]:
    """Arguments for `shard`."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))}


def within(grid: Grid) -> dict[str, Any]:
    return {"shard_within": grid[1]}


@contextmanager
def launched(local_rank: object, local_size: object) -> Iterator[None]:
    """As torchrun tells a process its place on its host."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size)):
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, str(value))
        yield


def added(parts: list[Tensor]) -> Tensor:
    first, *others = parts
    for part in others:
        first = first + part
    return first


def average_by_rows(parts: list[Tensor], grid: Grid) -> Tensor:
    """Each part divided first; sums of rows in the order of ranks, then of rows; in float32 where parts are less
    precise, and rounded to their dtype at the end."""
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    shares = [part.to(exact) * (1 / len(parts)) for part in parts]
    return added([added([shares[rank] for rank in row]) for row in rows_of(grid)])


def in_order_of_rows(grid: Grid, dtype: torch.dtype | None = None) -> Callable[[Any, GradBucket], Future[Tensor]]:
    """A hook for DDP: with it there is one right answer, and it can be compared bit by bit.

    `dtype`: what each rank's gradients are rounded to before they are added up.
    """

    def hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        buffer = bucket.buffer()
        parts = from_all_ranks(buffer.to(dtype or buffer.dtype))
        done.set_result(buffer.copy_(average_by_rows(parts, grid)))
        return done

    return hook


def hybrid_pair(grid: Grid, factory: Callable[..., Optimizer], *, where: Any = within, **options: Any) -> Pair:
    """DDP with the plain optimizer, beside ranks in such a grid."""
    return Pair(factory, hook=in_order_of_rows(grid), where=where(grid), **options)


def state_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    """What this rank holds."""
    held = optimizer.optim.state.values()
    return [value.clone() for entry in held for value in entry.values() if isinstance(value, torch.Tensor)]


def assert_replicas_are_equal(grid: Grid, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """All ranks have the same model, and those of a column the same state, bit by bit."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (values_of(model), state_of(optimizer)))
    assert all_equal([values for values, _ in found])
    for column in zip(*rows_of(grid), strict=True):
        assert all_equal([found[rank][1] for rank in column])


def trained(where: dict[str, Any], dtype: torch.dtype = torch.float32, steps: int = 4) -> list[Tensor]:
    """What a model becomes on such ranks."""
    model = seeded(mlp, 0).to(dtype)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **where, lr=0.05, weight_decay=0.1)
    for number in range(steps):
        torch.autograd.backward(model(batch(number).to(dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)
