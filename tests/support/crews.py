"""Jobs that save one checkpoint after the other until they are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from tests.support import handle  # what the server has loaded before it forks
from tests.support.store import connect_store
from zeroshard import ZeroRedundancyOptimizer, checkpoint, shard

LONG = 60.0
"""No wait is longer."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(handle.PRELOAD)


class News(NamedTuple):
    """From a rank: `what` is "loaded" or "saved", with a step, or "failed", with a reason."""

    what: str
    step: int
    reason: str = ""


class Post(NamedTuple):
    """Where a rank works, and how."""

    port: int
    run: str
    rank: int
    world_size: int
    folder: Path
    behind: bool


class Crew:
    """The ranks of one job. It goes on from the latest checkpoint, and checks that this is what was saved."""

    def __init__(self, port: int, name: str, world_size: int, folder: Path, *, behind: bool) -> None:
        self._ends: list[Connection[None, News]] = []
        self._ranks = []
        for rank in range(world_size):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            post = Post(port, name, rank, world_size, folder, behind)
            process = _CONTEXT.Process(target=_work, args=(theirs, post), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._ranks.append(process)

    def loaded(self) -> int:
        """The step that all ranks have gone on from."""
        steps = set()
        for end in self._ends:
            assert end.poll(LONG), "a rank did not begin"
            news = end.recv()
            assert news.what == "loaded", news
            steps.add(news.step)
        assert len(steps) == 1
        return int(steps.pop())

    def kill(self, draw: random.Random, longest: float) -> int:
        """Kill one or all ranks somewhere in their work, then the rest; the last step that all of them had saved."""
        time.sleep(draw.uniform(0, longest))  # the moment; whichever it is, the outcome must be right
        first = draw.choice([self._ranks, [draw.choice(self._ranks)]])
        self._check_news_before_the_kill()
        for process in first:
            process.kill()
        for process in self._ranks:
            if process not in first:
                process.join(draw.uniform(0, 0.1))  # it may hear of it, and clean up, or be killed meanwhile
                process.kill()
            process.join(LONG)
            assert process.exitcode is not None
        return min(self._last_saved(end) for end in self._ends)

    def _check_news_before_the_kill(self) -> None:
        self._steps = [0 for _ in self._ends]
        for number, end in enumerate(self._ends):
            while end.poll():
                news = end.recv()
                assert news.what == "saved", news
                self._steps[number] = news.step

    def _last_saved(self, end: Connection[None, News]) -> int:
        last = self._steps[self._ends.index(end)]
        with suppress(EOFError, OSError):
            while end.poll():
                news = end.recv()
                last = news.step if news.what == "saved" else last
        return last


def _work(news: Connection[News, None], post: Post) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(post.run, connect_store(post.port)),
        rank=post.rank,
        world_size=post.world_size,
        timeout=timedelta(seconds=LONG),
    )
    try:
        _save_for_ever(partial(_tell, news), post)
    except BaseException as error:
        _tell(news, "failed", 0, repr(error))
        os._exit(1)


def _tell(news: Connection[News, None], what: str, step: int, reason: str = "") -> None:
    news.send(News(what, step, reason))


def _save_for_ever(tell: partial[None], post: Post) -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30))
    optimizer = shard(model, torch.optim.AdamW)
    torch.autograd.backward(model(torch.ones(1, 50)).sum())
    optimizer.step()
    step, folder = 0, post.folder
    if checkpoint.latest(folder) is not None:
        step = checkpoint.load(folder, model=model, optimizer=optimizer).step or 0
        assert step
        _check(model, optimizer, step)
    dist.barrier()
    tell("loaded", step)
    while True:
        step += 1
        _mark(model, optimizer, step)
        checkpoint.save(folder, step=step, model=model, optimizer=optimizer, async_=post.behind, keep=2).wait()
        assert_swept(folder)
        tell("saved", step)
        dist.barrier()


def assert_swept(folder: Path) -> None:
    """Nothing is there but checkpoints, few of them."""
    names = sorted(entry.name for entry in folder.iterdir())
    steps = [name for name in names if name.startswith("step-")]
    assert names == [".lock", "latest", *steps], names
    assert len(steps) <= 2, names


def _mark(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    """All values are the step."""
    for tensor in _values(model, optimizer):
        tensor.fill_(step)


def _check(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    for tensor in _values(model, optimizer):
        assert bool((tensor == step).all()), f"step {step} has values of another step"


def _values(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [param.detach() for param in model.parameters()] + [it for it in state if isinstance(it, torch.Tensor)]
