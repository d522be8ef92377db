"""How fast a rank is by itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ..units import MIB

_REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """Of one rank: operations of a matrix product, and bytes that a copy reads and writes, a second."""

    product: float
    copy: float


def speed_of(device: torch.device) -> Speed:
    """All ranks measure at the same time, as they would work."""
    size, nbytes = (512, 32 * MIB) if device.type == "cpu" else (4096, 256 * MIB)
    matrix = torch.ones(size, size, dtype=torch.float32, device=device)
    product, source = torch.empty_like(matrix), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = timed(lambda: torch.mm(matrix, matrix, out=product), device, _REPEATS)
    copy = timed(lambda: target.copy_(source), device, _REPEATS)
    return Speed(2 * size**3 / multiply, 2 * nbytes / copy)


def timed(
    call: Callable[[], object], device: torch.device, repeats: int, of: Callable[[list[float]], float] = median
) -> float:
    """Seconds: the median, or what `of` makes of them, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return of(times[1:])
