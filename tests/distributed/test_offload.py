"""Offloaded state is updated as if it were on the device: on a GPU, and on a CPU that stands in for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zeroshard.build
import zeroshard.engine.host_buffers
import zeroshard.engine.offload
from tests.support import RankContext, ranks
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    ConfigError,
    CPUOffload,
    FlatShards,
    GradScaler,
    ParamRule,
    RankFailedError,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard._types import Rank
from zeroshard.engine.host_buffers import HostTransfer
from zeroshard.state.shard_tensor import ShardTensor

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ONE_BUCKET_PER_LAYER = FlatShards(bucket_bytes=4000)
"""Buckets of about one layer each."""
Choice = tuple[Any, dict[str, Any]]
"""An optimizer class, or rules, and options."""
OPTIMIZERS: dict[str, Choice] = {
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "AdamW without foreach": (optim.AdamW, {"lr": 0.01, "foreach": False}),
    "SGD": (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "Muon and AdamW": (
        [
            ParamRule(matrix_params(exclude=("0",)), optim.Muon, lr=0.01),
            ParamRule(remaining_params, optim.AdamW, lr=0.01),
        ],
        {},
    ),
}


HOST_STORAGES: set[int] = set()
"""Storages that `HostTransfer` allocated: without a GPU, only these show that state is offloaded."""


def _record_allocations(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_and_record(*args: Any) -> torch.Tensor:
        tensor = allocate(*args)
        HOST_STORAGES.add(tensor.untyped_storage().data_ptr())
        return tensor

    return allocate_and_record


@contextmanager
def force_offload(device: str) -> Iterator[None]:
    """On a machine without a GPU, host memory stands in for device memory: all transfers happen, within host memory."""
    modules = (zeroshard.engine.offload, zeroshard.build)
    is_offload_device = zeroshard.engine.offload.is_offload_device
    min_numel, zeroshard.engine.host_buffers.MIN_OFFLOAD_NUMEL = zeroshard.engine.host_buffers.MIN_OFFLOAD_NUMEL, 2
    allocate, zeros = HostTransfer.allocate, HostTransfer.zeros
    HOST_STORAGES.clear()
    try:
        HostTransfer.allocate, HostTransfer.zeros = _record_allocations(allocate), _record_allocations(zeros)  # type: ignore[method-assign]
        for module in modules if device == "cpu" else ():
            module.is_offload_device = lambda _: True  # type: ignore[attr-defined]
        yield
    finally:
        zeroshard.engine.host_buffers.MIN_OFFLOAD_NUMEL = min_numel
        HostTransfer.allocate, HostTransfer.zeros = allocate, zeros  # type: ignore[method-assign]
        for module in modules:
            module.is_offload_device = is_offload_device  # type: ignore[attr-defined]


def make_model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24, bias=False), nn.Tanh(), nn.Linear(24, 3)]
    return nn.Sequential(*layers).to(device, dtype)


class OffloadParityRun:
    """The same training run twice, with resident and with offloaded state."""

    def __init__(
        self,
        device: str,
        choice: Choice = OPTIMIZERS["AdamW"],
        *,
        dtype: torch.dtype = torch.float32,
        masters: bool = False,
        partition: FlatShards | None = ONE_BUCKET_PER_LAYER,
    ) -> None:
        config = ZeroConfig(partition=partition, master_dtype=torch.float32 if masters else None)
        self.resident = Run(device, choice, dtype, config)
        self.offloaded = Run(device, choice, dtype, replace(config, offload=CPUOffload()))

    def train(self, ctx: RankContext, steps: int) -> None:
        for run in (self.resident, self.offloaded):
            run.train(ctx, steps)
        self.check()

    def check(self) -> None:
        assert_same(list(self.offloaded.model.parameters()), list(self.resident.model.parameters()))
        found, expected = (_on_cpu(run.optimizer.sharded_state_dict()) for run in (self.offloaded, self.resident))
        assert_same(found, expected)


class Run:
    def __init__(self, device: str, choice: Choice, dtype: torch.dtype, config: ZeroConfig) -> None:
        self.device, self.steps, self.dtype = device, 0, dtype
        self.model = make_model(device, dtype)
        factory, options = choice
        self.optimizer: ShardedOptimizer = shard(self.model, factory, config=config, **options)

    def compute_loss(self, ctx: RankContext) -> torch.Tensor:
        seed = torch.Generator().manual_seed(100 * self.steps + ctx.rank)
        inputs = torch.randn(5, 24, generator=seed).to(self.device, self.dtype)
        loss: torch.Tensor = self.model(inputs).float().square().mean()
        return loss

    def train(self, ctx: RankContext, steps: int) -> None:
        for _ in range(steps):
            self.compute_loss(ctx).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return getattr(value, "local", value).cpu() if isinstance(value, torch.Tensor) else value


def large_state_tensors(optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """State tensors that must be in host memory."""
    values = [
        value for inner in optimizer.inner_optimizers for state in inner.state.values() for value in state.values()
    ]
    return [value for value in values if isinstance(value, torch.Tensor) and value.numel() > 1]


def assert_state_on_host(run: Run) -> None:
    found = large_state_tensors(run.optimizer)
    assert found
    assert {value.device.type for value in found} == {"cpu"}
    assert {value.untyped_storage().data_ptr() for value in found} <= HOST_STORAGES
    if run.device == "cuda":
        assert all(value.is_pinned() for value in found)


@ranks(1, 2, 3)
@on_devices
@sampled("optimizer_name", OPTIMIZERS)
def test_offloaded_updates_equal_resident_updates(ctx: RankContext, device: str, optimizer_name: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device, OPTIMIZERS[optimizer_name])
        for _ in range(4):
            parity.train(ctx, 1)
            assert_state_on_host(parity.offloaded)


@ranks(1, 2, 3)
@on_devices
def test_master_weights_are_offloaded(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device, dtype=torch.bfloat16, masters=True)
        for _ in range(4):
            parity.train(ctx, 1)
            assert_state_on_host(parity.offloaded)
            for bucket in parity.offloaded.optimizer.layout.buckets:
                storage = parity.offloaded.optimizer._model_binding._store.storage
                assert storage.update_target(bucket.index).untyped_storage().nbytes() == 0
                master_weights = [
                    storage.master_view(param_shard) for param_shard in bucket.param_shards_of_rank(Rank(ctx.rank))
                ]
                assert all(master is not None and master.device.type == "cpu" for master in master_weights)


@ranks(1, 2, 3)
@on_devices
def test_edits_of_offloaded_state_take_effect(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
            parity = OffloadParityRun(device, dtype=dtype, masters=masters, partition=FlatShards())
            parity.train(ctx, 2)
            for run in (parity.resident, parity.offloaded):
                first, second, third, *_ = run.model.parameters()
                del run.optimizer.state[second]
                run.optimizer.state[third]["exp_avg"] = torch.ones_like(third)
                if "step" in run.optimizer.state[first]:
                    run.optimizer.state[first]["step"].zero_()
            parity.train(ctx, 2)
            assert_state_on_host(parity.offloaded)


@ranks(1, 2)
@on_devices
def test_edits_of_params_take_effect(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device, dtype=torch.bfloat16, masters=True)
        parity.train(ctx, 2)
        for run in (parity.resident, parity.offloaded):
            with torch.no_grad():
                next(run.model.parameters()).mul_(0.5)
        parity.train(ctx, 2)


@ranks(1, 2)
@on_devices
def test_params_without_grads_stay_unchanged(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device)
        parity.train(ctx, 1)
        for run in (parity.resident, parity.offloaded):
            run.model[2].requires_grad_(False)  # type: ignore[index]
        parity.train(ctx, 2)
        for run in (parity.resident, parity.offloaded):
            run.optimizer.step()  # with no gradients at all
        parity.check()
        for run in (parity.resident, parity.offloaded):
            run.model.requires_grad_()
        parity.train(ctx, 2)


class CountsSteps(optim.AdamW):
    """Counts its steps outside its state, and warms up by that count."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.001 * self.count * group["steps"]
        return super().step(closure)


@ranks(1, 2)
@on_devices
def test_bucketwise_updates_count_as_one_step(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device, (CountsSteps, {}))
        parity.train(ctx, 3)
        assert [run.optimizer.inner_optimizers[0].count for run in (parity.offloaded, parity.resident)] == [3, 3]  # type: ignore[attr-defined]
        assert [group["steps"] for group in parity.offloaded.optimizer.param_groups] == [3]


class CountsStepsInTensors(optim.SGD):
    """Counts its steps in tensors: in an attribute, in its state, and in a group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        self.count = torch.zeros(())
        self.state["shared"] = {"count": torch.zeros(())}  # type: ignore[index]
        self.param_groups[0]["count"] = torch.zeros(())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        shared: Any = self.state
        for count in (self.count, shared["shared"]["count"], self.param_groups[0]["count"]):
            count.add_(1)
            self.param_groups[0]["lr"] = 0.01 / float(count)
            super().step(closure)
        return None


class ReplacesStateTensors(optim.Optimizer):
    """Replaces its state tensor in each step, keeps lists of tensors, and reads the old tensor late."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.grad is not None]:
                state = self.state[param]
                old = state.pop("mean", torch.zeros_like(param))
                if param.device.type == "cuda":
                    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                state["mean"] = old * 0.9 + param.grad
                state["history"] = [state["mean"].clone(), *state.get("history", [])][:2]
                param.sub_(sum(state["history"]), alpha=group["lr"])


@ranks(1, 2)
@on_devices
@sampled("factory", [CountsStepsInTensors, ReplacesStateTensors])
def test_optimizers_may_count_in_tensors_and_replace_state(ctx: RankContext, device: str, factory: Any) -> None:
    with force_offload(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimizers with state of another shape fall back to whole parameters
        parity = OffloadParityRun(device, (factory, {}), partition=None)
        parity.train(ctx, 3)
        for run in (parity.resident, parity.offloaded):
            run.optimizer.load_state_dict(run.optimizer.sharded_state_dict())
        parity.train(ctx, 2)


@ranks(1, 2)
@on_devices
@sampled("masters", [False, True])
def test_quantized_state_loads_with_offloaded_master_weights(
    ctx: RankContext, device: str, masters: bool, tmp_path: Path
) -> None:
    quantized = pytest.importorskip("torchao.optim").AdamW8bit
    choice = (quantized, {"lr": 0.01, "block_size": 16})
    dtype = torch.bfloat16 if masters else torch.float32
    with force_offload(device), torch.compiler.set_stance("force_eager"):
        first, second = (OffloadParityRun(device, choice, dtype=dtype, masters=masters) for _ in range(2))
        first.train(ctx, 2)
        checkpoint.save(tmp_path, step=2, model=first.offloaded.model, optimizer=first.offloaded.optimizer)
        for run in (second.resident, second.offloaded):
            checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
            run.steps = 2
        second.train(ctx, 2)


@ranks(2)
def test_host_out_of_memory_loses_no_update(ctx: RankContext) -> None:
    with force_offload("cpu"):
        parity = OffloadParityRun("cpu", dtype=torch.bfloat16, masters=True)
        run, allocate, calls = parity.offloaded, HostTransfer.allocate, [0]

        def fail_third_allocation(host: HostTransfer, *args: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise MemoryError("no pinned memory")
            return allocate(host, *args)

        run.compute_loss(ctx).backward()  # type: ignore[no-untyped-call]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostTransfer, "allocate", fail_third_allocation)
            with pytest.raises(MemoryError, match="no pinned memory"):
                run.optimizer.step()
        storage = run.optimizer._model_binding._store.storage
        for bucket in run.optimizer.layout.buckets:
            for param_shard in bucket.param_shards_of_rank(Rank(ctx.rank)):
                master = storage.master_view(param_shard)
                assert master is not None
                assert_same(master.bfloat16(), storage.param_view(param_shard))
        run.optimizer.zero_grad()
        run.train(ctx, 2)
        assert_state_on_host(run)


@ranks(1, 2)
@on_devices
@sampled("masters", [False, True])
def test_state_dict_and_checkpoint_round_trip(ctx: RankContext, device: str, masters: bool, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    with force_offload(device):
        first = OffloadParityRun(device, dtype=dtype, masters=masters)
        first.train(ctx, 3)
        full_state = first.offloaded.optimizer.full_state_dict()
        assert_same(full_state, first.resident.optimizer.full_state_dict())
        folder = tmp_path
        checkpoint.save(folder, step=3, model=first.offloaded.model, optimizer=first.offloaded.optimizer)
        second = OffloadParityRun(device, dtype=dtype, masters=masters)
        second.train(ctx, 1)
        for run in (second.resident, second.offloaded):
            checkpoint.load(folder, model=run.model, optimizer=run.optimizer)
            run.steps = first.resident.steps
        assert_state_on_host(second.offloaded)
        second.check()
        second.train(ctx, 2)
        first.train(ctx, 2)
        assert_same(list(second.offloaded.model.parameters()), list(first.resident.model.parameters()))


@ranks(1, 2)
@on_devices
def test_loaded_state_stays_in_host_memory(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        first, second = OffloadParityRun(device), OffloadParityRun(device)
        first.train(ctx, 3)
        loaded: list[Any] = [first.resident.optimizer.full_state_dict()]
        torch.distributed.broadcast_object_list(loaded, 0)
        for run in (second.resident, second.offloaded):
            run.model.load_state_dict(first.resident.model.state_dict())
            run.optimizer.load_state_dict(loaded[0])
            run.steps = first.resident.steps
        assert {value.device.type for value in large_state_tensors(second.offloaded.optimizer)} == {"cpu"}
        second.train(ctx, 2)
        assert_state_on_host(second.offloaded)


@ranks(1, 2)
@on_devices
def test_state_can_be_saved_before_the_first_step(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device, dtype=torch.bfloat16, masters=True)
        parity.check()
        sharded_state = parity.offloaded.optimizer.sharded_state_dict()["state"]
        found = [
            value.local
            for param_state in sharded_state.values()
            for value in param_state.values()
            if isinstance(value, ShardTensor)
        ]
        assert {"exp_avg", "master_weights"} <= {key for param_state in sharded_state.values() for key in param_state}
        assert {value.device.type for value in found} == {"cpu"}
        assert {value.untyped_storage().data_ptr() for value in found} <= HOST_STORAGES
        assert not large_state_tensors(parity.offloaded.optimizer)  # the optimizer does not keep the dict's state
        parity.train(ctx, 2)


@ranks(2)
@on_devices
def test_failed_step_moves_all_state_back_to_host(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device)
        parity.train(ctx, 2)
        run = parity.offloaded
        run.compute_loss(ctx).backward()  # type: ignore[no-untyped-call]
        failing_hook = _register_failing_hook(run.optimizer.optim, after=1) if ctx.rank == 1 else None
        with pytest.raises(ArithmeticError if ctx.rank == 1 else RankFailedError, match="no more"):
            run.optimizer.step()
        assert failing_hook is None or failing_hook.called
        assert_state_on_host(run)
        run.optimizer.zero_grad()
        run.train(ctx, 1)


class _FailingHook:
    def __init__(self, after: int) -> None:
        self.remaining_calls, self.called = after, False

    def __call__(self, *_: Any) -> None:
        self.remaining_calls -= 1
        if self.remaining_calls < 0 and not self.called:
            self.called = True
            raise ArithmeticError("no more")


def _register_failing_hook(optimizer: optim.Optimizer, after: int) -> _FailingHook:
    """Fail in the middle of a step: some buckets are updated, others are being prefetched."""
    hook = _FailingHook(after)
    optimizer.register_step_pre_hook(hook)
    return hook


@ranks(1, 2)
@on_devices
def test_closure_and_grad_scaler(ctx: RankContext, device: str) -> None:
    with force_offload(device):
        parity = OffloadParityRun(device)
        losses = []
        for run in (parity.resident, parity.offloaded):

            def closure(run: Run = run) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = run.compute_loss(ctx)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            losses.append([run.optimizer.step(closure).detach() for _ in range(2)])
            scaler = GradScaler(device, init_scale=256.0)
            for _ in range(2):
                run.optimizer.zero_grad()
                scaler.scale(run.compute_loss(ctx)).backward()  # type: ignore[no-untyped-call]
                scaler.step(run.optimizer)
                scaler.update()
        assert_same(losses[1], losses[0])
        parity.check()


@ranks(1, 2)
def test_warns_where_offload_has_no_effect(ctx: RankContext) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run("cpu", OPTIMIZERS["AdamW"], torch.float32, ZeroConfig(offload=CPUOffload()))
    assert [str(warning.message) for warning in caught if "CPUOffload" in str(warning.message)] == [
        "CPUOffload(...) has no effect: no parameter is on a GPU, so optimizer state is in host memory anyway"
    ]
    run.train(ctx, 2)
    with pytest.raises(ConfigError, match=r"offload=...\) needs partition=FlatShards\(\)"):
        ZeroRedundancyOptimizer(make_model("cpu").parameters(), optim.AdamW, config=ZeroConfig(offload=CPUOffload()))
