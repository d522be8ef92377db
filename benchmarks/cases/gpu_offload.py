"""Compare offloaded with resident state: step time and GPU memory."""

import statistics
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW

from zeroshard import CPUOffload, ShardedOptimizer, ZeroConfig, shard

from ..harness.ranks import run_ranks
from ..harness.report import Row
from ..harness.timing import cuda_clock, ms, wall_clock
from .gpu_flat import ParamBag
from .gpu_speed import MODELS, Machine

GIB = 2**30
MODES = {"resident": None, "pinned": CPUOffload(), "not pinned": CPUOffload(pin=False)}
PRECISIONS: dict[str, tuple[torch.dtype, int]] = {
    "float32": (torch.float32, 8),
    "bfloat16 with masters": (torch.bfloat16, 12),
}
"""Dtype of the parameters, and bytes per parameter that stay in host memory."""


class Measurement(NamedTuple):
    steps: list[float]
    peak: int
    between_steps: int
    numel: int
    checksum: float


def compare_with_resident(machine: Machine, rounds: int) -> list[Row]:
    (rates,) = run_ranks(1, _measure_copy_rates, machine, backend=machine.backend)
    rows = []
    for precision, (_, nbytes) in PRECISIONS.items():
        by_mode = {
            mode: run_ranks(1, _measure, machine, precision, mode, rounds, backend=machine.backend, limit_s=300)[0]
            for mode in MODES
        }
        least = nbytes * by_mode["pinned"].numel / min(rates)
        rows += _rows(precision, by_mode, least, machine)
    return rows


def _rows(precision: str, by_mode: dict[str, Measurement], least: float, machine: Machine) -> list[Row]:
    resident, rows = by_mode["resident"], []
    for mode in ("pinned", "not pinned"):
        ours, what = by_mode[mode], f"{MODELS[0]}, {precision}, 1 rank, fused AdamW, state in host memory, {mode}"
        step = statistics.median(ours.steps)
        slowdown = step / statistics.median(resident.steps)
        rows.append(Row(f"step, {what}", ms(ours.steps), f"{ms(resident.steps)} resident", slowdown))
        bar = 1.25 if mode == "pinned" and machine.device == "cuda" else None
        cells = ms(ours.steps), f"{1e3 * least:.0f} ms"
        rows.append(Row(f"step over the time of its copies, {what}", *cells, step / least, bar=bar))
        memory = (
            ("peak", ours.peak, resident.peak),
            ("between steps", ours.between_steps, resident.between_steps),
        )
        for name, our_bytes, resident_bytes in memory:
            cells = f"{our_bytes / GIB:.2f} GiB", f"{resident_bytes / GIB:.2f} GiB resident"
            rows.append(Row(f"GPU memory, {name}, {what}", *cells, our_bytes / max(resident_bytes, 1)))
        rows.append(
            Row(
                f"differs from resident, {what}",
                str(ours.checksum),
                str(resident.checksum),
                float(ours.checksum != resident.checksum),
                bar=0,
            )
        )
    return rows


def _measure(machine: Machine, precision: str, mode: str, rounds: int) -> Measurement:
    dtype, _ = PRECISIONS[precision]
    model = ParamBag(machine.shapes(MODELS[0]), machine.device).to(dtype)
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator(machine.device).manual_seed(number)
        param.grad = torch.randn(param.shape, generator=generator, device=machine.device).to(dtype)
    master_dtype = torch.float32 if dtype == torch.bfloat16 else None
    optimizer: ShardedOptimizer = shard(
        model, AdamW, lr=1e-3, config=ZeroConfig(master_dtype=master_dtype, offload=MODES[mode])
    )
    optimizer.step()  # creates the state
    memory = _MemoryMeter(machine.device)
    clock = cuda_clock if machine.device == "cuda" else wall_clock
    steps = [clock(optimizer.step) for _ in range(rounds)]
    sums = torch.stack([param.detach().double().sum() for param in model.parameters()])
    numel = sum(param.numel() for param in model.parameters())
    return Measurement(steps, memory.peak, memory.between_steps, numel, float(sums.sum()))


class _MemoryMeter:
    """GPU memory from now on; 0 on other devices."""

    def __init__(self, device: str) -> None:
        self._has_cuda = device == "cuda"
        if self._has_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.between_steps = torch.cuda.memory_allocated() if self._has_cuda else 0

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._has_cuda else 0


def _measure_copy_rates(machine: Machine) -> tuple[float, float]:
    """Return bytes per second from pinned host memory to the device and back, with concurrent copies."""
    has_cuda = machine.device == "cuda"
    size = GIB if has_cuda else 2**22
    on_host = [torch.empty(size, dtype=torch.uint8, pin_memory=has_cuda) for _ in range(2)]
    on_device = [torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)] if has_cuda else []  # type: ignore[no-untyped-call]

    def copy_both_directions() -> None:
        with torch.cuda.stream(streams[0]) if has_cuda else torch.no_grad():
            on_device[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]) if has_cuda else torch.no_grad():
            on_host[1].copy_(on_device[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    clock = cuda_clock if has_cuda else wall_clock
    seconds = statistics.median([clock(copy_both_directions) for _ in range(8)])
    return size / seconds, size / seconds
