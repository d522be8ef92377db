"""`zeroshard.checkpoint`: from any world size and partition to any other, from and to torch's own, bit for bit."""

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
from tests.support.checkpoints import ADAMW, WAYS, Way, assert_same_state, by_name, first_ranks, flat, net, plain, train
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from tests.support.tools import convert
from zeroshard import ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint.metadata import CheckpointMetadata

each_sharding = sampled("way", WAYS)


def get_dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's helpers say is to be saved."""
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def gather_state_by_name(optimizer: ZeroRedundancyOptimizer, model: nn.Module, group: Any = None) -> dict[str, Any]:
    """All state by name, on all ranks of the group."""
    found = [optimizer.full_state_dict(to=0)]
    dist.broadcast_object_list(found, src=0, group=group)
    assert found[0] is not None
    return by_name(optimizer, found[0], model)


@ranks(5)
@sampled("saving", [1, 2, 3, 4, 5])
def test_resharding_between_all_world_sizes_and_partitions(ctx: RankContext, tmp_path: Path, saving: int) -> None:
    writers = first_ranks(saving)
    for source in WAYS:
        folder = tmp_path / source.__name__
        expected: list[Any] = [None, None]
        if writers is not None:
            model = net()
            optimizer = source(model, writers)
            train(model, optimizer, 3)
            checkpoint.save(folder, step=3, model=model, optimizer=optimizer, process_group=writers)
            expected = [gather_state_by_name(optimizer, model, writers), model.state_dict()]
        dist.broadcast_object_list(expected, src=0)
        for loading in (1, 2, 3, 4, 5):
            target = WAYS[(loading + saving) % len(WAYS)]
            readers = first_ranks(loading)
            if readers is not None:
                other = net(seed=9)
                into = target(other, readers)
                loaded = checkpoint.load(folder, model=other, optimizer=into, process_group=readers)
                assert loaded.step == 3
                assert loaded.world_size == saving
                assert_same_state(gather_state_by_name(into, other, readers), expected[0])
                for name, value in other.state_dict().items():
                    assert torch.equal(value, expected[1][name]), name
            dist.barrier()


@ranks(1, 2, 4)
@each_sharding
def test_resumed_run_matches_uninterrupted_run(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    reference = net()
    train(reference, plain(reference), 13)
    model = net()
    optimizer = way(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    for target in WAYS:
        again = net(seed=5)
        into = target(again, None)
        checkpoint.load(tmp_path, model=again, optimizer=into)
        train(again, into, 10, first=3)
        for (name, ours), theirs in zip(again.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs), (target.__name__, name)
        assert torch.equal(again.seen, reference.seen)


@ranks(1, 2, 3)
@each_sharding
def test_save_and_load_before_the_first_step(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """There is no state yet, and what follows is what would have followed."""
    model, reference = net(), net()
    optimizer, other = way(model, None), way(reference, None)
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer)
    archive = CheckpointMetadata(tmp_path / "step-000000000")
    assert not archive.under("optim", "state")
    train(reference, other, 3)
    train(model, optimizer, 3)
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    again = net(seed=3)
    into = way(again, None)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    train(again, into, 3)
    assert all(map(torch.equal, again.parameters(), reference.parameters()))


@ranks(1, 2, 3)
@each_sharding
def test_round_trip_through_plain_optimizer(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """Replicated on all ranks, as under DDP."""
    model = net()
    optimizer = way(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "ours", step=3, model=model, optimizer=optimizer)
    expected = gather_state_by_name(optimizer, model)
    theirs = net(seed=3)
    their_optimizer = plain(theirs)
    checkpoint.load(tmp_path / "ours", model=theirs, optimizer=their_optimizer)
    assert_same_state(by_name(their_optimizer, their_optimizer.state_dict(), theirs), expected)
    checkpoint.save(tmp_path / "theirs", step=3, model=theirs, optimizer=their_optimizer)
    again = net(seed=4)
    into = way(again, None)
    checkpoint.load(tmp_path / "theirs", model=again, optimizer=into)
    assert_same_state(gather_state_by_name(into, again), expected)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@ranks(2, 3, 4)
@each_sharding
def test_round_trip_through_fsdp2(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model = net(odd=False)
    optimizer = way(model, None)
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
        again = net(seed=4, odd=False)
        into = way(again, None)
        checkpoint.load(tmp_path / source, model=again, optimizer=into)
        assert_same_state(gather_state_by_name(into, again), expected)
        assert all(map(torch.equal, again.parameters(), model.parameters()))


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
    assert {rank: part["position"] for rank, part in loaded.extra_by_rank.items()} == {
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
    model, again = net(), net(seed=2)
    optimizer, into = flat(model), flat(again)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(it, T_max=10) for it in (optimizer, into)]
    for _ in range(4):
        optimizer.step()
        schedulers[0].step()
    checkpoint.save(tmp_path, step=4, model=model, optimizer=optimizer, scheduler=schedulers[0])
    checkpoint.load(tmp_path, model=again, optimizer=into, scheduler=schedulers[1])
    assert schedulers[1].state_dict() == schedulers[0].state_dict()
    assert into.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@ranks(1, 2, 3)
@each_sharding
def test_async_save_captures_state_at_call_time(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """What is saved is what there was, however far training has gone on; one save waits for the one before."""
    model = net()
    optimizer = way(model, None)
    for step in (1, 2, 3):
        train(model, optimizer, 1, first=step - 1)
        expected = [param.detach().clone() for param in model.parameters()], gather_state_by_name(optimizer, model)
        saving = checkpoint.async_save(tmp_path, step=step, model=model, optimizer=optimizer)
    train(model, optimizer, 2, first=3)
    assert saving.wait() == tmp_path / "step-000000003"
    assert saving.done()
    again = net(seed=4)
    into = way(again, None)
    assert checkpoint.load(tmp_path, model=again, optimizer=into).step == 3
    assert all(map(torch.equal, again.parameters(), expected[0]))
    assert_same_state(gather_state_by_name(into, again), expected[1])


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
    """Also in another precision, and where there are none."""

    def made(seed: int, dtype: torch.dtype | None) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = net(seed).bfloat16()
        return model, shard(model, torch.optim.AdamW, config=ZeroConfig(master_dtype=dtype), **ADAMW)

    model, optimizer = made(0, torch.float32)
    for _ in range(3):
        torch.autograd.backward(model(torch.ones(4, 5, dtype=torch.bfloat16)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    expected = gather_state_by_name(optimizer, model)
    for dtype in (torch.float32, torch.float64, None):
        again, into = made(4, dtype)
        checkpoint.load(tmp_path, model=again, optimizer=into)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        found = gather_state_by_name(into, again)
        for name, state in found.items():
            if "master_weights" in state:
                assert torch.equal(state["master_weights"].float(), expected[name]["master_weights"])
            assert ("master_weights" in state) == (dtype is not None)


def make_dropin(model: nn.Module, *args: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), *args, **options)


class StepCountingSGD(torch.optim.SGD):
    """Keeps something for all parameters together, and something that only its dict shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = 0

    def step(self, closure: Any = None) -> Any:
        self.seen += 1
        shared: dict[str, torch.Tensor] = self.state["shared"]  # type: ignore[index]
        shared["total"] = shared.get("total", torch.zeros(2)) + 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict.get("seen", -1)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "seen"})


@ranks(1, 2, 3)
def test_global_optimizer_state_is_restored(ctx: RankContext, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = net(seed)
        return model, ZeroRedundancyOptimizer(model.named_parameters(), StepCountingSGD, lr=0.01, momentum=0.9)

    model, optimizer = made(0)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    again, into = made(4)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    assert isinstance(into.optim, StepCountingSGD)
    assert into.optim.seen == 3
    assert torch.equal(into.state["shared"]["total"], torch.full((2,), 3.0))
    for each, its in ((model, optimizer), (again, into)):
        train(each, its, 2, first=3)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    if ctx.rank == 0:
        file = convert(tmp_path, tmp_path / "all.pt", "torch")
        converted = torch.load(file, weights_only=True)["optim"]
        assert converted["seen"] == 3
        assert torch.equal(converted["state"]["shared"]["total"], torch.full((2,), 3.0))


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), torch.tensor(0.0), 0, False, 1.5], ids=str)
def test_global_state_of_plain_optimizer_is_restored(tmp_path: Path, value: Any) -> None:
    """Whatever it is, nothing among it."""
    model = net(0)
    optimizer, into = (torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for _ in range(2))
    train(model, optimizer, 2)
    optimizer.state["shared"] = value  # type: ignore[index]
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=model, optimizer=into)
    assert_same(into.state["shared"], value)  # type: ignore[index]


@ranks(1, 2, 3)
@sampled("way", [shard, make_dropin])
def test_loaded_options_add_state_the_optimizer_did_not_have(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    """Momentum, for an optimizer that was made without: also of a parameter without dimensions."""
    model, again = net(0), net(3)
    optimizer = way(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    train(model, optimizer, 3)
    into = way(again, torch.optim.SGD, lr=0.01)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    for each, its in ((model, optimizer), (again, into)):
        train(each, its, 2, first=3)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@ranks(1, 2)
def test_conjugate_and_strided_buffers_are_saved(ctx: RankContext, tmp_path: Path) -> None:
    def made(value: complex) -> nn.Module:
        model = nn.Module()
        model.register_buffer("turned", torch.full((3,), value).conj())
        model.register_buffer("slice", torch.arange(9.0).view(3, 3)[:, 1] * value.real)
        return model

    checkpoint.save(tmp_path, step=1, model=made(1 + 2j))
    again = made(0j)
    checkpoint.load(tmp_path, model=again)
    for name, value in made(1 + 2j).state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
