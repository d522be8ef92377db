"""Other timings: what the package does with messages, threads and locks is delayed at random, apart on each rank."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

LONGEST = 0.003
"""Seconds of a delay."""
OFTEN = 0.25
SWITCH = 1e-5
"""Seconds after which Python lets another thread go on."""
VERBS = (
    *("irecv", "all_reduce", "broadcast", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
)


class Delays:
    """Draws them, and counts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.count = 0

    def pause(self) -> None:
        self.count += 1
        if self._draw.random() < OFTEN:
            time.sleep(self._draw.uniform(0, LONGEST))


@contextmanager
def shuffled(seed: int) -> Iterator[Delays]:
    """While it is open, here and now. Locks are delayed in objects that are made inside."""
    delays, interval = Delays(1000 * seed + dist.get_rank()), sys.getswitchinterval()
    late = ThreadPoolExecutor(1)
    verbs = {verb: _slow_verb(getattr(dist, verb), delays) for verb in VERBS}
    slow_dist = _Altered(dist, {**verbs, "isend": _late_verb(dist.isend, delays, late)})
    slow_threading = _Altered(threading, _slow_threads(delays))
    with late, pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("zeroshard."):
                _replace(patch, module, {"dist": (dist, slow_dist), "threading": (threading, slow_threading)})
                _replace(patch, module, {"RLock": (threading.RLock, slow_threading.RLock)})
        sys.setswitchinterval(SWITCH)
        try:
            yield delays
        finally:
            sys.setswitchinterval(interval)


def _replace(patch: pytest.MonkeyPatch, module: Any, names: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (plain, slow) in names.items():
        if vars(module).get(name) is plain:
            patch.setattr(module, name, slow)


class _Altered:
    """A module with some of its functions exchanged."""

    def __init__(self, module: Any, exchanged: Mapping[str, Any]) -> None:
        self._module = module
        vars(self).update(exchanged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SlowWork:
    def __init__(self, work: Any, delays: Delays) -> None:
        self._work, self._delays = work, delays

    def wait(self, *args: Any) -> Any:
        self._delays.pause()
        done = self._work.wait(*args)
        self._delays.pause()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _SlowLock:
    def __init__(self, lock: Any, delays: Delays) -> None:
        self._lock, self._delays = lock, delays

    def __enter__(self) -> None:
        self._delays.pause()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._delays.pause()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _slow_verb(verb: Callable[..., Any], delays: Delays) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        work = verb(*args, **kwargs)
        return _SlowWork(work, delays) if hasattr(work, "wait") else work

    return call


def _late_verb(verb: Callable[..., Any], delays: Delays, pool: ThreadPoolExecutor) -> Callable[..., Any]:
    """Messages leave later than they are sent, one after the other, as in a network that is slow."""

    def leave(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        return verb(*args, **kwargs)

    return lambda *args, **kwargs: _Late(pool.submit(leave, *args, **kwargs))


class _Late:
    def __init__(self, left: Future[Any]) -> None:
        self._left = left

    def wait(self, *args: Any) -> Any:
        return self._left.result().wait(*args)


def _slow_threads(delays: Delays) -> dict[str, Any]:
    class Thread(threading.Thread):
        def start(self) -> None:
            delays.pause()
            super().start()
            delays.pause()

        def run(self) -> None:
            delays.pause()
            super().run()

    class Event(threading.Event):
        def set(self) -> None:
            delays.pause()
            super().set()

    return {
        "Thread": Thread,
        "Event": Event,
        "Lock": lambda: _SlowLock(threading.Lock(), delays),
        "RLock": lambda: _SlowLock(threading.RLock(), delays),
    }
