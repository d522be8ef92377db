"""zeroshard on one GPU: speed, waits for the device, correctness. Needs torch and nothing else.

PYTHONPATH=src python3 benchmarks/gpu_dropin.py --out DIR [--device cpu] [--only SECTION ...] [--no-fail]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases import gpu_parity, gpu_speed, gpu_sync  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.report import Section, finish, measure  # noqa: E402

TITLE = "zeroshard as a drop-in, on one GPU"
NOTE = (
    "Step times are medians by CUDA events, from an idle device on; contestants run in turns. "
    "Two ranks share the GPU over gloo for correctness. `--device cpu` only tries the code out."
)


def sections(machine: Machine) -> dict[str, Section]:
    rounds = 20 if machine.device == "cuda" else 3
    return {
        "parity": lambda: gpu_parity.parity(machine),
        "waits": lambda: gpu_sync.waits(machine),
        "alone": lambda: gpu_speed.alone(machine, rounds),
        "shares": lambda: gpu_speed.shares(machine, rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where gpu_dropin.json and gpu_dropin.md go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=sorted(sections(Machine("cpu"))))
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    available = sections(Machine(options.device))
    rows = measure({name: available[name] for name in options.only or available})
    return finish(rows, TITLE, NOTE, options.out and options.out / "gpu_dropin", fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
