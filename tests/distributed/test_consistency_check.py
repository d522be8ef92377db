"""Ranks whose parameters diverge are detected and named, and the step raises before it updates anything."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.fault_report import Count, keep_count
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    OverlapParityRun,
    Setup,
    ShardParityRun,
    Words,
    all_configs,
    all_equal,
    assert_same,
    batch,
    clone_values,
    group_size_options,
    make_seeded,
    mlp,
    next_word_loss,
    regression,
    rules,
    set_grads,
    small_model,
)
from zeroshard import (
    ConfigError,
    ConsistencyCheck,
    FlatShards,
    GradScaler,
    RankFailedError,
    RankMismatchError,
    ReplicaMismatchError,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)
from zeroshard.engine.checks import Checksums, find_majority

EVERY_STEP = ConsistencyCheck(every=1)
NUM_FLIPS = 40
"""Bit flips per optimizer."""
ADAMW: dict[str, Any] = {"lr": 0.05}


class MixedDtypeModel(nn.Module):
    """Parameters of several dtypes and strides, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        images = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)
        values = {
            "plain_values": torch.randn(7, 5),
            "half_values": torch.randn(9).half(),
            "short_values": torch.randn(3, 5).bfloat16(),
            "double_values": torch.randn(4, dtype=torch.float64),
            "complex_values": torch.randn(5, dtype=torch.complex64),
            "images_values": images,
            "transposed_values": torch.randn(6, 4).t(),
            "strided_values": torch.randn(5, 8)[:, ::2],
            "empty_values": torch.empty(0, 3),
            "one_values": torch.randn(()),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def flip_bit(param: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element as faulty memory would: autograd does not notice."""
    flat = param.detach().contiguous().view(-1).view(torch.uint8)
    flat[element * param.itemsize + bit // 8] ^= 1 << bit % 8
    changed = flat.view(param.dtype).view(param.shape)
    param.data.copy_(changed)


def non_empty_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if param.numel()}


def make_sharded(
    config: ZeroConfig | None = None, make: Callable[[], nn.Module] = MixedDtypeModel, **group_options: Any
) -> tuple[Any, Any]:
    model = make_seeded(make, 0)
    return model, shard(model, torch.optim.SGD, config=config or ZERO2, **group_options, lr=0.1, momentum=0.9)


def make_dropin(
    config: ZeroConfig | None = None, make: Callable[[], nn.Module] = MixedDtypeModel, **options: Any
) -> tuple[Any, Any]:
    model = make_seeded(make, 0)
    config = replace(config or ZeroConfig(), allow_mixed_dtypes=True)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, config=config, lr=0.1, momentum=0.9, **options
    )
    return model, optimizer


def all_setups(world_size: int) -> Iterator[tuple[nn.Module, Any]]:
    yield make_sharded()
    yield make_dropin()
    yield make_dropin(parameters_as_bucket_view=True)
    yield make_dropin(ZeroConfig(partition=FlatShards()))
    if world_size == 4:
        yield make_sharded(**group_size_options((2, 2)))


def owner_ranks(optimizer: Any, index: int, element: int) -> set[int]:
    """Return the ranks that own an element of a parameter's memory, one per shard group."""
    (param_shard,) = [
        candidate
        for candidate in optimizer.layout.param_shards(index)
        if candidate.in_param.start <= element < candidate.in_param.stop
    ]
    size = optimizer.world_size
    return {group * size + param_shard.owner for group in range(torch.distributed.get_world_size() // size)}


def storage_offset(param: Tensor, element: int) -> int:
    index = torch.unravel_index(torch.tensor(element), param.shape) if param.dim() else ()
    return sum(int(coordinate) * stride for coordinate, stride in zip(index, param.stride(), strict=True))


@ranks(2, 3, 4)
def test_every_bit_flip_is_detected_and_located(ctx: RankContext) -> None:
    """In any element of any parameter, on any rank. Checks change nothing."""
    rng, flips = random.Random(7), 0
    for model, optimizer in all_setups(ctx.world_size):
        flips += NUM_FLIPS
        params = non_empty_params(model)
        before = clone_values(model)
        optimizer.check_consistency()
        for _ in range(NUM_FLIPS):
            name = rng.choice(list(params))
            param = params[name]
            rank, element = rng.randrange(ctx.world_size), rng.randrange(param.numel())
            bit = rng.randrange(param.itemsize * 8)
            if ctx.rank == rank:
                flip_bit(param, element, bit)
            with pytest.raises(
                ReplicaMismatchError, match=rf"check_consistency\(\): 1 of 10 parameters .*\({name}\)"
            ) as caught:
                optimizer.check_consistency()
            offset = storage_offset(param, element)
            index = next(spec.index for spec in optimizer.layout.params if spec.name == name)
            wrong = [rank]
            if ctx.world_size == 2 and rank in owner_ranks(optimizer, index, offset):
                wrong = [1 - rank]
            assert list(caught.value.ranks) == wrong, (name, element, rank, str(caught.value))
            assert caught.value.params == (name,)
            assert ("no value has a majority" in str(caught.value)) == (ctx.world_size == 2)
            assert f"in bucket {optimizer.layout.bucket_of(index)}" in str(caught.value)
            if ctx.rank == rank:
                flip_bit(param, element, bit)
        optimizer.check_consistency()
        assert_same([value.tolist() for value in clone_values(model)], [value.tolist() for value in before])
    if ctx.rank == 0:
        named = f"parameter and bucket{', and the rank' * (ctx.world_size > 2)}"
        description = f"one bit is flipped on one rank; the error names {named}"
        keep_count(Count("flips", f"{ctx.world_size} ranks", description, flips))


@ranks(2, 3)
def test_step_detects_bit_flip_before_updating(ctx: RankContext) -> None:
    for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)):
        model, optimizer = make_sharded(replace(config, consistency_check=ConsistencyCheck(every=3)), mlp)
        for number in range(2):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
        torch.autograd.backward(regression(model, 2))
        optimizer.wait_for_params()
        if ctx.rank == ctx.world_size - 1:
            flip_bit(model[4].bias, 3, 30)
        before = clone_values(model)
        state = optimizer.full_state_dict()
        with pytest.raises(ReplicaMismatchError, match=r"before step 3: 1 of 10 parameters .*4\.bias") as caught:
            optimizer.step()
        assert caught.value.step == 3
        assert "Load the last checkpoint" in str(caught.value)
        assert_same([value.tolist() for value in clone_values(model)], [value.tolist() for value in before])
        assert_same(optimizer.full_state_dict(), state)


@ranks(2, 3, 4)
def test_check_at_every_step_detects_every_bit_flip(ctx: RankContext) -> None:
    rng = random.Random(11)
    for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)) * 6:
        check_random_bit_flip_is_detected(ctx, replace(config, consistency_check=EVERY_STEP), rng)


def check_random_bit_flip_is_detected(ctx: RankContext, config: ZeroConfig, rng: random.Random) -> None:
    """In any step, on any rank, in its own slice or another's, before the forward or after the backward pass."""
    model, optimizer = make_sharded(config, mlp)
    name, param = rng.choice(list(non_empty_params(model).items()))
    rank, element, bit = rng.randrange(ctx.world_size), rng.randrange(param.numel()), rng.randrange(32)
    moment = (rng.randrange(1, 5), rng.choice(["before", "after"]))

    def train() -> None:
        for step in range(1, 5):
            for phase in ("before", "after"):
                optimizer.wait_for_params()
                if (step, phase) == moment and ctx.rank == rank:
                    flip_bit(param, element, bit)
                if phase == "before":
                    torch.autograd.backward(regression(model, step))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ReplicaMismatchError) as caught:
        train()
    index = next(spec.index for spec in optimizer.layout.params if spec.name == name)
    is_owner = rank in owner_ranks(optimizer, index, storage_offset(param, element))
    wrong = 1 - rank if ctx.world_size == 2 and is_owner else rank
    assert (caught.value.step, caught.value.ranks, caught.value.params) == (moment[0], (wrong,), (name,))


@ranks(3, 4)
def test_diverged_rank_is_named(ctx: RankContext) -> None:
    """One rank has made a local step with another learning rate: many parameters differ, and the error names it."""
    for model, optimizer in (make_sharded(make=mlp), make_dropin(make=mlp)):
        optimizer.check_consistency()
        diverged_rank = ctx.world_size - 2
        if ctx.rank == diverged_rank:
            set_grads(model.parameters(), 1)
            torch.optim.SGD(model.parameters(), lr=0.3).step()
            optimizer.zero_grad()
        with pytest.raises(ReplicaMismatchError, match=r"10 of 10 parameters .*; and 5 more\.") as caught:
            optimizer.check_consistency()
        assert caught.value.ranks == (diverged_rank,)
        assert caught.value.params == tuple(name for name, _ in model.named_parameters())
        others = ", ".join(str(rank) for rank in range(ctx.world_size) if rank != diverged_rank)
        assert f"where rank {diverged_rank} differs from ranks {others}" in str(caught.value)
        assert len(set(ctx.gather(str(caught.value)))) == 1


@ranks(2, 3, 4)
def test_several_diverged_ranks_are_named(ctx: RankContext) -> None:
    model, optimizer = make_dropin(make=small_model)
    with torch.no_grad():
        model[1].weight[0, 0] = ctx.rank
    with pytest.raises(ReplicaMismatchError, match=r"1\.weight") as caught:
        optimizer.check_consistency()
    (owner,) = owner_ranks(optimizer, 2, 0)
    assert caught.value.ranks == tuple(rank for rank in range(ctx.world_size) if rank != owner)


@ranks(2, 3)
def test_step_resynchronizes_updated_params_only(ctx: RankContext) -> None:
    """All ranks get the owner's values, flipped bits included. Parameters that no step sends stay different."""
    flat = ZeroConfig(partition=FlatShards())
    for model, optimizer in (make_sharded(make=mlp), make_dropin(make=mlp), make_dropin(flat, mlp)):
        if ctx.rank == 0:
            flip_bit(model[0].weight, 0, 20)
        set_grads(model.parameters(), 0)
        optimizer.step()
        optimizer.check_consistency()
        assert all_equal(ctx.gather([model[0].weight.detach()]))
    model, optimizer = make_dropin(make=mlp)
    if ctx.rank == 0:
        flip_bit(model[8].weight, 35, 20)
    set_grads(model[:8].parameters(), 0)
    optimizer.step()
    with pytest.raises(ReplicaMismatchError) as caught:
        optimizer.check_consistency()
    assert caught.value.params == ("8.weight",)


@ranks(3, 4)
def test_every_rank_wrong_in_a_different_shard(ctx: RankContext) -> None:
    """Each shard is right on a majority of ranks, and no rank is right in all shards."""
    model, optimizer = make_sharded(ZeroConfig(), lambda: nn.Linear(6, 8, bias=False))
    param_shard = optimizer.layout.param_shard(0, (ctx.rank + 1) % ctx.world_size)
    flip_bit(model.weight, param_shard.in_param.start, 4)
    with pytest.raises(
        ReplicaMismatchError, match=r"\(weight\) in bucket 0, where every rank differs from the others in some shard\."
    ) as caught:
        optimizer.check_consistency()
    assert caught.value.ranks == tuple(range(ctx.world_size))
    assert "no value has a majority" not in str(caught.value)


@ranks(2)
def test_transient_mismatch_is_reported_as_unstable_memory(ctx: RankContext) -> None:
    _, optimizer = make_dropin(make=small_model)
    compute, errors = Checksums.compute, iter([1] * ctx.rank)

    def compute_with_errors(self: Checksums, tensors: Any) -> int:
        return compute(self, tensors) + next(errors, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checksums, "compute", compute_with_errors)
        with pytest.raises(
            ReplicaMismatchError, match="no longer when they were compared again: the memory of a rank is faulty"
        ) as caught:
            optimizer.check_consistency()
    assert (caught.value.ranks, caught.value.params) == ((), ())
    optimizer.check_consistency()


@ranks(2)
def test_explicit_check_with_ddp_overlap(ctx: RankContext) -> None:
    parity = OverlapParityRun(Setup(), mlp, torch.optim.AdamW, **ADAMW)
    parity.train(4)
    parity.zero.check_consistency()
    if ctx.rank:
        flip_bit(next(parity.ddp.parameters()), 3, 3)
    with pytest.raises(ReplicaMismatchError, match="1 of 10 parameters"):
        parity.zero.check_consistency()


def test_majority_vote() -> None:
    assert find_majority(["a", "a*", "b"]) == ([0, 1], [2], True)
    assert find_majority(["a*", "b", "b"]) == ([1, 2], [0], True)
    assert find_majority(["a", "b*"]) == ([1], [0], False)
    assert find_majority(["a", "b*", "c"]) == ([1], [0, 2], False)
    assert find_majority(["a*", "a", "b*", "b"]) == ([0, 1], [2, 3], False)
    assert find_majority(["a", "a", "b*", "b*", "c"]) == ([2, 3], [0, 1, 4], False)


def train(model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, int], Tensor] = regression) -> list[Tensor]:
    for number in range(4):
        torch.autograd.backward(loss(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return clone_values(model)


@ranks(1, 2)
def test_no_false_alarm_and_unchanged_results(ctx: RankContext) -> None:
    configs = [*all_configs(), replace(ZERO2, master_dtype=torch.float64)]
    for config in configs:
        found, expected = (
            train(model, shard(model, torch.optim.AdamW, config=each_config, **ADAMW))
            for each_config in (replace(config, consistency_check=EVERY_STEP), config)
            for model in [make_seeded(mlp, 0)]
        )
        assert all_equal([found, expected]), config


@ranks(4)
def test_no_false_alarm_with_rules_and_hybrid_sharding(ctx: RankContext) -> None:
    group_options = group_size_options((2, 2))
    for config in (ZERO2, replace(ZERO2, overlap_param_gather=True)):
        for make, loss, optimizers in ((Words, next_word_loss, rules()), (mlp, regression, torch.optim.AdamW)):
            found, expected = (
                train(model, shard(model, optimizers, config=each_config, **group_options), loss)
                for each_config in (replace(config, consistency_check=EVERY_STEP), config)
                for model in [make_seeded(make, 0)]
            )
            assert all_equal([found, expected])


@ranks(2, 3)
def test_no_false_alarm_under_ddp(ctx: RankContext) -> None:
    option_sets: list[dict[str, Any]] = [
        {},
        {"parameters_as_bucket_view": True},
        {"config": ZeroConfig(partition=FlatShards())},
    ]
    for options in option_sets:
        results = []
        for consistency_check in (EVERY_STEP, None):
            ddp = DistributedDataParallel(make_seeded(mlp, 0))
            config = replace(options.get("config", ZeroConfig()), consistency_check=consistency_check)
            optimizer = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, **{**options, "config": config}, **ADAMW
            )
            results.append(train(ddp, optimizer))
        assert all_equal(results)


@ranks(2, 3)
def test_closure_scaler_and_join_steps_count_toward_the_interval(ctx: RankContext) -> None:
    """Steps with a closure, steps that a scaler skips, and steps for which only some ranks have inputs."""
    model, optimizer = make_sharded(replace(ZERO2, consistency_check=ConsistencyCheck(every=2)), mlp)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = regression(model, 1)
        torch.autograd.backward(loss)
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    scaler = GradScaler("cpu", init_scale=4.0)
    torch.autograd.backward(scaler.scale(regression(model, 2) * (float("inf") if ctx.rank == 0 else 1.0)))
    is_corrupted = ctx.rank == 0
    if is_corrupted:
        flip_bit(model[0].weight, 2, 1)
    with pytest.raises(ReplicaMismatchError, match=r"before step 2: .*0\.weight"):
        scaler.step(optimizer)
    scaler.update()
    if is_corrupted:
        flip_bit(model[0].weight, 2, 1)
    optimizer.zero_grad()
    with Join([optimizer]):
        for number in range(1 + ctx.rank):  # step 3, and later steps
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    next_step = 3 + ctx.world_size
    if next_step % 2:
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        next_step += 1
    if is_corrupted:
        flip_bit(model[0].weight, 2, 1)
    with pytest.raises(ReplicaMismatchError, match=rf"before step {next_step}: .*0\.weight"):
        optimizer.step()


@ranks(2, 3)
def test_uneven_inputs_with_join(ctx: RankContext) -> None:
    """Ranks that only shadow a step take part in its check."""
    model, optimizer = make_dropin(ZeroConfig(consistency_check=EVERY_STEP), mlp)
    ddp = DistributedDataParallel(model)
    with Join([ddp, optimizer]):
        for number in range(2 + ctx.rank):
            optimizer.zero_grad()
            torch.autograd.backward(regression(ddp, number))
            optimizer.step()
    optimizer.check_consistency()
    assert all_equal(ctx.gather(clone_values(model)))


@ranks(2, 3)
def test_joined_rank_that_diverged_is_detected(ctx: RankContext) -> None:
    """Rank 0 changes a parameter after its last input. The next step, which it only shadows, raises on all ranks."""
    for make in (make_dropin, make_sharded):
        model, optimizer = make(ZeroConfig(consistency_check=EVERY_STEP), mlp)
        ddp = DistributedDataParallel(model) if make is make_dropin else None

        def train(model: Any = model, optimizer: Any = optimizer, ddp: Any = ddp) -> None:
            with Join([ddp, optimizer] if ddp else [optimizer]):
                for number in range(2 + ctx.rank):
                    torch.autograd.backward(regression(ddp or model, number))
                    optimizer.step()
                    optimizer.zero_grad()
                if ctx.rank == 0:
                    flip_bit(model[8].bias, 3, 20)

        with pytest.raises(ReplicaMismatchError, match=r"before step 3: 1 of 10 parameters .*\(8\.bias\)") as caught:
            train()
        wrong = 1 if ctx.world_size == 2 and 0 in owner_ranks(optimizer, 9, 3) else 0
        assert (caught.value.ranks, caught.value.params) == ((wrong,), ("8.bias",))


@ranks(2)
def test_ranks_in_different_calls_raise_mismatch(ctx: RankContext) -> None:
    model, optimizer = make_dropin(make=small_model)
    set_grads(model.parameters(), 0)
    with pytest.raises(RankMismatchError, match=r"the ranks are in different calls.*check_consistency\(\)"):
        optimizer.check_consistency() if ctx.rank else optimizer.step()


@ranks(2)
def test_checksum_failure_on_one_rank_raises_on_all_ranks(ctx: RankContext) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("nothing left")

    _, optimizer = make_dropin(make=small_model)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank:
            patch.setattr(Checksums, "_checksum_chunk", fail)
        with pytest.raises(MemoryError if ctx.rank else RankFailedError, match="nothing left"):
            optimizer.check_consistency()
    optimizer.check_consistency()


@ranks(2, 3)
def test_failure_while_locating_the_mismatch_raises_on_all_ranks(ctx: RankContext) -> None:
    """While ranks locate the parameters that differ, and while they locate the shards of one."""
    compute = Checksums.compute
    model, optimizer = make_dropin(make=small_model)
    if ctx.rank == 0:
        flip_bit(model[0].weight, 1, 2)
    for failing in (2, 2 + len(list(model.parameters()))):
        calls = count(1)

        def compute_or_fail(self: Checksums, tensors: Any, calls: Any = calls, failing: int = failing) -> int:
            if next(calls) == failing:
                raise MemoryError("nothing left")
            return compute(self, tensors)

        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(Checksums, "compute", compute_or_fail)
            with pytest.raises(MemoryError if ctx.rank == 1 else RankFailedError, match="nothing left"):
                optimizer.check_consistency()
    with pytest.raises(ReplicaMismatchError):
        optimizer.check_consistency()


@ranks(2)
def test_periodic_check_is_rejected_with_ddp_overlap(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"ConsistencyCheck\(\.\.\.\) cannot be used with overlap_with_ddp=True"):
        make_dropin(ZeroConfig(consistency_check=EVERY_STEP), overlap_with_ddp=True)


@ranks(2)
def test_different_check_intervals_are_rejected_at_construction(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError, match=re.escape("consistency_check=ConsistencyCheck(every=2)")):
        make_sharded(replace(ZERO2, consistency_check=ConsistencyCheck(every=1 + ctx.rank)))


@ranks(2)
def test_matches_plain_optimizer_with_checks_enabled(ctx: RankContext) -> None:
    parity = ShardParityRun(torch.optim.AdamW, config=replace(ZERO2, consistency_check=EVERY_STEP), **ADAMW)
    parity.train(3)
    parity.check_state()


@pytest.mark.gpu
@ranks(2)
def test_bit_flips_are_detected_on_gpu(ctx: RankContext) -> None:
    """Checksums equal those on the CPU; a check synchronizes with the device once."""
    rng = random.Random(3)
    for model, optimizer in (
        make_sharded(make=_make_mixed_dtype_model_on_gpu),
        make_dropin(make=_make_mixed_dtype_model_on_gpu),
    ):
        params = non_empty_params(model)
        sums = Checksums()
        assert sums.compute(params.values()) == sums.compute([param.cpu() for param in params.values()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                optimizer.check_consistency()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert len([warning for warning in caught if "called a synchronizing" in str(warning.message)]) == 1
        for name, param in params.items():
            element, bit = rng.randrange(param.numel()), rng.randrange(param.itemsize * 8)
            if ctx.rank:
                flip_bit(param, element, bit)
            with pytest.raises(ReplicaMismatchError) as found:
                optimizer.check_consistency()
            assert found.value.params == (name,)
            if ctx.rank:
                flip_bit(param, element, bit)
        optimizer.check_consistency()


def _make_mixed_dtype_model_on_gpu() -> nn.Module:
    return MixedDtypeModel().cuda()


@pytest.mark.gpu
@ranks(1, 2)
def test_no_false_alarm_on_gpu(ctx: RankContext) -> None:
    for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)):
        results = []
        for consistency_check in (EVERY_STEP, None):
            model = make_seeded(mlp, 0).cuda()
            optimizer = shard(
                model, torch.optim.AdamW, config=replace(config, consistency_check=consistency_check), **ADAMW
            )
            results.append(train(model, optimizer, _regression_on_gpu))
        assert all_equal(results)


def _regression_on_gpu(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(batch(number).cuda()).square().mean()
    return loss
