"""The planner's estimates against what one GPU has allocated. Needs torch and nothing else.

PYTHONPATH=src python3 benchmarks/gpu_planner.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_planner import against_plan  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "The planner against one GPU"
NOTE = (
    "A GPT of 1.31 G parameters with AdamW as each library takes it by default, 32 tokens a step. Allocated is "
    "`torch.cuda.max_memory_allocated` of rank 0, each case in a process of its own; the other ranks do not exist (the "
    "`fake` backend), so that messages arrive at once. The value is the difference over what was allocated. "
    "`--device cpu` only tries the code out."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where gpu_planner.json and gpu_planner.md go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=("usual", "special"))
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    machine = Machine(options.device)
    parts = {
        "usual": lambda: against_plan(machine, special=False),
        "special": lambda: against_plan(machine, special=True),
    }
    rows = measure({name: parts[name] for name in options.only or parts})
    return finish(rows, TITLE, NOTE, options.out and options.out / "gpu_planner", fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
