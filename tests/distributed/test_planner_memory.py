"""Compare the memory that `plan` estimates with the bytes of real tensors after a real step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, RMSprop

from tests.support import RankContext, ranks
from tests.support.tiers import sampled
from zeroshard import (
    ConfigError,
    CPUOffload,
    FlatShards,
    ParamRule,
    PeerCheckpoint,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.engine.grad_stage import local_grad
from zeroshard.planner import Network, Plan, plan
from zeroshard.state.tensor_utils import inner_tensors, is_wrapper_subclass, map_tensors

SMALL_BUCKETS = FlatShards(bucket_bytes=1 << 16)
MASTERS = torch.float32


def make_net(dtype: torch.dtype = torch.float32, vocab_size: int = 300) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(vocab_size, 40), nn.Linear(40, 133), nn.LayerNorm(133), nn.BatchNorm1d(133), nn.Linear(133, 7)
    ).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(4)).float().square().mean().backward()
        optimizer.step()


def state_bytes(states: Any) -> int:
    sizes: list[int] = []

    def add_nbytes(tensor: torch.Tensor) -> None:
        inner = inner_tensors(tensor).values() if is_wrapper_subclass(tensor) else [tensor]
        sizes.extend(inner_tensor.nbytes for inner_tensor in inner)

    map_tensors(states, add_nbytes)
    return sum(sizes)


class MeasuredBytes(NamedTuple):
    """Bytes on one rank."""

    state: int
    gradients: int
    master_weights: int
    snapshots: int = 0


def max_over_ranks(measured: MeasuredBytes) -> MeasuredBytes:
    """The bytes of the rank with the most memory."""
    all_measured: list[MeasuredBytes] = [measured] * dist.get_world_size()
    dist.all_gather_object(all_measured, measured)
    return max(all_measured, key=lambda measured: (sum(measured[:3]), measured))


def make_plan(model: nn.Module, classes: Any, config: ZeroConfig, **options: Any) -> Plan:
    return plan(model, classes, ranks=[dist.get_world_size()], config=config, device="cpu", **options)


def check_plan(model: nn.Module, classes: Any, config: ZeroConfig, **options: Any) -> ShardedOptimizer:
    """Compare the plan with the rank that uses most: parameters, gradients and masters exactly, other parts to 1 %."""
    planned = make_plan(model, classes, config, **options)
    stage = 2 if config.stage != 1 else 1
    estimate = planned.estimate_for(f"zeroshard {stage}", dist.get_world_size()).memory
    optimizer = shard(model, classes, config=config, **options)
    train(model, optimizer)
    buckets = range(len(optimizer.layout.buckets))
    params = sum(optimizer._model_binding._store.memory.buffer(bucket).nbytes for bucket in buckets)
    assert estimate.parameters == params + sum(buffer.nbytes for buffer in model.buffers())
    masters = sum(
        optimizer._model_binding._store.storage.update_target(bucket).nbytes
        for bucket in buckets
        if optimizer._model_binding._store.storage.has_master(bucket)
    )
    state = sum(state_bytes(inner.state) for inner in optimizer.inner_optimizers)
    snapshot_bytes = optimizer.peer_snapshots.bytes_sent if optimizer.peer_snapshots else 0
    measured = max_over_ranks(MeasuredBytes(state, gradient_bytes(optimizer, stage), masters, snapshot_bytes))
    assert (estimate.gradients, estimate.masters) == (measured.gradients, measured.master_weights)
    assert estimate.state == pytest.approx(measured.state, rel=0.01)
    assert planned.estimate_for(f"zeroshard {stage}", dist.get_world_size()).peer_checkpoint_bytes == pytest.approx(
        measured.snapshots, rel=0.01
    )
    return optimizer


HYBRID_CASES: dict[str, tuple[torch.dtype, ZeroConfig]] = {
    "float32": (torch.float32, ZeroConfig()),
    "bfloat16": (torch.bfloat16, ZeroConfig()),
    "master weights": (torch.bfloat16, ZeroConfig(master_dtype=MASTERS)),
    "deterministic reduce": (torch.float32, ZeroConfig(deterministic_reduce=True, stage=1)),
    "whole params": (torch.float32, ZeroConfig(partition=WholeParams())),
}


@ranks(2, 3, 4)
@sampled("case", HYBRID_CASES)
def test_hybrid_memory_and_traffic_match_the_plan(ctx: RankContext, case: str) -> None:
    dtype, config = HYBRID_CASES[case]
    for group_size in (size for size in (1, 2, 3) if ctx.world_size % size == 0):
        model = make_net(dtype)
        model[4].requires_grad_(False)
        estimate = make_plan(model, AdamW, config, shard_group_size=group_size).estimate_for(
            method_name(config), ctx.world_size
        )
        optimizer = check_plan(model, AdamW, config, shard_group_size=group_size)
        sent = torch.tensor(float(sum(nbytes or 0 for nbytes in optimizer.report().comm_volume)))
        dist.all_reduce(sent)
        # The average of all ranks. Chunks of a sum start at aligned offsets, so sizes are not exact to the byte.
        assert estimate.traffic.sent == pytest.approx(float(sent) / ctx.world_size, rel=0.01)


def method_name(config: ZeroConfig) -> str:
    return "zeroshard 2" if config.stage != 1 else "zeroshard 1"


def gradient_bytes(optimizer: ShardedOptimizer, stage: int) -> int:
    """Bytes of gradients in the dtype of their parameters."""
    if stage == 1:
        return sum(grad.nbytes for grad in map(local_grad, optimizer._engine.params.tensors) if grad is not None)
    grad_shards, buckets = optimizer._model_binding.reducer._shards, optimizer.layout.buckets
    return sum(grad_shard.numel() * buckets[bucket].dtype.itemsize for bucket, grad_shard in grad_shards.items())


@ranks(1, 3)
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (AdamW, {}),
        (Adam, {"amsgrad": True}),
        (SGD, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
        (RMSprop, {"centered": True}),
    ],
)
def test_memory_matches_the_plan(ctx: RankContext, optimizer_class: Any, options: dict[str, Any]) -> None:
    check_plan(make_net(), optimizer_class, ZeroConfig(), **options)
    check_plan(make_net(), optimizer_class, ZeroConfig(partition=SMALL_BUCKETS, stage=1), **options)


@ranks(1, 2, 3, 4)
def test_memory_with_master_weights_and_frozen_params_matches_the_plan(ctx: RankContext) -> None:
    for config in (
        ZeroConfig(master_dtype=MASTERS),
        ZeroConfig(master_dtype=MASTERS, partition=SMALL_BUCKETS, stage=1),
    ):
        check_plan(make_net(torch.bfloat16), AdamW, config)
        model = make_net(torch.bfloat16)
        model[1].requires_grad_(False)
        check_plan(model, AdamW, config)


@ranks(2, 4)
def test_memory_of_whole_param_optimizers_matches_the_plan(ctx: RankContext) -> None:
    rules = [ParamRule(matrix_params(exclude=["0"]), Muon, lr=0.02), ParamRule(remaining_params, AdamW, lr=1e-3)]
    check_plan(make_net(), rules, ZeroConfig())
    with pytest.warns(UserWarning, match="Adafactor needs whole parameters"):
        check_plan(make_net(), Adafactor, ZeroConfig())
    check_plan(make_net(), AdamW, ZeroConfig(partition=WholeParams()))


@ranks(2, 3)
def test_peer_checkpoint_memory_matches_the_plan(ctx: RankContext) -> None:
    """Snapshot messages also have headers, whose size matters only in small models."""
    peer_checkpoint = PeerCheckpoint(every=1)
    check_snapshots(check_plan(make_net(vocab_size=30_000), AdamW, ZeroConfig(peer_checkpoint=peer_checkpoint)))
    check_plan(
        make_net(torch.bfloat16, vocab_size=30_000),
        AdamW,
        ZeroConfig(peer_checkpoint=peer_checkpoint, master_dtype=MASTERS),
    )
    uneven = PeerCheckpoint(every=1, failure_domain_size=2)  # the last of three ranks stores snapshots of two
    check_snapshots(check_plan(make_net(vocab_size=30_000), AdamW, ZeroConfig(peer_checkpoint=uneven)))


def check_snapshots(optimizer: ShardedOptimizer) -> None:
    """Without a snapshot in flight, snapshots take half of the planned memory, which includes one in flight."""
    assert optimizer._peer_checkpointer is not None
    optimizer._peer_checkpointer.wait()
    assert optimizer.peer_snapshots is not None
    planned = make_plan(optimizer._model_binding.model, AdamW, optimizer._builder.config).estimate_for(
        "zeroshard 2", dist.get_world_size()
    )
    held_nbytes = max_over_ranks(MeasuredBytes(optimizer.peer_snapshots.nbytes, 0, 0)).state
    assert planned.memory.host == pytest.approx(2 * held_nbytes, rel=0.01)


@ranks(1)
def test_quantized_state_matches_the_plan(ctx: RankContext) -> None:
    """Quantized state cannot be measured on meta tensors."""
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Sequential(nn.Embedding(300, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    with torch.compiler.set_stance("force_eager"):
        check_plan(model, torchao.AdamW8bit, ZeroConfig())


@ranks(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ddp_and_torch_zero_baselines_match_measured_memory(ctx: RankContext) -> None:
    """DDP with the plain optimizer, and the rank with the most state under torch's ZeRO and under the drop-in."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    model = make_net()
    planned = make_plan(model, AdamW, ZeroConfig())
    ddp = DistributedDataParallel(model)
    plain = AdamW(model.parameters())
    train(ddp, plain)
    estimate = planned.estimate_for("DDP", ctx.world_size).memory
    assert estimate.parameters == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert estimate.gradients == sum(grad.nbytes for grad in map(local_grad, model.parameters()) if grad is not None)
    assert estimate.state == state_bytes(plain.state)
    for optimizer_class in (TorchZero, ZeroRedundancyOptimizer):
        sharded = optimizer_class(model.parameters(), AdamW)
        train(ddp, sharded)
        state = max_over_ranks(MeasuredBytes(state_bytes(sharded.optim.state), 0, 0)).state
        assert planned.estimate_for("torch ZeRO", ctx.world_size).memory.state == state


@ranks(1, 2, 3, 4)
def test_fsdp2_baseline_matches_measured_memory(ctx: RankContext) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 133), nn.Linear(133, 133), nn.Linear(133, 7))
    estimate = make_plan(model, AdamW, ZeroConfig()).estimate_for("FSDP2", ctx.world_size).memory
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    local_params = [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]
    assert (
        estimate.parameters
        == max_over_ranks(MeasuredBytes(0, 0, sum(param.nbytes for param in local_params))).master_weights
    )
    values = [value for state in optimizer.state.values() for value in state.values()]
    local_values = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    assert estimate.state == pytest.approx(
        max_over_ranks(MeasuredBytes(sum(value.nbytes for value in local_values), 0, 0)).state, rel=0.01
    )


def test_peer_snapshot_size_is_the_same_with_offload() -> None:
    model = make_net(torch.bfloat16)
    without_offload = ZeroConfig(peer_checkpoint=PeerCheckpoint(), master_dtype=MASTERS)
    resident, offloaded = (
        plan(model, AdamW, ranks=[4], config=config).estimate_for("zeroshard 2", 4)
        for config in (without_offload, dataclasses.replace(without_offload, offload=CPUOffload()))
    )
    assert (
        offloaded.peer_checkpoint_bytes
        == resident.peer_checkpoint_bytes
        == resident.memory.state + resident.memory.masters
    )
    assert offloaded.memory.host == resident.memory.host + resident.memory.state + resident.memory.masters


def test_empty_params_can_be_planned() -> None:
    model = nn.ParameterList([torch.zeros(64, 64), torch.zeros(0, dtype=torch.float64)])
    for group_size in (None, 2):
        assert plan(model, AdamW, ranks=[4], shard_group_size=group_size).estimate_for("zeroshard 2", 4).memory.peak > 0


def test_bandwidth_within_shard_groups() -> None:
    """`within` applies to all traffic if all ranks are in one shard group, and is rejected without shard groups."""
    fast, slow = Network(50e9, 0, within=500e9), Network(50e9, 0)
    model = nn.Linear(1000, 1000)
    with pytest.raises(ConfigError, match="inside shard groups needs shard groups"):
        plan(model, AdamW, ranks=[8], network=fast)
    with_fast_links = plan(model, AdamW, ranks=[8, 64], network=fast, shard_group_size=8)
    with_slow_links = plan(model, AdamW, ranks=[8, 64], network=slow, shard_group_size=8)
    for fast_estimate, slow_estimate in zip(with_fast_links, with_slow_links, strict=True):
        is_one_group = fast_estimate.ranks == 8
        ratio = slow_estimate.traffic.seconds / fast_estimate.traffic.seconds
        assert ratio == pytest.approx(10) if is_one_group else 1 <= ratio < 10
        assert is_one_group or fast_estimate.method.startswith("zeroshard") or ratio == 1


def test_config_options_passed_to_the_optimizer_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"overlap_param_gather=True is .*, not an optimizer argument"):
        plan(nn.Linear(2, 2), AdamW, overlap_param_gather=True)


@pytest.mark.parametrize("options", [{"bandwidth": 0}, {"bandwidth": math.nan}, {"within": 0}, {"latency": -1e-6}])
def test_invalid_network_is_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="bandwidths above 0 and a latency"):
        Network(**options)
