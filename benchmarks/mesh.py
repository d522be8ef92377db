"""Compare hybrid sharding (two shard groups) with sharding over all ranks, as ratios within one run.

python benchmarks/mesh.py [--quick] [--out DIR] [--no-fail]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.mesh import compare  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "Hybrid sharding: 2 x 2 ranks against 4 x 1"
NOTE = (
    "Four ranks, one thread each, gloo over loopback: `shard(..., shard_group_size=2)` against `shard(...)`, fused "
    "AdamW. "
    "Bytes are those of one iteration, of all ranks. The shard groups are ranks 0 and 1, and ranks 2 and 3. Links "
    "between shard groups are as fast as those within them, so the times only show the cost of the second reduction."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use a tiny model, to try the code; write no results")
    parser.add_argument("--out", type=Path, help="directory for mesh.json and mesh.md")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    name, rounds = ("tiny", 2) if options.quick else ("gpt", 8)
    out = options.out or (None if options.quick else ROOT / "benchmarks" / "results")
    rows = measure({"mesh": partial(compare, name, rounds)}, writes_results=out is not None)
    return finish(rows, TITLE, NOTE, out and out / "mesh", fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
