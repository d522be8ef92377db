"""torch's own functions to save and load, on sharded optimizers: DCP, its `Stateful`, and the state dict helpers.

Much of this is private in torch. If a test in this file fails after an update of torch, fix `state/dcp_compat.py`.
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
from tests.support.checkpoints import (
    ADAMW,
    OPTIMIZER_FACTORIES,
    MakeOptimizer,
    assert_same_state,
    flat,
    net,
    plain,
    state_by_name,
    train,
)
from tests.support.tiers import sampled
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.state.shard_tensor import ShardTensor

each_sharding = sampled("make_optimizer", OPTIMIZER_FACTORIES)
FULL_STATE_DICT = StateDictOptions(full_state_dict=True)


def make_trained(make_optimizer: MakeOptimizer, steps: int = 3) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = net()
    optimizer = make_optimizer(model, None)
    train(model, optimizer, steps)
    return model, optimizer


def train_reference(steps: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    """Train the plain optimizer; return the model and the state by parameter name."""
    model = net()
    optimizer = plain(model)
    train(model, optimizer, steps)
    return model, state_by_name(optimizer, optimizer.state_dict(), model)


def get_dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dicts that torch's helpers make for saving."""
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def collect_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in collect_tensors(part)]


@ranks(1, 2, 4)
@each_sharding
def test_full_state_dict_matches_plain_optimizer(ctx: RankContext, make_optimizer: MakeOptimizer) -> None:
    model, optimizer = make_trained(make_optimizer)
    _, expected = train_reference()
    found: Any = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
    assert_same_state(found["state"], expected)
    assert not any(isinstance(tensor, ShardTensor) for tensor in collect_tensors(found))
    plain_model = net()
    plain_state: Any = get_optimizer_state_dict(plain_model, plain(plain_model), options=FULL_STATE_DICT)
    assert found["param_groups"][0]["params"] == plain_state["param_groups"][0]["params"]


@ranks(1, 2, 3)
@each_sharding
def test_cpu_offloaded_full_state_dict_is_on_rank0_only(ctx: RankContext, make_optimizer: MakeOptimizer) -> None:
    model, optimizer = make_trained(make_optimizer)
    found: Any = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(found) == (ctx.rank == 0)


@ranks(1, 2, 3, 4)
@each_sharding
def test_dcp_round_trip_between_shardings(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    model, optimizer = make_trained(make_optimizer)
    expected = optimizer.full_state_dict(to=0)
    dcp_save(get_dcp_state(model, optimizer), checkpoint_id=tmp_path)
    for target in OPTIMIZER_FACTORIES:
        new_model = net(seed=7)
        new_optimizer = target(new_model, None)
        parts = get_dcp_state(new_model, new_optimizer)
        dcp_load(parts, checkpoint_id=tmp_path)
        set_state_dict(new_model, new_optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
        found = new_optimizer.full_state_dict(to=0)
        if expected is not None and found is not None:
            assert_same_state(state_by_name(new_optimizer, found, new_model), state_by_name(optimizer, expected, model))
        for ours, theirs in zip(new_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@ranks(2, 3)
@each_sharding
def test_flattened_state_dict_round_trip(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = make_trained(make_optimizer)
    expected = optimizer.full_state_dict(to=0)
    saved: Any = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_save({"optim": saved}, checkpoint_id=tmp_path)
    new_model = net(seed=7)
    new_optimizer = make_optimizer(new_model, None)
    parts: Any = {"optim": get_optimizer_state_dict(new_model, new_optimizer, options=options)}
    dcp_load(parts, checkpoint_id=tmp_path)
    set_optimizer_state_dict(new_model, new_optimizer, parts["optim"], options=options)
    found = new_optimizer.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(state_by_name(new_optimizer, found, new_model), state_by_name(optimizer, expected, model))


@ranks(1, 2, 3)
@each_sharding
@sampled("broadcast", [False, True])
def test_full_state_dict_loads_on_all_ranks(ctx: RankContext, make_optimizer: MakeOptimizer, broadcast: bool) -> None:
    """From the dict of each rank, or from that of rank 0 only."""
    odd = not broadcast  # torch sends transposed tensors in the wrong order
    model = net(odd=odd)
    optimizer = plain(model)
    train(model, optimizer, 3)
    expected = state_by_name(optimizer, optimizer.state_dict(), model)
    full: Any = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
    # Not strict: a plain optimizer has no state of a parameter that never had a gradient.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    new_model = net(seed=7, odd=odd)
    new_optimizer = make_optimizer(new_model, None)
    set_optimizer_state_dict(new_model, new_optimizer, full if ctx.rank == 0 or not broadcast else {}, options=options)
    found = new_optimizer.full_state_dict(to=0)
    if found is not None:
        assert_same_state(state_by_name(new_optimizer, found, new_model), expected)


@ranks(1, 2, 3)
@each_sharding
@sampled("in_background", [False, True])
def test_dcp_treats_optimizer_as_stateful(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer, in_background: bool
) -> None:
    """DCP calls `state_dict` and `load_state_dict` itself."""
    _, optimizer = make_trained(make_optimizer)
    expected = optimizer.full_state_dict(to=0)
    if in_background:
        future: Any = async_save({"optim": optimizer}, checkpoint_id=tmp_path)
        future.result()
    else:
        dcp_save({"optim": optimizer}, checkpoint_id=tmp_path)
    new_optimizer = make_optimizer(net(seed=7), None)
    dcp_load({"optim": new_optimizer}, checkpoint_id=tmp_path)
    found = new_optimizer.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(found["state"], expected["state"])


@ranks(1, 2, 3)
@each_sharding
def test_get_state_dict_has_no_side_effects(ctx: RankContext, make_optimizer: MakeOptimizer) -> None:
    """No fake step changes parameters, no gradients stay behind, and training goes on as without the calls."""
    model, queried = net(), net()
    optimizer, queried_optimizer = make_optimizer(model, None), make_optimizer(queried, None)
    for steps in (0, 2):
        train(model, optimizer, steps)
        train(queried, queried_optimizer, steps)
        before = [param.detach().clone() for param in queried.parameters()]
        get_optimizer_state_dict(queried, queried_optimizer)
        get_optimizer_state_dict(queried, queried_optimizer, options=FULL_STATE_DICT)
        assert all(map(torch.equal, before, queried.parameters()))
        assert all(param.grad is None for param in queried.parameters())
    train(model, optimizer, 3, first=2)
    train(queried, queried_optimizer, 3, first=2)
    assert all(map(torch.equal, model.parameters(), queried.parameters()))


@ranks(2)
def test_get_state_dict_keeps_pending_gradients(ctx: RankContext) -> None:
    model, queried = net(), net()
    optimizer, queried_optimizer = flat(model, None), flat(queried, None)
    for each_model, each_optimizer in ((model, optimizer), (queried, queried_optimizer)):
        torch.autograd.backward(each_model(torch.ones(4, 5)).square().mean())
        if each_model is queried:
            get_optimizer_state_dict(queried, queried_optimizer)
        each_optimizer.step()
    assert all(map(torch.equal, model.parameters(), queried.parameters()))


@ranks(2, 3, 4)
def test_round_trip_through_fsdp2(ctx: RankContext, tmp_path: Path) -> None:
    """State has the same names however the model is sharded."""
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
        assert_same_state(full["state"], state_by_name(optimizer, expected, model))

    dcp_save(
        get_dcp_state(theirs, their_optimizer),
        checkpoint_id=tmp_path / "theirs",
    )
    new_model = net(seed=4, odd=False)
    new_optimizer = flat(new_model, None)
    parts = get_dcp_state(new_model, new_optimizer)
    dcp_load(parts, checkpoint_id=tmp_path / "theirs")
    set_state_dict(new_model, new_optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    found = new_optimizer.full_state_dict(to=0)
    if expected is not None and found is not None:
        assert_same_state(state_by_name(new_optimizer, found, new_model), state_by_name(optimizer, expected, model))


def test_shard_tensor_supports_only_copy_move_and_save() -> None:
    shard_tensor = ShardTensor(torch.arange(4.0), (3, 2), (2, 1), 1)
    assert shard_tensor.shape == (3, 2)
    assert "1 to 5" in repr(shard_tensor)
    for copied in (
        copy.deepcopy(shard_tensor),
        shard_tensor.clone(),
        shard_tensor.detach(),
        shard_tensor.to(torch.float64),
    ):
        assert isinstance(copied, ShardTensor)
        assert copied.span == shard_tensor.span
        assert torch.equal(copied.local.float(), shard_tensor.local)
    with pytest.raises(NotImplementedError, match="can only be saved and loaded"):
        shard_tensor + 1
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in shard_tensor.__create_chunk_list__()]
    assert chunks == [((0, 1), (1, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 1))]
