"""Peer snapshots are resharded between arbitrary splits without losing or duplicating elements."""

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
from zeroshard._types import Span
from zeroshard.layout.spec import ParamSpec
from zeroshard.peer_checkpoint.snapshot import STATE_KEY, WEIGHTS_KEY, ShardAssembler, make_shard_data, slice_shard
from zeroshard.state.serialization import pack_into_buffers, unpack_from_buffers
from zeroshard.state.shard_tensor import ShardTensor
from zeroshard.state.state_dict import MASTER_KEY, StateShard


def make_spec(*shape: int, stride: tuple[int, ...] | None = None) -> ParamSpec:
    strides = stride or torch.empty(shape).stride()
    return ParamSpec(0, "weight", shape, strides, torch.float32, torch.device("cpu"), 0, True)


def make_spans(cuts: set[int], stop: int) -> list[Span]:
    bounds = sorted({0, stop, *(cut % (stop + 1) for cut in cuts)})
    return [Span(start, end) for start, end in pairwise(bounds)]


def make_shard(spec: ParamSpec, span: Span, values: torch.Tensor) -> dict[str, Any]:
    local = values[slice(*span)]
    state = {"step": torch.tensor(3.0), "exp_avg": 2 * local}
    shard_tensor = ShardTensor(local, spec.shape, spec.stride, span.start)
    return make_shard_data([StateShard(0, span, ("exp_avg",), state)], {0: shard_tensor})


@given(st.sets(st.integers(0, 99), max_size=5), st.sets(st.integers(0, 99), max_size=5))
def test_reshard_between_arbitrary_splits(old_cuts: set[int], new_cuts: set[int]) -> None:
    spec, values = make_spec(5, 7), torch.arange(35.0)
    shards = [make_shard(spec, span, values) for span in make_spans(old_cuts, 35)]
    for span in make_spans(new_cuts, 35):
        assembler = ShardAssembler([spec], {0: span})
        for shard in reversed(shards):
            assembler.add(slice_shard(shard, [spec], {0: span}))
        assembled = assembler.assemble()
        assert torch.equal(assembled.weights[0], values[slice(*span)])
        exp_avg = assembled.state[0]["exp_avg"]
        assert isinstance(exp_avg, ShardTensor)
        assert exp_avg.span == span
        assert torch.equal(exp_avg.local, 2 * values[slice(*span)])
        assert assembled.state[0]["step"].item() == 3
        assert list(assembled.state[0]) == ["step", "exp_avg"]


def test_unsharded_state_is_sliced_in_memory_order() -> None:
    spec = make_spec(3, 4, stride=(1, 3))
    state = torch.arange(12.0).view(3, 4)
    full = make_shard_data([StateShard(0, None, (), {"momentum": state})], {})
    entry = slice_shard(full, [spec], {0: Span(2, 7)})[STATE_KEY][0]
    assert entry[0] == [2, 7]
    assert entry[3]["momentum"].tolist() == [8, 1, 5, 9, 2]
    assert slice_shard(full, [spec], {0: Span(0, 12)})[STATE_KEY][0][3]["momentum"] is state
    assert slice_shard(full, [spec], {}) == {STATE_KEY: {}, WEIGHTS_KEY: {}}


def test_master_weights_are_stored_instead_of_params() -> None:
    spec, master = make_spec(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    shard_tensor = ShardTensor(master.bfloat16(), (4,), (1,), 0)
    shard = make_shard_data([StateShard(0, Span(0, 4), (MASTER_KEY,), {MASTER_KEY: master})], {0: shard_tensor})
    assert shard[WEIGHTS_KEY] == {}
    assembler = ShardAssembler([spec], {0: Span(1, 3)})
    assembler.add(slice_shard(shard, [spec], {0: Span(1, 3)}))
    assert assembler.assemble().weights[0].tolist() == [2, 3]


def test_missing_elements_are_rejected() -> None:
    spec, values = make_spec(10), torch.arange(10.0)
    assembler = ShardAssembler([spec], {0: Span(2, 8)})
    with pytest.raises(CheckpointError, match=r"no values of parameter 0 \(weight\)"):
        assembler.assemble()
    for span in (Span(0, 4), Span(5, 10)):
        assembler.add(slice_shard(make_shard(spec, span, values), [spec], {0: Span(2, 8)}))
    with pytest.raises(CheckpointError, match=r"of parameter 0 \(weight\) are incomplete: expected .* up to 8, got 4"):
        assembler.assemble()


def test_pack_and_unpack_round_trip() -> None:
    """Any optimizer state survives packing, shares no memory with its source and loses gaps between elements."""
    param = torch.nn.Parameter(torch.randn(3, 4).t())
    param.grad = torch.ones_like(param)
    keeper = Keeper([param])
    keeper.step()
    value: dict[Any, Any] = {"state": dict(keeper.state[param]), 3: [param.detach(), torch.ones(2).bool()]}
    packed = pack_into_buffers(value)
    param.data.zero_()
    unpacked = unpack_from_buffers(packed)
    assert not torch.equal(unpacked[3][0], value[3][0])
    value[3][0] = unpacked[3][0]
    assert_same(unpacked, value)
    gaps = torch.randn(4, 6)[:, ::2]
    assert torch.equal(unpack_from_buffers(pack_into_buffers({"gaps": gaps}))["gaps"], gaps)
    assert len(packed["flats"]) == len({flat.dtype for flat in packed["flats"]})


def test_pack_rejects_unsafe_types() -> None:
    with pytest.raises(CheckpointError, match="cannot be sent safely"):
        pack_into_buffers({"optimizer": Keeper})
