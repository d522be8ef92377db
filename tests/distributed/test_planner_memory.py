"""What `plan` says against what is there: bytes of real tensors after a real step."""

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
from zeroshard.engine.grad_bucket import local_grad
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
    found: list[int] = []

    def add_nbytes(tensor: torch.Tensor) -> None:
        parts = inner_tensors(tensor).values() if is_wrapper_subclass(tensor) else [tensor]
        found.extend(part.nbytes for part in parts)

    map_tensors(states, add_nbytes)
    return sum(found)


class MeasuredBytes(NamedTuple):
    """Bytes on a rank."""

    state: int
    gradients: int
    master_weights: int
    snapshots: int = 0


def max_over_ranks(measured: MeasuredBytes) -> MeasuredBytes:
    """That of the rank with most."""
    everyone: list[MeasuredBytes] = [measured] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    return max(everyone, key=lambda it: (sum(it[:3]), it))


def make_plan(model: nn.Module, classes: Any, config: ZeroConfig, **options: Any) -> Plan:
    return plan(model, classes, ranks=[dist.get_world_size()], config=config, device="cpu", **options)


def check_plan(model: nn.Module, classes: Any, config: ZeroConfig, **options: Any) -> ShardedOptimizer:
    """Each part on the rank that has most, within 1 %; parameters, slices and masters to the byte."""
    before = make_plan(model, classes, config, **options)
    stage = 2 if config.stage != 1 else 1
    usage = before.estimate_for(f"zeroshard {stage}", dist.get_world_size()).memory
    optimizer = shard(model, classes, config=config, **options)
    train(model, optimizer)
    engine, buckets = optimizer._engine, range(len(optimizer.layout.buckets))
    params = sum(engine.param_store.buffer(bucket).nbytes for bucket in buckets)
    assert usage.parameters == params + sum(it.nbytes for it in model.buffers())
    masters = sum(
        engine.storage.update_target(bucket).nbytes for bucket in buckets if engine.storage.has_master(bucket)
    )
    state = sum(state_bytes(it.state) for it in optimizer.inner_optimizers)
    copies = optimizer.peer_snapshots.bytes_sent if optimizer.peer_snapshots else 0
    found = max_over_ranks(MeasuredBytes(state, gradient_bytes(optimizer, stage), masters, copies))
    assert (usage.gradients, usage.masters) == (found.gradients, found.master_weights)
    assert usage.state == pytest.approx(found.state, rel=0.01)
    assert before.estimate_for(f"zeroshard {stage}", dist.get_world_size()).peer_checkpoint_bytes == pytest.approx(
        found.snapshots, rel=0.01
    )
    return optimizer


HYBRID_CASES: dict[str, tuple[torch.dtype, ZeroConfig]] = {
    "float32": (torch.float32, ZeroConfig()),
    "16 bits": (torch.bfloat16, ZeroConfig()),
    "masters": (torch.bfloat16, ZeroConfig(master_dtype=MASTERS)),
    "in order": (torch.float32, ZeroConfig(deterministic_reduce=True, stage=1)),
    "whole": (torch.float32, ZeroConfig(partition=WholeParams())),
}


@ranks(2, 3, 4)
@sampled("case", HYBRID_CASES)
def test_hybrid_memory_and_traffic_match_the_plan(ctx: RankContext, case: str) -> None:
    dtype, config = HYBRID_CASES[case]
    for row in (it for it in (1, 2, 3) if ctx.world_size % it == 0):
        model = make_net(dtype)
        model[4].requires_grad_(False)
        estimate = make_plan(model, AdamW, config, shard_group_size=row).estimate_for(
            method_name(config), ctx.world_size
        )
        optimizer = check_plan(model, AdamW, config, shard_group_size=row)
        sent = torch.tensor(float(sum(it or 0 for it in optimizer.report().comm_volume)))
        dist.all_reduce(sent)
        # On the average of all ranks. Parts of a sum start at multiples, so that these are not to the byte.
        assert estimate.traffic.sent == pytest.approx(float(sent) / ctx.world_size, rel=0.01)


def method_name(config: ZeroConfig) -> str:
    return "zeroshard 2" if config.stage != 1 else "zeroshard 1"


def gradient_bytes(optimizer: ShardedOptimizer, stage: int) -> int:
    """In the dtype of the parameters."""
    if stage == 1:
        return sum(grad.nbytes for grad in map(local_grad, optimizer._engine.params) if grad is not None)
    slices, buckets = optimizer._engine.grads._shards, optimizer.layout.buckets
    return sum(slice_.numel() * buckets[bucket].dtype.itemsize for bucket, slice_ in slices.items())


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
    with pytest.warns(UserWarning, match="looks at whole parameters"):
        check_plan(make_net(), Adafactor, ZeroConfig())
    check_plan(make_net(), AdamW, ZeroConfig(partition=WholeParams()))


@ranks(2, 3)
def test_peer_checkpoint_memory_matches_the_plan(ctx: RankContext) -> None:
    """Whose messages also say what is in them, which counts in small models only."""
    copied = PeerCheckpoint(every=1)
    check_snapshots(check_plan(make_net(vocab_size=30_000), AdamW, ZeroConfig(peer_checkpoint=copied)))
    check_plan(
        make_net(torch.bfloat16, vocab_size=30_000), AdamW, ZeroConfig(peer_checkpoint=copied, master_dtype=MASTERS)
    )
    crowded = PeerCheckpoint(every=1, failure_domain_size=2)  # of three ranks, the last keeps for two
    check_snapshots(check_plan(make_net(vocab_size=30_000), AdamW, ZeroConfig(peer_checkpoint=crowded)))


def check_snapshots(optimizer: ShardedOptimizer) -> None:
    """What they take when none is under way is half of what is planned for when one is."""
    assert optimizer._peer_checkpointer is not None
    optimizer._peer_checkpointer.wait()
    assert optimizer.peer_snapshots is not None
    before = make_plan(optimizer._model, AdamW, optimizer._config).estimate_for("zeroshard 2", dist.get_world_size())
    held = max_over_ranks(MeasuredBytes(optimizer.peer_snapshots.nbytes, 0, 0)).state
    assert before.memory.host == pytest.approx(2 * held, rel=0.01)


@ranks(1)
def test_quantized_state_matches_the_plan(ctx: RankContext) -> None:
    """Which cannot be measured on tensors without memory."""
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Sequential(nn.Embedding(300, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    with torch.compiler.set_stance("force_eager"):
        check_plan(model, torchao.AdamW8bit, ZeroConfig())


@ranks(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ddp_and_torch_zero_baselines_match_measured_memory(ctx: RankContext) -> None:
    """DDP with the plain optimizer, and the state of the fullest rank with torch's ZeRO and with the drop-in."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    model = make_net()
    found = make_plan(model, AdamW, ZeroConfig())
    wrapped = DistributedDataParallel(model)
    plain = AdamW(model.parameters())
    train(wrapped, plain)
    usage = found.estimate_for("DDP", ctx.world_size).memory
    assert usage.parameters == sum(it.nbytes for it in [*model.parameters(), *model.buffers()])
    assert usage.gradients == sum(grad.nbytes for grad in map(local_grad, model.parameters()) if grad is not None)
    assert usage.state == state_bytes(plain.state)
    for optimizer_class in (TorchZero, ZeroRedundancyOptimizer):
        sharded = optimizer_class(model.parameters(), AdamW)
        train(wrapped, sharded)
        state = max_over_ranks(MeasuredBytes(state_bytes(sharded.optim.state), 0, 0)).state
        assert found.estimate_for("torch ZeRO", ctx.world_size).memory.state == state


@ranks(1, 2, 3, 4)
def test_fsdp2_baseline_matches_measured_memory(ctx: RankContext) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 133), nn.Linear(133, 133), nn.Linear(133, 7))
    usage = make_plan(model, AdamW, ZeroConfig()).estimate_for("FSDP2", ctx.world_size).memory
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    local = [it.to_local() for it in model.parameters() if isinstance(it, DTensor)]
    assert usage.parameters == max_over_ranks(MeasuredBytes(0, 0, sum(it.nbytes for it in local))).master_weights
    moments = [value for state in optimizer.state.values() for value in state.values()]
    inside = [it.to_local() if isinstance(it, DTensor) else it for it in moments]
    assert usage.state == pytest.approx(
        max_over_ranks(MeasuredBytes(sum(it.nbytes for it in inside), 0, 0)).state, rel=0.01
    )


def test_peer_snapshot_size_is_the_same_with_offload() -> None:
    model = make_net(torch.bfloat16)
    copied = ZeroConfig(peer_checkpoint=PeerCheckpoint(), master_dtype=MASTERS)
    here, away = (
        plan(model, AdamW, ranks=[4], config=it).estimate_for("zeroshard 2", 4)
        for it in (copied, dataclasses.replace(copied, offload=CPUOffload()))
    )
    assert away.peer_checkpoint_bytes == here.peer_checkpoint_bytes == here.memory.state + here.memory.masters
    assert away.memory.host == here.memory.host + here.memory.state + here.memory.masters


def test_empty_params_can_be_planned() -> None:
    model = nn.ParameterList([torch.zeros(64, 64), torch.zeros(0, dtype=torch.float64)])
    for row in (None, 2):
        assert plan(model, AdamW, ranks=[4], shard_group_size=row).estimate_for("zeroshard 2", 4).memory.peak > 0


def test_bandwidth_within_shard_groups() -> None:
    """It is that of everybody, where all ranks are in one row; and of nobody without rows."""
    fast, slow = Network(50e9, 0, within=500e9), Network(50e9, 0)
    model = nn.Linear(1000, 1000)
    with pytest.raises(ConfigError, match="inside shard groups was given without shard groups"):
        plan(model, AdamW, ranks=[8], network=fast)
    rows = plan(model, AdamW, ranks=[8, 64], network=fast, shard_group_size=8)
    plain = plan(model, AdamW, ranks=[8, 64], network=slow, shard_group_size=8)
    for one, other in zip(rows, plain, strict=True):
        quick = one.ranks == 8
        ratio = other.traffic.seconds / one.traffic.seconds
        assert ratio == pytest.approx(10) if quick else 1 <= ratio < 10
        assert quick or one.method.startswith("zeroshard") or ratio == 1


def test_config_options_passed_to_the_optimizer_are_rejected() -> None:
    with pytest.raises(ConfigError, match="overlap_param_gather=True is not an option of an optimizer class"):
        plan(nn.Linear(2, 2), AdamW, overlap_param_gather=True)


@pytest.mark.parametrize("given", [{"bandwidth": 0}, {"bandwidth": math.nan}, {"within": 0}, {"latency": -1e-6}])
def test_invalid_network_is_rejected(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="bandwidths above 0 and a latency"):
        Network(**given)
