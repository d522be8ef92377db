"""`zeroshard.shard` on one GPU: alone over NCCL, as rank 0 of many ranks that do not exist, and two ranks over gloo."""

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
from .gpu_sync import examine

BYTES_A_PARAMETER = 28
IN_A_ROW = 5
WORLDS = (1, 8, 64, 512)


class Bag(nn.Module):
    """Parameters with gradients, and nothing that uses them."""

    def __init__(self, shapes: list[Shape], device: str) -> None:
        super().__init__()
        self.parts = nn.ParameterList(make_params(shapes, device=device))


def bandwidth(machine: Machine, rounds: int) -> list[Row]:
    """World size 1: the whole step against what memory allows."""
    (found,) = run_ranks(1, _bandwidth, machine, rounds, backend=machine.backend)
    times, elements, rate = found
    least = BYTES_A_PARAMETER * elements / rate
    step = statistics.median(times["zeroshard"])
    what = (
        f"step of {IN_A_ROW} in a row, {MODELS[0]}, 1 rank, fused AdamW, over the least time at {rate / 1e12:.2f} TB/s"
    )
    bar = 1.25 if machine.device == "cuda" else None
    row = Row(what, ms(times["zeroshard"]), f"{1e3 * least:.3g} ms at least", step / least, bar=bar)
    plain = ratio_row(
        f"step of {IN_A_ROW} in a row, {MODELS[0]}, 1 rank, fused AdamW",
        ms(times["zeroshard"]),
        f"{ms(times['plain'])} plain, unsharded",
        ratio(times["zeroshard"], times["plain"]),
    )
    return [row, plain]


def small(machine: Machine, rounds: int) -> list[Row]:
    """World size 1 and thousands of small tensors, against torch's class."""
    (times,) = run_ranks(1, _small, machine, rounds, backend=machine.backend)
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
    """What one rank of many has to do and to hold; `fake` messages cost nothing."""
    rows: list[Row] = []
    for model in MODELS:
        (found,) = run_ranks(1, _shares, machine, model, rounds, backend="none")
        _, whole = found[1]
        for world, (times, held) in found.items():
            what = f"rank 0's step of {world}, {model}, fused AdamW, without the copies that fake messages are"
            step = minus(times["zeroshard"], times["messages"])
            rows.append(Row(what, ms(step), f"{ms(times['share'])} inner optimizer alone"))
            state = f"rank 0's state and gradients of {world}, {model}, times {world}, over those of 1 rank"
            rows.append(
                Row(state, f"{held / 2**20:.4g} MiB", f"{whole / 2**20:.4g} MiB", world * held / whole, bar=1.01)
            )
    return rows


def waits(machine: Machine) -> list[Row]:
    """A step must put work on the GPU and return."""
    rows: list[Row] = []
    for where, (backend, world) in {"1 rank": (machine.backend, 1), "rank 0 of 8, fake": ("none", 8)}.items():
        (found,) = run_ranks(1, _waits, machine, world, backend=backend)
        for case, (problem, count) in found.items():
            what = f"waits for the device in clip and step, {where}, {case}"
            rows.append(Row(what, problem or f"none refused, {count} profiled", "", count + bool(problem), bar=0))
    return rows


def parity(machine: Machine) -> list[Row]:
    """Two ranks share the GPU over gloo: after 5 steps parameters are those of DDP and the plain optimizer."""
    rows: list[Row] = []
    for ranks in (1, 2):
        for case, differing in run_ranks(ranks, _parity, machine, limit_s=120)[0].items():
            what = f"parity with DDP, 5 iterations, {ranks} ranks over gloo, {case}"
            rows.append(Row(what, f"{differing} tensors differ", "DDP + AdamW", differing, bar=0))
    return rows


def _bandwidth(machine: Machine, rounds: int) -> tuple[Times, int, float]:
    shapes = machine.shapes(MODELS[0])
    ours, plain = Bag(shapes, machine.device), Bag(shapes, machine.device)
    contestants: dict[str, Run] = {
        "zeroshard": shard(ours, AdamW, lr=1e-3, fused=True).step,
        "plain": AdamW(plain.parameters(), lr=1e-3, fused=True).step,
    }
    source = torch.empty(2**30 if machine.device == "cuda" else 2**22, device=machine.device)
    target = torch.empty_like(source)
    contestants["copy"] = lambda: target.copy_(source)
    rows = machine.race({name: partial(_in_a_row, run) for name, run in contestants.items()}, rounds)
    times = {name: [seconds / IN_A_ROW for seconds in row] for name, row in rows.items()}
    rate = 2 * source.nbytes / statistics.median(times["copy"])
    return times, sum(param.numel() for param in ours.parameters()), rate


def _in_a_row(run: Run) -> None:
    """As in training, where the device still works when a step begins."""
    for _ in range(IN_A_ROW):
        run()


def _small(machine: Machine, rounds: int) -> Times:
    shapes = machine.shapes(MODELS[1])
    model = Bag(shapes, machine.device)
    optimizer = shard(model, AdamW, lr=1e-3, fused=True)
    contestants: dict[str, Run] = {"zeroshard": optimizer.step}
    for name, view in {"torch": False, "torch, bucket view": True}.items():
        params = make_params(shapes, device=machine.device)
        zero: Any = TorchZero(params, AdamW, parameters_as_bucket_view=view, lr=1e-3, fused=True)
        contestants[name] = zero.step
    contestants["plain"] = AdamW(make_params(shapes, device=machine.device), lr=1e-3, fused=True).step
    return machine.race(contestants, rounds, warm=True)


def _shares(machine: Machine, model: str, rounds: int) -> dict[int, tuple[Times, int]]:
    found: dict[int, tuple[Times, int]] = {}
    for world in WORLDS:
        with fake_group(world):
            optimizer = shard(Bag(machine.shapes(model), machine.device), AdamW, lr=1e-3, fused=True)
            optimizer.step()
            owned = [tuple(param.shape) for group in optimizer.optim.param_groups for param in group["params"]]
            alone = AdamW(make_params(owned, device=machine.device), lr=1e-3, fused=True)
            messages = partial(_send_parameters, optimizer)
            times = machine.race({"zeroshard": optimizer.step, "messages": messages, "share": alone.step}, rounds)
            state = [value for entry in optimizer.optim.state.values() for value in entry.values()]
            held = sum(tensor.nbytes for tensor in [*state, *optimizer._engine.grads.grad_tensors()])
            found[world] = (times, held)
    return found


def _send_parameters(optimizer: ShardedOptimizer) -> None:
    engine = optimizer._engine
    for bucket in engine.layout.buckets:
        engine.param_sync.start(bucket, engine.param_store.buffer(bucket.index))
    engine.param_sync.finish()


def _waits(machine: Machine, world: int) -> dict[str, tuple[str, int]]:
    if world == 1:
        return _wait_cases(machine)
    with fake_group(world):
        return _wait_cases(machine)


def _wait_cases(machine: Machine) -> dict[str, tuple[str, int]]:
    shapes: list[Shape] = [(1024,)] * 200 + [(2048, 1024)] * 16
    found: dict[str, tuple[str, int]] = {}
    for name in ("fused", "foreach"):
        options: dict[str, Any] = {name: True}
        optimizer = shard(Bag(shapes, machine.device), AdamW, lr=1e-3, **options)

        def clip_and_step(optimizer: Any = optimizer) -> None:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

        found[f"{name} AdamW"] = examine(machine, clip_and_step)
    return found


def _parity(machine: Machine) -> dict[str, int]:
    configs = {"float32": ZeroConfig(), "overlap_param_gather": ZeroConfig(overlap_param_gather=True)}
    found = {name: _differing(machine, config) for name, config in configs.items()}
    return found | {"bfloat16 with masters, two equal runs": _unequal_runs(machine)}


def _model(machine: Machine) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(machine.device)


def _batch(machine: Machine, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
    return torch.randn(32, 256, generator=generator).to(machine.device)


def _differing(machine: Machine, config: ZeroConfig) -> int:
    model, wrapped = _model(machine), DistributedDataParallel(_model(machine))
    optimizers: list[Any] = [shard(model, AdamW, lr=1e-3, fused=True, config=config)]
    optimizers.append(AdamW(wrapped.parameters(), lr=1e-3, fused=True))
    for step in range(5):
        for one, optimizer in zip((model, wrapped), optimizers, strict=True):
            one(_batch(machine, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), wrapped.module.parameters(), strict=True)
    return sum(not torch.equal(ours, theirs) for ours, theirs in pairs)


def _unequal_runs(machine: Machine) -> int:
    models = [_model(machine).bfloat16() for _ in range(2)]
    for model in models:
        optimizer = shard(model, AdamW, lr=1e-3, config=ZeroConfig(master_dtype=torch.float32))
        for step in range(5):
            model(_batch(machine, step).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(not torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
