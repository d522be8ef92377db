"""State in host memory on one GPU: time of a step and memory, against resident state. Needs torch and nothing else.

PYTHONPATH=src python3 benchmarks/gpu_offload.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_offload import against_resident  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "State in host memory, on one GPU"
NOTE = (
    "Medians by CUDA events, each case in a process of its own. The time of a step's copies is what the state and the "
    "master weights take both ways at once, at the bandwidth of pinned copies measured in the same run. Peaks are "
    "those of steps, with parameters and gradients. `--device cpu` only tries the code out."
)


def sections(machine: Machine) -> dict[str, Section]:
    rounds = 10 if machine.device == "cuda" else 3
    return {"offload": lambda: against_resident(machine, rounds)}


if __name__ == "__main__":
    sys.exit(run("gpu_offload", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
