"""A share of state is divided anew, in whatever places it was cut before, and nothing is lost or added."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.optimizers import Keeper
from tests.support.oracles import assert_same
from zeroshard import CheckpointError
from zeroshard.layout.specs import ParamSpec
from zeroshard.state.copies import RECORDS, WEIGHTS, Rebuilding, portion, share_of
from zeroshard.state.dcp import CutTensor
from zeroshard.state.parcels import packed, unpacked
from zeroshard.state.records import MASTER, StateRecord
from zeroshard.units import Span


def spec_of(*shape: int, stride: tuple[int, ...] | None = None) -> ParamSpec:
    steps = stride or torch.empty(shape).stride()
    return ParamSpec(0, "weight", shape, steps, torch.float32, torch.device("cpu"), 0, True)


def spans(cuts: set[int], stop: int) -> list[Span]:
    ends = sorted({0, stop, *(cut % (stop + 1) for cut in cuts)})
    return [Span(start, end) for start, end in pairwise(ends)]


def share(spec: ParamSpec, span: Span, values: torch.Tensor) -> dict[str, Any]:
    piece = values[slice(*span)]
    state = {"step": torch.tensor(3.0), "exp_avg": 2 * piece}
    part = CutTensor(piece, spec.shape, spec.stride, span.start)
    return share_of([StateRecord(0, span, ("exp_avg",), state)], {0: part})


@given(st.sets(st.integers(0, 99), max_size=5), st.sets(st.integers(0, 99), max_size=5))
def test_any_cuts_to_any_others(old: set[int], new: set[int]) -> None:
    spec, values = spec_of(5, 7), torch.arange(35.0)
    shares = [share(spec, span, values) for span in spans(old, 35)]
    for mine in spans(new, 35):
        rebuilding = Rebuilding([spec], {0: mine})
        for it in reversed(shares):
            rebuilding.add(portion(it, [spec], {0: mine}))
        found = rebuilding.result()
        assert torch.equal(found.weights[0], values[slice(*mine)])
        cut = found.state[0]["exp_avg"]
        assert isinstance(cut, CutTensor)
        assert cut.span == mine
        assert torch.equal(cut.local, 2 * values[slice(*mine)])
        assert found.state[0]["step"].item() == 3
        assert list(found.state[0]) == ["step", "exp_avg"]


def test_a_whole_one_is_cut_in_the_order_of_its_memory() -> None:
    spec = spec_of(3, 4, stride=(1, 3))
    state = torch.arange(12.0).view(3, 4)
    whole = share_of([StateRecord(0, None, (), {"momentum": state})], {})
    found = portion(whole, [spec], {0: Span(2, 7)})[RECORDS][0]
    assert found[0] == [2, 7]
    assert found[3]["momentum"].tolist() == [8, 1, 5, 9, 2]
    assert portion(whole, [spec], {0: Span(0, 12)})[RECORDS][0][3]["momentum"] is state
    assert portion(whole, [spec], {}) == {RECORDS: {}, WEIGHTS: {}}


def test_the_most_precise_values_are_kept_and_once() -> None:
    spec, master = spec_of(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    part = CutTensor(master.bfloat16(), (4,), (1,), 0)
    held = share_of([StateRecord(0, Span(0, 4), (MASTER,), {MASTER: master})], {0: part})
    assert held[WEIGHTS] == {}
    rebuilding = Rebuilding([spec], {0: Span(1, 3)})
    rebuilding.add(portion(held, [spec], {0: Span(1, 3)}))
    assert rebuilding.result().weights[0].tolist() == [2, 3]


def test_what_is_not_all_there_is_refused() -> None:
    spec, values = spec_of(10), torch.arange(10.0)
    rebuilding = Rebuilding([spec], {0: Span(2, 8)})
    with pytest.raises(CheckpointError, match=r"no values of parameter 0 \(weight\)"):
        rebuilding.result()
    for span in (Span(0, 4), Span(5, 10)):
        rebuilding.add(portion(share(spec, span, values), [spec], {0: Span(2, 8)}))
    with pytest.raises(CheckpointError, match=r"of parameter 0 \(weight\) up to element 4 only, and not up to 8"):
        rebuilding.result()


def test_parcels_give_back_what_was_packed() -> None:
    """Whatever optimizers keep; and nothing of it is shared. Gaps in memory go."""
    param = torch.nn.Parameter(torch.randn(3, 4).t())
    param.grad = torch.ones_like(param)
    keeper = Keeper([param])
    keeper.step()
    value: dict[Any, Any] = {"state": dict(keeper.state[param]), 3: [param.detach(), torch.ones(2).bool()]}
    found = packed(value)
    param.data.zero_()
    expected = unpacked(found)
    assert not torch.equal(expected[3][0], value[3][0])
    value[3][0] = expected[3][0]
    assert_same(expected, value)
    gaps = torch.randn(4, 6)[:, ::2]
    assert torch.equal(unpacked(packed({"gaps": gaps}))["gaps"], gaps)
    assert len(found["flats"]) == len({it.dtype for it in found["flats"]})


def test_parcels_refuse_what_would_run_code() -> None:
    with pytest.raises(CheckpointError, match="cannot be sent safely"):
        packed({"optimizer": Keeper})
