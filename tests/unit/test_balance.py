"""Balance of memory and compute across ranks."""

import pytest

from tests.support.oracles import spec, specs
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import Balance, FlatShards, MixedPartitioner, WholeParams, compute_balance
from zeroshard.layout.spec import ParamSpec


def numel(param_spec: ParamSpec) -> float:
    return param_spec.numel


def test_imbalance_is_max_over_mean() -> None:
    balance = Balance(numel_per_rank=(6, 2, 4), cost_per_rank=(1.0, 1.0, 1.0))
    assert balance.memory_imbalance == pytest.approx(1.5)
    assert balance.compute_imbalance == 1.0


@pytest.mark.parametrize("ranks", [1, 4])
def test_empty_layout_is_balanced(ranks: int) -> None:
    balance = Balance((0,) * ranks, (0.0,) * ranks)
    assert balance.memory_imbalance == balance.compute_imbalance == 1.0
    assert compute_balance(Layout.empty(ranks), numel) == balance


def test_whole_params_count_for_their_owner() -> None:
    layout = WholeParams().extend(Layout.empty(2), specs([5, 3, 1]))
    assert compute_balance(layout, numel) == Balance((5, 4), (5.0, 4.0))
    assert compute_balance(layout, lambda param_spec: param_spec.numel**2) == Balance((5, 4), (25.0, 10.0))


def test_cost_of_sharded_param_is_split_by_numel() -> None:
    layout = FlatShards().extend(Layout.empty(4), [spec(0, (6,)), spec(1, (2,))])
    balance = compute_balance(layout, lambda param_spec: 30.0 if param_spec.index == 0 else 1.0)
    assert balance.numel_per_rank == (2, 2, 2, 2)
    assert sorted(balance.cost_per_rank) == pytest.approx([1, 10, 10, 10])


def test_frozen_params_are_not_counted() -> None:
    frozen = specs([100], trainable=False)
    layout = WholeParams().extend(Layout.empty(2), [*frozen, *specs([4, 4], first=1)])
    assert compute_balance(layout, numel) == Balance((4, 4), (4.0, 4.0))


def test_empty_params() -> None:
    layout = FlatShards().extend(Layout.empty(2), [spec(0, (0, 3)), spec(1, (4,))])
    assert compute_balance(layout, numel) == Balance((2, 2), (2.0, 2.0))


def test_mixed_partitioner_balances_both_kinds_of_shards() -> None:
    matrices = [spec(index, (size, 10), group=0) for index, size in enumerate((3, 2, 1))]
    others = [spec(3, (40,), group=1)]
    layout = MixedPartitioner({0: numel}).extend(Layout.empty(2), [*matrices, *others])
    assert compute_balance(layout, numel) == Balance((50, 50), (50.0, 50.0))
