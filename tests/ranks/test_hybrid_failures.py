"""Rows of ranks: what cannot be asked for, and what fails on one rank, is raised on all, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support import RankContext, ranks
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    Grid,
    ShardTwins,
    assert_replicas_are_equal,
    both_stages,
    grids,
    launched,
    left_as_it_was,
    meshed,
    mlp,
    regression,
    seeded,
    within,
)
from tests.support.tiers import sampled
from zeroshard import (
    CheckpointError,
    ConfigError,
    RankFailedError,
    RankMismatchError,
    ReplicaMismatchError,
    ZeroConfig,
    broadcast_object,
    checkpoint,
    shard,
)
from zeroshard.comm import gloo as pairs
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import BufferPool

Where = dict[str, Any]


def refused(where: Where, match: str, error: type[Exception] = ConfigError) -> None:
    """On this rank; and the model is as it was."""
    model = seeded(mlp, dist.get_rank())
    with left_as_it_was(model), pytest.raises(error, match=match):
        shard(model, torch.optim.AdamW, **where)
    assert "zero_grad" not in vars(model)
    dist.barrier()  # all ranks came here


@ranks(4, timeout=30)
def test_what_cannot_be_asked_for(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    refused({"mesh": mesh, "process_group": dist.group.WORLD}, r"leave out process_group")
    refused({"mesh": mesh, "shard_group_size": 2}, r"give one of them")
    refused({"mesh": init_device_mesh("cpu", (2, 2, 1))}, r"one dimension \(shard\) or two .* not 3 .*Slice it")
    refused({"mesh": [[0, 1], [2, 3]]}, r"must be a torch.distributed.DeviceMesh, not a list")
    refused({"mesh": DeviceMesh("cpu", [[1, 0], [2, 3]])}, r"must ascend .*\[\[1, 0\], \[2, 3\]\]")
    refused({"shard_group_size": 3}, r"shard_group_size=3 does not divide the 4 ranks: give one of \[1, 2, 4\]")
    for value in (0, -1, True, 2.0, "host", "rack", [2]):
        refused({"shard_group_size": value}, r"must be 'node' or a number of ranks from 1 on, not ")


@ranks(4, timeout=30)
def test_hosts_that_cannot_be_rows(ctx: RankContext) -> None:
    node = {"shard_group_size": "node"}
    with launched(None, None):
        refused(node, r"LOCAL_RANK=None, LOCAL_WORLD_SIZE=None. Start with torchrun")
    with launched("first", 2):
        refused(node, r"LOCAL_RANK='first'")
    with launched(*((ctx.rank, 3) if ctx.rank < 3 else (0, 1))):
        refused(node, r"all hosts must have as many ranks, but there are 3 from rank 0 on, 1 from rank 3 on")
    with launched(ctx.rank // 2, 2):  # ranks dealt out to hosts in turns
        refused(node, r"numbered one after the other")
    with launched(ctx.rank % 2, 2 + ctx.rank // 2):
        refused(node, r"host of rank 2 has \[3\] ranks by LOCAL_WORLD_SIZE, but 2 of them train here: \[2, 3\]")
    with launched(None, None) if ctx.rank == 1 else launched(ctx.rank % 2, 2):
        error = ConfigError if ctx.rank == 1 else RankFailedError
        refused(node, r"LOCAL_RANK=None", error)


@ranks(4, timeout=30)
def test_ranks_that_ask_for_different_things(ctx: RankContext) -> None:
    odd = ctx.rank == 2
    refused({"shard_group_size": 1 if odd else 2}, r"rank 2: .*shard_group_size=1", RankMismatchError)
    refused({} if odd else {"shard_group_size": 2}, r"the ranks are in different calls", RankMismatchError)
    refused(meshed((2, 2)) if ctx.rank < 4 and not odd else spare_mesh((2, 2)), r"disagree", RankMismatchError)
    mesh = init_device_mesh("cpu", (2, 2))
    refused({"shard_group_size": 2} if odd else {"mesh": mesh}, r"disagree", RankMismatchError)
    both = {"mesh": mesh, "shard_group_size": 2}
    refused(both if odd else {"mesh": mesh}, r"give one of them", ConfigError if odd else RankFailedError)


def spare_mesh(grid: Grid) -> Where:
    """A mesh of the same ranks whose dimensions have other names."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("rows", "columns"))}


@ranks(4, timeout=30)
def test_ranks_that_disagree_in_other_rows_are_told(ctx: RankContext) -> None:
    """Facts are compared over all ranks: here rows agree within themselves."""
    model = seeded(mlp, 0)
    with pytest.raises(RankMismatchError, match=r"ranks 2, 3"):
        shard(model, torch.optim.AdamW, lr=0.1 + ctx.rank // 2, shard_group_size=2)
    optimizer = shard(model, torch.optim.AdamW, lr=0.1, shard_group_size=2)
    torch.autograd.backward(regression(model, 0))
    optimizer.param_groups[0]["lr"] = 0.1 + ctx.rank // 2
    with pytest.raises(RankMismatchError, match=r"ranks 2, 3"):
        optimizer.step()


def fails(ctx: RankContext) -> bool:
    return ctx.rank == ctx.world_size - 1


@contextmanager
def raised_on_all(ctx: RankContext) -> Iterator[None]:
    with pytest.raises(torch.OutOfMemoryError if fails(ctx) else RankFailedError, match="on purpose") as caught:
        yield
    if not fails(ctx):
        assert f"rank {ctx.world_size - 1} failed" in str(caught.value)


@contextmanager
def out_of_memory(ctx: RankContext) -> Iterator[None]:
    """No memory to pack gradients in, on one rank."""

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if fails(ctx):
            patch.setattr(BufferPool, "acquire", no_memory)
        yield


@contextmanager
def spoiled_sums(ctx: RankContext, calls: range) -> Iterator[None]:
    """Sums that end halfway, on one rank: those of these numbers, inside its row or across rows."""
    number = count()

    def half(slices: list[Tensor], into: Tensor, share: float) -> None:
        sum_in_rank_order(slices, into, share)
        if next(number) in calls:
            into.fill_(torch.nan)
            raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if fails(ctx):
            patch.setattr(pairs, "sum_in_rank_order", half)
        yield


def real_grids(ctx: RankContext) -> list[Grid]:
    return [grid for grid in grids(ctx.world_size) if grid[0] > 1]


def go_on(ctx: RankContext, twins: ShardTwins, grid: Grid) -> None:
    twins.train(2)
    assert_replicas_are_equal(grid, twins.model, twins.zero)


@both_stages
@ranks(2, 4, timeout=40)
def test_no_memory_to_pack_gradients_in(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in real_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        twins.train(1)
        for pool in twins.zero._grad_reducer._buffer_pools.values():
            pool._idle.clear()
        with out_of_memory(ctx):
            twins.sides[0].backward(7)
        with raised_on_all(ctx):
            twins.zero.step()
        go_on(ctx, twins, grid)


@sampled("which", [range(1), range(1, 2), range(4, 5), range(9, 10), range(10)], ids=str)
@both_stages
@ranks(2, 4, timeout=60)
def test_sums_that_cannot_be_made(ctx: RankContext, config: ZeroConfig, which: range) -> None:
    """Each of five buckets is summed up twice. Whether that is known before all ranks state that they are well, or
    after."""
    for grid in real_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        assert len(twins.zero.layout.buckets) == 5
        for patience in (0.0, 1.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", patience)
                with spoiled_sums(ctx, which):
                    twins.sides[0].backward(7)
                    with raised_on_all(ctx):
                        twins.zero.step()
        go_on(ctx, twins, grid)


@both_stages
@ranks(2, 4, timeout=60)
def test_ranks_that_make_different_numbers_of_passes(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in real_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        for failing_passes, other_passes in ((1, 0), (0, 1), (2, 1)):
            with spoiled_sums(ctx, range(1)):
                for number in range(failing_passes if fails(ctx) else other_passes):
                    twins.sides[0].backward(number)
                with raised_on_all(ctx):
                    twins.zero.step()
        go_on(ctx, twins, grid)


@ranks(2, 4, timeout=40)
def test_a_rank_without_a_pass_gives_zeros(ctx: RankContext) -> None:
    """Nobody waits for it, in whichever row it is."""
    for grid in real_grids(ctx):
        for config, absent in ((ZERO2, 0), (ZERO1, 0), (ZERO2, ctx.world_size - 1)):
            model, plain = seeded(mlp, 0), seeded(mlp, 0)
            optimizer = shard(model, torch.optim.SGD, lr=0.5, config=config, **within(grid))
            if ctx.rank != absent:
                torch.autograd.backward(regression(model, 0))
            optimizer.step()
            torch.autograd.backward(regression(plain, 0) * (ctx.rank != absent))
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.data.sub_(param.grad, alpha=0.5 / ctx.world_size)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo adds in another order
            assert_replicas_are_equal(grid, model, optimizer)


@ranks(2, 4, timeout=40)
def test_clearing_between_passes_on_one_rank_is_refused(ctx: RankContext) -> None:
    for grid in real_grids(ctx):
        twins = ShardTwins(ZERO2, where=within(grid))
        twins.sides[0].backward(1)
        if fails(ctx):
            twins.zero.zero_grad()
        twins.sides[0].backward(2)
        with pytest.raises(
            (RankMismatchError, RankFailedError),
            match=r"different backward passes.*Where one rank leaves a step out, all must",
        ):
            twins.zero.step()
        go_on(ctx, twins, grid)


class Broken(torch.optim.SGD):
    """Fails in its step where it is told to."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if self.param_groups[0].get("broken"):
            raise torch.OutOfMemoryError("no memory, on purpose")
        return super().step(closure)


@both_stages
@ranks(2, 4, timeout=60)
def test_an_update_that_fails_on_one_rank(ctx: RankContext, config: ZeroConfig) -> None:
    """All hear of it, also in other rows. No step is made before rows are the same again."""
    for grid in real_grids(ctx):
        twins = ShardTwins(config, optimizer_class=Broken, where=within(grid), lr=0.1, momentum=0.9)
        twins.train(2)
        optimizer, values = twins.zero, copy.deepcopy(twins.model.state_dict())
        state = broadcast_object(optimizer.full_state_dict(), 0)
        twins.sides[0].backward(7)
        optimizer.param_groups[0]["broken"] = fails(ctx)
        with raised_on_all(ctx):
            optimizer.step()
        optimizer.param_groups[0]["broken"] = False
        for call in (optimizer.step, partial(optimizer.clip_grad_norm_, 1.0)):
            with pytest.raises(ReplicaMismatchError, match=r"step 3 failed on a rank.*Load a checkpoint"):
                call()
        optimizer.load_state_dict(state)
        with pytest.raises(ReplicaMismatchError, match="parameters are not the same on all ranks"):
            optimizer.step()
        twins.model.load_state_dict(values)
        optimizer.zero_grad()
        go_on(ctx, twins, grid)


class OwnWay(Broken):
    """Is loaded beside what there is, which a load that fails later puts back."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class Refusing(nn.Linear):
    """Cannot be loaded, once, where it is told so."""

    refuses = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.refuses:
            self.refuses = False
            raise ArithmeticError("not loaded, on purpose")
        super()._load_from_state_dict(*args, **kwargs)


@ranks(2, 4, timeout=60)
def test_a_load_that_fails_makes_no_rows_equal(ctx: RankContext, tmp_path: Path) -> None:
    """It puts back what each row had, which is not the same in all of them."""
    for number, grid in enumerate(real_grids(ctx)):
        torch.manual_seed(0)
        model = Refusing(4, 4)
        optimizer = shard(model, OwnWay, lr=0.1, momentum=0.9, **within(grid))
        folder = tmp_path / str(number)
        one_step(model, optimizer)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
        optimizer.param_groups[0]["broken"] = fails(ctx)
        with raised_on_all(ctx):
            one_step(model, optimizer)
        optimizer.param_groups[0]["broken"] = False
        model.refuses = fails(ctx)
        with pytest.raises(CheckpointError, match="not loaded, on purpose"):
            checkpoint.load(folder, model=model, optimizer=optimizer)
        with pytest.raises(ReplicaMismatchError, match=r"step 2 failed on a rank.*Load a checkpoint"):
            one_step(model, optimizer)
        optimizer.zero_grad()
        checkpoint.load(folder, model=model, optimizer=optimizer)
        one_step(model, optimizer)
        assert_replicas_are_equal(grid, model, optimizer)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
