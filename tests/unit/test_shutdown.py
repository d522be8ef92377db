"""Interpreter shutdown while background threads are still waiting."""

import subprocess
import sys

from tests.support.tiers import sampled
from zeroshard.comm.failure import ABORT_TIMEOUT_S, DRAIN_TIMEOUT_S

MARGIN_S = 5.0
"""Extra seconds allowed on a busy machine."""
SCRIPT = """
import atexit, sys, threading, time
from zeroshard.comm import failure

start = time.monotonic()
atexit.register(lambda: print(time.monotonic() - start))  # runs after handlers registered later
failure.install_exit_handlers()
thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)
thread.start()
failure.join_at_exit(thread, {seconds})
{end}
"""


def measure_exit_seconds(end: str, seconds: float) -> float:
    command = [sys.executable, "-c", SCRIPT.format(end=end, seconds=seconds)]
    return float(subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout)


@sampled("end", ["raise RuntimeError", "1 / 0"])
def test_exit_after_error_waits_briefly(end: str) -> None:
    assert measure_exit_seconds(end, DRAIN_TIMEOUT_S) < ABORT_TIMEOUT_S + MARGIN_S < DRAIN_TIMEOUT_S


def test_clean_exit_waits_for_thread() -> None:
    assert measure_exit_seconds("pass", 3 * ABORT_TIMEOUT_S) >= 3 * ABORT_TIMEOUT_S
