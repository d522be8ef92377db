"""What is made and looked at does not grow with the number of ranks: counted, not timed."""

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
from tests.unit.test_partition import GROUPS, WORLD_SIZES, Groups, steadily
from zeroshard._types import Rank, Span
from zeroshard.comm import nccl
from zeroshard.comm.transport import non_empty_shards
from zeroshard.layout import layout as layouts
from zeroshard.layout import layout as shards
from zeroshard.layout import partition
from zeroshard.layout.layout import EqualShards, ExplicitShards, Layout, WholeParamShards
from zeroshard.layout.partition import FlatShards, MixedPartitioner, WholeParams, compute_balance
from zeroshard.layout.spec import ParamSpec, make_param_specs

ROOT = Path(__file__).resolve().parent.parent.parent
FEW, MANY = 8, 4096


def costs(one: ParamSpec) -> float:
    return one.numel


PARTITIONS: dict[str, Any] = {
    "cut": FlatShards(4096),
    "dealt": WholeParams(),
    "both": MixedPartitioner({0: costs}, 4096),
}


class Counting:
    """Stands in for a class and counts what is made."""

    def __init__(self, made: type) -> None:
        self._made, self.count = made, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._made(*args)


def made_for(kind: str, ranks: int) -> Counter[str]:
    """Objects that one rank makes to lay out 400 buckets of 2,000 parameters and find its own, by class."""
    given_ = [spec(i, (512 if i % 5 else 1024,), group=i % 2) for i in range(2000)]
    spans, pieces = Counting(Span), Counting(layouts.ParamShard)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layouts, partition, shards):
            patch.setattr(module, "Span", spans)
        patch.setattr(layouts, "ParamShard", pieces)
        layout = PARTITIONS[kind].extend(Layout.empty(ranks), given_)
        assert layout.params_owned_by(Rank(3))
        assert layout.digest
        assert kind == "dealt" or len(layout.buckets) >= 400
    return Counter(spans=spans.count, pieces=pieces.count)


@sampled("kind", PARTITIONS)
def test_no_more_is_made_for_more_ranks(kind: str) -> None:
    few, many = made_for(kind, FEW), made_for(kind, MANY)
    assert many["pieces"] <= few["pieces"] <= 2000
    # Shards of dealt buckets have one span for each rank that has something, so no more than parameters.
    assert many["spans"] <= few["spans"] + (0 if kind == "cut" else 3 * 2000)


@sampled("kind", PARTITIONS)
def test_loads_are_found_without_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PARTITIONS[kind].extend(Layout.empty(MANY), [spec(i, (5000,), group=i % 2) for i in range(400)])
    monkeypatch.setattr(layouts, "ParamShard", None)
    assert sum(layout.numel_per_rank(trainable=True)) == 400 * 5000
    assert sum(compute_balance(layout, costs).cost_per_rank) == pytest.approx(400 * 5000)


@steadily
@given(GROUPS, WORLD_SIZES, st.sampled_from(list(PARTITIONS)), st.booleans())
def test_loads_are_those_of_all_pieces(groups: Groups, world_size: int, kind: str, trainable: bool) -> None:
    layout = PARTITIONS[kind].extend(Layout.empty(world_size), make_param_specs(groups))
    expected = [0] * world_size
    for piece in (piece for bucket in layout.buckets for piece in bucket.param_shards):
        one = layout.params[piece.param]
        if one.trainable == trainable and one.storage_numel:
            expected[piece.owner] += piece.in_param.length * one.numel // one.storage_numel
    assert layout.numel_per_rank(trainable=trainable) == expected


def test_ranks_that_have_nothing_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt = WholeParamShards({Rank(7): Span(0, 5), Rank(9): Span(5, 5), Rank(4000): Span(5, 8)}, MANY)
    monkeypatch.delattr(ExplicitShards, "_span_of")
    assert list(non_empty_shards(dealt)) == [(7, Span(0, 5)), (4000, Span(5, 8))]


def test_shards_of_any_kind_tell_which_have_elements() -> None:
    equal = EqualShards(2, 4, 5)
    expected = [(0, Span(0, 2)), (1, Span(2, 4)), (2, Span(4, 5))]
    assert list(non_empty_shards(equal)) == list(non_empty_shards(list(equal))) == expected


@pytest.mark.parametrize("ranks", [nccl.MAX_SEQUENTIAL_ADDS + 1, MANY])
def test_slices_of_many_ranks_are_added_by_one_call(ranks: int) -> None:
    class Arrived:
        def wait(self) -> None:
            pass

    rows, into = torch.randn(ranks, 5).bfloat16(), torch.empty(5)
    nccl._BatchedSumWork(rows, Arrived(), into, 1 / ranks).wait()
    torch.testing.assert_close(into, rows.double().mean(0).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(400)
@sampled("kind", ["shard", "rules", "dropin"])
def test_one_of_thousands_of_ranks_updates_its_own(kind: str) -> None:
    """2,000 parameters on 4,096 ranks that are not there, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.test_rank_scaling", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr


def main(kind: str, rank: int = 1234, steps: int = 3) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=MANY)
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(64 * (1 + i % 64),) if i % 2 else (8, 8 * (1 + i % 16)) for i in range(2000)]
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])
    plain = [torch.nn.Parameter(param.detach().clone()) for param in model]
    sharded, reference, share = optimizers(kind, model, plain)
    for _ in range(steps):
        grads = [torch.randn_like(param) for param in plain]
        products = [(ours * grad).view(-1) for ours, grad in zip(model, grads, strict=True)]
        torch.cat(products).sum().backward()  # type: ignore[no-untyped-call]
        for theirs, grad in zip(plain, grads, strict=True):
            theirs.grad = grad * share
        sharded.step()
        sharded.zero_grad()
        reference()
    mine = [piece for bucket in sharded.layout.buckets for piece in bucket.param_shards_of_rank(Rank(rank))]
    assert mine
    for param, in_param, *_ in mine:
        ours, theirs = (params[param].detach().view(-1)[slice(*in_param)] for params in (model, plain))
        assert torch.equal(ours, theirs), f"parameter {param}: {(ours - theirs).abs().max()}"


def optimizers(kind: str, model: torch.nn.ParameterList, plain: list[torch.nn.Parameter]) -> tuple[Any, Any, float]:
    """The sharded one, the step of plain ones, and the share of this rank in the average: no other sends anything."""
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
    matrices = torch.optim.SGD([it for it in plain if it.dim() == 2], momentum=0.9)
    rest = torch.optim.AdamW([it for it in plain if it.dim() == 1])
    return zeroshard.shard(model, rules), lambda: (matrices.step(), rest.step()), 1 / MANY


if __name__ == "__main__":
    main(sys.argv[1])
