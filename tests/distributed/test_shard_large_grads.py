"""Large gradients are copied into their bucket as soon as they are there: all goes as with small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import test_shard_accumulation as accumulation
from tests.distributed import test_shard_autograd as graphs
from tests.distributed import test_shard_unused_params as unused
from tests.support import RankContext, ranks
from tests.support.oracles import mlp, regression, seeded
from tests.support.tiers import sampled
from zeroshard import FlatShards, ZeroConfig, shard
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import GradBucket
from zeroshard.engine.grad_reducer import MAX_IN_FLIGHT, FinishReduce, InFlightReduces

ONE_BUCKET, SMALL_BUCKETS = ZeroConfig(), ZeroConfig(partition=FlatShards(bucket_bytes=400))
"""One bucket for all parameters, and one for a few of them."""

SCENARIOS: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (accumulation.test_zero2_accumulates_passes_in_the_shard, {}),
    *(
        (scenario, {"config": config})
        for config in (ONE_BUCKET, SMALL_BUCKETS)
        for scenario in (
            accumulation.test_no_sync_passes_then_synced_pass,
            accumulation.test_uncleared_grads_accumulate_across_steps,
            accumulation.test_different_numbers_of_passes_per_rank,
            accumulation.test_rank_clears_grads_other_ranks_never_computed,
            accumulation.test_passes_after_clipping,
            graphs.test_retained_graph_with_second_backward,
            unused.test_params_unused_on_some_or_all_ranks,
            unused.test_unused_params_with_no_sync_passes,
            unused.test_tied_weights_and_layers_used_twice,
            unused.test_freeze_and_unfreeze_layers,
            unused.test_layer_frozen_after_backward_is_still_updated,
        )
    ),
    *(
        (accumulation.test_zero_grad_to_zeros, {"config": ONE_BUCKET, "by_model": by_model})
        for by_model in (False, True)
    ),
    (accumulation.test_grads_cleared_before_step_are_discarded, {"config": SMALL_BUCKETS, "by_model": False}),
    *((graphs.test_activation_checkpointing, {"reentrant": it, "everything": True}) for it in (False, True)),
    (graphs.test_nested_backward, {}),
]


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[scenario.__name__ for scenario, _ in SCENARIOS])
@ranks(2, 3)
def test_scenarios_pass_with_large_grads(ctx: RankContext, number: int) -> None:
    scenario, options = SCENARIOS[number]
    put: list[int] = []
    put_in = GradBucket.copy_in

    def counting(self: GradBucket, param: int, grad: torch.Tensor) -> None:
        put.append(param)
        put_in(self, param, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        patch.setattr(GradBucket, "copy_in", counting)
        vars(scenario)["__rank_body__"](ctx, **options)
    assert any(ctx.gather(bool(put)))


@ranks(2, 3)
@sampled("to_none", [False, True])
def test_zero_grad_during_backward(ctx: RankContext, to_none: bool) -> None:
    """What is copied already and has not been sent is cleared, too."""
    model = seeded(mlp, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        optimizer = shard(model, torch.optim.SGD, lr=0.1)
    params = list(model.parameters())

    def clear(_: torch.Tensor) -> None:
        assert params[-1].grad is None, "it is copied"
        optimizer.zero_grad(set_to_none=to_none)

    before = [param.detach().clone() for param in params]
    handle = params[-3].register_hook(clear)  # type: ignore[no-untyped-call]
    torch.autograd.backward(regression(model, ctx.rank))
    handle.remove()
    optimizer.step()
    moved = [not torch.equal(param, was) for param, was in zip(params, before, strict=True)]
    assert not any(moved[-2:])
    assert all(moved[:-3])


@ranks(2, 3)
def test_number_of_buckets_in_flight_is_limited(ctx: RankContext) -> None:
    """Ranks that keep pace wait for each other, here as long as it takes, before more is sent."""
    most: list[int] = []
    take_in = InFlightReduces.finish_arrived

    def watched(self: InFlightReduces, receive: FinishReduce) -> None:
        most.append(len(self))
        take_in(self, receive)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", 30.0)
        patch.setattr(InFlightReduces, "finish_arrived", watched)
        model = seeded(lambda: mlp(20), 0)
        optimizer = shard(model, torch.optim.SGD, lr=0.1, config=SMALL_BUCKETS)
        assert len(optimizer.layout.buckets) > 2 * MAX_IN_FLIGHT + 2
        for number in range(5):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    assert len(most) == 5 * len(optimizer.layout.buckets)
    assert max(most) == MAX_IN_FLIGHT + 1
