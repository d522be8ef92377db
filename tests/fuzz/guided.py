"""Coverage-guided fuzzing: `python tests/fuzz/guided.py metadata --seconds 60`. Needs atheris.

An input that breaks a guarantee ends the program with a traceback and is written to the corpus directory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETTINGS = ("-max_len=20000", "-rss_limit_mb=4096", "-timeout=20", "-print_final_stats=1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    atheris, targets = _import_instrumented()
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{args.target}-"))
    for number, seed in enumerate(targets.seeds(args.target)):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={args.seconds}", f"-artifact_prefix={corpus}/", str(corpus)]
    atheris.Setup([sys.argv[0], *SETTINGS, *options], targets.TARGETS[args.target])
    atheris.Fuzz()


def _import_instrumented() -> tuple[Any, Any]:
    """Return atheris and the targets. Only zeroshard is instrumented, not torch."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    atheris = import_module("atheris")
    for name in ("torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict"):
        import_module(name)
    with atheris.instrument_imports(include=["zeroshard"]):
        return atheris, import_module("tests.fuzz.targets")


if __name__ == "__main__":
    main()
