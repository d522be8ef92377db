"""State in host memory against resident state: the time of a step, and the memory of the GPU."""

import statistics
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW

from zeroshard import CPUOffload, ShardedOptimizer, ZeroConfig, shard

from ..harness.ranks import run_ranks
from ..harness.report import Row
from ..harness.timing import cuda_clock, ms, wall_clock
from .gpu_flat import Bag
from .gpu_speed import MODELS, Machine

GIB = 2**30
PLACES = {"resident": None, "pinned": CPUOffload(), "not pinned": CPUOffload(pin=False)}
PRECISIONS: dict[str, tuple[torch.dtype, int]] = {
    "float32": (torch.float32, 8),
    "bfloat16 with masters": (torch.bfloat16, 12),
}
"""What the parameters are, and bytes a parameter that rest in host memory."""


class Found(NamedTuple):
    steps: list[float]
    peak: int
    resting: int
    elements: int
    checksum: float


def against_resident(machine: Machine, rounds: int) -> list[Row]:
    (rates,) = run_ranks(1, _rates, machine, backend=machine.backend)
    rows = []
    for precision, (_, nbytes) in PRECISIONS.items():
        found = {
            place: run_ranks(1, _steps, machine, precision, place, rounds, backend=machine.backend, limit_s=300)[0]
            for place in PLACES
        }
        least = nbytes * found["pinned"].elements / min(rates)
        rows += _rows(precision, found, least, machine)
    return rows


def _rows(precision: str, found: dict[str, Found], least: float, machine: Machine) -> list[Row]:
    resident, rows = found["resident"], []
    for place in ("pinned", "not pinned"):
        it, what = found[place], f"{MODELS[0]}, {precision}, 1 rank, fused AdamW, state in host memory, {place}"
        slower = statistics.median(it.steps) / statistics.median(resident.steps)
        rows.append(Row(f"step, {what}", ms(it.steps), f"{ms(resident.steps)} resident", slower))
        over = statistics.median(it.steps) / least
        bar = 1.25 if place == "pinned" and machine.device == "cuda" else None
        rows.append(
            Row(f"step over the time of its copies, {what}", ms(it.steps), f"{1e3 * least:.0f} ms", over, bar=bar)
        )
        for name, mine, theirs in (("peak", it.peak, resident.peak), ("between steps", it.resting, resident.resting)):
            shown = f"{mine / GIB:.2f} GiB", f"{theirs / GIB:.2f} GiB resident"
            rows.append(Row(f"GPU memory, {name}, {what}", *shown, mine / max(theirs, 1)))
        rows.append(
            Row(
                f"differs from resident, {what}",
                str(it.checksum),
                str(resident.checksum),
                float(it.checksum != resident.checksum),
                bar=0,
            )
        )
    return rows


def _steps(machine: Machine, precision: str, place: str, rounds: int) -> Found:
    dtype, _ = PRECISIONS[precision]
    model = Bag(machine.shapes(MODELS[0]), machine.device).to(dtype)
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator(machine.device).manual_seed(number)
        param.grad = torch.randn(param.shape, generator=generator, device=machine.device).to(dtype)
    masters = torch.float32 if dtype == torch.bfloat16 else None
    optimizer: ShardedOptimizer = shard(
        model, AdamW, lr=1e-3, config=ZeroConfig(master_dtype=masters, offload=PLACES[place])
    )
    optimizer.step()  # makes the state
    memory = _Memory(machine.device)
    clock = cuda_clock if machine.device == "cuda" else wall_clock
    steps = [clock(optimizer.step) for _ in range(rounds)]
    sums = torch.stack([param.detach().double().sum() for param in model.parameters()])
    elements = sum(param.numel() for param in model.parameters())
    return Found(steps, memory.peak, memory.resting, elements, float(sums.sum()))


class _Memory:
    def __init__(self, device: str) -> None:
        self._counts = device == "cuda"
        if self._counts:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.resting = torch.cuda.memory_allocated() if self._counts else 0

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._counts else 0


def _rates(machine: Machine) -> tuple[float, float]:
    """Bytes a second from pinned host memory to the device, and back, both ways at once."""
    cuda = machine.device == "cuda"
    size = GIB if cuda else 2**22
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    near = [torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(streams[0]) if cuda else torch.no_grad():
            near[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]) if cuda else torch.no_grad():
            hosts[1].copy_(near[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    clock = cuda_clock if cuda else wall_clock
    seconds = statistics.median([clock(both) for _ in range(8)])
    return size / seconds, size / seconds
