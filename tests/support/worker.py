"""The worker side of the pool: a process that plays one rank of one run after another."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial, reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.optim import optimizer as optimizers

from tests.support.protocol import Job, Outcome
from tests.support.store import connect_store


def serve(connection: Connection[Outcome, Job | None], port: int, stacks: Path) -> None:
    """Play runs until the pool closes the connection."""
    _prepare(stacks)
    store = connect_store(port)
    connection.send(Outcome("passed"))
    with suppress(EOFError):
        while job := connection.recv():
            outcome = _attempt(partial(_play, job, store))
            connection.send(outcome)
            # Leaving the group breaks the collectives that peers are still in: right after a failure,
            # wrong otherwise, so the other ranks stay until the pool has heard from all.
            if outcome.status != "failed":
                connection.recv()
            connection.send(_attempt(_leave))


def _prepare(stacks: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = stacks.open("w")
    faulthandler.enable(file)
    # chain: once the stacks are written, the default action of SIGUSR1 ends the process.
    faulthandler.register(signal.SIGUSR1, file, all_threads=True, chain=True)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    install_importhook(get_config())
    gc.freeze()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(action: Callable[[], bytes]) -> Outcome:
    __tracebackhide__ = True
    try:
        return Outcome("passed", value=action())
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip))
    except BaseException as error:
        return Outcome("failed", str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short")))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _play(job: Job, store: Store) -> bytes:
    __tracebackhide__ = True
    _reset()
    body = _find(job.module, job.qualname)
    arguments = pickle.loads(job.arguments)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(job.run, store),
        rank=job.context.rank,
        world_size=job.context.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    with warnings.catch_warnings():
        return pickle.dumps(body(job.context, **arguments))


def _reset() -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()


def _find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = reduce(getattr, qualname.split("."), importlib.import_module(module))
    body: Callable[..., Any] = getattr(found, "__rank_body__", found)
    return body


def _leave() -> bytes:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    return b""
