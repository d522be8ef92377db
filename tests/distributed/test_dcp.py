"""torch's own ways to save and load, on our optimizers: DCP, its `Stateful`, and the helpers around it.

Much here is private in torch. What fails in this file after an update of torch is to be mended in `state/dcp.py` and
`state/callers.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, WAYS, Way, assert_same_state, by_name, flat, net, plain, train
from tests.support.tiers import sampled
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.state.shard_tensor import ShardTensor

each_sharding = sampled("way", WAYS)
FULL_STATE_DICT = StateDictOptions(full_state_dict=True)


def make_trained(way: Way, steps: int = 3) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = net()
    optimizer = way(model, None)
    train(model, optimizer, steps)
    return model, optimizer


def train_reference(steps: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    """The plain optimizer's state, by name."""
    model = net()
    optimizer = plain(model)
    train(model, optimizer, steps)
    return model, by_name(optimizer, optimizer.state_dict(), model)


def get_dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's helpers say is to be saved."""
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def collect_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in collect_tensors(part)]


@ranks(1, 2, 4)
@each_sharding
def test_full_state_dict_matches_plain_optimizer(ctx: RankContext, way: Way) -> None:
    model, optimizer = make_trained(way)
    _, expected = train_reference()
    found: Any = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
    assert_same_state(found["state"], expected)
    assert not any(isinstance(tensor, ShardTensor) for tensor in collect_tensors(found))
    plain_one = net()
    other: Any = get_optimizer_state_dict(plain_one, plain(plain_one), options=FULL_STATE_DICT)
    assert found["param_groups"][0]["params"] == other["param_groups"][0]["params"]


@ranks(1, 2, 3)
@each_sharding
def test_cpu_offloaded_full_state_dict_is_on_rank0_only(ctx: RankContext, way: Way) -> None:
    model, optimizer = make_trained(way)
    found: Any = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(found) == (ctx.rank == 0)


@ranks(1, 2, 3, 4)
@each_sharding
def test_dcp_round_trip_between_shardings(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model, optimizer = make_trained(way)
    expected = optimizer.full_state_dict(to=0)
    dcp_save(get_dcp_state(model, optimizer), checkpoint_id=tmp_path)
    for target in WAYS:
        again = net(seed=7)
        into = target(again, None)
        parts = get_dcp_state(again, into)
        dcp_load(parts, checkpoint_id=tmp_path)
        set_state_dict(again, into, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
        found = into.full_state_dict(to=0)
        if expected is not None and found is not None:
            assert_same_state(by_name(into, found, again), by_name(optimizer, expected, model))
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@ranks(2, 3)
@each_sharding
def test_flattened_state_dict_round_trip(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = make_trained(way)
    expected = optimizer.full_state_dict(to=0)
    saved: Any = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_save({"optim": saved}, checkpoint_id=tmp_path)
    again = net(seed=7)
    into = way(again, None)
    parts: Any = {"optim": get_optimizer_state_dict(again, into, options=options)}
    dcp_load(parts, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, into, parts["optim"], options=options)
    found = into.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(by_name(into, found, again), by_name(optimizer, expected, model))


@ranks(1, 2, 3)
@each_sharding
@sampled("broadcast", [False, True])
def test_full_state_dict_loads_on_all_ranks(ctx: RankContext, way: Way, broadcast: bool) -> None:
    """From all ranks, or from rank 0 alone."""
    odd = not broadcast  # torch sends transposed tensors in the wrong order
    model = net(odd=odd)
    optimizer = plain(model)
    train(model, optimizer, 3)
    expected = by_name(optimizer, optimizer.state_dict(), model)
    full: Any = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
    # Not strict: like torch's, a plain optimizer has no state of a parameter that never had a gradient.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    again = net(seed=7, odd=odd)
    into = way(again, None)
    set_optimizer_state_dict(again, into, full if ctx.rank == 0 or not broadcast else {}, options=options)
    found = into.full_state_dict(to=0)
    if found is not None:
        assert_same_state(by_name(into, found, again), expected)


@ranks(1, 2, 3)
@each_sharding
@sampled("background", [False, True])
def test_dcp_treats_optimizer_as_stateful(ctx: RankContext, tmp_path: Path, way: Way, background: bool) -> None:
    """DCP calls `state_dict` and `load_state_dict` itself."""
    _, optimizer = make_trained(way)
    expected = optimizer.full_state_dict(to=0)
    if background:
        future: Any = async_save({"optim": optimizer}, checkpoint_id=tmp_path)
        future.result()
    else:
        dcp_save({"optim": optimizer}, checkpoint_id=tmp_path)
    into = way(net(seed=7), None)
    dcp_load({"optim": into}, checkpoint_id=tmp_path)
    found = into.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(found["state"], expected["state"])


@ranks(1, 2, 3)
@each_sharding
def test_get_state_dict_has_no_side_effects(ctx: RankContext, way: Way) -> None:
    """No step is faked, no gradient is lost, and what follows is what would have followed."""
    model, asked = net(), net()
    optimizer, other = way(model, None), way(asked, None)
    for steps in (0, 2):
        train(model, optimizer, steps)
        train(asked, other, steps)
        before = [param.detach().clone() for param in asked.parameters()]
        get_optimizer_state_dict(asked, other)
        get_optimizer_state_dict(asked, other, options=FULL_STATE_DICT)
        assert all(map(torch.equal, before, asked.parameters()))
        assert all(param.grad is None for param in asked.parameters())
    train(model, optimizer, 3, first=2)
    train(asked, other, 3, first=2)
    assert all(map(torch.equal, model.parameters(), asked.parameters()))


@ranks(2)
def test_get_state_dict_keeps_pending_gradients(ctx: RankContext) -> None:
    model, asked = net(), net()
    optimizer, other = flat(model, None), flat(asked, None)
    for each, its in ((model, optimizer), (asked, other)):
        torch.autograd.backward(each(torch.ones(4, 5)).square().mean())
        if each is asked:
            get_optimizer_state_dict(asked, other)
        its.step()
    assert all(map(torch.equal, model.parameters(), asked.parameters()))


@ranks(2, 3, 4)
def test_round_trip_through_fsdp2(ctx: RankContext, tmp_path: Path) -> None:
    """Under the same names, whoever divided it how."""
    model = net(odd=False)
    optimizer = flat(model, None)
    train(model, optimizer, 3)
    expected = optimizer.full_state_dict(to=0)
    dcp_save(get_dcp_state(model, optimizer), checkpoint_id=tmp_path / "ours")

    theirs = net(seed=3, odd=False)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), **ADAMW)
    parts = get_dcp_state(theirs, their_optimizer)
    dcp_load(parts, checkpoint_id=tmp_path / "ours")
    set_state_dict(theirs, their_optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    full: Any = get_optimizer_state_dict(theirs, their_optimizer, options=FULL_STATE_DICT)
    if expected is not None:
        assert_same_state(full["state"], by_name(optimizer, expected, model))

    dcp_save(
        get_dcp_state(theirs, their_optimizer),
        checkpoint_id=tmp_path / "theirs",
    )
    again = net(seed=4, odd=False)
    into = flat(again, None)
    parts = get_dcp_state(again, into)
    dcp_load(parts, checkpoint_id=tmp_path / "theirs")
    set_state_dict(again, into, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    found = into.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(by_name(into, found, again), by_name(optimizer, expected, model))


def test_shard_tensor_supports_only_copy_move_and_save() -> None:
    part = ShardTensor(torch.arange(4.0), (3, 2), (2, 1), 1)
    assert part.shape == (3, 2)
    assert "1 to 5" in repr(part)
    for copied in (copy.deepcopy(part), part.clone(), part.detach(), part.to(torch.float64)):
        assert isinstance(copied, ShardTensor)
        assert copied.span == part.span
        assert torch.equal(copied.local.float(), part.local)
    with pytest.raises(NotImplementedError, match="made to be saved and loaded only"):
        part + 1
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in part.__create_chunk_list__()]
    assert boxes == [((0, 1), (1, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 1))]
