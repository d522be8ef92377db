"""Tests on a GPU: NCCL with one rank, gloo with CUDA tensors for several ranks. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.support import RankContext, ranks
from tests.support.checkpoints import save
from tests.support.oracles import ParityRun, all_equal, assert_same, small_model
from zeroshard import (
    FlatShards,
    GradScaler,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

pytestmark = pytest.mark.gpu

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 0.01, "fused": True}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (AdamW, {"lr": 0.01, "foreach": False}),
    (Adam, {"lr": 0.01, "capturable": True}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
]


def make_cuda_model() -> nn.Module:
    return small_model().cuda()


@ranks(1, 2)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_parity_before_and_after_load(ctx: RankContext, bucket_view: bool) -> None:
    for factory, options in CASES:
        parity = ParityRun(
            factory, model=make_cuda_model, zero_only={"parameters_as_bucket_view": bucket_view}, **options
        )
        parity.train(3)
        state = parity.zero.full_state_dict()
        if state is not None:
            assert_same(state["state"], _on_cpu(parity.plain.state_dict()["state"]))
        parity.zero.load_state_dict(parity.plain.state_dict())
        parity.train(3)


@ranks(1)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_drop_in_over_nccl_does_not_sync_with_host(ctx: RankContext, bucket_view: bool) -> None:
    torch.cuda.set_device(0)
    # This group does not support CPU tensors: control messages need another group.
    nccl = dist.new_group([0], backend="nccl")
    zero_only = {"process_group": nccl, "parameters_as_bucket_view": bucket_view}
    for factory, options in CASES:
        parity = ParityRun(factory, model=make_cuda_model, zero_only=zero_only, **options)
        parity.train(2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            parity.zero.step()
            parity.plain.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        parity.check()


@ranks(1, 2)
@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_overlap_with_ddp(ctx: RankContext, make_hook: Callable[..., Any]) -> None:
    ours, theirs = (DistributedDataParallel(make_cuda_model(), bucket_cap_mb=1e-4) for _ in range(2))
    zero = ZeroRedundancyOptimizer(ours.parameters(), AdamW, overlap_with_ddp=True, lr=0.01)
    plain = AdamW(theirs.parameters(), lr=0.01)
    ours.register_comm_hook(None, make_hook(allreduce_hook, ours, zero))
    theirs.register_comm_hook(None, allreduce_hook)
    for step in range(6):
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + ctx.rank)).cuda()
        for model, optimizer in ((ours, zero), (theirs, plain)):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
        if step >= 2:
            plain.step()
        assert_same(ours.module.state_dict(), theirs.module.state_dict(), f"the model after pass {step}")


@ranks(1, 2)
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_when_one_overflows(ctx: RankContext, fused: bool) -> None:
    model = make_cuda_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler.scale(model(torch.ones(3, 5).cuda()).sum()).backward()
    if ctx.rank == ctx.world_size - 1:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad.fill_(float("inf"))
    scaler.step(zero)
    assert_same(dict(model.state_dict()), before)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


CONFIGS = {
    "ZeRO-2": ZeroConfig(),
    "small buckets": ZeroConfig(partition=FlatShards(bucket_bytes=64)),
    "ZeRO-1": ZeroConfig(partition=FlatShards(bucket_bytes=64), stage=1),
    "overlapped": ZeroConfig(partition=FlatShards(bucket_bytes=64), overlap_param_gather=True),
}


def _train(model: nn.Module, optimizer: Optimizer, rank: int, steps: int = 4) -> dict[str, Any]:
    for step in range(steps):
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@ranks(1, 2)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shard_equals_ddp(ctx: RankContext, config: ZeroConfig) -> None:
    for factory, options in CASES:
        model, wrapped = make_cuda_model(), DistributedDataParallel(make_cuda_model())
        ours = _train(model, shard(model, factory, config=config, **options), ctx.rank)
        _train(wrapped, factory(wrapped.parameters(), **options), ctx.rank)
        assert_same(ours, dict(wrapped.module.state_dict()))


@ranks(2)
def test_step_broadcasts_buffers_of_rank_0(ctx: RankContext) -> None:
    """All ranks get rank 0's batch-norm statistics and counts, even if a rank evaluates by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    zero = shard(model, AdamW, lr=0.01)
    for step in range(2):
        model(torch.randn(5, 6, device="cuda") * (step + ctx.rank)).sum().backward()
        first, other = ctx.gather([buffer.cpu() for buffer in model.buffers()])
        assert not all_equal([first, other])
        zero.step()
        if ctx.rank == step:
            with torch.no_grad():
                model.eval()(torch.ones(5, 6, device="cuda"))
            model.train()
        assert all_equal([first, *ctx.gather([buffer.cpu() for buffer in model.buffers()])])


@ranks(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shard_over_nccl_does_not_sync_with_host(ctx: RankContext, config: ZeroConfig) -> None:
    torch.cuda.set_device(0)
    nccl = dist.new_group([0], backend="nccl")
    model, other = make_cuda_model(), make_cuda_model()
    optimizer = shard(model, AdamW, lr=0.01, process_group=nccl, config=config)
    assert optimizer.optim.param_groups[0]["fused"], "the fused implementation is the default on a GPU"
    ours = _train(model, optimizer, ctx.rank)
    assert_same(ours, _train(other, AdamW(other.parameters(), lr=0.01, fused=True), ctx.rank))
    model(torch.ones(3, 5, device="cuda")).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _make_drop_in(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), AdamW, **options)


def _make_flat(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return shard(model, AdamW, config=ZeroConfig(partition=FlatShards(bucket_bytes=200)), **options)


def _make_with_master_weights(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return shard(model.bfloat16(), AdamW, config=ZeroConfig(master_dtype=torch.float32), **options)


def _train_steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    for step in range(count):
        for index, param in enumerate(model.parameters()):
            torch.autograd.backward((param * (0.5 + 0.25 * ((step + index) % 3))).sum())
        optimizer.step()
        optimizer.zero_grad()


@ranks(1, 2)
@pytest.mark.parametrize("make_optimizer", [_make_drop_in, _make_flat, _make_with_master_weights])
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_checkpoint_round_trip(
    ctx: RankContext, tmp_path: Path, make_optimizer: Any, in_background: bool, fused: bool
) -> None:
    torch.cuda.set_device(0)
    model, loaded_model = make_cuda_model(), make_cuda_model()
    optimizer, loaded_optimizer = (
        make_optimizer(model, lr=0.01, fused=fused),
        make_optimizer(loaded_model, lr=0.01, fused=fused),
    )
    _train_steps(model, optimizer, 3)
    _train_steps(loaded_model, loaded_optimizer, 5)
    save(tmp_path, in_background=in_background, step=3, model=model, optimizer=optimizer)
    addresses = {
        value.data_ptr() for state in loaded_optimizer.optim.state.values() for value in state.values() if value.dim()
    }
    checkpoint.load(tmp_path, model=loaded_model, optimizer=loaded_optimizer)
    assert {
        value.data_ptr() for state in loaded_optimizer.optim.state.values() for value in state.values() if value.dim()
    } == addresses
    for _ in range(2):
        assert all(map(torch.equal, loaded_model.parameters(), model.parameters()))
        assert_same(loaded_optimizer.full_state_dict(), optimizer.full_state_dict())
        _train_steps(model, optimizer, 2)
        _train_steps(loaded_model, loaded_optimizer, 2)


@ranks(1, 2)
def test_master_weights_with_grad_scaler(ctx: RankContext) -> None:
    model = make_cuda_model().half()
    optimizer = shard(model, AdamW, lr=0.01, config=ZeroConfig(master_dtype=torch.float32))
    scaler = GradScaler("cuda", init_scale=8.0)
    for step in range(3):
        scaler.scale(model(torch.full((3, 5), step + 1.0).cuda().half()).float().sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = optimizer.full_state_dict()
    if state is not None:
        for index, param in enumerate(model.parameters()):
            assert_same(state["state"][index]["master_weights"].half(), param.detach().cpu())
