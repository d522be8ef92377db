"""`zeroshard.shard` on one GPU: one rank over NCCL, rank 0 of many simulated ranks, and two ranks over gloo."""

import statistics
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zeroshard import ShardedOptimizer, ZeroConfig, shard

from ..harness.models import Shape, make_params
from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, minus, ms, ratio
from .gpu_speed import MODELS, Machine
from .gpu_sync import find_waits

BYTES_PER_PARAM = 28
CONSECUTIVE_STEPS = 5
WORLDS = (1, 8, 64, 512)


class ParamBag(nn.Module):
    """Parameters with gradients, without a forward pass."""

    def __init__(self, shapes: list[Shape], device: str) -> None:
        super().__init__()
        self.params = nn.ParameterList(make_params(shapes, device=device))


def bandwidth(machine: Machine, rounds: int) -> list[Row]:
    """Compare a full step at world size 1 with the time that memory bandwidth allows."""
    (result,) = run_ranks(1, _race_with_copy, machine, rounds, backend=machine.backend)
    times, numel, bytes_per_s = result
    least = BYTES_PER_PARAM * numel / bytes_per_s
    step = statistics.median(times["zeroshard"])
    what = f"step of {CONSECUTIVE_STEPS} in a row, {MODELS[0]}, 1 rank, fused AdamW"
    bar = 1.25 if machine.device == "cuda" else None
    row = Row(
        f"{what}, over the least time at {bytes_per_s / 1e12:.2f} TB/s",
        ms(times["zeroshard"]),
        f"{1e3 * least:.3g} ms at least",
        step / least,
        bar=bar,
    )
    plain = ratio_row(
        what,
        ms(times["zeroshard"]),
        f"{ms(times['plain'])} plain, unsharded",
        ratio(times["zeroshard"], times["plain"]),
    )
    return [row, plain]


def small(machine: Machine, rounds: int) -> list[Row]:
    """Step thousands of small tensors at world size 1, compared with torch's class."""
    (times,) = run_ranks(1, _race_small, machine, rounds, backend=machine.backend)
    bar = 0.01 if machine.device == "cuda" else None
    what = f"step, {MODELS[1]}, 1 rank, fused AdamW"
    ours = times["zeroshard"]
    return [
        ratio_row(
            what, ms(ours), f"{ms(times[peer])} {peer}", ratio(ours, times[peer]), bar if peer == "torch" else None
        )
        for peer in ("torch", "torch, bucket view", "plain")
    ]


def shares(machine: Machine, rounds: int) -> list[Row]:
    """Measure the time and memory of one rank of many. `fake` messages cost nothing."""
    rows: list[Row] = []
    for model in MODELS:
        (results,) = run_ranks(1, _race_as_rank_0, machine, model, rounds, backend="none")
        _, total_bytes = results[1]
        for world, (times, rank_bytes) in results.items():
            what = f"rank 0's step of {world}, {model}, fused AdamW, without the copies of fake messages"
            step = minus(times["zeroshard"], times["messages"])
            rows.append(Row(what, ms(step), f"{ms(times['share'])} inner optimizer alone"))
            what = f"rank 0's state and gradients of {world}, {model}, times {world}, over those of 1 rank"
            cells = f"{rank_bytes / 2**20:.4g} MiB", f"{total_bytes / 2**20:.4g} MiB"
            rows.append(Row(what, *cells, world * rank_bytes / total_bytes, bar=1.01))
    return rows


def waits(machine: Machine) -> list[Row]:
    """Check that a step launches work on the GPU without waiting for it."""
    rows: list[Row] = []
    for where, (backend, world) in {"1 rank": (machine.backend, 1), "rank 0 of 8, fake": ("none", 8)}.items():
        (results,) = run_ranks(1, _find_waits, machine, world, backend=backend)
        for case, (error, count) in results.items():
            what = f"waits for the device in clip and step, {where}, {case}"
            rows.append(Row(what, error or f"none refused, {count} profiled", "", count + bool(error), bar=0))
    return rows


def parity(machine: Machine) -> list[Row]:
    """Compare parameters after 5 steps with DDP and the plain optimizer. Two ranks share the GPU over gloo."""
    rows: list[Row] = []
    for ranks in (1, 2):
        for case, num_different in run_ranks(ranks, _parity, machine, limit_s=120)[0].items():
            what = f"parity with DDP, 5 iterations, {ranks} ranks over gloo, {case}"
            rows.append(Row(what, f"{num_different} tensors differ", "DDP + AdamW", num_different, bar=0))
    return rows


def _race_with_copy(machine: Machine, rounds: int) -> tuple[Times, int, float]:
    shapes = machine.shapes(MODELS[0])
    ours, plain = ParamBag(shapes, machine.device), ParamBag(shapes, machine.device)
    contestants: dict[str, Run] = {
        "zeroshard": shard(ours, AdamW, lr=1e-3, fused=True).step,
        "plain": AdamW(plain.parameters(), lr=1e-3, fused=True).step,
    }
    source = torch.empty(2**30 if machine.device == "cuda" else 2**22, device=machine.device)
    target = torch.empty_like(source)
    contestants["copy"] = lambda: target.copy_(source)
    totals = machine.race({name: partial(_run_consecutively, run) for name, run in contestants.items()}, rounds)
    times = {name: [total / CONSECUTIVE_STEPS for total in by_round] for name, by_round in totals.items()}
    bytes_per_s = 2 * source.nbytes / statistics.median(times["copy"])
    return times, sum(param.numel() for param in ours.parameters()), bytes_per_s


def _run_consecutively(run: Run) -> None:
    """Run several times, as in training: the device is still busy when a step begins."""
    for _ in range(CONSECUTIVE_STEPS):
        run()


def _race_small(machine: Machine, rounds: int) -> Times:
    shapes = machine.shapes(MODELS[1])
    model = ParamBag(shapes, machine.device)
    optimizer = shard(model, AdamW, lr=1e-3, fused=True)
    contestants: dict[str, Run] = {"zeroshard": optimizer.step}
    for name, view in {"torch": False, "torch, bucket view": True}.items():
        params = make_params(shapes, device=machine.device)
        zero: Any = TorchZero(params, AdamW, parameters_as_bucket_view=view, lr=1e-3, fused=True)
        contestants[name] = zero.step
    contestants["plain"] = AdamW(make_params(shapes, device=machine.device), lr=1e-3, fused=True).step
    return machine.race(contestants, rounds, warm=True)


def _race_as_rank_0(machine: Machine, model: str, rounds: int) -> dict[int, tuple[Times, int]]:
    results: dict[int, tuple[Times, int]] = {}
    for world in WORLDS:
        with fake_group(world):
            optimizer = shard(ParamBag(machine.shapes(model), machine.device), AdamW, lr=1e-3, fused=True)
            optimizer.step()
            owned = [tuple(param.shape) for group in optimizer.optim.param_groups for param in group["params"]]
            alone = AdamW(make_params(owned, device=machine.device), lr=1e-3, fused=True)
            messages = partial(_send_params, optimizer)
            times = machine.race({"zeroshard": optimizer.step, "messages": messages, "share": alone.step}, rounds)
            state = [value for entry in optimizer.optim.state.values() for value in entry.values()]
            rank_bytes = sum(tensor.nbytes for tensor in [*state, *optimizer._engine.grads.grad_tensors()])
            results[world] = (times, rank_bytes)
    return results


def _send_params(optimizer: ShardedOptimizer) -> None:
    for bucket in optimizer.layout.buckets:
        optimizer._model_binding._param_sync.start(bucket, optimizer._model_binding._store.memory.buffer(bucket.index))
    optimizer._model_binding._param_sync.finish()


def _find_waits(machine: Machine, world: int) -> dict[str, tuple[str, int]]:
    if world == 1:
        return _find_waits_in_group(machine)
    with fake_group(world):
        return _find_waits_in_group(machine)


def _find_waits_in_group(machine: Machine) -> dict[str, tuple[str, int]]:
    shapes: list[Shape] = [(1024,)] * 200 + [(2048, 1024)] * 16
    results: dict[str, tuple[str, int]] = {}
    for name in ("fused", "foreach"):
        options: dict[str, Any] = {name: True}
        optimizer = shard(ParamBag(shapes, machine.device), AdamW, lr=1e-3, **options)

        def clip_and_step(optimizer: Any = optimizer) -> None:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

        results[f"{name} AdamW"] = find_waits(machine, clip_and_step)
    return results


def _parity(machine: Machine) -> dict[str, int]:
    configs = {"float32": ZeroConfig(), "overlap_param_gather": ZeroConfig(overlap_param_gather=True)}
    results = {name: _compare_with_ddp(machine, config) for name, config in configs.items()}
    return results | {"bfloat16 with masters, two equal runs": _compare_equal_runs(machine)}


def _make_model(machine: Machine) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(machine.device)


def _make_batch(machine: Machine, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
    return torch.randn(32, 256, generator=generator).to(machine.device)


def _compare_with_ddp(machine: Machine, config: ZeroConfig) -> int:
    """Return the number of parameters that differ."""
    model, wrapped = _make_model(machine), DistributedDataParallel(_make_model(machine))
    optimizers: list[Any] = [shard(model, AdamW, lr=1e-3, fused=True, config=config)]
    optimizers.append(AdamW(wrapped.parameters(), lr=1e-3, fused=True))
    for step in range(5):
        for module, optimizer in zip((model, wrapped), optimizers, strict=True):
            module(_make_batch(machine, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), wrapped.module.parameters(), strict=True)
    return sum(not torch.equal(ours, theirs) for ours, theirs in pairs)


def _compare_equal_runs(machine: Machine) -> int:
    """Run the same training twice. Return the number of parameters that differ."""
    models = [_make_model(machine).bfloat16() for _ in range(2)]
    for model in models:
        optimizer = shard(model, AdamW, lr=1e-3, config=ZeroConfig(master_dtype=torch.float32))
        for step in range(5):
            model(_make_batch(machine, step).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(not torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
