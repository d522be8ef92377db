"""Build and step an optimizer for many parameters on many ranks, of which only rank 0 exists."""

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon

import zeroshard
from zeroshard import FlatShards, ParamRule, ZeroConfig, matrix_params, remaining_params
from zeroshard.build import EngineBuilder

from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, markdown
from ..harness.resources import MIB, peak_bytes, reset_peak

KINDS = ("cut", "buckets", "rules", "dropin")
SIZES = (64, 512, 64, 512, 256, 512, 64, 512, 64, 4096, 64, 512)
"""Sizes of parameters, in turns; every other one is a matrix."""
BUCKETS = 400
STEPS = 2
PARAMS = (10_000, 30_000, 100_000)
RANKS = (8, 64, 512, 4096)
BUILD_BAR_S, PARAMS_BAR, RANKS_BAR = 10, 12, 1.5
"""For building with most parameters on most ranks; for ten times the parameters; for 512 times the ranks."""
COLLECTIVES = (
    *("all_reduce", "broadcast", "gather", "reduce_scatter_single", "all_gather_single", "all_to_all_single"),
    *("reduce_scatter_tensor", "all_gather_into_tensor"),
)


LEGEND = (
    "layout: part of build. backward: the model's backward pass, including hooks and packing. backward, step: the "
    "faster of two. kept, peak: Python memory after and during the build, from tracemalloc. resident: peak memory of "
    "the process during the build beyond the model's, including flat copies of parameters and tensor objects."
)


class Case(NamedTuple):
    kind: str
    params: int
    ranks: int

    def __str__(self) -> str:
        return f"{_NAMES[self.kind].format(self.params)}, {self.ranks:,} ranks"


Measurements = dict[str, float]
"""Seconds and MiB, by name."""
UNITS = {
    "build": "s",
    "layout": "s",
    "backward": "s",
    "step": "s",
    "kept": "MiB",
    "peak": "MiB",
    "resident": "MiB",
}
_NAMES = {
    "cut": "shard, {:,} small",
    "buckets": "shard, {:,} buckets",
    "rules": "shard with rules, {:,} small",
    "dropin": "drop-in, {:,} small",
}


class Cases:
    """All cases that were measured."""

    def __init__(self, *, quick: bool) -> None:
        self._counts: tuple[int, ...] = (1_000, 10_000) if quick else PARAMS
        self._ranks: tuple[int, ...] = (8, 4096) if quick else RANKS
        self._measured: dict[Case, Measurements] = {}

    def rows(self, kind: str) -> list[Row]:
        """Measure the cases with most parameters or most ranks. Only `cut` includes those in between."""
        counts = (BUCKETS,) if kind == "buckets" else self._counts
        ranks = self._ranks
        for count, size in product(counts, ranks):
            is_end = count in (counts[0], counts[-1]) and size in (ranks[0], ranks[-1])
            if (count == counts[-1] or size == ranks[-1]) and (is_end or kind == "cut"):
                self._measure(Case(kind, count, size), memory=is_end)
        few, many = Case(kind, counts[-1], ranks[0]), Case(kind, counts[-1], ranks[-1])
        rows = [
            Row(
                f"{many}: build",
                f"{self._measured[many]['build']:.3g} s",
                "",
                self._measured[many]["build"],
                bar=BUILD_BAR_S,
            )
        ]
        rows += self._growth_rows(few, many, f"from {ranks[0]} ranks", RANKS_BAR)
        if len(counts) > 1:
            rows += self._growth_rows(Case(kind, counts[0], ranks[-1]), many, f"from {counts[0]:,}", PARAMS_BAR)
        return rows

    def _measure(self, case: Case, *, memory: bool) -> None:
        (measurements,) = run_ranks(1, _measure_time, *case, backend="none", start="forkserver")
        if memory:
            measurements |= run_ranks(1, _measure_memory, *case, backend="none", start="forkserver")[0]
        self._measured[case] = measurements
        print(f"{case}: {measurements}", file=sys.stderr, flush=True)

    def _growth_rows(self, before: Case, after: Case, since: str, bar: float) -> Iterator[Row]:
        for name in ("build", "step", "kept", "resident"):
            a, b = self._measured[before][name], self._measured[after][name]
            # Steps have no bar: the backend's copies are not timed, but they leave cold caches.
            row_bar = bar if name != "step" else None
            yield Row(f"{after}: {name}, {since}", f"{a:.3g} -> {b:.3g} {UNITS[name]}", "", b / a, bar=row_bar)

    def table(self) -> str:
        head = ["case", *(f"{name}, {unit}" for name, unit in UNITS.items())]
        lines = [[str(case), *_cells(measurements)] for case, measurements in self._measured.items()]
        return f"{LEGEND}\n\n{markdown([head, *lines])}"

    def record(self) -> list[dict[str, Any]]:
        return [{**case._asdict(), **measurements} for case, measurements in self._measured.items()]


def _cells(measurements: Measurements) -> Iterator[str]:
    for name, unit in UNITS.items():
        value = measurements.get(name)
        yield "" if value is None else f"{value:.0f}" if unit == "MiB" else f"{value:.2g}"


def _measure_time(kind: str, params: int, ranks: int) -> Measurements:
    with fake_group(ranks), _CpuClock() as clock:
        model = _make_warm_model(kind, params)
        with mock.patch.object(EngineBuilder, "extend_layout", clock.wrap(EngineBuilder.extend_layout)):
            before = reset_peak()
            build, optimizer = clock.time(lambda: _build(kind, model))
        resident = (peak_bytes() - before) / MIB
        iterations = [_time_iteration(clock, model, optimizer) for _ in range(STEPS)]
        backward, step = map(min, zip(*iterations, strict=True))
        return {"build": build, "layout": clock.wrapped_s, "backward": backward, "step": step, "resident": resident}


def _time_iteration(clock: "_CpuClock", model: nn.ParameterList, optimizer: Any) -> tuple[float, float]:
    loss = torch.cat([param.view(-1)[:1] for param in model]).sum()
    backward, _ = clock.time(loss.backward)
    step, _ = clock.time(optimizer.step)
    optimizer.zero_grad()
    return backward, step


def _measure_memory(kind: str, params: int, ranks: int) -> Measurements:
    with fake_group(ranks):
        model = _make_warm_model(kind, params)
        tracemalloc.start()
        optimizer = _build(kind, model)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
        assert optimizer, "the optimizer must be alive while memory is measured"
        return {"kept": kept / MIB, "peak": peak / MIB}


def _make_warm_model(kind: str, params: int) -> nn.ParameterList:
    """Make a model after sharding a tiny one, so that imports and probes are not counted."""
    for count in (24, params):
        model = _make_model(kind, count)
        if count != params:
            optimizer = _build(kind, model)
            torch.cat([param.view(-1) for param in model]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def _make_model(kind: str, params: int) -> nn.ParameterList:
    if kind == "buckets":
        return nn.ParameterList([nn.Parameter(torch.zeros(128, 128)) for _ in range(params)])
    sizes = [SIZES[index % len(SIZES)] for index in range(params)]
    shapes = [(size,) if index % 2 else (8, size // 8) for index, size in enumerate(sizes)]
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def _build(kind: str, model: nn.ParameterList) -> Any:
    if kind == "dropin":
        return zeroshard.ZeroRedundancyOptimizer(model.parameters(), AdamW)
    if kind == "rules":
        return zeroshard.shard(model, [ParamRule(matrix_params(), Muon), ParamRule(remaining_params, AdamW)])
    config = ZeroConfig(partition=FlatShards(bucket_bytes=1)) if kind == "buckets" else None
    return zeroshard.shard(model, AdamW, config=config)


class _CpuClock:
    """CPU time without the backend's collectives, which stand in for a network."""

    def __init__(self) -> None:
        self.wrapped_s = 0.0
        """Seconds of the last call of a wrapped function."""
        self._excluded_s = 0.0
        self._patches = ExitStack()

    def __enter__(self) -> "_CpuClock":
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self._patches.enter_context(mock.patch.object(dist, name, self._exclude(getattr(dist, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def time(self, run: Callable[[], Any]) -> tuple[float, Any]:
        start = time.process_time() - self._excluded_s
        result = run()
        return time.process_time() - self._excluded_s - start, result

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wrapped_s, result = self.time(lambda: function(*args, **kwargs))
            return result

        return timed

    def _exclude(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def excluded(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._excluded_s += time.process_time() - start

        return excluded
