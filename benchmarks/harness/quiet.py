"""Check that no other process uses the CPU: a table from a busy machine would be wrong, and nobody could tell."""

import os
import sys
import time
from pathlib import Path

MAX_BUSY_SHARE = 0.1
"""Share of the time of all CPUs that other processes may use: what an idle machine spends on its own services."""
SAMPLE_SECONDS = 2.0
TIMEOUT_S = 60.0


def require_quiet_machine() -> None:
    """Wait until the machine is quiet. Call while the benchmark itself is idle.

    Raises:
        SystemExit: Other processes are still busy after `TIMEOUT_S` seconds.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while (share := _busy_share()) > MAX_BUSY_SHARE:
        if time.monotonic() > deadline:
            load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
            sys.exit(
                f"The machine is busy: other processes use {share:.0%} of the CPU time (load average {load}), at most "
                f"{MAX_BUSY_SHARE:.0%} is allowed. No results were written. Stop other work and run again, or measure "
                "without writing results (--quick)."
            )


def _busy_share() -> float:
    """Return the share of the time of all CPUs that is used now, measured for `SAMPLE_SECONDS`."""
    busy_before, total_before = _cpu_ticks()
    time.sleep(SAMPLE_SECONDS)
    busy, total = _cpu_ticks()
    return (busy - busy_before) / max(1, total - total_before)


def _cpu_ticks() -> tuple[int, int]:
    """Return the time that all CPUs have worked, and all time, since the machine was started."""
    user, nice, system, idle, iowait, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    total = user + nice + system + idle + iowait + sum(others[:3])
    return total - idle - iowait, total
