"""zeroshard's checkpoints against those of FSDP2 and of torch's ZeroRedundancyOptimizer, as ratios within one run.

python benchmarks/checkpoint.py [--quick] [--rounds N] [--folder DIR] [--out DIR] [--no-fail]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.checkpoint import compare, place  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "zeroshard's checkpoints"
NOTE = (
    "Times are medians of the slowest rank's, one thread a rank, gloo over loopback. Contestants take turns, each time "
    "in new processes that have saved and loaded a tiny model before. A ratio is the median of the rounds' own "
    "quotients, with their quartiles in parentheses. All save the model and the state of fused AdamW after one step, "
    "and sync their files; loading goes into a model and an optimizer that have their memory already. What was loaded "
    "is compared with what was saved. Extra memory is resident memory at the peak beyond that before the call, on the "
    "worst rank in the worst round."
)


def main() -> int:
    options = _options()
    parent = options.folder or place()
    size, rounds = ("tiny", 2) if options.quick else ("100M", 3)
    rows = measure({"checkpoint": partial(compare, options.rounds or rounds, size, parent)})
    note = f"{NOTE} Files are in {'memory' if options.folder is None and parent else 'a folder on the disk'}."
    return finish(rows, TITLE, note, options.out and options.out / "checkpoint", fail=not options.no_fail)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the code out; writes no results")
    parser.add_argument("--rounds", type=int, help="so many; writes no results")
    parser.add_argument("--folder", type=Path, help="for the files, about 3 GiB of them; writes no results")
    parser.add_argument("--out", type=Path, help="where checkpoint.json and checkpoint.md go, also of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.rounds or options.folder):
        options.out = ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
