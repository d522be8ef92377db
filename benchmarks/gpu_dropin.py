"""Measure the drop-in on one GPU: speed, device synchronization, correctness. Needs only torch.

PYTHONPATH=src python3 benchmarks/gpu_dropin.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import gpu_parity, gpu_speed, gpu_sync  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "zeroshard as a drop-in, on one GPU"
NOTE = (
    "Step times are medians, measured with CUDA events from an idle device on. Contestants run in turns. "
    "For correctness two ranks share the GPU over gloo. `--device cpu` only tries the code."
)


def sections(machine: Machine) -> dict[str, Section]:
    rounds = 20 if machine.device == "cuda" else 3
    return {
        "parity": lambda: gpu_parity.parity(machine),
        "waits": lambda: gpu_sync.waits(machine),
        "alone": lambda: gpu_speed.alone(machine, rounds),
        "shares": lambda: gpu_speed.shares(machine, rounds),
    }


if __name__ == "__main__":
    sys.exit(run("gpu_dropin", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
