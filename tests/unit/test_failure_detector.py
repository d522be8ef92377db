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
