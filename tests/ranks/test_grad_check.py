"""The drop-in without DDP: gradients that nobody has averaged are noticed in the first step, and correct ones never."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import Branches, assert_same, mlp, regression, seeded, small_model, through_branches
from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer

UNAVERAGED = r"differ between ranks.*DistributedDataParallel.*zeroshard\.shard"
PARTITIONS = (WholeParams(), FlatShards())


def drop_in(model: nn.Module, partition: Any, factory: Any = optim.SGD, **options: Any) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=partition)
    return ZeroRedundancyOptimizer(model.parameters(), factory, lr=0.1, config=config, **options)


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [it for it in caught if "differ between ranks" in str(it.message)]


def own_grads(model: nn.Module, number: int) -> None:
    """Of this rank's inputs only."""
    model.zero_grad()
    torch.autograd.backward(regression(model, number))


@ranks(2, 3)
@pytest.mark.parametrize("partition", PARTITIONS, ids=["whole", "flat"])
def test_unaveraged_gradients_are_noticed_once(ctx: RankContext, partition: Any) -> None:
    for by_closure in (False, True):
        model = seeded(mlp)
        zero = drop_in(model, partition)
        closure = [lambda model=model: own_grads(model, 0)] if by_closure else []
        own_grads(model, 0)
        with pytest.warns(UserWarning, match=UNAVERAGED) as caught:
            zero.step(*closure)
        assert [it.filename for it in caught if "differ between" in str(it.message)] == [__file__]
        with no_warning():
            own_grads(model, 1)
            zero.step(*closure)


@ranks(2, 3)
@pytest.mark.parametrize("partition", PARTITIONS, ids=["whole", "flat"])
def test_a_warning_changes_nothing(ctx: RankContext, partition: Any) -> None:
    """The owner's gradient counts, also where the warning is an error; and no further message is sent for it."""
    results, calls = [], []
    for action in ("ignore", "error"):
        model = seeded(mlp)
        zero = drop_in(model, partition)
        for number in range(3):
            own_grads(model, number)
            with warnings.catch_warnings(), recorded() as traffic:
                warnings.simplefilter(action)
                try:
                    zero.step()
                except UserWarning:
                    if isinstance(partition, FlatShards):  # raised before anything was updated
                        zero.step()
            calls.append(traffic.verbs.count("all_reduce"))
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(results[1], results[0])
    assert calls[0] == calls[1] == calls[2]


def under_ddp(partition: Any) -> None:
    net = DistributedDataParallel(seeded(mlp))
    own_grads(net, 0)
    drop_in(net, partition).step()


def clipped_and_rounded(partition: Any) -> None:
    """By norms that each rank computes by itself."""
    net = DistributedDataParallel(seeded(mlp))
    own_grads(net, 0)
    clip_grad_norm_(net.parameters(), 0.1 * (1 + 1e-6 * torch.distributed.get_rank()))
    drop_in(net, partition).step()


def with_unused_parameters(partition: Any) -> None:
    net = DistributedDataParallel(seeded(Branches), find_unused_parameters=True)
    torch.autograd.backward(through_branches(net, 0))
    drop_in(net, partition).step()


def by_a_scaler(partition: Any) -> None:
    """Also where the first step is skipped."""
    net, scaler = DistributedDataParallel(seeded(mlp)), GradScaler("cpu", init_scale=2.0**30)
    zero = drop_in(net, partition)
    for number in range(3):
        net.zero_grad()
        loss = regression(net, number) * (torch.inf if number == 0 else 1)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(zero)
        scaler.update()


def of_rows(partition: Any) -> None:
    """Sparse gradients."""
    rank = torch.distributed.get_rank()
    net = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))))
    torch.autograd.backward(net(torch.tensor([1, 1, 2 + rank])).square().mean())
    drop_in(net, partition).step()


def of_zeros(partition: Any) -> None:
    model = seeded(mlp)
    own_grads(model, 0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(torch.distributed.get_rank() == 0)
    drop_in(model, partition).step()


def at_the_owner_only(partition: Any) -> None:
    """Gradients of a parameter on the one rank that owns it: with flat shards all have to have it."""
    if isinstance(partition, WholeParams):
        model = seeded(small_model)
        zero = drop_in(model, partition)
        for index, param in enumerate(model.parameters()):
            if zero.layout.owner_of(index) == zero.rank:
                param.grad = torch.full_like(param, index + 1.0)
        zero.step()


class Shrink(optim.SGD):
    """Moves parameters without gradients, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
        return super().step(closure)


def moved_without_gradients(partition: Any) -> None:
    if isinstance(partition, WholeParams):
        model = seeded(small_model)
        zero = drop_in(model, partition, Shrink)
        for index, param in enumerate(model.parameters()):
            if zero.layout.owner_of(index) == zero.rank:
                param.grad = torch.full_like(param, index + 1.0)
        zero.step()


def of_uneven_inputs(partition: Any) -> None:
    net = DistributedDataParallel(seeded(mlp))
    zero = drop_in(net, partition)
    with Join([net, zero]):
        for number in range(1 + torch.distributed.get_rank()):
            own_grads(net, number)
            zero.step()


def by_a_hook(partition: Any) -> None:
    if isinstance(partition, FlatShards):
        net = DistributedDataParallel(seeded(mlp))
        zero = drop_in(net, partition)
        net.register_comm_hook(None, zero.ddp_hook())
        own_grads(net, 0)
        zero.step()


CORRECT: list[Callable[[Any], None]] = [
    *(under_ddp, clipped_and_rounded, with_unused_parameters, by_a_scaler, of_rows, of_zeros),
    *(at_the_owner_only, moved_without_gradients, of_uneven_inputs, by_a_hook),
]


@ranks(1, 2, 3)
def test_correct_programs_get_no_warning(ctx: RankContext) -> None:
    for partition in PARTITIONS:
        for train in CORRECT:
            with no_warning():
                train(partition)
