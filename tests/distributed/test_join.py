"""Uneven inputs: ranks without further inputs keep updating the parameters that they own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import (
    Branches,
    Loss,
    OverlapParityRun,
    ParityRun,
    Setup,
    assert_same,
    batch,
    branches_loss,
    mlp,
    regression,
    set_grads,
    setups,
    small_model,
)
from zeroshard import ZeroRedundancyOptimizer

InputCounts = list[int]
"""Number of inputs per rank."""
SetGrads = Callable[[Iterable[torch.Tensor], int], None]


def uneven_counts(size: int) -> Iterator[InputCounts]:
    """Rank 0 has the most inputs, the fewest, none, all of them; then the last rank has none."""
    yield [size + 1 - rank for rank in range(size)]
    yield [rank + 1 for rank in range(size)]
    yield [0] + [2] * (size - 1)
    yield [2] + [0] * (size - 1)
    yield [3] * (size - 1) + [0]


class GradSummer(Joinable):
    """Sums the gradients of the ranks that still train, on all ranks."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._params = list(params)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.all_reduce_grads()

    def all_reduce_grads(self) -> None:
        for param in self._params:
            assert param.grad is not None
            dist.all_reduce(param.grad)

    def join_hook(self, **_: Any) -> JoinHook:
        reducer = self

        class ShadowAllReduce(JoinHook):
            def main_hook(self) -> None:
                for param in reducer._params:
                    param.grad = torch.zeros_like(param)
                reducer.all_reduce_grads()

        return ShadowAllReduce()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def integer_grad(param: torch.Tensor, index: int, step: int, rank: int) -> torch.Tensor:
    """Integer values: their sum is exact in any order."""
    return torch.arange(param.numel()).add_(7 * step + 3 * rank + index).remainder_(5).float().view_as(param)


OPTIMIZERS: list[tuple[Callable[..., Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5}),
]


class JoinParityRun:
    """The sharded optimizer and the plain one, each with its own DDP model."""

    def __init__(
        self, factory: Callable[..., Optimizer], defaults: dict[str, Any], *, bucket_view: bool = False
    ) -> None:
        self.ddp, self.plain_ddp = (DistributedDataParallel(small_model()) for _ in range(2))
        self.zero = ZeroRedundancyOptimizer(
            self.ddp.parameters(), factory, parameters_as_bucket_view=bucket_view, **defaults
        )
        self.plain = factory(self.plain_ddp.parameters(), **defaults)

    def train(self, ctx: RankContext, counts: InputCounts, *, local_passes: int = 0) -> None:
        with Join([self.plain_ddp]):
            _train(self.plain_ddp, self.plain, counts[ctx.rank], local_passes=local_passes)
        with Join([self.ddp, self.zero]):
            _train(self.ddp, self.zero, counts[ctx.rank], local_passes=local_passes)
        # The plain optimizer's state is up to date only where it trained to the end.
        self.plain.load_state_dict(ctx.gather(self.plain.state_dict())[counts.index(max(counts))])
        self.compare()

    def compare(self) -> None:
        assert_same(self.ddp.state_dict(), self.plain_ddp.state_dict(), "the model")
        for rank in range(self.zero.world_size):
            self.zero.consolidate_state_dict(to=rank)
        assert_same(self.zero.state_dict(), self.plain.state_dict(), "the state")


def _train(model: Any, optimizer: Optimizer, steps: int, *, local_passes: int = 0) -> None:
    """Train; before each pass through DDP, accumulate gradients of `local_passes` passes without DDP."""
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(local_passes):
            torch.autograd.backward(model.module(batch(step + 50 * number)[:, :5]).square().mean())
        torch.autograd.backward(model(batch(step)[:, :5]).square().mean())
        optimizer.step()


@ranks(1, 2, 3, 4)
def test_equals_the_plain_optimizer_under_join(ctx: RankContext) -> None:
    for number, counts in enumerate(uneven_counts(ctx.world_size)):
        for optimizer in OPTIMIZERS:
            JoinParityRun(*optimizer, bucket_view=number % 2 == 0).train(ctx, counts)


@ranks(2, 3)
def test_training_continues_after_join(ctx: RankContext) -> None:
    parity = JoinParityRun(*OPTIMIZERS[0])
    first, second, *_ = uneven_counts(ctx.world_size)
    parity.train(ctx, first)
    for model, optimizer in ((parity.ddp, parity.zero), (parity.plain_ddp, parity.plain)):
        _train(model, optimizer, 2)
    parity.compare()
    parity.train(ctx, second)
    parity.train(ctx, first)


@ranks(2, 3)
def test_grad_accumulation_under_join(ctx: RankContext) -> None:
    for counts in uneven_counts(ctx.world_size):
        JoinParityRun(*OPTIMIZERS[0]).train(ctx, counts, local_passes=2)


@ranks(2, 3)
def test_even_inputs_and_disabled_join(ctx: RankContext) -> None:
    parity = JoinParityRun(*OPTIMIZERS[0])
    parity.train(ctx, [2] * ctx.world_size)
    with Join([parity.ddp, parity.zero], enable=False):
        _train(parity.ddp, parity.zero, 2)
    _train(parity.plain_ddp, parity.plain, 2)
    parity.compare()


@ranks(2, 3)
def test_early_termination_raises_on_all_ranks(ctx: RankContext) -> None:
    for with_ddp in (True, False):
        parity = JoinParityRun(*OPTIMIZERS[0])
        joinables: list[Any] = [parity.ddp, parity.zero] if with_ddp else [parity.zero]
        model = parity.ddp if with_ddp else parity.ddp.module
        with pytest.raises(RuntimeError, match="exhausted"), Join(joinables, throw_on_early_termination=True):
            _train(model, parity.zero, 2 + ctx.rank)
        assert_same(ctx.gather(model.state_dict()), [model.state_dict()] * ctx.world_size)


def join_without_ddp(ctx: RankContext, parity: ParityRun, counts: InputCounts, grads: SetGrads = set_grads) -> None:
    """Gradients are equal on the ranks that still train; a rank that joins has others, and must not step with them."""
    with Join([parity.zero]):
        for step in range(counts[ctx.rank]):
            grads(parity.model.parameters(), step)
            parity.zero.step()
        set_grads(parity.model.parameters(), 1000 + ctx.rank)
    for step in range(max(counts)):
        grads(parity.plain_model.parameters(), step)
        parity.plain.step()
    parity.check()


@ranks(1, 2, 3, 4)
def test_joined_rank_never_steps_with_its_own_grads(ctx: RankContext) -> None:
    for number, counts in enumerate(uneven_counts(ctx.world_size)):
        for factory, defaults in OPTIMIZERS:
            parity = ParityRun(factory, zero_only={"parameters_as_bucket_view": number % 2 == 0}, **defaults)
            for _ in range(2):
                join_without_ddp(ctx, parity, counts)
                set_grads(parity.model.parameters(), 2000 + ctx.rank)


def set_some_grads(params: Iterable[torch.Tensor], step: int) -> None:
    params = list(params)
    for param in params:
        param.grad = None
    set_grads(params[step % 2 :: 2], step)


def set_sparse_grads(params: Iterable[torch.Tensor], step: int) -> None:
    """Uncoalesced gradients: one index occurs twice."""
    for param in params:
        values = torch.linspace(0.1, 0.7 + step, 12).view(4, 3)
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1, 0]]), values, param.shape)


def make_embeddings() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Embedding(5, 3) for _ in range(3))


@ranks(2, 3)
def test_params_without_grads_under_join(ctx: RankContext) -> None:
    for counts in uneven_counts(ctx.world_size):
        join_without_ddp(ctx, ParityRun(torch.optim.AdamW, lr=0.1), counts, set_some_grads)


@ranks(2, 3)
def test_sparse_grads_under_join(ctx: RankContext) -> None:
    for counts in uneven_counts(ctx.world_size):
        join_without_ddp(ctx, ParityRun(torch.optim.SGD, model=make_embeddings, lr=0.3), counts, set_sparse_grads)


@ranks(3)
def test_join_on_a_subgroup(ctx: RankContext) -> None:
    group = dist.new_group([0, 2])
    if ctx.rank != 1:
        join_without_ddp(ctx, ParityRun(torch.optim.AdamW, zero_only={"process_group": group}), [1, 0, 3])


def set_summed_grads(params: Iterable[torch.Tensor], step: int, counts: InputCounts) -> None:
    """Set the gradients that `GradSummer` makes from those of the ranks that still train."""
    for index, param in enumerate(params):
        param.grad = sum(
            (integer_grad(param, index, step, rank) for rank, count in enumerate(counts) if step < count),
            start=torch.zeros_like(param),
        )


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("zero_first", [False, True])
def test_grads_set_by_another_joinable(ctx: RankContext, zero_first: bool) -> None:
    """With `zero_first` each step uses the gradients that were set after the previous step."""
    for counts in uneven_counts(ctx.world_size):
        parity = ParityRun(torch.optim.SGD, lr=0.1, momentum=0.9)
        grad_summer = GradSummer(parity.model.parameters())
        with Join([parity.zero, grad_summer] if zero_first else [grad_summer, parity.zero]):
            for step in range(counts[ctx.rank]):
                if zero_first:
                    parity.zero.step()
                for index, param in enumerate(parity.model.parameters()):
                    param.grad = integer_grad(param, index, step, ctx.rank)
                grad_summer()
                if not zero_first:
                    parity.zero.step()
        for step in range(max(counts)):
            if zero_first:
                parity.plain.step()
            set_summed_grads(parity.plain_model.parameters(), step, counts)
            if not zero_first:
                parity.plain.step()
        parity.check()


def join_overlap_run(ctx: RankContext, parity: OverlapParityRun, counts: InputCounts, loss: Loss) -> None:
    with Join([parity.plain_ddp]):
        for number in range(counts[ctx.rank]):
            torch.autograd.backward(loss(parity.plain_ddp, number))
            if number >= parity.setup.warmup:
                parity.plain.step()
            parity.plain.zero_grad()
    with Join([parity.ddp, parity.zero]):
        for number in range(counts[ctx.rank]):
            torch.autograd.backward(loss(parity.ddp, number))
            parity.zero.zero_grad()
    parity.compare()


def pair_setups_with_counts(ctx: RankContext, **fixed: Any) -> Iterator[tuple[Setup, InputCounts]]:
    """All counts, each with one setup; the pairs differ between world sizes."""
    all_setups = list(setups(bucket_view=False, **fixed))
    for number, counts in enumerate(uneven_counts(ctx.world_size)):
        yield all_setups[(number + ctx.world_size) % len(all_setups)], counts


@ranks(1, 2, 3, 4)
def test_overlap_under_join(ctx: RankContext) -> None:
    for setup, counts in pair_setups_with_counts(ctx, static_graph=False):
        parity = OverlapParityRun(setup, mlp, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        join_overlap_run(ctx, parity, [count + 2 * (count > 0) for count in counts], regression)


@ranks(2, 3)
def test_overlap_under_join_with_unused_parameters(ctx: RankContext) -> None:
    for setup, counts in pair_setups_with_counts(ctx, static_graph=False, find_unused=True):
        parity = OverlapParityRun(setup, Branches, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        # On a rank that never had an input, DDP's map of used parameters is not initialized.
        join_overlap_run(ctx, parity, [count + 2 for count in counts], branches_loss)


@ranks(2, 3)
def test_overlap_under_join_with_a_static_graph(ctx: RankContext) -> None:
    for setup, counts in pair_setups_with_counts(ctx, static_graph=True):
        parity = OverlapParityRun(setup, mlp, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        join_overlap_run(ctx, parity, [count + 2 for count in counts], regression)
