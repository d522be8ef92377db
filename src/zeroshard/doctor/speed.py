"""How fast a rank is by itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from .._types import MIB

_SPEED_REPEATS = 5


@dataclass(frozen=True)
class RankSpeed:
    """Of one rank: operations of a matrix product, and bytes that a copy reads and writes, a second."""

    product: float
    copy: float


def measure_speed(device: torch.device) -> RankSpeed:
    """All ranks measure at the same time, as they would work."""
    size, nbytes = (512, 32 * MIB) if device.type == "cpu" else (4096, 256 * MIB)
    matrix = torch.ones(size, size, dtype=torch.float32, device=device)
    product, source = torch.empty_like(matrix), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = time_call(lambda: torch.mm(matrix, matrix, out=product), device, _SPEED_REPEATS)
    copy = time_call(lambda: target.copy_(source), device, _SPEED_REPEATS)
    return RankSpeed(2 * size**3 / multiply, 2 * nbytes / copy)


def time_call(
    call: Callable[[], object], device: torch.device, repeats: int, summarize: Callable[[list[float]], float] = median
) -> float:
    """Seconds: the median, or what `of` makes of them, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return summarize(times[1:])
