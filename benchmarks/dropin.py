"""Compare zeroshard with torch's own ZeroRedundancyOptimizer and the plain optimizer, as ratios within one run.

python benchmarks/dropin.py [--quick] [--only SECTION ...] [--out DIR] [--no-fail]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import construction, groups, iteration, state, steps  # noqa: E402
from benchmarks.harness.report import Section, finish, measure  # noqa: E402

TITLE = "zeroshard as a drop-in"
NOTE = (
    "Times are medians. Contestants run in turns, with one thread per rank and gloo over loopback. Ratios are computed "
    "per round; the table shows their median, with the quartiles in parentheses."
)


def sections(quick: bool) -> dict[str, Section]:
    """Return all measurements by name. `quick`: fewer rounds, and no measurements with 4 ranks."""
    scale = 1 if quick else 2
    return {
        "small": lambda: steps.many_small(6 * scale, more_ranks=not quick),
        "alone": lambda: steps.alone(12 * scale),
        "beyond": lambda: steps.beyond_inner(6 * scale),
        "construct": lambda: construction.growth(4 * scale),
        "groups": lambda: groups.many_groups(4 * scale),
        "state": lambda: state.consolidation(1 if quick else 3, more_ranks=not quick),
        "iteration": lambda: iteration.iterations(3 * scale),
    }


def main() -> int:
    options = _parse_options()
    available = sections(options.quick)
    rows = measure(
        {name: available[name] for name in options.only or available}, writes_results=options.out is not None
    )
    return finish(rows, TITLE, NOTE, options.out and options.out / "dropin", fail=not options.no_fail)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 2 ranks; write no results")
    parser.add_argument("--only", nargs="+", choices=sorted(sections(True)), help="run only these; write no results")
    parser.add_argument("--out", type=Path, help="directory for dropin.json and dropin.md, even of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    if options.out is None and not options.quick and options.only is None:
        options.out = ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
