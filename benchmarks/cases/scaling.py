"""Building and stepping for many parameters on many ranks, of which only one is there."""

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
"""Of parameters, in turns; every other one is a matrix."""
BUCKETS = 400
STEPS = 2
PARAMS = (10_000, 30_000, 100_000)
RANKS = (8, 64, 512, 4096)
MOST_SECONDS, MOST_FOR_TEN_TIMES, MOST_FOR_RANKS = 10, 12, 1.5
"""To build for most parameters on most ranks; ten times the parameters; 512 times the ranks."""
VERBS = (
    *("all_reduce", "broadcast", "gather", "reduce_scatter_single", "all_gather_single", "all_to_all_single"),
    *("reduce_scatter_tensor", "all_gather_into_tensor"),
)


EXPLAINED = (
    "layout: of build. backward: that of the model, with what hooks and packing add. step: the faster of two, as "
    "backward. kept, peak: Python memory after and while it is built, by tracemalloc. resident: the peak of the "
    "process while it is built beyond what the model took, flat copies of parameters and tensor objects included."
)


class Case(NamedTuple):
    kind: str
    params: int
    ranks: int

    def __str__(self) -> str:
        return f"{_NAMES[self.kind].format(self.params)}, {self.ranks:,} ranks"


Found = dict[str, float]
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
    """What was measured so far."""

    def __init__(self, *, quick: bool) -> None:
        self._counts: tuple[int, ...] = (1_000, 10_000) if quick else PARAMS
        self._ranks: tuple[int, ...] = (8, 4096) if quick else RANKS
        self._found: dict[Case, Found] = {}

    def rows(self, kind: str) -> list[Row]:
        """Measure the cases with most parameters or most ranks; what lies between is left out but for `cut`."""
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
                f"{self._found[many]['build']:.3g} s",
                "",
                self._found[many]["build"],
                bar=MOST_SECONDS,
            )
        ]
        rows += self._growth(few, many, f"from {ranks[0]} ranks", MOST_FOR_RANKS)
        if len(counts) > 1:
            rows += self._growth(Case(kind, counts[0], ranks[-1]), many, f"from {counts[0]:,}", MOST_FOR_TEN_TIMES)
        return rows

    def _measure(self, case: Case, *, memory: bool) -> None:
        (found,) = run_ranks(1, _seconds, *case, backend="none", start="forkserver")
        if memory:
            found |= run_ranks(1, _memory, *case, backend="none", start="forkserver")[0]
        self._found[case] = found
        print(f"{case}: {found}", file=sys.stderr, flush=True)

    def _growth(self, before: Case, after: Case, since: str, bar: float) -> Iterator[Row]:
        for name in ("build", "step", "kept", "resident"):
            a, b = self._found[before][name], self._found[after][name]
            judged = bar if name != "step" else None  # the backend's copies, left out, leave cold caches behind
            yield Row(f"{after}: {name}, {since}", f"{a:.3g} -> {b:.3g} {UNITS[name]}", "", b / a, bar=judged)

    def table(self) -> str:
        head = ["case", *(f"{name}, {unit}" for name, unit in UNITS.items())]
        lines = [[str(case), *_cells(found)] for case, found in self._found.items()]
        return f"{EXPLAINED}\n\n{markdown([head, *lines])}"

    def record(self) -> list[dict[str, Any]]:
        return [{**case._asdict(), **found} for case, found in self._found.items()]


def _cells(found: Found) -> Iterator[str]:
    for name, unit in UNITS.items():
        yield "" if name not in found else f"{found[name]:.0f}" if unit == "MiB" else f"{found[name]:.2g}"


def _seconds(kind: str, params: int, ranks: int) -> Found:
    with fake_group(ranks), _Clock() as clock:
        model = _warm_model(kind, params)
        with mock.patch.object(EngineBuilder, "extend_layout", clock.noting(EngineBuilder.extend_layout)):
            before = reset_peak()
            build, optimizer = clock.time(lambda: _build(kind, model))
        resident = (peak_bytes() - before) / MIB
        turns = [_turn(clock, model, optimizer) for _ in range(STEPS)]
        backward, step = map(min, zip(*turns, strict=True))
        return {"build": build, "layout": clock.noted, "backward": backward, "step": step, "resident": resident}


def _turn(clock: "_Clock", model: nn.ParameterList, optimizer: Any) -> tuple[float, float]:
    loss = torch.cat([param.view(-1)[:1] for param in model]).sum()
    backward, _ = clock.time(loss.backward)
    step, _ = clock.time(optimizer.step)
    optimizer.zero_grad()
    return backward, step


def _memory(kind: str, params: int, ranks: int) -> Found:
    with fake_group(ranks):
        model = _warm_model(kind, params)
        tracemalloc.start()
        optimizer = _build(kind, model)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
        assert optimizer, "it is still there"
        return {"kept": kept / MIB, "peak": peak / MIB}


def _warm_model(kind: str, params: int) -> nn.ParameterList:
    """A model, after a tiny one of its kind was sharded: what is imported and tried out once is not counted."""
    for count in (24, params):
        model = _model(kind, count)
        if count != params:
            optimizer = _build(kind, model)
            torch.cat([param.view(-1) for param in model]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def _model(kind: str, params: int) -> nn.ParameterList:
    if kind == "buckets":
        return nn.ParameterList([nn.Parameter(torch.zeros(128, 128)) for _ in range(params)])
    sizes = [SIZES[place % len(SIZES)] for place in range(params)]
    shapes = [(size,) if place % 2 else (8, size // 8) for place, size in enumerate(sizes)]
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def _build(kind: str, model: nn.ParameterList) -> Any:
    if kind == "dropin":
        return zeroshard.ZeroRedundancyOptimizer(model.parameters(), AdamW)
    if kind == "rules":
        return zeroshard.shard(model, [ParamRule(matrix_params(), Muon), ParamRule(remaining_params, AdamW)])
    config = ZeroConfig(partition=FlatShards(bucket_bytes=1)) if kind == "buckets" else None
    return zeroshard.shard(model, AdamW, config=config)


class _Clock:
    """CPU seconds, without those that the backend takes in the place of a network."""

    def __init__(self) -> None:
        self.noted = 0.0
        self._apart = 0.0
        self._patches = ExitStack()

    def __enter__(self) -> "_Clock":
        for verb in VERBS:
            if hasattr(dist, verb):
                self._patches.enter_context(mock.patch.object(dist, verb, self._left_out(getattr(dist, verb))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def time(self, run: Callable[[], Any]) -> tuple[float, Any]:
        start = time.process_time() - self._apart
        result = run()
        return time.process_time() - self._apart - start, result

    def noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.noted, result = self.time(lambda: call(*args, **kwargs))
            return result

        return timed

    def _left_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._apart += time.process_time() - start

        return timed
