"""The end of a process whose threads still wait."""

import subprocess
import sys

from tests.support.tiers import sampled
from zeroshard.comm.failure import ABORT_TIMEOUT_S, DRAIN_TIMEOUT_S

BUSY = 5.0
"""Seconds that a busy machine may add."""
SCRIPT = """
import atexit, sys, threading, time
from zeroshard.comm import failure

start = time.monotonic()
atexit.register(lambda: print(time.monotonic() - start))  # after what is registered later
failure.install_exit_handlers()
thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)
thread.start()
failure.join_at_exit(thread, {seconds})
{end}
"""


def seconds_of(end: str, seconds: float) -> float:
    command = [sys.executable, "-c", SCRIPT.format(end=end, seconds=seconds)]
    return float(subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout)


@sampled("end", ["raise RuntimeError", "1 / 0"])
def test_who_has_hung_up_waits_for_a_moment_only(end: str) -> None:
    assert seconds_of(end, DRAIN_TIMEOUT_S) < ABORT_TIMEOUT_S + BUSY < DRAIN_TIMEOUT_S


def test_else_what_may_still_come_is_waited_for() -> None:
    assert seconds_of("pass", 3 * ABORT_TIMEOUT_S) >= 3 * ABORT_TIMEOUT_S
