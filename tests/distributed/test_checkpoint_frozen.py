"""Frozen and never used parameters have no state: not after a save, not in its files, and not after a load."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    OPTIMIZER_FACTORIES,
    MakeOptimizer,
    first_ranks,
    one_bucket,
    plain,
    state_by_name,
    train,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    CheckpointError,
    ParamRule,
    RankFailedError,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.checkpoint.metadata import CheckpointMetadata

each_sharding = sampled("make_optimizer", OPTIMIZER_FACTORIES)


class AdapterModel(nn.Module):
    """A frozen base, two small matrices that are trained, and a large one that is used only if `use_late`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 3))
        self.late = nn.Parameter(torch.randn(3, 600))
        self.use_late = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down @ self.up
        return out + (out @ self.late).mean(1, keepdim=True) if self.use_late else out


def make_adapter_model(seed: int = 0) -> AdapterModel:
    torch.manual_seed(seed)
    return AdapterModel()


def allocated_state_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Return the bytes of memory that this rank holds for state, used or not."""
    tensors = [
        value for inner in optimizer.inner_optimizers for state in inner.state.values() for value in state.values()
    ]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def max_used_state_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Return the bytes of all state tensors, plus the padding that alignment may add."""
    tensors = [
        value for inner in optimizer.inner_optimizers for state in inner.state.values() for value in state.values()
    ]
    return sum(tensor.nbytes + 64 * len(optimizer.layout.params) for tensor in tensors)


def gather_state_by_name(
    optimizer: Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the full state by parameter name, on all ranks of the group."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return dict(sorted(state_by_name(optimizer, optimizer.state_dict(), model).items()))
    found = [optimizer.full_state_dict(to=0)]
    dist.broadcast_object_list(found, group_src=0, group=group)
    assert found[0] is not None
    return dict(sorted(state_by_name(optimizer, found[0], model).items()))


def list_saved_names(directory: Path, step: int) -> set[str]:
    return {str(entry.path[2]) for entry in CheckpointMetadata(directory / f"step-{step:09}").under("optim", "state")}


def train_stage(model: AdapterModel, optimizer: Optimizer, stage: int) -> None:
    """Train one of four stages.

    0: no step yet. 1: only the adapter. 2: all parameters, including the base. 3: all but `down`, frozen with state.
    """
    model.use_late = stage >= 2
    model.base.requires_grad_(stage >= 2)
    model.down.requires_grad_(stage != 3)
    if stage:
        train(model, optimizer, 2, first=10 * stage)


@ranks(1, 2, 4)
@each_sharding
def test_saved_state_matches_plain_optimizer(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    model, reference = make_adapter_model(), make_adapter_model()
    optimizer, reference_optimizer = make_optimizer(model, None), plain(reference)
    for stage in range(4):
        train_stage(model, optimizer, stage)
        train_stage(reference, reference_optimizer, stage)
        before = allocated_state_bytes(optimizer)
        checkpoint.save(tmp_path, step=stage, model=model, optimizer=optimizer)
        assert allocated_state_bytes(optimizer) == before
        state = gather_state_by_name(reference_optimizer, reference)
        assert list_saved_names(tmp_path, stage) == state.keys()
        for target in OPTIMIZER_FACTORIES:
            new_model = make_adapter_model(seed=5)
            new_optimizer = target(new_model, None)
            checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
            assert allocated_state_bytes(new_optimizer) <= max_used_state_bytes(new_optimizer)
            assert_same(gather_state_by_name(new_optimizer, new_model), state)
            # Parameters without state get their initial state now, as with the plain optimizer.
            oracle_model = make_adapter_model()
            oracle_model.load_state_dict(reference.state_dict())
            oracle_optimizer = plain(oracle_model)
            oracle_optimizer.load_state_dict(deepcopy(reference_optimizer.state_dict()))  # torch shares step counts
            for each_model, each_optimizer in ((new_model, new_optimizer), (oracle_model, oracle_optimizer)):
                each_model.use_late = True
                each_model.requires_grad_(True)
                train(each_model, each_optimizer, 2, first=50)
            assert_same(dict(new_model.named_parameters()), dict(oracle_model.named_parameters()))


def make_with_rules(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    muon, adamw = (
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.01),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.01),
    )
    return shard(model, [muon, adamw], process_group=group)


def make_with_masters(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(master_dtype=torch.float64)
    return shard(model, torch.optim.AdamW, process_group=group, config=config, lr=0.01)


def make_hybrid(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    shard_group_size = 2 if group is None else None
    return shard(model, torch.optim.AdamW, process_group=group, shard_group_size=shard_group_size, lr=0.01)


@ranks(4)
@pytest.mark.parametrize("make_optimizer", [make_with_rules, make_with_masters, make_hybrid, one_bucket])
def test_frozen_params_at_another_world_size(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    """Four ranks save; three load without passing `process_group`."""
    model = make_adapter_model()
    optimizer = make_optimizer(model, None)
    readers = first_ranks(3)
    for stage in range(4):
        train_stage(model, optimizer, stage)
        before, expected = allocated_state_bytes(optimizer), gather_state_by_name(optimizer, model)
        checkpoint.save(tmp_path, step=stage, model=model, optimizer=optimizer)
        assert allocated_state_bytes(optimizer) == before
        assert list_saved_names(tmp_path, stage) == expected.keys()
        if readers is not None:
            new_model = make_adapter_model(seed=5)
            new_optimizer = make_optimizer(new_model, readers)
            with pytest.warns(UserWarning, match="saved by 4 ranks and is loaded by 3"):
                checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
            assert allocated_state_bytes(new_optimizer) <= max_used_state_bytes(new_optimizer)
            assert_same(gather_state_by_name(new_optimizer, new_model, readers), expected)
        dist.barrier()


@ranks(1, 2, 3)
@each_sharding
def test_dcp_state_dict_covers_all_trainable_params(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    """As torch's helpers make it for a plain optimizer, but the optimizer keeps none of the added state."""
    model = make_adapter_model()
    optimizer = make_optimizer(model, None)
    model.down.requires_grad_(False)  # its neighbours in the bucket stay trainable
    for stage in (0, 1):
        if stage:
            train(model, optimizer, 2)
        before = allocated_state_bytes(optimizer)
        found: Any = get_optimizer_state_dict(model, optimizer)["state"]
        state_by_index = optimizer.sharded_state_dict()["state"]
        names = [name for name, _ in model.named_parameters()]
        for named_state in (found, {names[index]: state for index, state in state_by_index.items()}):
            local_names = {name for name, state in named_state.items() if state}
            assert {name for rank_names in ctx.gather(sorted(local_names)) for name in rank_names} == {"up", "late"}
        assert allocated_state_bytes(optimizer) == before
    dcp_save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    new_model = make_adapter_model(seed=5)
    new_optimizer = make_optimizer(new_model, None)
    new_model.down.requires_grad_(False)
    target = {"optim": get_optimizer_state_dict(new_model, new_optimizer)}
    dcp_load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(new_model, new_optimizer, target["optim"])
    state = gather_state_by_name(new_optimizer, new_model)
    assert state.keys() == {"up", "late"}
    assert_same(state["up"], gather_state_by_name(optimizer, model)["up"])
    new_model.load_state_dict(model.state_dict())
    for each_model, each_optimizer in ((model, optimizer), (new_model, new_optimizer)):
        each_model.use_late = True
        each_model.down.requires_grad_(True)
        train(each_model, each_optimizer, 2, first=5)
    assert_same(dict(new_model.named_parameters()), dict(model.named_parameters()))


@ranks(1, 2, 3)
def test_loading_state_that_is_still_at_its_initial_value(ctx: RankContext, tmp_path: Path) -> None:
    """Earlier versions and torch's helpers save such state of parameters that are used only later."""
    model = make_adapter_model()
    optimizer = one_bucket(model)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp_save(parts, checkpoint_id=tmp_path)
    new_model = make_adapter_model(seed=5)
    new_optimizer = one_bucket(new_model)
    new_model.late.requires_grad_(False)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert gather_state_by_name(new_optimizer, new_model).keys() == {"down", "up", "late"}
    new_model.late.requires_grad_(True)
    for each_model, each_optimizer in ((model, optimizer), (new_model, new_optimizer)):
        train_stage(each_model, each_optimizer, 1)
        train_stage(each_model, each_optimizer, 2)
    assert_same(dict(new_model.named_parameters()), dict(model.named_parameters()))


class QuantizedBaseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(5, 3)
        self.base = nn.Parameter(torch.randn(7).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.trained(x) * self.base.float().sum()
        return out


@ranks(1, 2, 3)
def test_frozen_float8_weight_round_trips(ctx: RankContext, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, new_model = QuantizedBaseModel(), QuantizedBaseModel()
    optimizer, new_optimizer = one_bucket(model), one_bucket(new_model)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert torch.equal(new_model.base.view(torch.uint8), model.base.view(torch.uint8))
    for each_model, each_optimizer in ((model, optimizer), (new_model, new_optimizer)):
        train(each_model, each_optimizer, 2, first=2)
    assert_same(dict(new_model.trained.named_parameters()), dict(model.trained.named_parameters()))
    assert optimizer.sharded_state_dict()["state"].keys() == {0, 1, 2}


@ranks(2, 3)
def test_state_missing_on_some_owners_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    """The first step fails on one rank."""
    model = make_adapter_model()
    model.use_late = True
    optimizer = one_bucket(model)

    def fail(*_: Any) -> None:
        if ctx.rank == 1:
            raise MemoryError("no memory for state")

    optimizer.optim.register_step_pre_hook(fail)
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer)
    with pytest.raises((MemoryError, RankFailedError), match="no memory for state"):
        train(model, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"only some owners of .*late.* have optimizer state"):
        checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000000"
    checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
