"""Hybrid sharding: invalid arguments and failures on one rank raise on all ranks, and training can continue."""

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
    DdpParityRun,
    Grid,
    assert_params_unchanged,
    assert_replicas_are_equal,
    both_stages,
    grids,
    group_size_options,
    make_seeded,
    mesh_options,
    mlp,
    regression,
    torchrun_env,
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
from zeroshard.comm import gloo
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import BufferPool

ShardGroupArgs = dict[str, Any]


def assert_rejected(shard_group_args: ShardGroupArgs, match: str, error: type[Exception] = ConfigError) -> None:
    """Check that `shard` raises on this rank and leaves the model unchanged."""
    model = make_seeded(mlp, dist.get_rank())
    with assert_params_unchanged(model), pytest.raises(error, match=match):
        shard(model, torch.optim.AdamW, **shard_group_args)
    assert "zero_grad" not in vars(model)
    dist.barrier()  # all ranks reach this line


@ranks(4, timeout=30)
def test_invalid_mesh_and_group_size_are_rejected(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_rejected({"mesh": mesh, "process_group": dist.group.WORLD}, r"Remove process_group=")
    assert_rejected({"mesh": mesh, "shard_group_size": 2}, r"mesh= and shard_group_size= both .* Pass one of them")
    assert_rejected(
        {"mesh": init_device_mesh("cpu", (2, 2, 1))}, r"one dimension \(shard\) or two .* got 3: .*Slice it"
    )
    assert_rejected({"mesh": [[0, 1], [2, 3]]}, r"mesh to be a torch.distributed.DeviceMesh, got list")
    assert_rejected({"mesh": DeviceMesh("cpu", [[1, 0], [2, 3]])}, r"expected ascending ranks .*\[\[1, 0\], \[2, 3\]\]")
    assert_rejected({"shard_group_size": 3}, r"shard_group_size=3 does not divide the 4 ranks: give one of \[1, 2, 4\]")
    for value in (0, -1, True, 2.0, "host", "rack", [2]):
        assert_rejected({"shard_group_size": value}, r"to be 'node' or a positive number of ranks, got ")


@ranks(4, timeout=30)
def test_hosts_that_cannot_form_shard_groups_are_rejected(ctx: RankContext) -> None:
    node = {"shard_group_size": "node"}
    with torchrun_env(None, None):
        assert_rejected(node, r"LOCAL_RANK=None, LOCAL_WORLD_SIZE=None. Start with torchrun")
    with torchrun_env("first", 2):
        assert_rejected(node, r"LOCAL_RANK='first'")
    with torchrun_env(*((ctx.rank, 3) if ctx.rank < 3 else (0, 1))):
        assert_rejected(node, r"all hosts must have the same number of ranks, got 3 from rank 0 on, 1 from rank 3 on")
    with torchrun_env(ctx.rank // 2, 2):  # ranks are assigned to hosts in turn
        assert_rejected(node, r"must take part and be numbered consecutively")
    with torchrun_env(ctx.rank % 2, 2 + ctx.rank // 2):
        assert_rejected(node, r"host of rank 2, LOCAL_WORLD_SIZE is \[3\], but 2 of its ranks train here: \[2, 3\]")
    with torchrun_env(None, None) if ctx.rank == 1 else torchrun_env(ctx.rank % 2, 2):
        error = ConfigError if ctx.rank == 1 else RankFailedError
        assert_rejected(node, r"LOCAL_RANK=None", error)


@ranks(4, timeout=30)
def test_different_shard_group_arguments_are_a_mismatch(ctx: RankContext) -> None:
    differs = ctx.rank == 2
    assert_rejected({"shard_group_size": 1 if differs else 2}, r"rank 2: .*shard_group_size=1", RankMismatchError)
    assert_rejected({} if differs else {"shard_group_size": 2}, r"the ranks are in different calls", RankMismatchError)
    assert_rejected(
        make_mesh_with_other_dim_names((2, 2)) if differs else mesh_options((2, 2)),
        r"disagree",
        RankMismatchError,
    )
    mesh = init_device_mesh("cpu", (2, 2))
    assert_rejected({"shard_group_size": 2} if differs else {"mesh": mesh}, r"disagree", RankMismatchError)
    both = {"mesh": mesh, "shard_group_size": 2}
    assert_rejected(
        both if differs else {"mesh": mesh},
        r"mesh= and shard_group_size= both .* Pass one of them",
        ConfigError if differs else RankFailedError,
    )


def make_mesh_with_other_dim_names(grid: Grid) -> ShardGroupArgs:
    """A mesh of the same ranks with other dimension names."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("rows", "columns"))}


@ranks(4, timeout=30)
def test_mismatch_between_shard_groups_is_reported_on_all_ranks(ctx: RankContext) -> None:
    """Values are compared over all ranks: here they are equal within each shard group."""
    model = make_seeded(mlp, 0)
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
    """On one rank, allocating a buffer to pack gradients fails."""

    def raise_out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(BufferPool, "acquire", raise_out_of_memory)
        yield


@contextmanager
def failing_sums(ctx: RankContext, calls: range) -> Iterator[None]:
    """On one rank, fail in the middle of the sums numbered `calls`, within its shard group or across groups."""
    call_numbers = count()

    def fail_halfway(shards: list[Tensor], output: Tensor, scale: float) -> None:
        sum_in_rank_order(shards, output, scale)
        if next(call_numbers) in calls:
            output.fill_(torch.nan)
            raise torch.OutOfMemoryError("no memory, on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(gloo, "sum_in_rank_order", fail_halfway)
        yield


def replicated_grids(ctx: RankContext) -> list[Grid]:
    return [grid for grid in grids(ctx.world_size) if grid[0] > 1]


def continue_training(ctx: RankContext, parity: DdpParityRun, grid: Grid) -> None:
    parity.train(2)
    assert_replicas_are_equal(grid, parity.model, parity.zero)


@both_stages
@ranks(2, 4, timeout=40)
def test_out_of_memory_in_bucket_packing_raises_on_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in replicated_grids(ctx):
        parity = DdpParityRun(config, group_options=group_size_options(grid))
        parity.train(1)
        for pool in parity.zero._model_binding.reducer._buffer_pools.values():
            pool._idle.clear()
        with failing_bucket_allocation(ctx):
            parity.sides[0].backward(7)
        with expect_out_of_memory_on_all_ranks(ctx):
            parity.zero.step()
        continue_training(ctx, parity, grid)


@sampled("failing_calls", [range(1), range(1, 2), range(4, 5), range(9, 10), range(10)], ids=str)
@both_stages
@ranks(2, 4, timeout=60)
def test_failed_reduce_raises_on_all_ranks(ctx: RankContext, config: ZeroConfig, failing_calls: range) -> None:
    """Each of five buckets is summed twice. Depending on the timeout, the failure is detected before or after
    consensus."""
    for grid in replicated_grids(ctx):
        parity = DdpParityRun(config, group_options=group_size_options(grid))
        assert len(parity.zero.layout.buckets) == 5
        for timeout in (0.0, 1.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(grad_reducer, "WAIT_BUDGET_S", timeout)
                with failing_sums(ctx, failing_calls):
                    parity.sides[0].backward(7)
                    with expect_out_of_memory_on_all_ranks(ctx):
                        parity.zero.step()
        continue_training(ctx, parity, grid)


@both_stages
@ranks(2, 4, timeout=60)
def test_failed_reduce_with_different_numbers_of_backward_passes(ctx: RankContext, config: ZeroConfig) -> None:
    for grid in replicated_grids(ctx):
        parity = DdpParityRun(config, group_options=group_size_options(grid))
        for failing_passes, other_passes in ((1, 0), (0, 1), (2, 1)):
            with failing_sums(ctx, range(1)):
                for number in range(failing_passes if is_failing_rank(ctx) else other_passes):
                    parity.sides[0].backward(number)
                with expect_out_of_memory_on_all_ranks(ctx):
                    parity.zero.step()
        continue_training(ctx, parity, grid)


@ranks(2, 4, timeout=40)
def test_rank_without_backward_contributes_zeros(ctx: RankContext) -> None:
    """No rank waits for it, whichever shard group it is in."""
    for grid in replicated_grids(ctx):
        for config, idle_rank in ((ZERO2, 0), (ZERO1, 0), (ZERO2, ctx.world_size - 1)):
            model, plain = make_seeded(mlp, 0), make_seeded(mlp, 0)
            optimizer = shard(model, torch.optim.SGD, lr=0.5, config=config, **group_size_options(grid))
            if ctx.rank != idle_rank:
                torch.autograd.backward(regression(model, 0))
            optimizer.step()
            torch.autograd.backward(regression(plain, 0) * (ctx.rank != idle_rank))
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.data.sub_(param.grad, alpha=0.5 / ctx.world_size)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo sums in another order
            assert_replicas_are_equal(grid, model, optimizer)


@ranks(2, 4, timeout=40)
def test_zero_grad_between_passes_on_one_rank_is_rejected(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        parity = DdpParityRun(ZERO2, group_options=group_size_options(grid))
        parity.sides[0].backward(1)
        if is_failing_rank(ctx):
            parity.zero.zero_grad()
        parity.sides[0].backward(2)
        with pytest.raises(
            (RankMismatchError, RankFailedError),
            match=r"different backward passes.*If one rank skips a step, all ranks must",
        ):
            parity.zero.step()
        continue_training(ctx, parity, grid)


class FailingSGD(torch.optim.SGD):
    """Fails in its step if its first group has the option `broken`."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if self.param_groups[0].get("broken"):
            raise torch.OutOfMemoryError("no memory, on purpose")
        return super().step(closure)


@both_stages
@ranks(2, 4, timeout=60)
def test_failed_update_blocks_steps_until_a_checkpoint_is_loaded(ctx: RankContext, config: ZeroConfig) -> None:
    """All ranks raise, in other shard groups too. Steps are rejected until all replicas are equal again."""
    for grid in replicated_grids(ctx):
        parity = DdpParityRun(
            config, optimizer_class=FailingSGD, group_options=group_size_options(grid), lr=0.1, momentum=0.9
        )
        parity.train(2)
        optimizer, values = parity.zero, copy.deepcopy(parity.model.state_dict())
        state = broadcast_object(optimizer.full_state_dict(), 0)
        parity.sides[0].backward(7)
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
        parity.model.load_state_dict(values)
        optimizer.zero_grad()
        continue_training(ctx, parity, grid)


class FailingSGDWithCustomLoad(FailingSGD):
    """With its own `load_state_dict` it is loaded out of place: if the load fails later, the old state is restored."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class FailsToLoadOnce(nn.Linear):
    """Fails to load once if `should_fail` is set."""

    should_fail = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.should_fail:
            self.should_fail = False
            raise ArithmeticError("not loaded, on purpose")
        super()._load_from_state_dict(*args, **kwargs)


@ranks(2, 4, timeout=60)
def test_failed_load_does_not_resolve_a_replica_mismatch(ctx: RankContext, tmp_path: Path) -> None:
    """It restores what each shard group had, which differs between groups."""
    for number, grid in enumerate(replicated_grids(ctx)):
        torch.manual_seed(0)
        model = FailsToLoadOnce(4, 4)
        optimizer = shard(model, FailingSGDWithCustomLoad, lr=0.1, momentum=0.9, **group_size_options(grid))
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


@ranks(4, timeout=30)
def test_gradients_edited_in_a_closure_block_no_later_step(ctx: RankContext) -> None:
    """All ranks raise before any has updated anything, so shard groups have not diverged."""
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=ZERO1, shard_group_size=2)

    def closure(*, edit: bool) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(regression(model, 0))
        if edit:
            next(param.grad for param in model.parameters() if param.grad is not None).mul_(2)

    with (
        assert_params_unchanged(model),
        pytest.raises((RuntimeError, RankFailedError), match=r"param\.grad"),
    ):
        optimizer.step(partial(closure, edit=ctx.rank == 1))
    assert optimizer._engine.steps == 0
    optimizer.step(partial(closure, edit=False))
    optimizer.check_consistency()
