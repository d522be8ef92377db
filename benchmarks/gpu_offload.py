"""Compare offloaded with resident state on one GPU: step time and memory. Needs only torch.

PYTHONPATH=src python3 benchmarks/gpu_offload.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_offload import compare_with_resident  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "State in host memory, on one GPU"
NOTE = (
    "Medians, measured with CUDA events, each case in its own process. The time of a step's copies is the time to "
    "copy state and master weights in both directions concurrently, at the bandwidth of pinned copies measured in the "
    "same run. Peaks are those of steps and include parameters and gradients. `--device cpu` only tries the code."
)


def sections(machine: Machine) -> dict[str, Section]:
    rounds = 10 if machine.device == "cuda" else 3
    return {"offload": lambda: compare_with_resident(machine, rounds)}


if __name__ == "__main__":
    sys.exit(run("gpu_offload", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
