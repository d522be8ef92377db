"""Measure the time to build a sharded optimizer, with and without cached probe results.

python benchmarks/construction.py [--quick] [--out DIR]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness.ranks import run_ranks  # noqa: E402
from benchmarks.harness.report import Row, finish, measure, ratio_row  # noqa: E402
from benchmarks.harness.timing import Run, Times, ms, race, ratio, slowest  # noqa: E402
from zeroshard import ParamRule, ZeroRedundancyOptimizer, matrix_params, remaining_params, shard  # noqa: E402
from zeroshard.engine import probe  # noqa: E402

TITLE = "Construction"
NOTE = (
    "2 ranks, a model of 24 layers of 64 x 64, the slowest rank's time. *Probed*: the optimizer class is stepped on "
    "probe tensors, as in the first construction in a process. "
    "*Memoised*: all later constructions with the same class and options reuse the results."
)
RANKS = 2


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))


def muon_and_adamw() -> list[ParamRule]:
    return [
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.02),
        ParamRule(remaining_params, torch.optim.AdamW, lr=1e-3),
    ]


BUILDERS: dict[str, Callable[[nn.Module], object]] = {
    "shard, AdamW": lambda model: shard(model, torch.optim.AdamW, lr=1e-3),
    "shard, Muon and AdamW": lambda model: shard(model, muon_and_adamw()),
    "drop-in, AdamW": lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; write no results")
    parser.add_argument("--out", type=Path, help="directory for construction.md; default of a full run: results/")
    options = parser.parse_args()
    out = options.out or (None if options.quick else ROOT / "benchmarks" / "results")
    rows = measure({"construction": partial(_rows, 5 if options.quick else 31)}, writes_results=out is not None)
    return finish(rows, TITLE, NOTE, out and out / "construction", fail=True)


def _rows(rounds: int) -> list[Row]:
    times = slowest(run_ranks(RANKS, _race, rounds))
    rows = []
    for name in BUILDERS:
        memoised, probed = times[f"{name} memoised"], times[f"{name} probed"]
        cells = f"{ms(memoised)} memoised", f"{ms(probed)} probed"
        rows.append(ratio_row(name, *cells, ratio(memoised, probed), 1.0))
    return rows


def _race(rounds: int) -> Times:
    model = make_model()

    def build_without_cache(build: Callable[[nn.Module], object]) -> object:
        cached_answers, probe._cached_answers = probe._cached_answers, WeakKeyDictionary()
        try:
            return build(model)
        finally:
            probe._cached_answers = cached_answers

    contestants: dict[str, Run] = {}
    for name, build in BUILDERS.items():
        contestants[f"{name} probed"] = partial(build_without_cache, build)
        contestants[f"{name} memoised"] = partial(build, model)
    return race(contestants, rounds)


if __name__ == "__main__":
    sys.exit(main())
