"""Ranks whose parameters part are found, named, and stopped before they update anything."""

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
    DdpTwins,
    Pair,
    Setup,
    Words,
    all_configs,
    all_equal,
    assert_same,
    batch,
    mlp,
    next_word,
    regression,
    rules,
    seeded,
    set_grads,
    small_model,
    values_of,
    within,
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
"""Of each optimizer."""
ADAMW: dict[str, Any] = {"lr": 0.05}


class MixedDtypeModel(nn.Module):
    """Parameters of several dtypes and strides, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        images = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)
        made = {
            "plain_values": torch.randn(7, 5),
            "half_values": torch.randn(9).half(),
            "short_values": torch.randn(3, 5).bfloat16(),
            "double_values": torch.randn(4, dtype=torch.float64),
            "complex_values": torch.randn(5, dtype=torch.complex64),
            "images_values": images,
            "turned_values": torch.randn(6, 4).t(),
            "gaps_values": torch.randn(5, 8)[:, ::2],
            "empty_values": torch.empty(0, 3),
            "one_values": torch.randn(()),
        }
        for name, value in made.items():
            self.register_parameter(name, nn.Parameter(value))


def flip_bit(param: Tensor, element: int, bit: int) -> None:
    """One bit of one element, as its memory would lose it: autograd knows nothing of it."""
    flat = param.detach().contiguous().view(-1).view(torch.uint8)
    flat[element * param.itemsize + bit // 8] ^= 1 << bit % 8
    changed = flat.view(param.dtype).view(param.shape)
    param.data.copy_(changed)


def non_empty_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if param.numel()}


def make_sharded(
    config: ZeroConfig | None = None, make: Callable[[], nn.Module] = MixedDtypeModel, **where: Any
) -> tuple[Any, Any]:
    model = seeded(make, 0)
    return model, shard(model, torch.optim.SGD, config=config or ZERO2, **where, lr=0.1, momentum=0.9)


def make_dropin(
    config: ZeroConfig | None = None, make: Callable[[], nn.Module] = MixedDtypeModel, **more: Any
) -> tuple[Any, Any]:
    model = seeded(make, 0)
    config = replace(config or ZeroConfig(), allow_mixed_dtypes=True)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, config=config, lr=0.1, momentum=0.9, **more
    )
    return model, optimizer


def all_setups(world_size: int) -> Iterator[tuple[nn.Module, Any]]:
    yield make_sharded()
    yield make_dropin()
    yield make_dropin(parameters_as_bucket_view=True)
    yield make_dropin(ZeroConfig(partition=FlatShards()))
    if world_size == 4:
        yield make_sharded(**within((2, 2)))


def owner_ranks(optimizer: Any, index: int, element: int) -> set[int]:
    """Ranks that own an element of a parameter's memory."""
    (piece,) = [it for it in optimizer.layout.param_shards(index) if it.in_param.start <= element < it.in_param.stop]
    size = optimizer.world_size
    return {row * size + piece.owner for row in range(torch.distributed.get_world_size() // size)}


def storage_offset(param: Tensor, element: int) -> int:
    index = torch.unravel_index(torch.tensor(element), param.shape) if param.dim() else ()
    return sum(int(it) * step for it, step in zip(index, param.stride(), strict=True))


@ranks(2, 3, 4)
def test_every_bit_flip_is_detected_and_located(ctx: RankContext) -> None:
    """At any place of any parameter, on any rank; and no check changes anything."""
    draw, flips = random.Random(7), 0
    for model, optimizer in all_setups(ctx.world_size):
        flips += NUM_FLIPS
        params = non_empty_params(model)
        before = values_of(model)
        optimizer.check_consistency()
        for _ in range(NUM_FLIPS):
            name = draw.choice(list(params))
            param = params[name]
            rank, element = draw.randrange(ctx.world_size), draw.randrange(param.numel())
            bit = draw.randrange(param.itemsize * 8)
            if ctx.rank == rank:
                flip_bit(param, element, bit)
            with pytest.raises(
                ReplicaMismatchError, match=rf"check_consistency\(\): 1 of 10 parameters .*\({name}\)"
            ) as caught:
                optimizer.check_consistency()
            place = storage_offset(param, element)
            index = next(spec.index for spec in optimizer.layout.params if spec.name == name)
            wrong = [rank]
            if ctx.world_size == 2 and rank in owner_ranks(optimizer, index, place):
                wrong = [1 - rank]
            assert list(caught.value.ranks) == wrong, (name, element, rank, str(caught.value))
            assert caught.value.params == (name,)
            assert ("no value has a majority" in str(caught.value)) == (ctx.world_size == 2)
            assert f"in bucket {optimizer.layout.bucket_of(index)}" in str(caught.value)
            if ctx.rank == rank:
                flip_bit(param, element, bit)
        optimizer.check_consistency()
        assert_same([it.tolist() for it in values_of(model)], [it.tolist() for it in before])
    if ctx.rank == 0:
        done = (
            f"one bit is flipped on one rank; parameter and bucket{', and the rank' * (ctx.world_size > 2)} are named"
        )
        keep_count(Count("flips", f"{ctx.world_size} ranks", done, flips))


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
        before = values_of(model)
        state = optimizer.full_state_dict()
        with pytest.raises(ReplicaMismatchError, match=r"before step 3: 1 of 10 parameters .*4\.bias") as caught:
            optimizer.step()
        assert caught.value.step == 3
        assert "Load the last checkpoint" in str(caught.value)
        assert_same([it.tolist() for it in values_of(model)], [it.tolist() for it in before])
        assert_same(optimizer.full_state_dict(), state)


@ranks(2, 3, 4)
def test_check_at_every_step_detects_every_bit_flip(ctx: RankContext) -> None:
    draw = random.Random(11)
    for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)) * 6:
        check_random_bit_flip_is_detected(ctx, replace(config, consistency_check=EVERY_STEP), draw)


def check_random_bit_flip_is_detected(ctx: RankContext, config: ZeroConfig, draw: random.Random) -> None:
    """In any step, on any rank, its own slice or another's; before the forward pass, or after gradients were made."""
    model, optimizer = make_sharded(config, mlp)
    name, param = draw.choice(list(non_empty_params(model).items()))
    rank, element, bit = draw.randrange(ctx.world_size), draw.randrange(param.numel()), draw.randrange(32)
    moment = (draw.randrange(1, 5), draw.choice(["before", "after"]))

    def train() -> None:
        for step in range(1, 5):
            for part in ("before", "after"):
                optimizer.wait_for_params()
                if (step, part) == moment and ctx.rank == rank:
                    flip_bit(param, element, bit)
                if part == "before":
                    torch.autograd.backward(regression(model, step))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ReplicaMismatchError) as caught:
        train()
    index = next(spec.index for spec in optimizer.layout.params if spec.name == name)
    is_owners = rank in owner_ranks(optimizer, index, storage_offset(param, element))
    wrong = 1 - rank if ctx.world_size == 2 and is_owners else rank
    assert (caught.value.step, caught.value.ranks, caught.value.params) == (moment[0], (wrong,), (name,))


@ranks(3, 4)
def test_diverged_rank_is_named(ctx: RankContext) -> None:
    """It has made a step of its own, with another learning rate: many parameters differ, and it is named."""
    for model, optimizer in (make_sharded(make=mlp), make_dropin(make=mlp)):
        optimizer.check_consistency()
        odd = ctx.world_size - 2
        if ctx.rank == odd:
            set_grads(model.parameters(), 1)
            torch.optim.SGD(model.parameters(), lr=0.3).step()
            optimizer.zero_grad()
        with pytest.raises(ReplicaMismatchError, match=r"10 of 10 parameters .*; and 5 more\.") as caught:
            optimizer.check_consistency()
        assert caught.value.ranks == (odd,)
        assert caught.value.params == tuple(name for name, _ in model.named_parameters())
        others = ", ".join(str(rank) for rank in range(ctx.world_size) if rank != odd)
        assert f"where rank {odd} differs from ranks {others}" in str(caught.value)
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
    """The owner's value comes to all, lost bits and all. What no step sends stays different."""
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
    """Each part has a majority of ranks that are right, and no rank is right in all."""
    model, optimizer = make_sharded(ZeroConfig(), lambda: nn.Linear(6, 8, bias=False))
    piece = optimizer.layout.param_shard(0, (ctx.rank + 1) % ctx.world_size)
    flip_bit(model.weight, piece.in_param.start, 4)
    with pytest.raises(
        ReplicaMismatchError, match=r"\(weight\) in bucket 0, of which every rank has lost a part\."
    ) as caught:
        optimizer.check_consistency()
    assert caught.value.ranks == tuple(range(ctx.world_size))
    assert "no value has a majority" not in str(caught.value)


@ranks(2)
def test_transient_mismatch_is_reported_as_unstable_memory(ctx: RankContext) -> None:
    _, optimizer = make_dropin(make=small_model)
    right, calls = Checksums.compute, iter([1] * ctx.rank)

    def unsteady(self: Checksums, tensors: Any) -> int:
        return right(self, tensors) + next(calls, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checksums, "compute", unsteady)
        with pytest.raises(
            ReplicaMismatchError, match="when all looked again they did not: a rank's memory is unsteady"
        ) as caught:
            optimizer.check_consistency()
    assert (caught.value.ranks, caught.value.params) == ((), ())
    optimizer.check_consistency()


@ranks(2)
def test_explicit_check_with_ddp_overlap(ctx: RankContext) -> None:
    twins = DdpTwins(Setup(), mlp, torch.optim.AdamW, **ADAMW)
    twins.train(4)
    twins.zero.check_consistency()
    if ctx.rank:
        flip_bit(next(twins.ddp.parameters()), 3, 3)
    with pytest.raises(ReplicaMismatchError, match="1 of 10 parameters"):
        twins.zero.check_consistency()


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
    return values_of(model)


@ranks(1, 2)
def test_no_false_alarm_and_unchanged_results(ctx: RankContext) -> None:
    configs = [*all_configs(), replace(ZERO2, master_dtype=torch.float64)]
    for config in configs:
        found, expected = (
            train(model, shard(model, torch.optim.AdamW, config=it, **ADAMW))
            for it in (replace(config, consistency_check=EVERY_STEP), config)
            for model in [seeded(mlp, 0)]
        )
        assert all_equal([found, expected]), config


@ranks(4)
def test_no_false_alarm_with_rules_and_hybrid_sharding(ctx: RankContext) -> None:
    where = within((2, 2))
    for config in (ZERO2, replace(ZERO2, overlap_param_gather=True)):
        for make, loss, chosen in ((Words, next_word, rules()), (mlp, regression, torch.optim.AdamW)):
            found, expected = (
                train(model, shard(model, chosen, config=it, **where), loss)
                for it in (replace(config, consistency_check=EVERY_STEP), config)
                for model in [seeded(make, 0)]
            )
            assert all_equal([found, expected])


@ranks(2, 3)
def test_no_false_alarm_under_ddp(ctx: RankContext) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"parameters_as_bucket_view": True},
        {"config": ZeroConfig(partition=FlatShards())},
    ]
    for options in ways:
        results = []
        for drift in (EVERY_STEP, None):
            ddp = DistributedDataParallel(seeded(mlp, 0))
            config = replace(options.get("config", ZeroConfig()), consistency_check=drift)
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, **{**options, "config": config}, **ADAMW
            )
            results.append(train(ddp, zero))
        assert all_equal(results)


@ranks(2, 3)
def test_closure_scaler_and_join_steps_count_toward_the_interval(ctx: RankContext) -> None:
    """With a closure, with a scaler that leaves them out, and where only some ranks have inputs."""
    model, optimizer = make_sharded(replace(ZERO2, consistency_check=ConsistencyCheck(every=2)), mlp)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = regression(model, 1)
        torch.autograd.backward(loss)
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    scaler = GradScaler("cpu", init_scale=4.0)
    torch.autograd.backward(scaler.scale(regression(model, 2) * (float("inf") if ctx.rank == 0 else 1.0)))
    spoil = ctx.rank == 0
    if spoil:
        flip_bit(model[0].weight, 2, 1)
    with pytest.raises(ReplicaMismatchError, match=r"before step 2: .*0\.weight"):
        scaler.step(optimizer)
    scaler.update()
    if spoil:
        flip_bit(model[0].weight, 2, 1)
    optimizer.zero_grad()
    with Join([optimizer]):
        for number in range(1 + ctx.rank):  # the third step, and more
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    coming = 3 + ctx.world_size
    if coming % 2:
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        coming += 1
    if spoil:
        flip_bit(model[0].weight, 2, 1)
    with pytest.raises(ReplicaMismatchError, match=rf"before step {coming}: .*0\.weight"):
        optimizer.step()


@ranks(2, 3)
def test_uneven_inputs_with_join(ctx: RankContext) -> None:
    """Ranks that only shadow a step take part, and a rank that drifts among them is found by all."""
    model, optimizer = make_dropin(ZeroConfig(consistency_check=EVERY_STEP), mlp)
    ddp = DistributedDataParallel(model)
    with Join([ddp, optimizer]):
        for number in range(2 + ctx.rank):
            optimizer.zero_grad()
            torch.autograd.backward(regression(ddp, number))
            optimizer.step()
    optimizer.check_consistency()
    assert all_equal(ctx.gather(values_of(model)))


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
    """While ranks look for the parameters that differ, and for the pieces of one."""
    right = Checksums.compute
    model, optimizer = make_dropin(make=small_model)
    if ctx.rank == 0:
        flip_bit(model[0].weight, 1, 2)
    for failing in (2, 2 + len(list(model.parameters()))):
        calls = count(1)

        def total(self: Checksums, tensors: Any, calls: Any = calls, failing: int = failing) -> int:
            if next(calls) == failing:
                raise MemoryError("nothing left")
            return right(self, tensors)

        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(Checksums, "compute", total)
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
    pair = Pair(torch.optim.AdamW, config=replace(ZERO2, consistency_check=EVERY_STEP), **ADAMW)
    pair.train(3)
    pair.check_state()


@pytest.mark.gpu
@ranks(2)
def test_bit_flips_are_detected_on_gpu(ctx: RankContext) -> None:
    """The same sums as on the CPU; the host waits for the device once."""
    draw = random.Random(3)
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
        assert len([it for it in caught if "called a synchronizing" in str(it.message)]) == 1
        for name, param in params.items():
            element, bit = draw.randrange(param.numel()), draw.randrange(param.itemsize * 8)
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
        for drift in (EVERY_STEP, None):
            model = seeded(mlp, 0).cuda()
            optimizer = shard(model, torch.optim.AdamW, config=replace(config, consistency_check=drift), **ADAMW)
            results.append(train(model, optimizer, _regression_on_gpu))
        assert all_equal(results)


def _regression_on_gpu(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(batch(number).cuda()).square().mean()
    return loss
