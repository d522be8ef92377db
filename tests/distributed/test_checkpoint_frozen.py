"""Parameters that are frozen or were never used have no state: not after a save, not in its files, not after a load."""

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
from tests.support.checkpoints import WAYS, Way, by_name, first_ranks, one_bucket, plain, train
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

each_sharding = sampled("way", WAYS)


class AdapterModel(nn.Module):
    """A frozen base, two small matrices that are trained, and a large one that is used only if `deep`."""

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
    """Bytes of memory that this rank keeps for state, used or not."""
    tensors = [it for inner in optimizer.inner_optimizers for state in inner.state.values() for it in state.values()]
    return sum({it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors}.values())


def max_used_state_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of state tensors, with what alignment may add."""
    tensors = [it for inner in optimizer.inner_optimizers for state in inner.state.values() for it in state.values()]
    return sum(it.nbytes + 64 * len(optimizer.layout.params) for it in tensors)


def gather_state_by_name(
    optimizer: Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """By name, on all ranks of the group."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return dict(sorted(by_name(optimizer, optimizer.state_dict(), model).items()))
    found = [optimizer.full_state_dict(to=0)]
    dist.broadcast_object_list(found, group_src=0, group=group)
    assert found[0] is not None
    return dict(sorted(by_name(optimizer, found[0], model).items()))


def list_saved_names(folder: Path, step: int) -> set[str]:
    return {str(entry.path[2]) for entry in CheckpointMetadata(folder / f"step-{step:09}").under("optim", "state")}


def train_stage(model: AdapterModel, optimizer: Optimizer, stage: int) -> None:
    """Nothing yet; the adapter alone; everything, the base too; without `down`, which has state and is frozen."""
    model.use_late = stage >= 2
    model.base.requires_grad_(stage >= 2)
    model.down.requires_grad_(stage != 3)
    if stage:
        train(model, optimizer, 2, first=10 * stage)


@ranks(1, 2, 4)
@each_sharding
def test_saved_state_matches_plain_optimizer(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model, reference = make_adapter_model(), make_adapter_model()
    optimizer, expected = way(model, None), plain(reference)
    for stage in range(4):
        train_stage(model, optimizer, stage)
        train_stage(reference, expected, stage)
        before = allocated_state_bytes(optimizer)
        checkpoint.save(tmp_path, step=stage, model=model, optimizer=optimizer)
        assert allocated_state_bytes(optimizer) == before
        state = gather_state_by_name(expected, reference)
        assert list_saved_names(tmp_path, stage) == state.keys()
        for target in WAYS:
            again = make_adapter_model(seed=5)
            into = target(again, None)
            checkpoint.load(tmp_path, model=again, optimizer=into)
            assert allocated_state_bytes(into) <= max_used_state_bytes(into)
            assert_same(gather_state_by_name(into, again), state)
            # What had no state begins now, as it does for the plain optimizer.
            ahead = make_adapter_model()
            ahead.load_state_dict(reference.state_dict())
            oracle = plain(ahead)
            oracle.load_state_dict(deepcopy(expected.state_dict()))  # torch shares step counts
            for each, its in ((again, into), (ahead, oracle)):
                each.use_late = True
                each.requires_grad_(True)
                train(each, its, 2, first=50)
            assert_same(dict(again.named_parameters()), dict(ahead.named_parameters()))


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
    within = 2 if group is None else None
    return shard(model, torch.optim.AdamW, process_group=group, shard_group_size=within, lr=0.01)


@ranks(4)
@pytest.mark.parametrize("way", [make_with_rules, make_with_masters, make_hybrid, one_bucket])
def test_frozen_params_at_another_world_size(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """From four ranks to three, which load without naming their group."""
    model = make_adapter_model()
    optimizer = way(model, None)
    readers = first_ranks(3)
    for stage in range(4):
        train_stage(model, optimizer, stage)
        before, expected = allocated_state_bytes(optimizer), gather_state_by_name(optimizer, model)
        checkpoint.save(tmp_path, step=stage, model=model, optimizer=optimizer)
        assert allocated_state_bytes(optimizer) == before
        assert list_saved_names(tmp_path, stage) == expected.keys()
        if readers is not None:
            again = make_adapter_model(seed=5)
            into = way(again, readers)
            with pytest.warns(UserWarning, match="saved by 4 ranks and is loaded by 3"):
                checkpoint.load(tmp_path, model=again, optimizer=into)
            assert allocated_state_bytes(into) <= max_used_state_bytes(into)
            assert_same(gather_state_by_name(into, again, readers), expected)
        dist.barrier()


@ranks(1, 2, 3)
@each_sharding
def test_dcp_state_dict_covers_all_trainable_params(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """As torch's helpers make it for a plain optimizer; ours keeps none of it."""
    model = make_adapter_model()
    optimizer = way(model, None)
    model.down.requires_grad_(False)  # its neighbours in the bucket are not
    for stage in (0, 1):
        if stage:
            train(model, optimizer, 2)
        before = allocated_state_bytes(optimizer)
        found: Any = get_optimizer_state_dict(model, optimizer)["state"]
        numbered = optimizer.sharded_state_dict()["state"]
        names = [name for name, _ in model.named_parameters()]
        for part in (found, {names[number]: state for number, state in numbered.items()}):
            mine = {name for name, state in part.items() if state}
            assert {name for each in ctx.gather(sorted(mine)) for name in each} == {"up", "late"}
        assert allocated_state_bytes(optimizer) == before
    dcp_save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    again = make_adapter_model(seed=5)
    into = way(again, None)
    again.down.requires_grad_(False)
    target = {"optim": get_optimizer_state_dict(again, into)}
    dcp_load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, into, target["optim"])
    state = gather_state_by_name(into, again)
    assert state.keys() == {"up", "late"}
    assert_same(state["up"], gather_state_by_name(optimizer, model)["up"])
    again.load_state_dict(model.state_dict())
    for each, its in ((model, optimizer), (again, into)):
        each.use_late = True
        each.down.requires_grad_(True)
        train(each, its, 2, first=5)
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))


@ranks(1, 2, 3)
def test_loading_state_that_is_still_at_its_initial_value(ctx: RankContext, tmp_path: Path) -> None:
    """As earlier versions and torch's helpers save it, of parameters that are used only later."""
    model = make_adapter_model()
    optimizer = one_bucket(model)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp_save(parts, checkpoint_id=tmp_path)
    again = make_adapter_model(seed=5)
    into = one_bucket(again)
    again.late.requires_grad_(False)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    assert gather_state_by_name(into, again).keys() == {"down", "up", "late"}
    again.late.requires_grad_(True)
    for each, its in ((model, optimizer), (again, into)):
        train_stage(each, its, 1)
        train_stage(each, its, 2)
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))


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
    model, again = QuantizedBaseModel(), QuantizedBaseModel()
    optimizer, into = one_bucket(model), one_bucket(again)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    assert torch.equal(again.base.view(torch.uint8), model.base.view(torch.uint8))
    for each, its in ((model, optimizer), (again, into)):
        train(each, its, 2, first=2)
    assert_same(dict(again.trained.named_parameters()), dict(model.trained.named_parameters()))
    assert optimizer.sharded_state_dict()["state"].keys() == {0, 1, 2}


@ranks(2, 3)
def test_state_missing_on_some_owners_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    """After a first step that failed on one rank."""
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
    with pytest.raises(CheckpointError, match=r"some ranks have optimizer state of .*late.* have none"):
        checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000000"
    checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
