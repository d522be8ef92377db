"""Scripts under torchrun, as users start them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# How a warning begins that is as it should be: a checkpoint was saved by other ranks.
EXPECTED = "default:checkpoints"


def torchrun(
    script: Path | str,
    ranks: int,
    folder: Path,
    *options: str,
    status: int = 0,
    warnings: str = f"error,{EXPECTED}",
) -> str:
    """What the script prints, or with "-m" a module, run in `folder`, which ends with this status.

    `warnings` says what becomes of them. Each rank prints into a file of its own: torchrun has Python write a line and
    its end apart, so that lines of ranks that share a pipe get into each other.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": warnings,
    }
    env = {**os.environ, **settings}
    with tempfile.TemporaryDirectory() as logs:
        command += ["--redirects", "1", "--log-dir", logs, str(script), *options]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        printed = sorted(Path(logs).rglob("stdout.log"), key=lambda file: int(file.parent.name))
        assert len(printed) == ranks
        return "".join(file.read_text(encoding="utf-8") for file in printed)
