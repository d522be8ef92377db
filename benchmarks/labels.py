"""What labels for the profiler, and the times that go with them, cost a step.

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

TITLE = "What labels cost"
NOTE = "One rank, 2,000 tensors of 256 elements in one bucket, AdamW; medians of 21 rounds, one thread."
MANY, ROUNDS = 2_000, 21
BAR = 0.01
"""Of an iteration."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where labels.md goes")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return finish(measure({"labels": _rows}), TITLE, NOTE, options.out / "labels", fail=not options.no_fail)


def _rows() -> list[Row]:
    with fake_group(1):
        params = [nn.Parameter(torch.ones(256)) for _ in range(2_000)]
        optimizer = zeroshard.shard(nn.ParameterList(params), torch.optim.AdamW)
        iteration = _median(lambda: _iterate(params, optimizer))
        count = sum(it.num_calls for it in optimizer.report().times.phases.values())
    quiet = _median(_make_labels) / MANY
    with profile(activities=[ProfilerActivity.CPU]):
        recorded = _median(_make_labels) / MANY
    words = f"{count} labels in an iteration"
    return [
        Row("a label while nobody profiles", f"{quiet * 1e6:.2g} us", "", quiet * 1e6),
        Row("a label while somebody profiles", f"{recorded * 1e6:.2g} us", "", recorded * 1e6),
        Row(words, f"{count * quiet * 1e6:.2g} us", f"{iteration * 1e3:.3g} ms", count * quiet / iteration, bar=BAR),
    ]


def _iterate(params: list[nn.Parameter], optimizer: Any) -> None:
    torch.autograd.backward(torch.cat([*params]).sum())
    optimizer.step()
    optimizer.zero_grad()


def _make_labels() -> None:
    clock = StepProfiler()
    for _ in range(MANY):
        with clock.phase(Phase.PACK_GRADS, 3):
            pass


def _median(run: Callable[[], object]) -> float:
    """Of what it takes, after a round that does not count."""
    return median([wall_clock(run) for _ in range(ROUNDS + 1)][1:])


if __name__ == "__main__":
    sys.exit(main())
