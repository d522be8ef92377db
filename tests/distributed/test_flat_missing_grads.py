"""Unusual steps with flat shards: gradients are missing, ranks differ, ranks fail.

Parameters without a gradient stay as the unsharded optimizer leaves them, however long the flat params that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import SGD, Optimizer

from tests.distributed.test_flat_parity import flat_options, random_params
from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import ParityRun, assert_params_unchanged, assert_same, set_grads
from zeroshard import FlatShards, RankFailedError, RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer

SHAPES: list[tuple[int, ...]] = [(5, 4), (7,), (), (3, 3), (11,), (2, 2, 2)]
GradMask = Sequence[bool]
make_model = partial(random_params, *SHAPES)


def assert_full_state_matches(parity: ParityRun) -> None:
    found = parity.zero.full_state_dict()
    if found is not None:
        expected = parity.plain.state_dict()
        # zeroshard's state is in parameter order, torch's in the order of first gradients.
        expected["state"] = dict(sorted(expected["state"].items()))
        assert_same(found, expected, "the state dict")


def set_grads_for(mask: GradMask) -> Callable[[Iterable[Tensor], int], None]:
    """Return a function that sets gradients of the parameters in the mask, and clears the others."""

    def set_masked_grads(params: Iterable[Tensor], step: int) -> None:
        params = list(params)
        set_grads(params, step)
        for param, has_grad in zip(params, mask, strict=True):
            param.grad = param.grad if has_grad else None

    return set_masked_grads


def parse_mask(text: str) -> list[bool]:
    return [letter == "x" for letter in text]


CASES: list[tuple[type[Optimizer], int, dict[str, Any]]] = [
    (optim.AdamW, 60, {"weight_decay": 0.1}),
    (optim.AdamW, 1 << 20, {"weight_decay": 0.1}),
    (optim.SGD, 1 << 20, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.NAdam, 300, {"foreach": True}),
    (optim.Adagrad, 1 << 20, {"foreach": True}),
    (optim.Rprop, 60, {"foreach": False}),
    (optim.Adam, 1 << 20, {"fused": True}),
    (optim.ASGD, 1 << 20, {"t0": 1.0}),
]


@ranks(1, 2, 3, 4)
def test_params_without_grads_keep_their_state(ctx: RankContext) -> None:
    for cls, bucket_bytes, options in CASES:
        parity = ParityRun(cls, model=make_model, zero_only=flat_options(bucket_bytes), **options)
        for mask in ("xx.xxx", "xxxxxx", "......", "x.x.x.", ".x.x.x", "xxxxxx"):
            parity.train(1, set_grads_for(parse_mask(mask)))
        if not options.get("fused"):  # the fused kernel rounds the moments of a tensor's last elements differently
            assert_full_state_matches(parity)


GRAD_MASKS = st.lists(st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), min_size=3, max_size=3)


@ranks(1, 2, 3)
def test_any_sequence_of_missing_grads_equals_unsharded(ctx: RankContext) -> None:
    @settings(max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(GRAD_MASKS, st.sampled_from([60, 300, 1 << 20]))
    def check_example(masks: list[list[bool]], bucket_bytes: int) -> None:
        parity = ParityRun(optim.AdamW, model=make_model, zero_only=flat_options(bucket_bytes), weight_decay=0.1)
        for mask in masks:
            parity.train(1, set_grads_for(mask))
        assert_full_state_matches(parity)

    check_example()


@ranks(1, 2, 3)
def test_flat_params_are_split_only_at_missing_grads(ctx: RankContext) -> None:
    parity = ParityRun(optim.AdamW, model=partial(random_params, *[(4,)] * 12), zero_only=flat_options(1 << 20))
    (group,) = parity.zero.optim.param_groups
    parity.train(1)
    assert len(group["params"]) == 1
    parity.train(1, set_grads_for([index != 5 for index in range(12)]))
    (group,) = parity.zero.optim.param_groups
    num_flat_params = [len(flat_params) for flat_params in ctx.gather(group["params"])]
    # A rank with parameter 5 inside its shard holds three flat params; fewer if 5 is split or at the edge.
    assert sum(num_flat_params) in range(ctx.world_size + 1, ctx.world_size + 3)
    steps = sorted(
        {float(state["step"]) for states in ctx.gather(parity.zero.optim.state) for state in states.values()}
    )
    assert steps == [1.0, 2.0]
    parity.train(2)


@ranks(2, 3)
def test_unchanged_buckets_are_not_sent(ctx: RankContext) -> None:
    """One bucket per parameter: the bucket of a parameter without a gradient is not sent."""
    parity = ParityRun(optim.SGD, model=partial(random_params, (192,), (384,)), zero_only=flat_options(8), lr=0.1)
    parity.train(1)
    sent_bytes = []
    for mask in ([True, True], [False, True]):
        set_grads_for(mask)(parity.model.parameters(), 1)
        with recorded() as traffic:
            parity.zero.step()
        sent_bytes.append(sum(ctx.gather(sum(traffic.sizes("isend")))))
    assert sent_bytes == [(ctx.world_size - 1) * 4 * size for size in (576, 384)]


# ---- frozen and unfrozen parameters


def set_frozen(parity: ParityRun, indices: Iterable[int], *, frozen: bool = True) -> None:
    for model, _ in parity.sides:
        params = list(model.parameters())
        for index in indices:
            params[index].requires_grad_(not frozen)
            params[index].grad = None


def make_partly_frozen() -> nn.ParameterList:
    params = make_model()
    for index in (1, 4):
        params[index].requires_grad_(False)
    return params


@ranks(1, 2, 3, 4)
def test_params_frozen_at_construction_can_be_unfrozen(ctx: RankContext) -> None:
    for bucket_bytes in (60, 1 << 20):
        parity = ParityRun(
            optim.AdamW, model=make_partly_frozen, zero_only=flat_options(bucket_bytes), weight_decay=0.1
        )
        parity.train(2)
        assert_full_state_matches(parity)
        set_frozen(parity, [4], frozen=False)
        parity.train(2)
        assert_full_state_matches(parity)
        set_frozen(parity, [1], frozen=False)
        parity.train(1)
        assert_full_state_matches(parity)


@ranks(1, 2, 3, 4)
def test_params_frozen_during_training_can_be_unfrozen(ctx: RankContext) -> None:
    for bucket_bytes in (60, 1 << 20):
        parity = ParityRun(optim.AdamW, model=make_model, zero_only=flat_options(bucket_bytes), weight_decay=0.1)
        parity.train(2)
        set_frozen(parity, [0, 3])
        parity.train(2)
        assert_full_state_matches(parity)
        set_frozen(parity, [0, 3], frozen=False)
        parity.train(2)
        assert_full_state_matches(parity)


@ranks(2, 4)
def test_frozen_params_take_no_state_and_the_rest_is_balanced(ctx: RankContext) -> None:
    def make_params_with_large_frozen() -> nn.ParameterList:
        params = random_params((64, 64), (16, 16), (16,))
        params[0].requires_grad_(False)
        return params

    parity = ParityRun(optim.Adam, model=make_params_with_large_frozen, zero_only=flat_options(1 << 20))
    parity.train(1)
    local_numel = sum(state["exp_avg"].numel() for state in parity.zero.optim.state.values())
    assert local_numel == (16 * 16 + 16) // ctx.world_size
    assert_full_state_matches(parity)


@ranks(2, 3, 4)
def test_splitting_flat_params_allocates_no_extra_state(ctx: RankContext) -> None:
    parity = ParityRun(optim.Adam, model=partial(random_params, *[(24,)] * 8), zero_only=flat_options(1 << 20))
    parity.train(1)
    before = count_momentum_bytes(parity)
    for mask in ("x.x.x.x.", ".x.x.x.x", "xx..xx..", "xxxxxxxx"):
        parity.train(1, set_grads_for(parse_mask(mask)))
    assert count_momentum_bytes(parity) == before == 2 * 4 * 8 * 24 // ctx.world_size


def count_momentum_bytes(parity: ParityRun) -> int:
    """Return the bytes of all moments, each counted once."""
    bytes_by_address = {
        address: value.nbytes
        for state in parity.zero.optim.state.values()
        for value in (state["exp_avg"], state["exp_avg_sq"])
        for address in [value.data_ptr()]
    }
    return sum(bytes_by_address.values())


# ---- ranks that differ in which gradients they have


@ranks(2, 3)
def test_owner_grad_counts_where_other_ranks_have_none(ctx: RankContext) -> None:
    """For a parameter that is not split, only the owner's gradient counts."""
    shapes = [(16,)] * ctx.world_size
    parity = ParityRun(optim.SGD, model=partial(random_params, *shapes), zero_only=flat_options(1 << 20), lr=0.1)
    owned = set(parity.zero.layout.params_owned_by(parity.zero.rank))
    assert len(owned) == 1
    set_grads(parity.model.parameters(), 0)
    for index, param in enumerate(parity.model.parameters()):
        param.grad = param.grad if index in owned else None
    parity.zero.step()
    set_grads(parity.plain_model.parameters(), 0)
    parity.plain.step()
    parity.check()


@ranks(2, 3)
def test_shard_owner_without_grad_is_a_mismatch_on_all_ranks(ctx: RankContext) -> None:
    parity = ParityRun(optim.SGD, model=partial(random_params, (5, 5)), zero_only=flat_options(), lr=0.1)
    set_grads_for([ctx.rank != 1])(parity.model.parameters(), 0)
    with pytest.raises(RankMismatchError, match="rank 1 has no gradient of parameter 0"):
        parity.zero.step()
    parity.check()
    parity.train(1)


# ---- ranks that do different things, and ranks that fail


def make_trained_run() -> ParityRun:
    parity = ParityRun(optim.AdamW, model=make_model, zero_only=flat_options(), lr=0.05)
    parity.train(2)
    return parity


@ranks(2, 3, 4)
def test_different_partitions_are_a_mismatch_on_all_ranks(ctx: RankContext) -> None:
    for number, odd_partition in enumerate((FlatShards(100), FlatShards(1 << 20), WholeParams(), None)):
        is_odd_rank = ctx.rank == number % ctx.world_size
        partition = odd_partition if is_odd_rank else FlatShards(200)
        model = make_model()
        mismatch = pytest.raises(RankMismatchError, match=r"partition=FlatShards\(bucket_bytes=200\)")
        with assert_params_unchanged(model), mismatch:
            ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, config=ZeroConfig(partition=partition))


@ranks(2, 3)
def test_different_step_options_are_a_mismatch_and_change_nothing(ctx: RankContext) -> None:
    parity = make_trained_run()
    parity.zero.param_groups[0]["lr"] = 0.05 + ctx.rank
    set_grads(parity.model.parameters(), 9)
    with pytest.raises(RankMismatchError, match=r"lr=0\.05"):
        parity.zero.step()
    parity.zero.param_groups[0]["lr"] = 0.05
    parity.check()
    parity.train(2)


class FailingSGD(SGD):
    """Fails before or after it updates its parameters, as `fail_when` says."""

    fail_when = ""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.fail_when == "before":
            raise ArithmeticError("the step broke")
        result = super().step(closure)
        if self.fail_when == "after":
            raise ArithmeticError("the step broke")
        return result


@contextmanager
def expect_failing_inner_step(ctx: RankContext, parity: ParityRun, culprit: int, when: str) -> Iterator[None]:
    """One rank's inner step fails, and all ranks raise."""
    inner: Any = parity.zero.optim
    is_culprit = ctx.rank == culprit
    inner.fail_when = when if is_culprit else ""
    with pytest.raises(ArithmeticError if is_culprit else RankFailedError, match="the step broke") as caught:
        yield
    assert is_culprit or f"rank {culprit} failed: ArithmeticError" in str(caught.value)
    inner.fail_when = ""


@ranks(1, 2, 3, 4)
def test_failing_inner_step_raises_on_all_ranks_and_training_continues(ctx: RankContext) -> None:
    parity = ParityRun(FailingSGD, model=make_model, zero_only=flat_options(), lr=0.1, momentum=0.9)
    for culprit in range(ctx.world_size):
        set_grads(parity.model.parameters(), parity.steps)
        # The step fails after the update, so the result equals the plain optimizer's step.
        with expect_failing_inner_step(ctx, parity, culprit, "after"):
            parity.zero.step()
        set_grads(parity.plain_model.parameters(), parity.steps)
        parity.plain.step()
        parity.check()
        parity.train(1)


@ranks(2, 3)
def test_step_failing_on_one_rank_is_applied_by_the_others(ctx: RankContext) -> None:
    parity = ParityRun(FailingSGD, model=make_model, zero_only=flat_options(), lr=0.1)
    for culprit in range(ctx.world_size):
        start = [param.detach().clone() for param in parity.model.parameters()]
        set_grads(parity.model.parameters(), parity.steps)
        with expect_failing_inner_step(ctx, parity, culprit, "before"):
            parity.zero.step()
        set_grads(parity.plain_model.parameters(), parity.steps)
        parity.plain.step()
        params = list(parity.plain_model.parameters())
        with torch.no_grad():
            for param_shard in (
                param_shard for bucket in parity.zero.layout.buckets for param_shard in bucket.param_shards
            ):
                if param_shard.owner == culprit:
                    span = slice(*param_shard.in_param)
                    params[param_shard.param].view(-1)[span] = start[param_shard.param].view(-1)[span]
        parity.check()
        parity.train(1)  # without momentum, so the lost update affects no later step on either side


@ranks(1, 2, 3)
def test_failing_closure_changes_nothing(ctx: RankContext) -> None:
    parity = make_trained_run()

    def closure() -> torch.Tensor:
        set_grads(parity.model.parameters(), 7)
        if ctx.rank == ctx.world_size - 1:
            raise ZeroDivisionError("a bad batch")
        return torch.zeros(())

    is_culprit = ctx.rank == ctx.world_size - 1
    with pytest.raises(ZeroDivisionError if is_culprit else RankFailedError, match="a bad batch"):
        parity.zero.step(closure)
    parity.check()
    assert_full_state_matches(parity)
    parity.train(2)
