"""`broadcast_object`, and the optimizer as a Python object: copying, pickling, its `state`."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad, Adam

from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same
from zeroshard import CheckpointError, RankFailedError, RankMismatchError, broadcast_object


def make_plain_values() -> dict[Any, Any]:
    return {
        "tensors": [torch.arange(6.0).view(2, 3), torch.tensor(3, dtype=torch.int8), torch.empty(0)],
        "ordered": OrderedDict(b=1, a=(2, None, True)),
        "text": "text",
        "bytes": b"\0\1",
        "numbers": [1, 0.1, 1j],
        "sparse": torch.eye(3).to_sparse(),
        "empty": {},
        7: torch.bfloat16,
    }


@ranks(1, 2, 3, 4)
def test_object_reaches_every_rank(ctx: RankContext) -> None:
    for source in range(ctx.world_size):
        values: list[Any] = [make_plain_values(), None, "text", torch.ones(2), [], 10**30]
        for value in values:
            sent = value if ctx.rank == source else object()
            found = broadcast_object(sent, source)
            assert_same(found, value)
            assert (found is sent) == (ctx.rank == source)


@ranks(2)
def test_received_tensors_are_on_the_given_device(ctx: RankContext) -> None:
    sent = {"deep": (torch.ones(2, 3), [torch.ones(1)])} if ctx.rank == 0 else None
    found = broadcast_object(sent, 0, device=torch.device("cpu" if ctx.rank == 0 else "meta"))
    tensor, (other,) = found["deep"]
    assert (tensor.shape, tensor.is_meta, other.is_meta) == ((2, 3), ctx.rank == 1, ctx.rank == 1)


@ranks(3, 4)
def test_source_is_a_global_rank_in_a_subgroup(ctx: RankContext) -> None:
    members = [1, ctx.world_size - 1]
    group = dist.new_group(members)
    if ctx.rank not in members:
        return
    for source in members:
        assert broadcast_object(f"from {ctx.rank}", source, group) == f"from {source}"
    with pytest.raises(ValueError, match="0"):
        broadcast_object("from no member", 0, group)


class Opaque:
    pass


@ranks(1, 2, 3)
def test_unsafe_objects_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    for source in range(ctx.world_size):
        for value, location in (
            (Opaque(), "the value"),
            ({"a": [1, Opaque()]}, r"\['a'\]\[1\]"),
            (lambda: 1, "function"),
        ):
            is_source = ctx.rank == source
            with pytest.raises(CheckpointError if is_source else RankFailedError, match=location) as caught:
                broadcast_object(value if is_source else None, source)
            assert "add_safe_globals" in str(caught.value)
            assert is_source or f"rank {source}" in str(caught.value)
        assert broadcast_object("afterwards", source) == "afterwards"


@ranks(2)
def test_different_sources_are_a_mismatch(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError, match="rank 0: src_rank=0; rank 1: src_rank=1"):
        broadcast_object("text", ctx.rank)


@ranks(1, 2)
def test_optimizer_cannot_be_copied_or_pickled(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    for attempt in (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda zero: torch.save(zero, io.BytesIO()),
        lambda zero: copy.deepcopy({"nested": [zero]}),
    ):
        with pytest.raises(TypeError, match=r"(?s)copied or pickled.*full_state_dict"):
            attempt(parity.zero)
    parity.train(1)


@ranks(1, 2, 3)
def test_state_contains_only_params_owned_by_this_rank(ctx: RankContext) -> None:
    for make in (partial(ParityRun, Adam), partial(ParityRun, Adagrad), partial(ParityRun, SGD, lr=0.1, momentum=0.9)):
        parity = make()
        parity.train(2)
        params = list(zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True))
        owned = {id(param) for group in parity.zero.optim.param_groups for param in group["params"]}
        for param, plain in params:
            assert (param in parity.zero.state) == (id(param) in owned)
            assert_same(dict(parity.zero.state[param]), parity.plain.state[plain] if id(param) in owned else {})
        assert parity.zero.state is parity.zero.optim.state
        owned_counts = ctx.gather(len(owned))
        assert sum(owned_counts) == len(params)
        # Reading the state of other ranks' parameters above does not change the full state dict.
        found = parity.zero.full_state_dict()
        if found is not None:
            assert_same(found, parity.plain.state_dict())
        parity.train(1)
