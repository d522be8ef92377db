"""Measure `zeroshard.shard` on one GPU: speed, device synchronization, correctness. Needs only torch.

PYTHONPATH=src python3 benchmarks/gpu_sharded.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import gpu_flat  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.gpu import run  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

TITLE = "zeroshard.shard on one GPU"
NOTE = (
    "Step times are medians, measured with CUDA events from an idle device on. Contestants run in turns. The least "
    "time is the time to move 28 bytes per parameter (read parameter, gradient and two moments; write all but the "
    "gradient) at the bandwidth of a copy, measured in the same run. `--device cpu` only tries the code."
)


def sections(machine: Machine) -> dict[str, Section]:
    rounds = 20 if machine.device == "cuda" else 3
    return {
        "parity": lambda: gpu_flat.parity(machine),
        "waits": lambda: gpu_flat.waits(machine),
        "bandwidth": lambda: gpu_flat.bandwidth(machine, rounds),
        "small": lambda: gpu_flat.small(machine, rounds),
        "shares": lambda: gpu_flat.shares(machine, rounds),
    }


if __name__ == "__main__":
    sys.exit(run("gpu_sharded", __doc__, TITLE, NOTE, lambda device: sections(Machine(device))))
