"""The planner's estimates against what one GPU has allocated. Needs torch and nothing else.

PYTHONPATH=src python3 benchmarks/gpu_planner.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_planner import against_plan  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "The planner against one GPU"
NOTE = (
    "A GPT of 1.31 G parameters with AdamW as each library takes it by default, 32 tokens a step. Allocated is "
    "`torch.cuda.max_memory_allocated` of rank 0, each case in a process of its own; the other ranks do not exist (the "
    "`fake` backend), so that messages arrive at once. The value is the difference over what was allocated. "
    "`--device cpu` only tries the code out."
)


def sections(machine: Machine) -> dict[str, Section]:
    return {
        "usual": lambda: against_plan(machine, special=False),
        "special": lambda: against_plan(machine, special=True),
    }


if __name__ == "__main__":
    sys.exit(run("gpu_planner", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
