"""Compare the planner's estimates with the memory that one GPU allocates. Needs only torch.

PYTHONPATH=src python3 benchmarks/gpu_planner.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_planner import compare_with_plan  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "The planner against one GPU"
NOTE = (
    "A GPT of 1.31 G parameters with each library's default AdamW, 32 tokens per step. Allocated is "
    "`torch.cuda.max_memory_allocated` of rank 0, each case in its own process. The other ranks do not exist (the "
    "`fake` backend), so messages arrive immediately. The value is the difference relative to the allocated bytes. "
    "`--device cpu` only tries the code."
)


def sections(machine: Machine) -> dict[str, Section]:
    return {
        "usual": lambda: compare_with_plan(machine, special=False),
        "special": lambda: compare_with_plan(machine, special=True),
    }


if __name__ == "__main__":
    sys.exit(run("gpu_planner", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
