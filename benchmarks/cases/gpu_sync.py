"""A step must put work on the GPU and return: no waiting for the device on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..harness.models import RECIPES, make_params
from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row
from ..harness.timing import Run
from .gpu_speed import Machine

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
MARK = "the measured step"


def waits(machine: Machine) -> list[Row]:
    """World size 1, where nothing travels, and rank 0 of 8 on the `fake` backend, where all is packed and sent."""
    runs = {"1 rank": (machine.backend, 1), "rank 0 of 8, fake": ("none", 8)}
    rows: list[Row] = []
    for where, (backend, world) in runs.items():
        (found,) = run_ranks(1, _examine_all, machine, world, backend=backend)
        for case, (problem, count) in found.items():
            what = f"waits for the device in a step, {where}, {case}"
            rows.append(Row(what, problem or f"none refused, {count} profiled", "", count + bool(problem), bar=0))
    return rows


def _examine_all(machine: Machine, world: int) -> dict[str, tuple[str, int]]:
    if world == 1:
        return _cases(machine)
    with fake_group(world):
        return _cases(machine)


def _cases(machine: Machine) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for name in ("SGD", "fused AdamW", "foreach AdamW"):
        for view in (False, True):
            optimizer = RECIPES[name].sharded("zeroshard", _mixed_params(machine), bucket_view=view)
            found[name + (", bucket view" if view else "")] = examine(machine, optimizer.step)
    return found


def _mixed_params(machine: Machine) -> list[torch.Tensor]:
    """Small ones that are packed, large ones that travel alone, one whose strides need care."""
    params = make_params([(1024,)] * 200 + [(2048, 1024)] * 16, device=machine.device)
    turned = torch.nn.Parameter(torch.randn(96, 64, device=machine.device).t())
    turned.grad = torch.randn_like(turned)
    return [*params, turned]


def examine(machine: Machine, run: Run) -> tuple[str, int]:
    """What refused to run without waiting for the device, and how many waits a profile shows."""
    for _ in range(2):
        run()
    try:
        with _refused(machine):
            run()
    except Exception as error:
        return f"refused: {str(error).splitlines()[0]}", 0
    return "", _profiled_waits(machine, run)


@contextmanager
def _refused(machine: Machine) -> Iterator[None]:
    """Waiting for the device raises."""
    if machine.device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _profiled_waits(machine: Machine, run: Run) -> int:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if machine.device == "cuda" else [])
    with profile(activities=activities) as profiler, record_function(MARK):
        run()
    events = profiler.events() or []
    whole = next(event.time_range for event in events if event.name == MARK and event.device_type.name == "CPU")
    return sum(event.name in WAITS and whole.start <= event.time_range.start <= whole.end for event in events)
