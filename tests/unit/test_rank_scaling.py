"""Work per rank does not grow with the world size. Objects are counted, not timed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zeroshard
from tests.support.oracles import spec
from tests.support.tiers import sampled
from tests.unit.test_partition import GROUPS, WORLD_SIZES, Groups, deterministic_examples
from zeroshard._types import Rank, Span
from zeroshard.comm import nccl
from zeroshard.layout import layout as layouts
from zeroshard.layout import partition
from zeroshard.layout.layout import EqualShards, ExplicitShards, Layout, WholeParamShards
from zeroshard.layout.partition import FlatShards, MixedPartitioner, WholeParams, compute_balance
from zeroshard.layout.spec import ParamSpec, make_param_specs

ROOT = Path(__file__).resolve().parent.parent.parent
FEW, MANY = 8, 4096


def numel_cost(param_spec: ParamSpec) -> float:
    return param_spec.numel


PARTITIONERS: dict[str, Any] = {
    "flat": FlatShards(4096),
    "whole": WholeParams(),
    "mixed": MixedPartitioner({0: numel_cost}, 4096),
}


class CountingFactory:
    """Stands in for a class and counts the instances it creates."""

    def __init__(self, cls: type) -> None:
        self._cls, self.count = cls, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._cls(*args)


def count_objects(kind: str, ranks: int) -> Counter[str]:
    """Count the objects that one rank creates to lay out 2,000 parameters in 400 buckets and find its own."""
    specs = [spec(i, (512 if i % 5 else 1024,), group=i % 2) for i in range(2000)]
    spans, param_shards = CountingFactory(Span), CountingFactory(layouts.ParamShard)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layouts, partition):
            patch.setattr(module, "Span", spans)
        patch.setattr(layouts, "ParamShard", param_shards)
        layout = PARTITIONERS[kind].extend(Layout.empty(ranks), specs)
        assert layout.params_owned_by(Rank(3))
        assert layout.digest
        assert kind == "whole" or len(layout.buckets) >= 400
    return Counter(spans=spans.count, param_shards=param_shards.count)


@sampled("kind", PARTITIONERS)
def test_object_count_does_not_grow_with_world_size(kind: str) -> None:
    few, many = count_objects(kind, FEW), count_objects(kind, MANY)
    assert many["param_shards"] <= few["param_shards"] <= 2000
    # Whole-parameter buckets have one span per rank with a non-empty shard, so at most one per parameter.
    assert many["spans"] <= few["spans"] + (0 if kind == "flat" else 3 * 2000)


@sampled("kind", PARTITIONERS)
def test_loads_are_computed_without_param_shards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PARTITIONERS[kind].extend(Layout.empty(MANY), [spec(i, (5000,), group=i % 2) for i in range(400)])
    monkeypatch.setattr(layouts, "ParamShard", None)
    assert sum(layout.numel_per_rank(trainable=True)) == 400 * 5000
    assert sum(compute_balance(layout, numel_cost).cost_per_rank) == pytest.approx(400 * 5000)


@deterministic_examples
@given(GROUPS, WORLD_SIZES, st.sampled_from(list(PARTITIONERS)), st.booleans())
def test_loads_match_sum_over_param_shards(groups: Groups, world_size: int, kind: str, trainable: bool) -> None:
    layout = PARTITIONERS[kind].extend(Layout.empty(world_size), make_param_specs(groups))
    expected = [0] * world_size
    for param_shard in (param_shard for bucket in layout.buckets for param_shard in bucket.param_shards):
        param_spec = layout.params[param_shard.param]
        if param_spec.trainable == trainable and param_spec.storage_numel:
            expected[param_shard.owner] += param_shard.in_param.length * param_spec.numel // param_spec.storage_numel
    assert layout.numel_per_rank(trainable=trainable) == expected


def test_empty_shards_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_shards = WholeParamShards({Rank(7): Span(0, 5), Rank(9): Span(5, 5), Rank(4000): Span(5, 8)}, MANY)
    monkeypatch.delattr(ExplicitShards, "_span_of")
    assert list(whole_shards.non_empty()) == [(7, Span(0, 5)), (4000, Span(5, 8))]


def test_non_empty_equal_shards() -> None:
    expected = [(0, Span(0, 2)), (1, Span(2, 4)), (2, Span(4, 5))]
    assert list(EqualShards(2, 4, 5).non_empty()) == expected


@pytest.mark.parametrize("ranks", [nccl.MAX_SEQUENTIAL_ADDS + 1, MANY])
def test_batched_sum_over_many_ranks(ranks: int) -> None:
    class CompletedWork:
        def wait(self) -> None:
            pass

    contributions, output = torch.randn(ranks, 5).bfloat16(), torch.empty(5)
    nccl._BatchedSumWork(contributions, CompletedWork(), output, 1 / ranks).wait()
    torch.testing.assert_close(output, contributions.double().mean(0).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(400)
@sampled("kind", ["shard", "rules", "dropin"])
def test_one_of_4096_ranks_updates_its_shard(kind: str) -> None:
    """2,000 parameters on 4,096 fake ranks, in a subprocess."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.test_rank_scaling", kind]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert result.returncode == 0, result.stderr


def main(kind: str, rank: int = 1234, steps: int = 3) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=MANY)
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(64 * (1 + i % 64),) if i % 2 else (8, 8 * (1 + i % 16)) for i in range(2000)]
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])
    plain = [torch.nn.Parameter(param.detach().clone()) for param in model]
    sharded, reference, weight = make_optimizers(kind, model, plain)
    for _ in range(steps):
        grads = [torch.randn_like(param) for param in plain]
        products = [(ours * grad).view(-1) for ours, grad in zip(model, grads, strict=True)]
        torch.cat(products).sum().backward()  # type: ignore[no-untyped-call]
        for theirs, grad in zip(plain, grads, strict=True):
            theirs.grad = grad * weight
        sharded.step()
        sharded.zero_grad()
        reference()
    own_shards = [
        param_shard for bucket in sharded.layout.buckets for param_shard in bucket.param_shards_of_rank(Rank(rank))
    ]
    assert own_shards
    for param, in_param, *_ in own_shards:
        ours, theirs = (params[param].detach().view(-1)[slice(*in_param)] for params in (model, plain))
        assert torch.equal(ours, theirs), f"parameter {param}: {(ours - theirs).abs().max()}"


def make_optimizers(
    kind: str, model: torch.nn.ParameterList, plain: list[torch.nn.Parameter]
) -> tuple[Any, Any, float]:
    """Return the sharded optimizer, the plain step, and this rank's weight in the average (others send nothing)."""
    if kind == "dropin":
        return (
            zeroshard.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW),
            torch.optim.AdamW(plain).step,
            1,
        )
    if kind == "shard":
        return zeroshard.shard(model, torch.optim.AdamW), torch.optim.AdamW(plain).step, 1 / MANY
    rules = [
        zeroshard.ParamRule(zeroshard.matrix_params(), torch.optim.SGD, partition=WholeParams(), momentum=0.9),
        zeroshard.ParamRule(zeroshard.remaining_params, torch.optim.AdamW),
    ]
    matrices = torch.optim.SGD([param for param in plain if param.dim() == 2], momentum=0.9)
    rest = torch.optim.AdamW([param for param in plain if param.dim() == 1])
    return zeroshard.shard(model, rules), lambda: (matrices.step(), rest.step()), 1 / MANY


if __name__ == "__main__":
    main(sys.argv[1])
