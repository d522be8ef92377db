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

ShardGroupArgs = dict[str, Any]


def assert_rejected(shard_group_args: ShardGroupArgs, match: str, error: type[Exception] = ConfigError) -> None:
    """On this rank; and the model is as it was."""
    model = seeded(mlp, dist.get_rank())
    with left_as_it_was(model), pytest.raises(error, match=match):
        shard(model, torch.optim.AdamW, **shard_group_args)
    assert "zero_grad" not in vars(model)
    dist.barrier()  # all ranks came here


@ranks(4, timeout=30)
def test_invalid_mesh_and_group_size_are_rejected(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_rejected({"mesh": mesh, "process_group": dist.group.WORLD}, r"leave out process_group")
    assert_rejected({"mesh": mesh, "shard_group_size": 2}, r"give one of them")
    assert_rejected({"mesh": init_device_mesh("cpu", (2, 2, 1))}, r"one dimension \(shard\) or two .* not 3 .*Slice it")
    assert_rejected({"mesh": [[0, 1], [2, 3]]}, r"must be a torch.distributed.DeviceMesh, not a list")
    assert_rejected({"mesh": DeviceMesh("cpu", [[1, 0], [2, 3]])}, r"must ascend .*\[\[1, 0\], \[2, 3\]\]")
    assert_rejected({"shard_group_size": 3}, r"shard_group_size=3 does not divide the 4 ranks: give one of \[1, 2, 4\]")
    for value in (0, -1, True, 2.0, "host", "rack", [2]):
        assert_rejected({"shard_group_size": value}, r"must be 'node' or a number of ranks from 1 on, not ")


@ranks(4, timeout=30)
def test_hosts_that_cannot_form_shard_groups_are_rejected(ctx: RankContext) -> None:
    node = {"shard_group_size": "node"}
    with launched(None, None):
        assert_rejected(node, r"LOCAL_RANK=None, LOCAL_WORLD_SIZE=None. Start with torchrun")
    with launched("first", 2):
        assert_rejected(node, r"LOCAL_RANK='first'")
    with launched(*((ctx.rank, 3) if ctx.rank < 3 else (0, 1))):
        assert_rejected(node, r"all hosts must have as many ranks, but there are 3 from rank 0 on, 1 from rank 3 on")
    with launched(ctx.rank // 2, 2):  # ranks dealt out to hosts in turns
        assert_rejected(node, r"numbered one after the other")
    with launched(ctx.rank % 2, 2 + ctx.rank // 2):
        assert_rejected(node, r"host of rank 2 has \[3\] ranks by LOCAL_WORLD_SIZE, but 2 of them train here: \[2, 3\]")
    with launched(None, None) if ctx.rank == 1 else launched(ctx.rank % 2, 2):
        error = ConfigError if ctx.rank == 1 else RankFailedError
        assert_rejected(node, r"LOCAL_RANK=None", error)


@ranks(4, timeout=30)
def test_different_shard_group_arguments_are_a_mismatch(ctx: RankContext) -> None:
    odd = ctx.rank == 2
    assert_rejected({"shard_group_size": 1 if odd else 2}, r"rank 2: .*shard_group_size=1", RankMismatchError)
    assert_rejected({} if odd else {"shard_group_size": 2}, r"the ranks are in different calls", RankMismatchError)
    assert_rejected(
        meshed((2, 2)) if ctx.rank < 4 and not odd else make_mesh_with_other_dim_names((2, 2)),
        r"disagree",
        RankMismatchError,
    )
    mesh = init_device_mesh("cpu", (2, 2))
    assert_rejected({"shard_group_size": 2} if odd else {"mesh": mesh}, r"disagree", RankMismatchError)
    both = {"mesh": mesh, "shard_group_size": 2}
    assert_rejected(both if odd else {"mesh": mesh}, r"give one of them", ConfigError if odd else RankFailedError)


def make_mesh_with_other_dim_names(grid: Grid) -> ShardGroupArgs:
    """A mesh of the same ranks whose dimensions have other names."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("rows", "columns"))}


@ranks(4, timeout=30)
def test_mismatch_between_shard_groups_is_reported_on_all_ranks(ctx: RankContext) -> None:
    """Facts are compared over all ranks: here rows agree within themselves."""
    model = seeded(mlp, 0)
    with pytest.raises(RankMismatchError, match=r"ranks 2, 3"):
        shard(model, torch.optim.AdamW, lr=0.1 + ctx.rank // 2, shard_group_size=2)
    optimizer = shard(model, torch.optim.AdamW, lr=0.1, shard_group_size=2)
    torch.autograd.backward(regression(model, 0))
    optimizer.param_groups[0]["lr"] = 0.1 + ctx.rank // 2
    with pytest.raises(RankMismatchError, match=r"ranks 2, 3"):
        optimizer.step()


def is_failing_rank(ctx: RankContext) -> bool:
    return ctx.rank == ctx.world_size - 1


@contextmanager
def expect_out_of_memory_on_all_ranks(ctx: RankContext) -> Iterator[None]:
    with pytest.raises(
        torch.OutOfMemoryError if is_failing_rank(ctx) else RankFailedError, match="on purpose"
    ) as caught:
        yield
    if not is_failing_rank(ctx):
        assert f"rank {ctx.world_size - 1} failed" in str(caught.value)


@contextmanager
def failing_bucket_allocation(ctx: RankContext) -> Iterator[None]:
    """No memory to pack gradients in, on one rank."""

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(BufferPool, "acquire", no_memory)
        yield


@contextmanager
def failing_sums(ctx: RankContext, calls: range) -> Iterator[None]:
    """Sums that end halfway, on one rank: those of these numbers, inside its row or across rows."""
    number = count()

    def half(slices: list[Tensor], into: Tensor, share: float) -> None:
        sum_in_rank_order(slices, into, share)
        if next(number) in calls:
            into.fill_(torch.nan)
            raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(pairs, "sum_in_rank_order", half)
        yield


def replicated_grids(ctx: RankContext) -> list[Grid]:
    return [grid for grid in grids(ctx.world_size) if grid[0] > 1]


def continue_training(ctx: RankContext, twins: ShardTwins, grid: Grid) -> None:
    twins.train(2)
    assert_replicas_are_equal(grid, twins.model, twins.zero)


@both_stages
@ranks(2, 4, timeout=40)
def test_out_of_memory_in_bucket_packing_raises_on_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in replicated_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        twins.train(1)
        for pool in twins.zero._grad_reducer._buffer_pools.values():
            pool._idle.clear()
        with failing_bucket_allocation(ctx):
            twins.sides[0].backward(7)
        with expect_out_of_memory_on_all_ranks(ctx):
            twins.zero.step()
        continue_training(ctx, twins, grid)


@sampled("which", [range(1), range(1, 2), range(4, 5), range(9, 10), range(10)], ids=str)
@both_stages
@ranks(2, 4, timeout=60)
def test_failed_reduce_raises_on_all_ranks(ctx: RankContext, config: ZeroConfig, which: range) -> None:
    """Each of five buckets is summed up twice. Whether that is known before all ranks state that they are well, or
    after."""
    for grid in replicated_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        assert len(twins.zero.layout.buckets) == 5
        for patience in (0.0, 1.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", patience)
                with failing_sums(ctx, which):
                    twins.sides[0].backward(7)
                    with expect_out_of_memory_on_all_ranks(ctx):
                        twins.zero.step()
        continue_training(ctx, twins, grid)


@both_stages
@ranks(2, 4, timeout=60)
def test_failed_reduce_with_different_numbers_of_backward_passes(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in replicated_grids(ctx):
        twins = ShardTwins(config, where=within(grid))
        for failing_passes, other_passes in ((1, 0), (0, 1), (2, 1)):
            with failing_sums(ctx, range(1)):
                for number in range(failing_passes if is_failing_rank(ctx) else other_passes):
                    twins.sides[0].backward(number)
                with expect_out_of_memory_on_all_ranks(ctx):
                    twins.zero.step()
        continue_training(ctx, twins, grid)


@ranks(2, 4, timeout=40)
def test_rank_without_backward_contributes_zeros(ctx: RankContext) -> None:
    """Nobody waits for it, in whichever row it is."""
    for grid in replicated_grids(ctx):
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
def test_zero_grad_between_passes_on_one_rank_is_rejected(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        twins = ShardTwins(ZERO2, where=within(grid))
        twins.sides[0].backward(1)
        if is_failing_rank(ctx):
            twins.zero.zero_grad()
        twins.sides[0].backward(2)
        with pytest.raises(
            (RankMismatchError, RankFailedError),
            match=r"different backward passes.*Where one rank leaves a step out, all must",
        ):
            twins.zero.step()
        continue_training(ctx, twins, grid)


class FailingSGD(torch.optim.SGD):
    """Fails in its step where it is told to."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if self.param_groups[0].get("broken"):
            raise torch.OutOfMemoryError("no memory, on purpose")
        return super().step(closure)


@both_stages
@ranks(2, 4, timeout=60)
def test_failed_update_blocks_steps_until_a_checkpoint_is_loaded(ctx: RankContext, config: ZeroConfig) -> None:
    """All hear of it, also in other rows. No step is made before rows are the same again."""
    for grid in replicated_grids(ctx):
        twins = ShardTwins(config, optimizer_class=FailingSGD, where=within(grid), lr=0.1, momentum=0.9)
        twins.train(2)
        optimizer, values = twins.zero, copy.deepcopy(twins.model.state_dict())
        state = broadcast_object(optimizer.full_state_dict(), 0)
        twins.sides[0].backward(7)
        optimizer.param_groups[0]["broken"] = is_failing_rank(ctx)
        with expect_out_of_memory_on_all_ranks(ctx):
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
        continue_training(ctx, twins, grid)


class FailingSGDWithCustomLoad(FailingSGD):
    """Is loaded beside what there is, which a load that fails later puts back."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class FailsToLoadOnce(nn.Linear):
    """Cannot be loaded, once, where it is told so."""

    should_fail = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.should_fail:
            self.should_fail = False
            raise ArithmeticError("not loaded, on purpose")
        super()._load_from_state_dict(*args, **kwargs)


@ranks(2, 4, timeout=60)
def test_failed_load_does_not_resolve_a_replica_mismatch(ctx: RankContext, tmp_path: Path) -> None:
    """It puts back what each row had, which is not the same in all of them."""
    for number, grid in enumerate(replicated_grids(ctx)):
        torch.manual_seed(0)
        model = FailsToLoadOnce(4, 4)
        optimizer = shard(model, FailingSGDWithCustomLoad, lr=0.1, momentum=0.9, **within(grid))
        folder = tmp_path / str(number)
        train_one_step(model, optimizer)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
        optimizer.param_groups[0]["broken"] = is_failing_rank(ctx)
        with expect_out_of_memory_on_all_ranks(ctx):
            train_one_step(model, optimizer)
        optimizer.param_groups[0]["broken"] = False
        model.should_fail = is_failing_rank(ctx)
        with pytest.raises(CheckpointError, match="not loaded, on purpose"):
            checkpoint.load(folder, model=model, optimizer=optimizer)
        with pytest.raises(ReplicaMismatchError, match=r"step 2 failed on a rank.*Load a checkpoint"):
            train_one_step(model, optimizer)
        optimizer.zero_grad()
        checkpoint.load(folder, model=model, optimizer=optimizer)
        train_one_step(model, optimizer)
        assert_replicas_are_equal(grid, model, optimizer)


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
