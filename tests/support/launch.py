"""Scripts under torchrun, as users start them."""

import os
import subprocess
import sys
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

    `warnings` says what becomes of them.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(script), *options]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": warnings,
    }
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout
