"""Parameters that were moved to shared memory, for another process to read, can still be trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn, optim

from tests.support import RankContext, ranks
from tests.support.oracles import DdpParityRun, ParityRun, Side, assert_same, clone_values, some_configs
from tests.support.tiers import sampled
from zeroshard import FlatShards, ZeroConfig


def share_all(model: nn.Module) -> None:
    model.share_memory()


def share_first_param(model: nn.Module) -> None:
    next(model.parameters()).data.share_memory_()  # type: ignore[no-untyped-call]


def send_through_queue(model: nn.Module) -> None:
    """Send the state dict through a queue, as scripts do that evaluate in another process."""
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(model.state_dict())
    assert_same(queue.get(), model.state_dict())


SHARE_FNS: list[Callable[[nn.Module], None]] = [share_all, share_first_param, send_through_queue]


@some_configs
@ranks(1, 2, 3)
def test_sharded_model_trains_in_shared_memory(ctx: RankContext, config: ZeroConfig) -> None:
    """Share between steps, and between backward and step, when gradients are shared, too."""

    def iterate(share: Callable[[nn.Module], None], side: Side, number: int) -> None:
        side.backward(number)
        share(side.model)
        side.update()
        share(side.model)

    for share in SHARE_FNS:
        DdpParityRun(config).run(3, partial(iterate, share))


@ranks(2, 3)
def test_sharing_on_one_rank_only(ctx: RankContext) -> None:
    for share in SHARE_FNS:
        parity = DdpParityRun()
        for rank in range(ctx.world_size):
            parity.train(1)
            if ctx.rank == rank:
                share(parity.model)
        parity.train(1)


DROP_IN_OPTIONS: list[dict[str, Any]] = [
    {"config": ZeroConfig(partition=FlatShards())},
    {"parameters_as_bucket_view": True},
    {"parameters_as_bucket_view": False},
]


@sampled("zero_only", DROP_IN_OPTIONS, ids=["flat", "bucket-view", "separate"])
@ranks(1, 2, 3)
def test_drop_in_trains_in_shared_memory(ctx: RankContext, zero_only: dict[str, Any]) -> None:
    for share in SHARE_FNS:
        parity = ParityRun(optim.SGD, zero_only=zero_only, lr=0.1, momentum=0.9)
        for _ in range(2):
            parity.train(1)
            share(parity.model)
        parity.train(1)


@ranks(1, 2)
def test_shared_tensors_keep_their_values(ctx: RankContext) -> None:
    """The next step moves parameters back into flat memory."""
    parity = DdpParityRun()
    parity.train(1)
    parity.model.share_memory()
    shared, before = [param.data for param in parity.model.parameters()], clone_values(parity.model)
    parity.train(1)
    assert_same(shared, before)
    assert not any(torch.equal(param, old) for param, old in zip(parity.model.parameters(), before, strict=True))
