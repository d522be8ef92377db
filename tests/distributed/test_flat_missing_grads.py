"""Steps that are not like the others: gradients are missing, ranks differ, ranks fail.

Parameters without a gradient stay as the unsharded optimizer leaves them, however long the tensors they lie in.
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
from tests.support.oracles import Twins, assert_same, left_as_it_was, set_grads
from zeroshard import FlatShards, RankFailedError, RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer

SHAPES: list[tuple[int, ...]] = [(5, 4), (7,), (), (3, 3), (11,), (2, 2, 2)]
GradMask = Sequence[bool]
make_model = partial(random_params, *SHAPES)


def assert_full_state_matches(twins: Twins) -> None:
    found = twins.zero.full_state_dict()
    if found is not None:
        expected = twins.plain.state_dict()
        # Ours is in the order of parameters, torch's in the order in which they got their first gradient.
        expected["state"] = dict(sorted(expected["state"].items()))
        assert_same(found, expected, "the state dict")


def set_grads_for(mask: GradMask) -> Callable[[Iterable[Tensor], int], None]:
    """Gradients of some parameters, none of the others."""

    def grads(params: Iterable[Tensor], step: int) -> None:
        params = list(params)
        set_grads(params, step)
        for param, has in zip(params, mask, strict=True):
            param.grad = param.grad if has else None

    return grads


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
        twins = Twins(cls, model=make_model, zero_only=flat_options(bucket_bytes), **options)
        for present in ("xx.xxx", "xxxxxx", "......", "x.x.x.", ".x.x.x", "xxxxxx"):
            twins.train(1, set_grads_for(parse_mask(present)))
        if not options.get("fused"):  # whose kernel rounds the momenta of the last elements of a tensor otherwise
            assert_full_state_matches(twins)


GRAD_MASKS = st.lists(st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), min_size=3, max_size=3)


@ranks(1, 2, 3)
def test_any_sequence_of_missing_grads_equals_unsharded(ctx: RankContext) -> None:
    @settings(max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(GRAD_MASKS, st.sampled_from([60, 300, 1 << 20]))
    def trains_alike(patterns: list[list[bool]], bucket_bytes: int) -> None:
        twins = Twins(optim.AdamW, model=make_model, zero_only=flat_options(bucket_bytes), weight_decay=0.1)
        for present in patterns:
            twins.train(1, set_grads_for(present))
        assert_full_state_matches(twins)

    trains_alike()


@ranks(1, 2, 3)
def test_flat_params_are_split_only_at_missing_grads(ctx: RankContext) -> None:
    twins = Twins(optim.AdamW, model=partial(random_params, *[(4,)] * 12), zero_only=flat_options(1 << 20))
    (group,) = twins.zero.optim.param_groups
    twins.train(1)
    assert len(group["params"]) == 1
    twins.train(1, set_grads_for([index != 5 for index in range(12)]))
    (group,) = twins.zero.optim.param_groups
    mine = [len(counts) for counts in ctx.gather(group["params"])]
    # The rank that has parameter 5 in its midst holds three tensors; where it is cut or at an edge, less.
    assert sum(mine) in range(ctx.world_size + 1, ctx.world_size + 3)
    steps = sorted({float(state["step"]) for states in ctx.gather(twins.zero.optim.state) for state in states.values()})
    assert steps == [1.0, 2.0]
    twins.train(2)


@ranks(2, 3)
def test_unchanged_buckets_are_not_sent(ctx: RankContext) -> None:
    """One bucket a parameter: that of the parameter without a gradient stays at home."""
    twins = Twins(optim.SGD, model=partial(random_params, (192,), (384,)), zero_only=flat_options(8), lr=0.1)
    twins.train(1)
    sent = []
    for present in ([True, True], [False, True]):
        set_grads_for(present)(twins.model.parameters(), 1)
        with recorded() as traffic:
            twins.zero.step()
        sent.append(sum(ctx.gather(sum(traffic.sizes("isend")))))
    assert sent == [(ctx.world_size - 1) * 4 * size for size in (576, 384)]


# ---- frozen and thawed


def set_frozen(twins: Twins, indices: Iterable[int], *, frozen: bool = True) -> None:
    for module, _ in twins.sides:
        params = list(module.parameters())
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
        twins = Twins(optim.AdamW, model=make_partly_frozen, zero_only=flat_options(bucket_bytes), weight_decay=0.1)
        twins.train(2)
        assert_full_state_matches(twins)
        set_frozen(twins, [4], frozen=False)
        twins.train(2)
        assert_full_state_matches(twins)
        set_frozen(twins, [1], frozen=False)
        twins.train(1)
        assert_full_state_matches(twins)


@ranks(1, 2, 3, 4)
def test_params_frozen_during_training_can_be_unfrozen(ctx: RankContext) -> None:
    for bucket_bytes in (60, 1 << 20):
        twins = Twins(optim.AdamW, model=make_model, zero_only=flat_options(bucket_bytes), weight_decay=0.1)
        twins.train(2)
        set_frozen(twins, [0, 3])
        twins.train(2)
        assert_full_state_matches(twins)
        set_frozen(twins, [0, 3], frozen=False)
        twins.train(2)
        assert_full_state_matches(twins)


@ranks(2, 4)
def test_frozen_params_take_no_state_and_the_rest_is_balanced(ctx: RankContext) -> None:
    def frozen_giant() -> nn.ParameterList:
        params = random_params((64, 64), (16, 16), (16,))
        params[0].requires_grad_(False)
        return params

    twins = Twins(optim.Adam, model=frozen_giant, zero_only=flat_options(1 << 20))
    twins.train(1)
    held = sum(state["exp_avg"].numel() for state in twins.zero.optim.state.values())
    assert held == (16 * 16 + 16) // ctx.world_size
    assert_full_state_matches(twins)


@ranks(2, 3, 4)
def test_splitting_flat_params_allocates_no_extra_state(ctx: RankContext) -> None:
    twins = Twins(optim.Adam, model=partial(random_params, *[(24,)] * 8), zero_only=flat_options(1 << 20))
    twins.train(1)
    before = count_momentum_bytes(twins)
    for present in ("x.x.x.x.", ".x.x.x.x", "xx..xx..", "xxxxxxxx"):
        twins.train(1, set_grads_for(parse_mask(present)))
    assert count_momentum_bytes(twins) == before == 2 * 4 * 8 * 24 // ctx.world_size


def count_momentum_bytes(twins: Twins) -> int:
    """The memory of momenta, each counted once."""
    found = {
        key: value.nbytes
        for state in twins.zero.optim.state.values()
        for value in (state["exp_avg"], state["exp_avg_sq"])
        for key in [value.data_ptr()]
    }
    return sum(found.values())


# ---- ranks that differ in which gradients they have


@ranks(2, 3)
def test_owner_grad_counts_where_other_ranks_have_none(ctx: RankContext) -> None:
    """A parameter in one piece: the gradient of its owner is what counts."""
    shapes = [(16,)] * ctx.world_size
    twins = Twins(optim.SGD, model=partial(random_params, *shapes), zero_only=flat_options(1 << 20), lr=0.1)
    owned = set(twins.zero.layout.params_owned_by(twins.zero.rank))
    assert len(owned) == 1
    set_grads(twins.model.parameters(), 0)
    for index, param in enumerate(twins.model.parameters()):
        param.grad = param.grad if index in owned else None
    twins.zero.step()
    set_grads(twins.plain_model.parameters(), 0)
    twins.plain.step()
    twins.check()


@ranks(2, 3)
def test_shard_owner_without_grad_is_a_mismatch_on_all_ranks(ctx: RankContext) -> None:
    twins = Twins(optim.SGD, model=partial(random_params, (5, 5)), zero_only=flat_options(), lr=0.1)
    set_grads_for([ctx.rank != 1])(twins.model.parameters(), 0)
    with pytest.raises(RankMismatchError, match="rank 1 has no gradient of parameter 0"):
        twins.zero.step()
    twins.check()
    twins.train(1)


# ---- ranks that do different things, and ranks that fail


def make_trained_twins() -> Twins:
    twins = Twins(optim.AdamW, model=make_model, zero_only=flat_options(), lr=0.05)
    twins.train(2)
    return twins


@ranks(2, 3, 4)
def test_different_partitions_are_a_mismatch_on_all_ranks(ctx: RankContext) -> None:
    for number, config in enumerate((FlatShards(100), FlatShards(1 << 20), WholeParams(), None)):
        odd = ctx.rank == number % ctx.world_size
        partition = config if odd else FlatShards(200)
        module = make_model()
        mismatch = pytest.raises(RankMismatchError, match=r"partition=FlatShards\(bucket_bytes=200\)")
        with left_as_it_was(module), mismatch:
            ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, config=ZeroConfig(partition=partition))


@ranks(2, 3)
def test_different_step_options_are_a_mismatch_and_change_nothing(ctx: RankContext) -> None:
    twins = make_trained_twins()
    twins.zero.param_groups[0]["lr"] = 0.05 + ctx.rank
    set_grads(twins.model.parameters(), 9)
    with pytest.raises(RankMismatchError, match=r"lr=0\.05"):
        twins.zero.step()
    twins.zero.param_groups[0]["lr"] = 0.05
    twins.check()
    twins.train(2)


class FailingSGD(SGD):
    """Fails when told so, before or after it has updated its parameters."""

    fails = ""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.fails == "before":
            raise ArithmeticError("the step broke")
        result = super().step(closure)
        if self.fails == "after":
            raise ArithmeticError("the step broke")
        return result


@contextmanager
def expect_failing_inner_step(ctx: RankContext, twins: Twins, culprit: int, when: str) -> Iterator[None]:
    """One rank's inner step fails, and all ranks raise."""
    inner: Any = twins.zero.optim
    mine = ctx.rank == culprit
    inner.fails = when if mine else ""
    with pytest.raises(ArithmeticError if mine else RankFailedError, match="the step broke") as caught:
        yield
    assert mine or f"rank {culprit} failed: ArithmeticError" in str(caught.value)
    inner.fails = ""


@ranks(1, 2, 3, 4)
def test_failing_inner_step_raises_on_all_ranks_and_training_continues(ctx: RankContext) -> None:
    twins = Twins(FailingSGD, model=make_model, zero_only=flat_options(), lr=0.1, momentum=0.9)
    for culprit in range(ctx.world_size):
        set_grads(twins.model.parameters(), twins.steps)
        # This one fails once all is done, so that the step is the plain optimizer's.
        with expect_failing_inner_step(ctx, twins, culprit, "after"):
            twins.zero.step()
        set_grads(twins.plain_model.parameters(), twins.steps)
        twins.plain.step()
        twins.check()
        twins.train(1)


@ranks(2, 3)
def test_step_failing_on_one_rank_is_applied_by_the_others(ctx: RankContext) -> None:
    twins = Twins(FailingSGD, model=make_model, zero_only=flat_options(), lr=0.1)
    for culprit in range(ctx.world_size):
        start = [param.detach().clone() for param in twins.model.parameters()]
        set_grads(twins.model.parameters(), twins.steps)
        with expect_failing_inner_step(ctx, twins, culprit, "before"):
            twins.zero.step()
        set_grads(twins.plain_model.parameters(), twins.steps)
        twins.plain.step()
        params = list(twins.plain_model.parameters())
        with torch.no_grad():
            for piece in (piece for bucket in twins.zero.layout.buckets for piece in bucket.param_shards):
                if piece.owner == culprit:
                    span = slice(*piece.in_param)
                    params[piece.param].view(-1)[span] = start[piece.param].view(-1)[span]
        twins.check()
        twins.train(1)  # no momentum, so that a lost update is lost for good on both sides


@ranks(1, 2, 3)
def test_failing_closure_changes_nothing(ctx: RankContext) -> None:
    twins = make_trained_twins()

    def closure() -> torch.Tensor:
        set_grads(twins.model.parameters(), 7)
        if ctx.rank == ctx.world_size - 1:
            raise ZeroDivisionError("a bad batch")
        return torch.zeros(())

    mine = ctx.rank == ctx.world_size - 1
    with pytest.raises(ZeroDivisionError if mine else RankFailedError, match="a bad batch"):
        twins.zero.step(closure)
    twins.check()
    assert_full_state_matches(twins)
    twins.train(2)
