"""The example with Ray Train runs on a local Ray, survives a lost worker and resumes."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.conftest import REQUIRED
from zeroshard.checkpoint import latest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None and not os.environ.get(REQUIRED), reason="needs Ray: pip install 'ray[train]'"
)

LOSES_A_WORKER = """
import os
from pathlib import Path

import ray.train
import ray_train


def lose_a_worker_once(settings):
    report = ray.train.report

    def exit_or_report(metrics):
        marker = Path(settings["folder"]) / "exited"
        if metrics["step"] == 20 and ray.train.get_context().get_world_rank() == 1 and not marker.exists():
            marker.touch()
            os._exit(1)
        report(metrics)

    ray.train.report = exit_or_report
    ray_train.train(settings)


ray_train.make_trainer(Path(ray_train.FOLDER), 2, 30, lose_a_worker_once).fit()
"""


def run(script: Path, directory: Path, *options: str) -> list[tuple[int, int]]:
    """Run a script on a Ray of its own, and return the steps and numbers of workers that were printed, in order."""
    token = directory / "token"
    token.write_text(secrets.token_hex(32), encoding="ascii")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")]),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_TOKEN_PATH": str(token),  # otherwise Ray writes one to the home directory
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then listens on the loopback interface only
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(script), *options]
    with tempfile.TemporaryDirectory(prefix="ray-") as session:  # not `directory`: paths of sockets must be short
        env["RAY_TMPDIR"] = session
        result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"step (\d+), (\d+) workers: loss \d", result.stdout)
    return [(int(step), int(workers)) for step, workers in dict.fromkeys(found)]


@pytest.mark.timeout(600)
def test_a_run_that_lost_a_worker_and_was_resumed(tmp_path: Path) -> None:
    script = tmp_path / "loses_a_worker.py"
    script.write_text(LOSES_A_WORKER, encoding="utf-8")
    # The worker exits before step 20 is printed. A run that started over would print it.
    assert run(script, tmp_path) == [(10, 2), (30, 2)]
    folder = tmp_path / "checkpoints-ray"
    assert (folder / "exited").exists()
    assert run(ROOT / "examples" / "ray_train.py", tmp_path, "--workers", "1", "--steps", "40") == [(40, 1)]
    assert latest(folder) == folder / "step-000000040"
