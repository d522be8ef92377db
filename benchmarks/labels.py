"""Measure the cost of profiler labels and of the step times that are recorded with them.

python benchmarks/labels.py [--out DIR] [--no-fail]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import zeroshard  # noqa: E402
from benchmarks.harness.ranks import fake_group  # noqa: E402
from benchmarks.harness.report import Row, finish, measure  # noqa: E402
from benchmarks.harness.timing import wall_clock  # noqa: E402
from zeroshard.profiling import Phase, StepProfiler  # noqa: E402

TITLE = "Cost of profiler labels"
NOTE = "One rank, 2,000 tensors of 256 elements in one bucket, AdamW; medians of 21 rounds, one thread."
NUM_LABELS, ROUNDS = 2_000, 21
BAR = 0.01
"""Ratio of the labels' time to the iteration's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for labels.md")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return finish(
        measure({"labels": _rows}, writes_results=True), TITLE, NOTE, options.out / "labels", fail=not options.no_fail
    )


def _rows() -> list[Row]:
    with fake_group(1):
        params = [nn.Parameter(torch.ones(256)) for _ in range(2_000)]
        optimizer = zeroshard.shard(nn.ParameterList(params), torch.optim.AdamW)
        iteration = _median(lambda: _iterate(params, optimizer))
        count = sum(phase.num_calls for phase in optimizer.report().times.phases.values())
    unprofiled = _median(_make_labels) / NUM_LABELS
    with profile(activities=[ProfilerActivity.CPU]):
        profiled = _median(_make_labels) / NUM_LABELS
    total = count * unprofiled
    what = f"{count} labels in an iteration"
    return [
        Row("a label without a profiler", f"{unprofiled * 1e6:.2g} us", "", unprofiled * 1e6),
        Row("a label under a profiler", f"{profiled * 1e6:.2g} us", "", profiled * 1e6),
        Row(what, f"{total * 1e6:.2g} us", f"{iteration * 1e3:.3g} ms", total / iteration, bar=BAR),
    ]


def _iterate(params: list[nn.Parameter], optimizer: Any) -> None:
    torch.autograd.backward(torch.cat([*params]).sum())
    optimizer.step()
    optimizer.zero_grad()


def _make_labels() -> None:
    profiler = StepProfiler()
    for _ in range(NUM_LABELS):
        with profiler.phase(Phase.PACK_GRADS, 3):
            pass


def _median(run: Callable[[], object]) -> float:
    """Return the median time, after a round that does not count."""
    return median([wall_clock(run) for _ in range(ROUNDS + 1)][1:])


if __name__ == "__main__":
    sys.exit(main())
