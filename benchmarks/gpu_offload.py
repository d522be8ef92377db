"""State in host memory on one GPU: time of a step and memory, against resident state. Needs torch and nothing else.

PYTHONPATH=src python3 benchmarks/gpu_offload.py --out DIR [--device cpu] [--no-fail]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.gpu_offload import against_resident  # noqa: E402
from benchmarks.cases.gpu_speed import Machine  # noqa: E402
from benchmarks.harness.report import finish, measure  # noqa: E402

TITLE = "State in host memory, on one GPU"
NOTE = (
    "Medians by CUDA events, each case in a process of its own. The time of a step's copies is what the state and the "
    "master weights take both ways at once, at the bandwidth of pinned copies measured in the same run. Peaks are "
    "those of steps, with parameters and gradients. `--device cpu` only tries the code out."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where gpu_offload.json and gpu_offload.md go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    rounds = 10 if options.device == "cuda" else 3
    rows = measure({"offload": lambda: against_resident(Machine(options.device), rounds)})
    return finish(rows, TITLE, NOTE, options.out and options.out / "gpu_offload", fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
