"""`zeroshard.checkpoint`: bitwise resharding between world sizes and partitions, and round trips with plain torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    OPTIMIZER_FACTORIES,
    MakeOptimizer,
    assert_same_state,
    first_ranks,
    flat,
    net,
    plain,
    state_by_name,
    train,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from tests.support.tools import convert
from zeroshard import ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint.metadata import CheckpointMetadata

each_sharding = sampled("make_optimizer", OPTIMIZER_FACTORIES)


def get_dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dicts that torch's helpers make for saving."""
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def gather_state_by_name(optimizer: ZeroRedundancyOptimizer, model: nn.Module, group: Any = None) -> dict[str, Any]:
    """Return the full state by parameter name, on all ranks of the group."""
    found = [optimizer.full_state_dict(to=0)]
    dist.broadcast_object_list(found, src=0, group=group)
    assert found[0] is not None
    return state_by_name(optimizer, found[0], model)


@ranks(5)
@sampled("num_writers", [1, 2, 3, 4, 5])
def test_resharding_between_all_world_sizes_and_partitions(ctx: RankContext, tmp_path: Path, num_writers: int) -> None:
    writers = first_ranks(num_writers)
    for source in OPTIMIZER_FACTORIES:
        directory = tmp_path / source.__name__
        expected: list[Any] = [None, None]
        if writers is not None:
            model = net()
            optimizer = source(model, writers)
            train(model, optimizer, 3)
            checkpoint.save(directory, step=3, model=model, optimizer=optimizer, process_group=writers)
            expected = [gather_state_by_name(optimizer, model, writers), model.state_dict()]
        dist.broadcast_object_list(expected, src=0)
        for num_readers in (1, 2, 3, 4, 5):
            target = OPTIMIZER_FACTORIES[(num_readers + num_writers) % len(OPTIMIZER_FACTORIES)]
            readers = first_ranks(num_readers)
            if readers is not None:
                new_model = net(seed=9)
                new_optimizer = target(new_model, readers)
                loaded = checkpoint.load(directory, model=new_model, optimizer=new_optimizer, process_group=readers)
                assert loaded.step == 3
                assert loaded.world_size == num_writers
                assert_same_state(gather_state_by_name(new_optimizer, new_model, readers), expected[0])
                for name, value in new_model.state_dict().items():
                    assert torch.equal(value, expected[1][name]), name
            dist.barrier()


@ranks(1, 2, 4)
@each_sharding
def test_resumed_run_matches_uninterrupted_run(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    reference = net()
    train(reference, plain(reference), 13)
    model = net()
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    for target in OPTIMIZER_FACTORIES:
        new_model = net(seed=5)
        new_optimizer = target(new_model, None)
        checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
        train(new_model, new_optimizer, 10, first=3)
        for (name, ours), theirs in zip(new_model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs), (target.__name__, name)
        assert torch.equal(new_model.seen, reference.seen)


@ranks(1, 2, 3)
@each_sharding
def test_save_and_load_before_the_first_step(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    """There is no state yet, and training goes on as without the save or the load."""
    model, reference = net(), net()
    optimizer, reference_optimizer = make_optimizer(model, None), make_optimizer(reference, None)
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer)
    metadata = CheckpointMetadata(tmp_path / "step-000000000")
    assert not metadata.under("optim", "state")
    train(reference, reference_optimizer, 3)
    train(model, optimizer, 3)
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    new_model = net(seed=3)
    new_optimizer = make_optimizer(new_model, None)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    train(new_model, new_optimizer, 3)
    assert all(map(torch.equal, new_model.parameters(), reference.parameters()))


@ranks(1, 2, 3)
@each_sharding
def test_round_trip_through_plain_optimizer(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    """The plain optimizer is replicated on all ranks, as under DDP."""
    model = net()
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "ours", step=3, model=model, optimizer=optimizer)
    expected = gather_state_by_name(optimizer, model)
    theirs = net(seed=3)
    their_optimizer = plain(theirs)
    checkpoint.load(tmp_path / "ours", model=theirs, optimizer=their_optimizer)
    assert_same_state(state_by_name(their_optimizer, their_optimizer.state_dict(), theirs), expected)
    checkpoint.save(tmp_path / "theirs", step=3, model=theirs, optimizer=their_optimizer)
    new_model = net(seed=4)
    new_optimizer = make_optimizer(new_model, None)
    checkpoint.load(tmp_path / "theirs", model=new_model, optimizer=new_optimizer)
    assert_same_state(gather_state_by_name(new_optimizer, new_model), expected)
    assert all(map(torch.equal, new_model.parameters(), model.parameters()))


@ranks(2, 3, 4)
@each_sharding
def test_round_trip_through_fsdp2(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    model = net(odd=False)
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "ours", step=3, model=model, optimizer=optimizer)
    expected = gather_state_by_name(optimizer, model)
    theirs = net(seed=3, odd=False)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), **ADAMW)
    checkpoint.load(tmp_path / "ours", model=theirs, optimizer=their_optimizer)
    checkpoint.save(tmp_path / "theirs", step=3, model=theirs, optimizer=their_optimizer)
    torch_saved = get_dcp_state(theirs, their_optimizer)
    dcp_save(torch_saved, checkpoint_id=tmp_path / "torch")
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    torch_saved["optim"] = get_optimizer_state_dict(theirs, their_optimizer, options=flattened)
    dcp_save(torch_saved, checkpoint_id=tmp_path / "flattened")
    for source in ("theirs", "torch", "flattened"):
        new_model = net(seed=4, odd=False)
        new_optimizer = make_optimizer(new_model, None)
        checkpoint.load(tmp_path / source, model=new_model, optimizer=new_optimizer)
        assert_same_state(gather_state_by_name(new_optimizer, new_model), expected)
        assert all(map(torch.equal, new_model.parameters(), model.parameters()))


@ranks(1, 2, 3)
def test_rng_state_and_extra_are_restored_per_rank(ctx: RankContext, tmp_path: Path) -> None:
    model = net()
    torch.manual_seed(100 + ctx.rank)
    random.seed(ctx.rank)
    checkpoint.save(tmp_path, step=1, model=model, extra={"position": ctx.rank, "seen": torch.ones(2)})
    expected = torch.rand(3), random.random()
    loaded = checkpoint.load(tmp_path, model=model)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert loaded.extra["position"] == ctx.rank
    assert {rank: extra["position"] for rank, extra in loaded.extra_by_rank.items()} == {
        rank: rank for rank in range(ctx.world_size)
    }


@ranks(3)
def test_load_at_another_world_size_warns_about_per_rank_state(ctx: RankContext, tmp_path: Path) -> None:
    model = net()
    checkpoint.save(tmp_path, step=1, model=model, extra=ctx.rank)
    readers = first_ranks(2)
    if readers is None:
        return
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="saved by 3 ranks and is loaded by 2"):
        loaded = checkpoint.load(tmp_path, model=model, process_group=readers)
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.extra is None
    assert loaded.extra_by_rank == {0: 0, 1: 1, 2: 2}


@ranks(1, 2)
def test_lr_scheduler_is_restored(ctx: RankContext, tmp_path: Path) -> None:
    model, new_model = net(), net(seed=2)
    optimizer, new_optimizer = flat(model), flat(new_model)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each_optimizer, T_max=10)
        for each_optimizer in (optimizer, new_optimizer)
    ]
    for _ in range(4):
        optimizer.step()
        schedulers[0].step()
    checkpoint.save(tmp_path, step=4, model=model, optimizer=optimizer, scheduler=schedulers[0])
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer, scheduler=schedulers[1])
    assert schedulers[1].state_dict() == schedulers[0].state_dict()
    assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@ranks(1, 2, 3)
@each_sharding
def test_async_save_captures_state_at_call_time(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    """A save holds the state at the time of the call while training goes on; each save waits for the previous one."""
    model = net()
    optimizer = make_optimizer(model, None)
    for step in (1, 2, 3):
        train(model, optimizer, 1, first=step - 1)
        expected = [param.detach().clone() for param in model.parameters()], gather_state_by_name(optimizer, model)
        save_handle = checkpoint.async_save(tmp_path, step=step, model=model, optimizer=optimizer)
    train(model, optimizer, 2, first=3)
    assert save_handle.wait() == tmp_path / "step-000000003"
    assert save_handle.done()
    new_model = net(seed=4)
    new_optimizer = make_optimizer(new_model, None)
    assert checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer).step == 3
    assert all(map(torch.equal, new_model.parameters(), expected[0]))
    assert_same_state(gather_state_by_name(new_optimizer, new_model), expected[1])


@ranks(1, 2)
def test_keep_deletes_older_checkpoints(ctx: RankContext, tmp_path: Path) -> None:
    model = net()
    for step in (1, 5, 20, 100, 300):
        checkpoint.save(tmp_path, step=step, model=model, keep=2)
    names = sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir())
    assert names == ["step-000000100", "step-000000300"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000300"
    assert checkpoint.load(tmp_path / "step-000000100", model=model).step == 100


@ranks(1, 2, 3)
def test_master_weights_are_restored_in_any_precision(ctx: RankContext, tmp_path: Path) -> None:
    """Also as masters of another precision, and without masters."""

    def make_bf16_model(seed: int, dtype: torch.dtype | None) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = net(seed).bfloat16()
        return model, shard(model, torch.optim.AdamW, config=ZeroConfig(master_dtype=dtype), **ADAMW)

    model, optimizer = make_bf16_model(0, torch.float32)
    for _ in range(3):
        torch.autograd.backward(model(torch.ones(4, 5, dtype=torch.bfloat16)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    expected = gather_state_by_name(optimizer, model)
    for dtype in (torch.float32, torch.float64, None):
        new_model, new_optimizer = make_bf16_model(4, dtype)
        checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
        assert all(map(torch.equal, new_model.parameters(), model.parameters()))
        found = gather_state_by_name(new_optimizer, new_model)
        for name, state in found.items():
            if "master_weights" in state:
                assert torch.equal(state["master_weights"].float(), expected[name]["master_weights"])
            assert ("master_weights" in state) == (dtype is not None)


def make_dropin(model: nn.Module, *args: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), *args, **options)


class StepCountingSGD(torch.optim.SGD):
    """Keeps state that belongs to no parameter, and a step count that only its state dict shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        shared: dict[str, torch.Tensor] = self.state["shared"]  # type: ignore[index]
        shared["total"] = shared.get("total", torch.zeros(2)) + 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict.get("num_steps", -1)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "num_steps"})


@ranks(1, 2, 3)
def test_global_optimizer_state_is_restored(ctx: RankContext, tmp_path: Path) -> None:
    def make_run(seed: int) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = net(seed)
        return model, ZeroRedundancyOptimizer(model.named_parameters(), StepCountingSGD, lr=0.01, momentum=0.9)

    model, optimizer = make_run(0)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    new_model, new_optimizer = make_run(4)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert isinstance(new_optimizer.optim, StepCountingSGD)
    assert new_optimizer.optim.num_steps == 3
    assert torch.equal(new_optimizer.state["shared"]["total"], torch.full((2,), 3.0))
    for each_model, each_optimizer in ((model, optimizer), (new_model, new_optimizer)):
        train(each_model, each_optimizer, 2, first=3)
    assert all(map(torch.equal, new_model.parameters(), model.parameters()))
    if ctx.rank == 0:
        path = convert(tmp_path, tmp_path / "all.pt", "torch")
        converted = torch.load(path, weights_only=True)["optim"]
        assert converted["num_steps"] == 3
        assert torch.equal(converted["state"]["shared"]["total"], torch.full((2,), 3.0))


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), torch.tensor(0.0), 0, False, 1.5], ids=str)
def test_global_state_of_plain_optimizer_is_restored(tmp_path: Path, value: Any) -> None:
    """Of any type, and also if it is falsy."""
    model = net(0)
    optimizer, new_optimizer = (torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for _ in range(2))
    train(model, optimizer, 2)
    optimizer.state["shared"] = value  # type: ignore[index]
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=model, optimizer=new_optimizer)
    assert_same(new_optimizer.state["shared"], value)  # type: ignore[index]


@ranks(1, 2, 3)
@sampled("make_optimizer", [shard, make_dropin])
def test_loaded_options_add_state_the_optimizer_did_not_have(
    ctx: RankContext, tmp_path: Path, make_optimizer: Any
) -> None:
    """Momentum, for an optimizer constructed without it; also of a scalar parameter."""
    model, new_model = net(0), net(3)
    optimizer = make_optimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    train(model, optimizer, 3)
    new_optimizer = make_optimizer(new_model, torch.optim.SGD, lr=0.01)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    for each_model, each_optimizer in ((model, optimizer), (new_model, new_optimizer)):
        train(each_model, each_optimizer, 2, first=3)
    assert all(map(torch.equal, new_model.parameters(), model.parameters()))


@ranks(1, 2)
def test_conjugate_and_strided_buffers_are_saved(ctx: RankContext, tmp_path: Path) -> None:
    def make_model(value: complex) -> nn.Module:
        model = nn.Module()
        model.register_buffer("conjugate", torch.full((3,), value).conj())
        model.register_buffer("strided", torch.arange(9.0).view(3, 3)[:, 1] * value.real)
        return model

    checkpoint.save(tmp_path, step=1, model=make_model(1 + 2j))
    new_model = make_model(0j)
    checkpoint.load(tmp_path, model=new_model)
    for name, value in make_model(1 + 2j).state_dict().items():
        assert torch.equal(new_model.state_dict()[name], value), name
