"""Input guided by coverage: `python tests/fuzz/guided.py archive --seconds 60`. Needs atheris.

An input that breaks a promise ends the program with its trace, and lies in the folder of the seeds afterwards.
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
    given = argparse.ArgumentParser()
    given.add_argument("target")
    given.add_argument("--seconds", type=int, default=60)
    chosen = given.parse_args()
    warnings.simplefilter("ignore")
    atheris, targets = _instrumented()
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{chosen.target}-"))
    for number, seed in enumerate(targets.seeds(chosen.target)):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={chosen.seconds}", f"-artifact_prefix={corpus}/", str(corpus)]
    atheris.Setup([sys.argv[0], *SETTINGS, *options], targets.TARGETS[chosen.target])
    atheris.Fuzz()


def _instrumented() -> tuple[Any, Any]:
    """Atheris, and the targets with our own code instrumented; torch's is not."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    atheris = import_module("atheris")
    for name in ("torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict"):
        import_module(name)
    with atheris.instrument_imports(include=["zeroshard"]):
        return atheris, import_module("tests.fuzz.targets")


if __name__ == "__main__":
    main()
