"""Check that a step launches work on the GPU and returns without waiting for the device."""

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
STEP_LABEL = "the measured step"


def waits(machine: Machine) -> list[Row]:
    """Check world size 1, which sends nothing, and rank 0 of 8 on the `fake` backend, which packs and sends."""
    runs = {"1 rank": (machine.backend, 1), "rank 0 of 8, fake": ("none", 8)}
    rows: list[Row] = []
    for where, (backend, world) in runs.items():
        (results,) = run_ranks(1, _find_all_waits, machine, world, backend=backend)
        for case, (error, count) in results.items():
            what = f"waits for the device in a step, {where}, {case}"
            rows.append(Row(what, error or f"none refused, {count} profiled", "", count + bool(error), bar=0))
    return rows


def _find_all_waits(machine: Machine, world: int) -> dict[str, tuple[str, int]]:
    if world == 1:
        return _find_waits_in_group(machine)
    with fake_group(world):
        return _find_waits_in_group(machine)


def _find_waits_in_group(machine: Machine) -> dict[str, tuple[str, int]]:
    results: dict[str, tuple[str, int]] = {}
    for name in ("SGD", "fused AdamW", "foreach AdamW"):
        for view in (False, True):
            optimizer = RECIPES[name].sharded("zeroshard", _make_mixed_params(machine), bucket_view=view)
            results[name + (", bucket view" if view else "")] = find_waits(machine, optimizer.step)
    return results


def _make_mixed_params(machine: Machine) -> list[torch.Tensor]:
    """Make small parameters, which are packed, large ones, which are sent alone, and a transposed one."""
    params = make_params([(1024,)] * 200 + [(2048, 1024)] * 16, device=machine.device)
    transposed = torch.nn.Parameter(torch.randn(96, 64, device=machine.device).t())
    transposed.grad = torch.randn_like(transposed)
    return [*params, transposed]


def find_waits(machine: Machine, run: Run) -> tuple[str, int]:
    """Return the error of a call that waits for the device, and the number of waits in a profile."""
    for _ in range(2):
        run()
    try:
        with _forbid_waits(machine):
            run()
    except Exception as error:
        return f"refused: {str(error).splitlines()[0]}", 0
    return "", _count_profiled_waits(machine, run)


@contextmanager
def _forbid_waits(machine: Machine) -> Iterator[None]:
    """Make calls that wait for the device raise."""
    if machine.device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _count_profiled_waits(machine: Machine, run: Run) -> int:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if machine.device == "cuda" else [])
    with profile(activities=activities) as profiler, record_function(STEP_LABEL):
        run()
    events = profiler.events() or []
    step = next(event.time_range for event in events if event.name == STEP_LABEL and event.device_type.name == "CPU")
    return sum(event.name in WAITS and step.start <= event.time_range.start <= step.end for event in events)
