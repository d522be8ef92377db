"""Measure how construction and steps scale with the number of parameters and of (simulated) ranks.

python benchmarks/scaling.py [--quick] [--only SECTION ...] [--out DIR] [--no-fail]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import scaling  # noqa: E402
from benchmarks.harness.report import Appendix, finish, measure  # noqa: E402

TITLE = "Scaling with parameters and ranks"
NOTE = (
    "One process is rank 0 of all ranks on torch's `fake` backend, which drops messages. The backend's own time is "
    "left out. Times are CPU seconds of one thread. Each case runs in its own process, after a tiny optimizer was "
    "built and stepped. Small parameters have 64 to 4,096 elements, 600 on average."
)


def main() -> int:
    options = _parse_options()
    cases = scaling.Cases(quick=options.quick)
    rows = measure(
        {kind: partial(cases.rows, kind) for kind in options.only or scaling.KINDS},
        writes_results=options.out is not None,
    )
    more = Appendix(cases.table(), {"cases": cases.record()})
    return finish(rows, TITLE, NOTE, options.out and options.out / "scaling", fail=not options.no_fail, more=more)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the parameters; write no results")
    parser.add_argument("--only", nargs="+", choices=scaling.KINDS, help="only these sections; write no results")
    parser.add_argument("--out", type=Path, help="directory for scaling.json and scaling.md, even of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    if options.out is None and not options.quick and options.only is None:
        options.out = ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
