"""Jobs whose ranks are killed: while they save checkpoints, or while the rest continues from in-memory copies."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from tests.support.checkpoints import save
from tests.support.oracles import added
from tests.support.pool import PRELOAD, connect_store
from zeroshard import (
    CheckpointError,
    FlatShards,
    PeerCheckpoint,
    RankLostError,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard._types import Rank
from zeroshard.comm.collectives import BackgroundComm, Comm
from zeroshard.peer_checkpoint import restore as recovery
from zeroshard.peer_checkpoint.restore import restore_from_peers
from zeroshard.peer_checkpoint.snapshot import PeerCheckpointer, PeerSnapshots
from zeroshard.state.serialization import StateSender

# ---- Jobs that save one checkpoint after the other

LONG = 60.0
"""No wait is longer."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


class SaveNews(NamedTuple):
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
        self._ends: list[Connection[None, SaveNews]] = []
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

    def _last_saved(self, end: Connection[None, SaveNews]) -> int:
        last = self._steps[self._ends.index(end)]
        with suppress(EOFError, OSError):
            while end.poll():
                news = end.recv()
                last = news.step if news.what == "saved" else last
        return last


def _work(news: Connection[SaveNews, None], post: Post) -> None:
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


def _tell(news: Connection[SaveNews, None], what: str, step: int, reason: str = "") -> None:
    news.send(SaveNews(what, step, reason))


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
        save(folder, behind=post.behind, step=step, model=model, optimizer=optimizer, keep=2)
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
    for tensor in _tensors(model, optimizer):
        tensor.fill_(step)


def _check(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    for tensor in _tensors(model, optimizer):
        assert bool((tensor == step).all()), f"step {step} has values of another step"


def _tensors(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [param.detach() for param in model.parameters()] + [it for it in state if isinstance(it, torch.Tensor)]


# ---- Jobs that continue in the processes that are left

GROUP_TIMEOUT = timedelta(seconds=10)
"""How long ranks wait for each other."""
EVERY = 3
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "foreach": True}

CHECKED = 4
"""Steps after which values are compared."""

Values = dict[str, list[Any]]
"""Of parameters. Not tensors: a process that is gone could not hand those over."""


class End(NamedTuple):
    """Of a process, by its own hand, while it makes the copy of a step."""

    step: int
    moment: Literal["in the middle", "all have it"]
    """When it has sent a part; or, being the first, when all others have said that they have their copies."""


FALLS: dict[str, tuple[Any, str]] = {
    "what ranks hold is compared": (recovery, "_take_inventory"),
    "shares are sent": (StateSender, "send"),
    "all that was rebuilt is taken over": (recovery, "_write_params_and_buffers"),
    "the next copy is made": (PeerCheckpointer, "capture"),
}
"""Moments in `restore` at which a process kills itself, and what it would have done then."""


class Order(NamedTuple):
    """Be this rank of that job: begin, or go on from the copies that are left, until a rank is lost."""

    run: str
    rank: int
    world_size: int
    begin: bool
    end: End | None = None
    fall: str = ""
    """One of `FALLS`, or none."""


class News(NamedTuple):
    """From a process: "begun" and "trained" with a step, "lost" when another rank is gone, "falls" when it is about to
    kill itself, "refused" and "failed" with a reason."""

    what: str
    step: int = 0
    values: Values | None = None
    reason: str = ""
    opened: Sequence[str] = ()
    """Files that were opened by `restore`."""
    moment: float = 0.0
    """When it was lost, or falls, on a clock that is the same for all processes."""


class Survivor:
    """One process, and the connection to it."""

    def __init__(self, port: int, *, overlap: bool) -> None:
        self._end: Connection[Order | None, News]
        self._end, remote = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_live, args=(remote, port, overlap), daemon=True)
        self.process.start()
        remote.close()

    def tell(self, order: Order) -> None:
        self._end.send(order)

    def hear(self, what: str) -> News:
        assert self._end.poll(LONG), f"nothing was heard, instead of {what!r}"
        news = self._end.recv()
        assert news.what == what, news
        return news

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LONG)

    def close(self) -> None:
        self.kill()
        self._end.close()


def oracle(world_sizes: Sequence[int]) -> Values:
    """A plain model after steps that so many ranks make, in one process and never interrupted."""
    torch.set_num_threads(1)  # as on ranks: sums are made in another order by several
    model = _model(0)
    plain = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step, world_size in enumerate(world_sizes):
        parts = []
        for rank in range(world_size):
            plain.zero_grad()
            _loss(model, step, rank).backward()  # type: ignore[no-untyped-call]
            parts.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = added([grad * (1 / world_size) for grad in grads if grad is not None])
        plain.step()
    return _values(model)


def _values(model: nn.Module) -> Values:
    return {name: value.tolist() for name, value in sorted(model.named_parameters())}


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.BatchNorm1d(30), nn.Linear(30, 3)
    )


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    out: Tensor = model(torch.randn(4, 6, generator=draw))
    return (out - torch.randn(4, 3, generator=draw)).square().mean()


def _live(end: Connection[News, Order | None], port: int, overlap: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    life = _Life(end, port, overlap=overlap)
    try:
        while order := end.recv():
            life.follow(order)
    except BaseException as error:
        end.send(News("failed", reason=repr(error)))
        os._exit(1)


class _Life:
    def __init__(self, end: Connection[News, Order | None], port: int, *, overlap: bool) -> None:
        self._end, self._port = end, port
        partition = FlatShards(bucket_bytes=400)
        self._config = ZeroConfig(
            partition=partition, peer_checkpoint=PeerCheckpoint(every=EVERY), overlap_param_gather=overlap
        )
        self._model = _model(os.getpid())
        self._held: PeerSnapshots | None = None
        self._opened: list[str] = []
        self._listens = False
        sys.addaudithook(self._notice)

    def follow(self, order: Order) -> None:
        store = PrefixStore(order.run, connect_store(self._port))
        size = order.world_size
        dist.init_process_group("gloo", store=store, rank=order.rank, world_size=size, timeout=GROUP_TIMEOUT)
        try:
            self._train(order)
        except RankLostError as error:
            self._end.send(News("lost", reason=repr(error), moment=time.monotonic()))
        except CheckpointError as error:
            self._end.send(News("refused", reason=str(error)))
        dist.destroy_process_group()

    def _train(self, order: Order) -> None:
        if order.begin:
            self._model = _model(order.rank)
        optimizer = shard(self._model, torch.optim.AdamW, config=self._config, **ADAMW)
        if order.end is not None:
            _prepare(order.end, optimizer)
        if order.fall:
            self._prepare_to_fall(*FALLS[order.fall])
        step = self._begin(optimizer) if order.begin else self._restore(optimizer)
        self._held = optimizer.peer_snapshots
        self._end.send(News("begun", step, opened=self._opened))
        for number in range(step, step + CHECKED):
            self._iterate(optimizer, number)
        self._end.send(News("trained", step + CHECKED, _values(self._model)))
        for number in count(step + CHECKED):
            self._iterate(optimizer, number)

    def _begin(self, optimizer: ShardedOptimizer) -> int:
        for number in range(EVERY):
            self._iterate(optimizer, number)
        assert optimizer._peer_checkpointer is not None
        optimizer._peer_checkpointer.wait()
        return EVERY

    def _restore(self, optimizer: ShardedOptimizer) -> int:
        self._opened, self._listens = [], True
        step = restore_from_peers(optimizer, self._held)
        self._listens = False
        return step

    def _prepare_to_fall(self, owner: Any, name: str) -> None:
        def fall(*_: Any, **__: Any) -> NoReturn:
            self._end.send(News("falls", moment=time.monotonic()))
            _die()

        setattr(owner, name, fall)

    def _iterate(self, optimizer: ShardedOptimizer, number: int) -> None:
        torch.autograd.backward(_loss(self._model, number, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()

    def _notice(self, event: str, details: tuple[Any, ...]) -> None:
        if self._listens and event == "open":
            self._opened.append(str(details[0]))


def _die() -> NoReturn:
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("not reached")


def _prepare(end: End, optimizer: ShardedOptimizer) -> None:
    """The process kills itself at that moment."""

    def is_due() -> bool:
        return optimizer._engine.steps == end.step

    send, tell = StateSender.send, BackgroundComm._send_flag

    def sends_a_part(self: StateSender, comm: Comm, to: Rank) -> None:
        if is_due():
            comm.send(torch.tensor([1000]), to).wait()
            _die()
        send(self, comm, to)

    def tells_no_one(self: BackgroundComm, flag: Tensor, rank: Rank) -> None:
        return _die() if is_due() else tell(self, flag, rank)

    if end.moment == "in the middle":
        StateSender.send = sends_a_part  # type: ignore[method-assign]
    else:
        BackgroundComm._send_flag = tells_no_one  # type: ignore[method-assign]
