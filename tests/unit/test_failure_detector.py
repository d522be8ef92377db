"""The failure detector keeps track of this rank's current activity."""

import threading

import pytest

from zeroshard.comm import failure
from zeroshard.comm.failure import FailureDetector, WaitMonitor


def test_activity_is_restored_after_an_error() -> None:
    detector, seen = FailureDetector(), []
    detector.set_activity("between steps")

    def broadcast() -> None:
        with detector.activity("broadcasting buffers"):
            seen.append(detector._activity)
            raise ValueError("bad buffer")

    with pytest.raises(ValueError, match="bad buffer"):
        broadcast()
    assert (seen, detector._activity) == (["broadcasting buffers"], "between steps")


def test_waits_without_a_watcher_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(failure, "_watcher", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monitor = WaitMonitor()
    monitor.start()
    monitor.end()
    assert failure._watcher is None


def test_waits_are_logged_again_at_growing_intervals() -> None:
    """Short long waits are logged the 1st, 2nd, 4th, ... time; one that goes on is logged again."""
    logged: list[float] = []

    class Recorder(FailureDetector):
        def log_wait(self, waited_s: float) -> None:
            logged.append(waited_s)

    monitor, detector = WaitMonitor(), Recorder()
    for start, length_s in ((100, 30), (1000, 30), (2000, 30), (3000, 2000)):
        monitor._started[0] = start
        for now in range(start, start + length_s):
            assert monitor.report(detector, now, ())
        monitor._started.clear()
        assert not monitor.report(detector, start + length_s, ())
    first_s = failure.LONG_WAIT_S + failure.PUBLISH_TIME_S
    expected = [first_s, first_s, first_s, *failure.REPEAT_LOG_AFTER_S]  # the third wait is not logged
    assert [0 <= waited_s - limit_s < 1 for waited_s, limit_s in zip(logged, expected, strict=True)] == [True] * 6
