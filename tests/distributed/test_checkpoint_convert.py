"""`zeroshard checkpoint convert`: checkpoints of several ranks are converted bit for bit, to and from every format."""

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
from tests.support.tools import convert
from zeroshard import ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.cli.checkpoint import describe_checkpoint

each_sharding = sampled("make_optimizer", OPTIMIZER_FACTORIES)


def gather_full_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Return the full state in torch's format, on all ranks."""
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
    """Return the full tensors of an FSDP2 model and its optimizer state by name, as torch gathers them."""
    parts: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return parts[0], parts[1]["state"]


@ranks(1, 2, 3)
@each_sharding
def test_plain_torch_resumes_from_converted_file(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    model = net()
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    description = describe_checkpoint(tmp_path / "saved")
    assert (description["step"], description["world_size"], list(description["ranks"])) == (
        3,
        ctx.world_size,
        list(range(ctx.world_size)),
    )
    files = Path(description["path"]).glob("*.distcp")
    assert description["totals"]["file_bytes"] == sum(file.stat().st_size for file in files)
    state = gather_full_state(optimizer)
    reference = net(seed=1)
    reference.load_state_dict(model.state_dict())
    reference_optimizer = plain(reference)
    reference_optimizer.load_state_dict(state)

    saved = torch.load(convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch"), weights_only=True)
    assert saved["optim"]["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert saved["zeroshard"]["step"] == 3
    new_model = net(seed=2)
    new_model.load_state_dict(saved["model"])
    new_optimizer = plain(new_model)
    new_optimizer.load_state_dict(saved["optim"])
    assert_same_state(
        state_by_name(new_optimizer, new_optimizer.state_dict(), new_model), state_by_name(optimizer, state, model)
    )
    train(new_model, new_optimizer, 5, first=3)
    train(reference, reference_optimizer, 5, first=3)
    assert_models_equal(new_model, reference)


@ranks(1, 2, 3)
@each_sharding
def test_convert_to_torch_and_back_and_dcp_to_dcp(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    model = net()
    optimizer = make_optimizer(model, None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train(model, optimizer, 3)
    scheduler.step()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint.save(tmp_path / "saved", step=3, extra={"position": ctx.rank}, **parts)
    expected = state_by_name(optimizer, gather_full_state(optimizer), model)
    convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch")
    convert_on_rank0(tmp_path / "all.pt", tmp_path / "back", "dcp")
    convert_on_rank0(tmp_path / "saved", tmp_path / "direct", "dcp")
    for directory, target in zip(("back", "direct"), (flat, make_optimizer), strict=True):
        new_model = net(seed=4)
        new_optimizer = target(new_model, None)
        new_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(new_optimizer, T_max=10)
        loaded = checkpoint.load(
            tmp_path / directory, model=new_model, optimizer=new_optimizer, scheduler=new_scheduler
        )
        assert (loaded.step, loaded.world_size, loaded.extra) == (3, ctx.world_size, {"position": ctx.rank})
        assert new_scheduler.state_dict() == scheduler.state_dict()
        assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert_same_state(state_by_name(new_optimizer, gather_full_state(new_optimizer), new_model), expected)
        assert_models_equal(new_model, model)


@ranks(1, 2, 3)
@each_sharding
def test_convert_to_safetensors(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    model = net()
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    expected = state_by_name(optimizer, gather_full_state(optimizer), model)
    file = convert_on_rank0(tmp_path / "saved", tmp_path / "all.safetensors", "safetensors")
    with safe_open(file, framework="pt") as found:
        for name, value in model.state_dict().items():
            assert torch.equal(found.get_tensor(f"model.{name}"), value), name
        for name, state in expected.items():
            for key, value in state.items():
                assert torch.equal(found.get_tensor(f"optim.state.{name}.{key}"), value), (name, key)
        metadata = found.metadata()
    (group,) = json.loads(metadata["param_groups"])
    assert group["params"] == [name for name, _ in model.named_parameters()]
    assert group["lr"] == ADAMW["lr"]
    assert tuple(group["betas"]) == optimizer.param_groups[0]["betas"]
    assert json.loads(metadata["zeroshard"])["world_size"] == ctx.world_size


@ranks(2)
def test_convert_keeps_param_groups_and_their_order(ctx: RankContext, tmp_path: Path) -> None:
    """Parameter numbers follow the groups, not the model."""

    def make_groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        without_decay = [named.pop("unused"), named.pop("enter.bias")]
        return [{"params": without_decay, "weight_decay": 0.0}, {"params": list(named.values()), "weight_decay": 0.1}]

    model = net()
    optimizer = shard(model, torch.optim.AdamW, params=make_groups(model), lr=0.05)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "saved", step=3, model=model, optimizer=optimizer)
    expected = state_by_name(optimizer, gather_full_state(optimizer), model)
    saved = torch.load(convert_on_rank0(tmp_path / "saved", tmp_path / "all.pt", "torch"), weights_only=True)
    assert [group["weight_decay"] for group in saved["optim"]["param_groups"]] == [0.0, 0.1]
    new_model = net(seed=1)
    new_optimizer = torch.optim.AdamW(make_groups(new_model), lr=1.0)
    new_optimizer.load_state_dict(saved["optim"])
    assert_same_state(state_by_name(new_optimizer, new_optimizer.state_dict(), new_model), expected)


@ranks(1, 2, 3)
def test_convert_fsdp2_checkpoints(ctx: RankContext, tmp_path: Path) -> None:
    """Checkpoints written by torch alone, in both of its forms, are read by torch alone after the conversion."""

    def make_fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed, odd=False)
        model.unused.requires_grad_(False)  # torch refuses to load incomplete state
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)

    model, optimizer = make_fsdp2(0)
    train(model, optimizer, 3)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp_save(parts, checkpoint_id=tmp_path / "nested")
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    parts["optim"] = get_optimizer_state_dict(model, optimizer, options=flattened)
    dcp_save(parts, checkpoint_id=tmp_path / "flattened")
    full_weights, full_state = gather_fsdp2_state(model, optimizer)
    tensors = model.state_dict().items()
    for form in ("nested", "flattened"):
        description = describe_checkpoint(tmp_path / form)
        assert (description["step"], description["world_size"], list(description["ranks"])) == (
            None,
            ctx.world_size,
            list(range(ctx.world_size)),
        )
        assert {name: tuple(value["shape"]) for name, value in description["model"].items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors
        }
        assert description["state"].keys() == {name for name, param in model.named_parameters() if param.requires_grad}
        assert description["state_keys"] == ["exp_avg", "exp_avg_sq", "step"]
        file = convert_on_rank0(tmp_path / form, tmp_path / f"{form}.pt", "torch")
        if ctx.rank == 0:
            plain_model = net(seed=3, odd=False)
            plain_optimizer = plain(plain_model)
            saved = torch.load(file, weights_only=True)
            plain_model.load_state_dict(saved["model"])
            plain_optimizer.load_state_dict(saved["optim"])
            assert_same_state(state_by_name(plain_optimizer, plain_optimizer.state_dict(), plain_model), full_state)
            assert all(torch.equal(value, full_weights[name]) for name, value in plain_model.state_dict().items())
        for source, target in ((file, "from-file"), (tmp_path / form, "from-directory")):
            directory = convert_on_rank0(source, tmp_path / f"{form}-{target}", "dcp")
            new_model, new_optimizer = make_fsdp2(5)
            new_parts: dict[str, Any] = dict(
                zip(("model", "optim"), get_state_dict(new_model, new_optimizer), strict=True)
            )
            dcp_load(new_parts, checkpoint_id=directory)
            set_state_dict(
                new_model,
                new_optimizer,
                model_state_dict=new_parts["model"],
                optim_state_dict=new_parts["optim"],
            )
            found_weights, found_state = gather_fsdp2_state(new_model, new_optimizer)
            if ctx.rank == 0:
                assert_same_state(found_state, full_state)
                assert all(torch.equal(found_weights[name], value) for name, value in full_weights.items())
