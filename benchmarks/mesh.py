"""State divided within rows of ranks against state divided among all of them, as ratios within one run.

python benchmarks/mesh.py [--quick] [--out DIR] [--no-fail]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.mesh import two_rows  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "Replicas of shards: 2 x 2 ranks against 4 x 1"
NOTE = (
    "Four ranks, one thread each, gloo over loopback: `shard(..., shard_group_size=2)` against `shard(...)`, fused "
    "AdamW. "
    "Bytes are those of one iteration, of all ranks; rows are ranks 0 and 1, and 2 and 3. Links between rows are no "
    "slower here than those within, so that the times only show what the second sum costs."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the code out; writes no results")
    parser.add_argument("--out", type=Path, help="where mesh.json and mesh.md go")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    name, rounds = ("tiny", 2) if options.quick else ("gpt", 8)
    rows = measure({"mesh": partial(two_rows, name, rounds)})
    out = options.out or (None if options.quick else ROOT / "benchmarks" / "results")
    return finish(rows, TITLE, NOTE, out and out / "mesh", fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
