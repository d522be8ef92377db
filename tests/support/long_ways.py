"""Ways to train the model of a long run: each facade, driven in the same manner."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.long_oracle import ADAMW, Net, groups_of
from tests.support.pair import average, from_all_ranks, in_rank_order
from zeroshard import Drift, FlatShards, KeepFull, NonFinite, SecondCopy, ZeroConfig, ZeroRedundancyOptimizer, shard

TINY = FlatShards(bucket_bytes=6000)


class Way:
    """An optimizer for a model. `sums`: how several passes add up, as `Oracle.accumulate` knows it."""

    name: str
    sums: str
    needs_all_ranks = False
    """Every rank must make every backward pass, as with DDP."""
    overlaps = False
    """Reading the model would end what it is to test."""
    optimizer: ZeroRedundancyOptimizer

    def __init__(self, model: Net, *, added: bool) -> None:
        self.model, self.forward = model, model
        self.begin(added=added)

    def begin(self, *, added: bool) -> None:
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def after_backward(self) -> None:
        """What a script does with gradients that nobody else averages."""

    def other_params_train(self) -> None:
        """Some were frozen, thawed or added."""


class Sharded(Way):
    config: ZeroConfig

    def begin(self, *, added: bool) -> None:
        groups = groups_of(self.model, added=added)
        self.optimizer = self.sharded = shard(self.model, torch.optim.AdamW, params=groups, config=self.config, **ADAMW)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharded.no_sync()


class Zero2(Sharded):
    name, sums = "zero2", "added"
    config = ZeroConfig(partition=TINY, drift=Drift(every=3), nonfinite=NonFinite("raise"))


class Zero1(Sharded):
    name, sums = "zero1", "once"
    config = ZeroConfig(partition=TINY, retention=KeepFull(), second_copy=SecondCopy(every=7))


class Overlapped(Sharded):
    name, sums, config, overlaps = "overlap", "added", ZeroConfig(partition=TINY, overlap_gather=True), True


class DropIn(Way):
    """Gradients are averaged by the script."""

    name, sums = "drop-in", "onto"
    bucket_view = True

    def begin(self, *, added: bool) -> None:
        groups, config = groups_of(self.model, added=added), ZeroConfig(mixed_dtypes=True)
        self.optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, config=config, parameters_as_bucket_view=self.bucket_view, **ADAMW
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def after_backward(self) -> None:
        params = [param for param in self.model.parameters() if param.requires_grad]
        flags = from_all_ranks(torch.tensor([param.grad is not None for param in params], dtype=torch.int64))
        used = [param for param, count in zip(params, sum(flags, torch.zeros(len(params))), strict=True) if count]
        for dtype in dict.fromkeys(param.dtype for param in used):
            _average_grads([param for param in used if param.dtype == dtype])


def _average_grads(params: list[torch.nn.Parameter]) -> None:
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    mean = average(from_all_ranks(torch.cat([grad.flatten() for grad in grads])))
    for param, part in zip(params, torch.split(mean, [param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).clone()


class UnderDdp(DropIn):
    name, bucket_view, needs_all_ranks = "drop-in under DDP", False, True

    def begin(self, *, added: bool) -> None:
        super().begin(added=added)
        self.other_params_train()

    def other_params_train(self) -> None:
        """DDP must be wrapped anew."""
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.ddp.register_comm_hook(None, in_rank_order)
        self.forward = self.ddp  # type: ignore[assignment]

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.ddp.no_sync()
        return context

    def after_backward(self) -> None:
        pass


WAYS: list[type[Way]] = [Zero2, DropIn, Overlapped, UnderDdp, Zero1]
