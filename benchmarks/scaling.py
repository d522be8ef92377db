"""How building and stepping grow with the number of parameters, and with that of ranks that do not exist.

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

TITLE = "zeroshard in a world that grows"
NOTE = (
    "One process is rank 0 of so many ranks on torch's `fake` backend, whose messages go nowhere; what the backend "
    "itself takes is left out. Times are CPU seconds of one thread, each case in a process of its own, after a tiny "
    "optimizer was made and stepped. Small parameters have 64 to 4,096 elements, 600 on average."
)


def main() -> int:
    options = _options()
    cases = scaling.Cases(quick=options.quick)
    rows = measure({kind: partial(cases.rows, kind) for kind in options.only or scaling.KINDS})
    more = Appendix(cases.table(), {"cases": cases.record()})
    return finish(rows, TITLE, NOTE, options.out and options.out / "scaling", fail=not options.no_fail, more=more)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the parameters; writes no results")
    parser.add_argument("--only", nargs="+", choices=scaling.KINDS, help="these sections; writes no results")
    parser.add_argument("--out", type=Path, help="where scaling.json and scaling.md go, also of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    if options.out is None and not options.quick and options.only is None:
        options.out = ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
