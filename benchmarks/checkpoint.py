"""Compare zeroshard's checkpoints with those of FSDP2 and torch's ZeroRedundancyOptimizer, as ratios within one run.

python benchmarks/checkpoint.py [--quick] [--rounds N] [--folder DIR] [--out DIR] [--no-fail]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.checkpoint import compare, in_memory_folder  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "zeroshard's checkpoints"
NOTE = (
    "Times are medians of the slowest rank, with one thread per rank and gloo over loopback. Contestants take turns, "
    "each time in new processes that have first saved and loaded a tiny model. Ratios are computed per round; the "
    "table shows their median, with the quartiles in parentheses. All contestants save the model and the state of "
    "fused AdamW after one step, and sync their files. They load into a model and an optimizer that have allocated "
    "their memory. The loaded values are compared with the saved ones. Extra memory is the peak of resident memory "
    "minus its value before the call, on the worst rank in the worst round."
)


def main() -> int:
    options = _parse_options()
    parent = options.folder or in_memory_folder()
    size, rounds = ("tiny", 2) if options.quick else ("100M", 3)
    rows = measure(
        {"checkpoint": partial(compare, options.rounds or rounds, size, parent)}, writes_results=options.out is not None
    )
    note = f"{NOTE} Files are in {'memory' if options.folder is None and parent else 'a directory on disk'}."
    return finish(rows, TITLE, note, options.out and options.out / "checkpoint", fail=not options.no_fail)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use a tiny model, to try the code; write no results")
    parser.add_argument("--rounds", type=int, help="number of rounds; write no results")
    parser.add_argument("--folder", type=Path, help="directory for about 3 GiB of files; write no results")
    parser.add_argument("--out", type=Path, help="directory for checkpoint.json and checkpoint.md")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.rounds or options.folder):
        options.out = ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
