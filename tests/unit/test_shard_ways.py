"""What waits for messages: several works as one, and a thread that tells when works are done."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from zeroshard.comm.pending import Pending, Together, Watcher
from zeroshard.comm.shards import _ByPairs, _Enqueued, _Summed


class Work:
    """A message that arrives when the test says so, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.arrives = threading.Event()
        self._failure = failure

    def wait(self) -> None:
        assert self.arrives.wait(30)
        if self._failure is not None:
            raise self._failure


def arrived(failure: Exception | None = None) -> Work:
    work = Work(failure)
    work.arrives.set()
    return work


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeroshard-watcher"]


def test_several_works_are_done_when_all_are() -> None:
    waited: list[int] = []

    class Noting(Work):
        def wait(self) -> None:
            waited.append(id(self))

    works = [Noting(), Noting(), Noting()]
    Together(works).wait()
    assert waited == list(map(id, works))


def test_what_arrived_is_told_without_waiting() -> None:
    first, second = Work(), Work()
    watched = Watcher().watch([first, second])
    assert not watched.done(0)
    first.arrives.set()
    assert not watched.done(0)
    second.arrives.set()
    watched.wait()
    assert watched.done(0)


def test_a_failure_is_raised_by_every_wait_and_stops_no_other() -> None:
    watcher = Watcher()
    failing = watcher.watch([arrived(RuntimeError("the peer is gone"))])
    fine = watcher.watch([arrived()])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            failing.wait()
    fine.wait()
    assert failing.done(0)
    assert fine.done(0)


def test_the_thread_lives_as_long_as_there_is_something_to_wait_for() -> None:
    watcher = Watcher()
    for _ in range(3):
        works = [Work(), Work()]
        watched = [watcher.watch([work]) for work in works]
        threads = watchers()
        assert len(threads) == 1
        for work in works:
            work.arrives.set()
        for it in watched:
            it.wait()
        threads[0].join(30)
        assert not watchers()


def test_what_has_arrived_is_let_go() -> None:
    tensor = torch.ones(3)
    pending = Pending(arrived(), tensor)
    assert any(value is tensor for value in vars(pending).values())
    pending.wait()
    pending.wait()
    assert not any(value is tensor for value in vars(pending).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("into_dtype", [None, torch.float64])
def test_slices_are_added_in_their_order(dtype: torch.dtype, into_dtype: torch.dtype | None) -> None:
    """A large value, its negative, and a small one: what is left depends on the order and the precision."""
    values = [2.0**9, 1.0, -(2.0**9)]
    slices = [torch.full((4,), value).to(dtype) for value in values]
    into = torch.full((4,), 9.0).to(dtype if into_dtype is None or dtype.is_complex else into_dtype)
    arriving = _ByPairs(slices, _Enqueued(arrived()), keep=slices[0])
    assert arriving.arrives(0)
    arriving.add_up(into, 1 / 3)
    exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros(4, dtype=exact)
    for part in slices:
        total = total + part.to(exact) * (1 / 3)
    torch.testing.assert_close(into, total.to(into.dtype), rtol=1e-3, atol=1e-4)
    assert into.abs().min() > 0.3  # the small one was not lost, as it would be in bfloat16


def test_sums_are_divided_once() -> None:
    total: Any = torch.tensor([3.0, 6.0])
    into = torch.zeros(2, dtype=torch.bfloat16)
    _Summed(total, arrived(), keep=total).add_up(into, 1 / 3)
    assert into.tolist() == [1.0, 2.0]
