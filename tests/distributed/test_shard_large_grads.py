"""Large gradients are copied into their bucket as soon as they are ready; results are as with small gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import test_shard_accumulation as accumulation
from tests.distributed import test_shard_autograd as graphs
from tests.distributed import test_shard_unused_params as unused
from tests.support import RankContext, ranks
from tests.support.oracles import both_stages, make_seeded, mlp, regression
from tests.support.tiers import sampled
from zeroshard import FlatShards, ZeroConfig, shard
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import ReduceBucket
from zeroshard.engine.grad_reducer import MAX_IN_FLIGHT, FinishReduce, InFlightReduces

ONE_BUCKET, SMALL_BUCKETS = ZeroConfig(), ZeroConfig(partition=FlatShards(bucket_bytes=400))
"""One bucket for all parameters, and several buckets of a few parameters each."""

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
    *(
        (graphs.test_activation_checkpointing, {"reentrant": reentrant, "checkpoint_all": True})
        for reentrant in (False, True)
    ),
    (graphs.test_nested_backward, {}),
]


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[scenario.__name__ for scenario, _ in SCENARIOS])
@ranks(2, 3)
def test_scenarios_pass_with_large_grads(ctx: RankContext, number: int) -> None:
    scenario, options = SCENARIOS[number]
    copied_params: list[int] = []
    copy_in = ReduceBucket.copy_in

    def record_copy(self: ReduceBucket, param: int, grad: torch.Tensor) -> None:
        copied_params.append(param)
        copy_in(self, param, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        patch.setattr(ReduceBucket, "copy_in", record_copy)
        vars(scenario)["__rank_body__"](ctx, **options)
    assert any(ctx.gather(bool(copied_params)))


@ranks(2, 3)
@sampled("to_none", [False, True])
def test_zero_grad_during_backward(ctx: RankContext, to_none: bool) -> None:
    """Gradients that are copied into a bucket but not sent yet are cleared, too."""
    model = make_seeded(mlp, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        optimizer = shard(model, torch.optim.SGD, lr=0.1)
    params = list(model.parameters())

    def clear(_: torch.Tensor) -> None:
        assert params[-1].grad is None, "the gradient is not copied into its bucket yet"
        optimizer.zero_grad(set_to_none=to_none)

    before = [param.detach().clone() for param in params]
    handle = params[-3].register_hook(clear)  # type: ignore[no-untyped-call]
    torch.autograd.backward(regression(model, ctx.rank))
    handle.remove()
    optimizer.step()
    changed = [not torch.equal(param, old) for param, old in zip(params, before, strict=True)]
    assert not any(changed[-2:])
    assert all(changed[:-3])


@ranks(2, 3)
def test_number_of_buckets_in_flight_is_limited(ctx: RankContext) -> None:
    """Ranks that keep pace wait for each other before they send more. The long timeout makes them wait in any case."""
    in_flight_counts: list[int] = []
    finish_arrived = InFlightReduces.finish_arrived

    def record_in_flight(self: InFlightReduces, receive: FinishReduce) -> None:
        in_flight_counts.append(len(self))
        finish_arrived(self, receive)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_BUDGET_S", 30.0)
        patch.setattr(InFlightReduces, "finish_arrived", record_in_flight)
        model = make_seeded(lambda: mlp(20), 0)
        optimizer = shard(model, torch.optim.SGD, lr=0.1, config=SMALL_BUCKETS)
        assert len(optimizer.layout.buckets) > 2 * MAX_IN_FLIGHT + 2
        for number in range(5):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    assert len(in_flight_counts) == 5 * len(optimizer.layout.buckets)
    assert max(in_flight_counts) == MAX_IN_FLIGHT + 1


@both_stages
@ranks(2, 3)
def test_grad_shards_freed_by_zero_grad(ctx: RankContext, config: ZeroConfig) -> None:
    """On accelerators `zero_grad` frees the shards. Here the CPU does too: accumulation and clearing work as before."""
    scenarios: list[tuple[Callable[..., None], dict[str, Any]]] = [
        (accumulation.test_uncleared_grads_accumulate_across_steps, {}),
        (accumulation.test_passes_after_clipping, {}),
        (accumulation.test_grads_cleared_before_step_are_discarded, {"by_model": False}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "DEVICES_THAT_KEEP_SHARDS", ())
        model = make_seeded(mlp, 0)
        optimizer = shard(model, torch.optim.SGD, lr=0.1, config=config)
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        shards = [weakref.ref(grads) for grads in optimizer._engine.grads.shard_tensors()]
        optimizer.zero_grad()
        assert shards
        assert all(ref() is None for ref in shards)
        for scenario, options in scenarios:
            vars(scenario)["__rank_body__"](ctx, config, **options)
