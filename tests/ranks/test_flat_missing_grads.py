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

from tests.ranks.test_flat_parity import flat, randoms
from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import Twins, assert_same, left_as_it_was, set_grads
from zeroshard import FlatShards, RankFailedError, RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer

SHAPES: list[tuple[int, ...]] = [(5, 4), (7,), (), (3, 3), (11,), (2, 2, 2)]
Presence = Sequence[bool]
model = partial(randoms, *SHAPES)


def assert_state(twins: Twins) -> None:
    found = twins.zero.full_state_dict()
    if found is not None:
        expected = twins.plain.state_dict()
        # Ours is in the order of parameters, torch's in the order in which they got their first gradient.
        expected["state"] = dict(sorted(expected["state"].items()))
        assert_same(found, expected, "the state dict")


def only(present: Presence) -> Callable[[Iterable[Tensor], int], None]:
    """Gradients of some parameters, none of the others."""

    def grads(params: Iterable[Tensor], step: int) -> None:
        params = list(params)
        set_grads(params, step)
        for param, has in zip(params, present, strict=True):
            param.grad = param.grad if has else None

    return grads


def pattern(text: str) -> list[bool]:
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
def test_missing_ones_keep_their_state(ctx: RankContext) -> None:
    for cls, bucket_bytes, options in CASES:
        twins = Twins(cls, model=model, zero_only=flat(bucket_bytes), **options)
        for present in ("xx.xxx", "xxxxxx", "......", "x.x.x.", ".x.x.x", "xxxxxx"):
            twins.train(1, only(pattern(present)))
        if not options.get("fused"):  # whose kernel rounds the momenta of the last elements of a tensor otherwise
            assert_state(twins)


PATTERNS = st.lists(st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), min_size=3, max_size=3)


@ranks(1, 2, 3)
def test_any_order_of_presence(ctx: RankContext) -> None:
    @settings(max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(PATTERNS, st.sampled_from([60, 300, 1 << 20]))
    def trains_alike(patterns: list[list[bool]], bucket_bytes: int) -> None:
        twins = Twins(optim.AdamW, model=model, zero_only=flat(bucket_bytes), weight_decay=0.1)
        for present in patterns:
            twins.train(1, only(present))
        assert_state(twins)

    trains_alike()


@ranks(1, 2, 3)
def test_long_tensors_are_split_only_where_gradients_are_missing(ctx: RankContext) -> None:
    twins = Twins(optim.AdamW, model=partial(randoms, *[(4,)] * 12), zero_only=flat(1 << 20))
    (group,) = twins.zero.optim.param_groups
    twins.train(1)
    assert len(group["params"]) == 1
    twins.train(1, only([index != 5 for index in range(12)]))
    (group,) = twins.zero.optim.param_groups
    mine = [len(counts) for counts in ctx.gather(group["params"])]
    # The rank that has parameter 5 in its midst holds three tensors; where it is cut or at an edge, less.
    assert sum(mine) in range(ctx.world_size + 1, ctx.world_size + 3)
    steps = sorted({float(state["step"]) for states in ctx.gather(twins.zero.optim.state) for state in states.values()})
    assert steps == [1.0, 2.0]
    twins.train(2)


@ranks(2, 3)
def test_what_does_not_move_does_not_travel(ctx: RankContext) -> None:
    """One bucket a parameter: that of the parameter without a gradient stays at home."""
    twins = Twins(optim.SGD, model=partial(randoms, (192,), (384,)), zero_only=flat(8), lr=0.1)
    twins.train(1)
    sent = []
    for present in ([True, True], [False, True]):
        only(present)(twins.model.parameters(), 1)
        with recorded() as traffic:
            twins.zero.step()
        sent.append(sum(ctx.gather(sum(traffic.sizes("isend")))))
    assert sent == [(ctx.world_size - 1) * 4 * size for size in (576, 384)]


# ---- frozen and thawed


def froze(twins: Twins, indices: Iterable[int], *, frozen: bool = True) -> None:
    for module, _ in twins.sides:
        params = list(module.parameters())
        for index in indices:
            params[index].requires_grad_(not frozen)
            params[index].grad = None


def partly_frozen() -> nn.ParameterList:
    params = model()
    for index in (1, 4):
        params[index].requires_grad_(False)
    return params


@ranks(1, 2, 3, 4)
def test_frozen_from_the_start_and_thawed_later(ctx: RankContext) -> None:
    for bucket_bytes in (60, 1 << 20):
        twins = Twins(optim.AdamW, model=partly_frozen, zero_only=flat(bucket_bytes), weight_decay=0.1)
        twins.train(2)
        assert_state(twins)
        froze(twins, [4], frozen=False)
        twins.train(2)
        assert_state(twins)
        froze(twins, [1], frozen=False)
        twins.train(1)
        assert_state(twins)


@ranks(1, 2, 3, 4)
def test_frozen_later_and_thawed_again(ctx: RankContext) -> None:
    for bucket_bytes in (60, 1 << 20):
        twins = Twins(optim.AdamW, model=model, zero_only=flat(bucket_bytes), weight_decay=0.1)
        twins.train(2)
        froze(twins, [0, 3])
        twins.train(2)
        assert_state(twins)
        froze(twins, [0, 3], frozen=False)
        twins.train(2)
        assert_state(twins)


@ranks(2, 4)
def test_frozen_parameters_take_no_state_and_the_rest_is_shared_equally(ctx: RankContext) -> None:
    def frozen_giant() -> nn.ParameterList:
        params = randoms((64, 64), (16, 16), (16,))
        params[0].requires_grad_(False)
        return params

    twins = Twins(optim.Adam, model=frozen_giant, zero_only=flat(1 << 20))
    twins.train(1)
    held = sum(state["exp_avg"].numel() for state in twins.zero.optim.state.values())
    assert held == (16 * 16 + 16) // ctx.world_size
    assert_state(twins)


@ranks(2, 3, 4)
def test_splitting_takes_no_more_state(ctx: RankContext) -> None:
    twins = Twins(optim.Adam, model=partial(randoms, *[(24,)] * 8), zero_only=flat(1 << 20))
    twins.train(1)
    before = held_bytes(twins)
    for present in ("x.x.x.x.", ".x.x.x.x", "xx..xx..", "xxxxxxxx"):
        twins.train(1, only(pattern(present)))
    assert held_bytes(twins) == before == 2 * 4 * 8 * 24 // ctx.world_size


def held_bytes(twins: Twins) -> int:
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
def test_owners_decide_where_others_have_none(ctx: RankContext) -> None:
    """A parameter in one piece: the gradient of its owner is what counts."""
    shapes = [(16,)] * ctx.world_size
    twins = Twins(optim.SGD, model=partial(randoms, *shapes), zero_only=flat(1 << 20), lr=0.1)
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
def test_owners_of_pieces_that_disagree_are_named_on_all_ranks(ctx: RankContext) -> None:
    twins = Twins(optim.SGD, model=partial(randoms, (5, 5)), zero_only=flat(), lr=0.1)
    only([ctx.rank != 1])(twins.model.parameters(), 0)
    with pytest.raises(RankMismatchError, match="rank 1 has no gradient of parameter 0"):
        twins.zero.step()
    twins.check()
    twins.train(1)


# ---- ranks that do different things, and ranks that fail


def trained() -> Twins:
    twins = Twins(optim.AdamW, model=model, zero_only=flat(), lr=0.05)
    twins.train(2)
    return twins


@ranks(2, 3, 4)
def test_different_buckets_are_a_mismatch_on_every_rank(ctx: RankContext) -> None:
    for number, config in enumerate((FlatShards(100), FlatShards(1 << 20), WholeParams(), None)):
        odd = ctx.rank == number % ctx.world_size
        partition = config if odd else FlatShards(200)
        module = model()
        mismatch = pytest.raises(RankMismatchError, match=r"partition=FlatShards\(bucket_bytes=200\)")
        with left_as_it_was(module), mismatch:
            ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, config=ZeroConfig(partition=partition))


@ranks(2, 3)
def test_different_options_in_a_step_are_a_mismatch_and_change_nothing(ctx: RankContext) -> None:
    twins = trained()
    twins.zero.param_groups[0]["lr"] = 0.05 + ctx.rank
    set_grads(twins.model.parameters(), 9)
    with pytest.raises(RankMismatchError, match=r"lr=0\.05"):
        twins.zero.step()
    twins.zero.param_groups[0]["lr"] = 0.05
    twins.check()
    twins.train(2)


class Fragile(SGD):
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
def failing(ctx: RankContext, twins: Twins, culprit: int, when: str) -> Iterator[None]:
    """One rank's inner step fails, and all ranks raise."""
    inner: Any = twins.zero.optim
    mine = ctx.rank == culprit
    inner.fails = when if mine else ""
    with pytest.raises(ArithmeticError if mine else RankFailedError, match="the step broke") as caught:
        yield
    assert mine or f"rank {culprit} failed: ArithmeticError" in str(caught.value)
    inner.fails = ""


@ranks(1, 2, 3, 4)
def test_a_failing_inner_step_is_raised_everywhere_and_training_goes_on(ctx: RankContext) -> None:
    twins = Twins(Fragile, model=model, zero_only=flat(), lr=0.1, momentum=0.9)
    for culprit in range(ctx.world_size):
        set_grads(twins.model.parameters(), twins.steps)
        # This one fails once all is done, so that the step is the plain optimizer's.
        with failing(ctx, twins, culprit, "after"):
            twins.zero.step()
        set_grads(twins.plain_model.parameters(), twins.steps)
        twins.plain.step()
        twins.check()
        twins.train(1)


@ranks(2, 3)
def test_a_step_that_fails_at_once_is_made_by_the_others_and_reaches_all(ctx: RankContext) -> None:
    twins = Twins(Fragile, model=model, zero_only=flat(), lr=0.1)
    for culprit in range(ctx.world_size):
        start = [param.detach().clone() for param in twins.model.parameters()]
        set_grads(twins.model.parameters(), twins.steps)
        with failing(ctx, twins, culprit, "before"):
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
def test_a_failing_closure_leaves_everything_as_it_was(ctx: RankContext) -> None:
    twins = trained()

    def closure() -> torch.Tensor:
        set_grads(twins.model.parameters(), 7)
        if ctx.rank == ctx.world_size - 1:
            raise ZeroDivisionError("a bad batch")
        return torch.zeros(())

    mine = ctx.rank == ctx.world_size - 1
    with pytest.raises(ZeroDivisionError if mine else RankFailedError, match="a bad batch"):
        twins.zero.step(closure)
    twins.check()
    assert_state(twins)
    twins.train(2)
