"""`zeroshard checkpoint convert`: what several ranks have saved comes back bit for bit, through every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, WAYS, Way, assert_same_state, by_name, flat, net, plain, train
from tests.support.tiers import sampled
from tests.support.tools import convert
from zeroshard import ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.cli.checkpoint import describe_checkpoint

each_sharding = sampled("way", WAYS)


def gather_full_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The state of all ranks in torch's format, on all of them."""
    found = [optimizer.full_state_dict(to=0)]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def convert_on_rank0(source: Path, target: Path, to: str) -> Path:
    """Convert on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        convert(source, target, to)
    dist.barrier()
    return target


def assert_models_equal(found: nn.Module, expected: nn.Module) -> None:
    for (name, ours), theirs in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def gather_fsdp2_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of an FSDP2 model and its state by name, as torch gathers them."""
    parts: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return parts[0], parts[1]["state"]


@ranks(1, 2, 3)
@each_sharding
def test_plain_torch_resumes_from_converted_file(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model = net()
    optimizer = way(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    seen = describe_checkpoint(tmp_path / "saved")
    assert (seen.step, seen.world_size, list(seen.ranks)) == (3, ctx.world_size, list(range(ctx.world_size)))
    assert seen.totals.file_bytes == sum(it.stat().st_size for it in Path(seen.path).glob("*.distcp"))
    state = gather_full_state(optimizer)
    reference = net(seed=1)
    reference.load_state_dict(model.state_dict())
    reference_optimizer = plain(reference)
    reference_optimizer.load_state_dict(state)

    saved = torch.load(convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch"), weights_only=True)
    assert saved["optim"]["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert saved["zeroshard"]["step"] == 3
    again = net(seed=2)
    again.load_state_dict(saved["model"])
    into = plain(again)
    into.load_state_dict(saved["optim"])
    assert_same_state(by_name(into, into.state_dict(), again), by_name(optimizer, state, model))
    train(again, into, 5, first=3)
    train(reference, reference_optimizer, 5, first=3)
    assert_models_equal(again, reference)


@ranks(1, 2, 3)
@each_sharding
def test_convert_to_torch_and_back_and_dcp_to_dcp(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model = net()
    optimizer = way(model, None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train(model, optimizer, 3)
    scheduler.step()
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint.save(tmp_path / "saved", step=3, extra={"position": ctx.rank}, **given)
    expected = by_name(optimizer, gather_full_state(optimizer), model)
    convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch")
    convert_on_rank0(tmp_path / "all.pt", tmp_path / "back", "dcp")
    convert_on_rank0(tmp_path / "saved", tmp_path / "direct", "dcp")
    for directory, target in zip(("back", "direct"), (flat, way), strict=True):
        again = net(seed=4)
        into = target(again, None)
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(into, T_max=10)
        loaded = checkpoint.load(tmp_path / directory, model=again, optimizer=into, scheduler=theirs)
        assert (loaded.step, loaded.world_size, loaded.extra) == (3, ctx.world_size, {"position": ctx.rank})
        assert theirs.state_dict() == scheduler.state_dict()
        assert into.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert_same_state(by_name(into, gather_full_state(into), again), expected)
        assert_models_equal(again, model)


@ranks(1, 2, 3)
@each_sharding
def test_convert_to_safetensors(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    model = net()
    optimizer = way(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    expected = by_name(optimizer, gather_full_state(optimizer), model)
    file = convert_on_rank0(tmp_path / "saved", tmp_path / "all.safetensors", "safetensors")
    with safe_open(file, framework="pt") as found:
        for name, value in model.state_dict().items():
            assert torch.equal(found.get_tensor(f"model.{name}"), value), name
        for name, state in expected.items():
            for key, value in state.items():
                assert torch.equal(found.get_tensor(f"optim.state.{name}.{key}"), value), (name, key)
        texts = found.metadata()
    (group,) = json.loads(texts["param_groups"])
    assert group["params"] == [name for name, _ in model.named_parameters()]
    assert group["lr"] == ADAMW["lr"]
    assert tuple(group["betas"]) == optimizer.param_groups[0]["betas"]
    assert json.loads(texts["zeroshard"])["world_size"] == ctx.world_size


@ranks(2)
def test_convert_keeps_param_groups_and_their_order(ctx: RankContext, tmp_path: Path) -> None:
    """Numbers follow the groups, not the model."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        late = [named.pop("unused"), named.pop("enter.bias")]
        return [{"params": late, "weight_decay": 0.0}, {"params": list(named.values()), "weight_decay": 0.1}]

    model = net()
    optimizer = shard(model, torch.optim.AdamW, params=groups(model), lr=0.05)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    expected = by_name(optimizer, gather_full_state(optimizer), model)
    saved = torch.load(convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch"), weights_only=True)
    assert [group["weight_decay"] for group in saved["optim"]["param_groups"]] == [0.0, 0.1]
    again = net(seed=1)
    into = torch.optim.AdamW(groups(again), lr=1.0)
    into.load_state_dict(saved["optim"])
    assert_same_state(by_name(into, into.state_dict(), again), expected)


@ranks(1, 2, 3)
def test_convert_fsdp2_checkpoints(ctx: RankContext, tmp_path: Path) -> None:
    """Written by torch alone, in both of its forms, and read by torch alone."""

    def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed, odd=False)
        model.unused.requires_grad_(False)  # torch refuses to load state of which some is missing
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)

    model, optimizer = sharded(0)
    train(model, optimizer, 3)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp_save(parts, checkpoint_id=tmp_path / "nested")
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    parts["optim"] = get_optimizer_state_dict(model, optimizer, options=flattened)
    dcp_save(parts, checkpoint_id=tmp_path / "flattened")
    whole, state = gather_fsdp2_state(model, optimizer)
    shapes = model.state_dict().items()
    for form in ("nested", "flattened"):
        seen = describe_checkpoint(tmp_path / form)
        assert (seen.step, seen.world_size, list(seen.ranks)) == (None, ctx.world_size, list(range(ctx.world_size)))
        assert {name: value.shape for name, value in seen.model.items()} == {n: tuple(p.shape) for n, p in shapes}
        assert seen.state.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
        assert seen.state_keys == ["exp_avg", "exp_avg_sq", "step"]
        file = convert_on_rank0(tmp_path / form, tmp_path / f"{form}.pt", "torch")
        if ctx.rank == 0:
            again = net(seed=3, odd=False)
            into = plain(again)
            saved = torch.load(file, weights_only=True)
            again.load_state_dict(saved["model"])
            into.load_state_dict(saved["optim"])
            assert_same_state(by_name(into, into.state_dict(), again), state)
            assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())
        for source, target in ((file, "from-file"), (tmp_path / form, "from-directory")):
            directory = convert_on_rank0(source, tmp_path / f"{form}-{target}", "dcp")
            other, its = sharded(5)
            into_parts: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(other, its), strict=True))
            dcp_load(into_parts, checkpoint_id=directory)
            set_state_dict(
                other,
                its,
                model_state_dict=into_parts["model"],
                optim_state_dict=into_parts["optim"],
            )
            found, its_state = gather_fsdp2_state(other, its)
            if ctx.rank == 0:
                assert_same_state(its_state, state)
                assert all(torch.equal(found[name], value) for name, value in whole.items())
