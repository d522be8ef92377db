"""The drop-in without DDP: the first step detects gradients that are not averaged, and never warns of correct ones."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from tests.support.oracles import Branches, assert_same, branches_loss, make_seeded, mlp, regression, small_model
from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, shard

UNAVERAGED_WARNING = r"differ between ranks.*DistributedDataParallel.*zeroshard\.shard"
PARTITIONS = (WholeParams(), FlatShards())


def make_drop_in(model: nn.Module, partition: Any, factory: Any = optim.SGD, **options: Any) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=partition)
    return ZeroRedundancyOptimizer(model.parameters(), factory, lr=0.1, config=config, **options)


@contextmanager
def assert_no_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [warning for warning in caught if "differ between ranks" in str(warning.message)]


def compute_local_grads(model: nn.Module, number: int) -> None:
    """Compute gradients of this rank's inputs only."""
    model.zero_grad()
    torch.autograd.backward(regression(model, number))


@ranks(2, 3)
@pytest.mark.parametrize("partition", PARTITIONS, ids=["whole", "flat"])
def test_unaveraged_grads_warn_once(ctx: RankContext, partition: Any) -> None:
    for use_closure in (False, True):
        model = make_seeded(mlp)
        zero = make_drop_in(model, partition)
        closure = [lambda model=model: compute_local_grads(model, 0)] if use_closure else []
        compute_local_grads(model, 0)
        with pytest.warns(UserWarning, match=UNAVERAGED_WARNING) as caught:
            zero.step(*closure)
        assert [warning.filename for warning in caught if "differ between" in str(warning.message)] == [__file__]
        with assert_no_warning():
            compute_local_grads(model, 1)
            zero.step(*closure)


@ranks(2, 3)
@pytest.mark.parametrize("partition", PARTITIONS, ids=["whole", "flat"])
def test_warning_does_not_affect_training(ctx: RankContext, partition: Any) -> None:
    """The owner's gradient is used, even if the warning is an error, and the check sends no extra message."""
    results, calls = [], []
    for action in ("ignore", "error"):
        model = make_seeded(mlp)
        zero = make_drop_in(model, partition)
        for number in range(3):
            compute_local_grads(model, number)
            with warnings.catch_warnings(), recorded() as traffic:
                warnings.simplefilter(action)
                with suppress(UserWarning):  # raised after the update
                    zero.step()
            calls.append(traffic.verbs.count("all_reduce"))
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(results[1], results[0])
    assert calls[0] == calls[1] == calls[2]


class CountsStepsInGroup(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["num_steps"] = self.param_groups[0].get("num_steps", 0) + 1
        return super().step(closure)


@ranks(2, 3)
@pytest.mark.parametrize("partition", PARTITIONS, ids=["whole", "flat"])
def test_warning_as_error_keeps_group_options_that_the_update_has_set(ctx: RankContext, partition: Any) -> None:
    model = make_seeded(mlp)
    zero = make_drop_in(model, partition, CountsStepsInGroup)
    compute_local_grads(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=UNAVERAGED_WARNING):
            zero.step()
    assert zero.param_groups[0]["num_steps"] == 1


def train_with_ddp(partition: Any) -> None:
    net = DistributedDataParallel(make_seeded(mlp))
    compute_local_grads(net, 0)
    make_drop_in(net, partition).step()


def train_with_local_clipping(partition: Any) -> None:
    """Clip by a norm that each rank computes locally."""
    net = DistributedDataParallel(make_seeded(mlp))
    compute_local_grads(net, 0)
    clip_grad_norm_(net.parameters(), 0.1 * (1 + 1e-6 * torch.distributed.get_rank()))
    make_drop_in(net, partition).step()


def train_with_unused_params(partition: Any) -> None:
    net = DistributedDataParallel(make_seeded(Branches), find_unused_parameters=True)
    torch.autograd.backward(branches_loss(net, 0))
    make_drop_in(net, partition).step()


def train_with_grad_scaler(partition: Any) -> None:
    """Train with a GradScaler that skips the first step."""
    net, scaler = DistributedDataParallel(make_seeded(mlp)), GradScaler("cpu", init_scale=2.0**30)
    zero = make_drop_in(net, partition)
    for number in range(3):
        net.zero_grad()
        loss = regression(net, number) * (torch.inf if number == 0 else 1)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(zero)
        scaler.update()


def train_with_sparse_grads(partition: Any) -> None:
    """Train an embedding with sparse gradients."""
    rank = torch.distributed.get_rank()
    net = DistributedDataParallel(make_seeded(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))))
    torch.autograd.backward(net(torch.tensor([1, 1, 2 + rank])).square().mean())
    make_drop_in(net, partition).step()


def train_with_zero_grads_on_other_ranks(partition: Any) -> None:
    model = make_seeded(mlp)
    compute_local_grads(model, 0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(torch.distributed.get_rank() == 0)
    make_drop_in(model, partition).step()


def train_with_grads_on_owner_only(partition: Any) -> None:
    """Set each gradient only on the rank that owns the parameter; flat shards need gradients on all ranks."""
    model = make_seeded(small_model)
    zero = make_drop_in(model, partition)
    for index, param in enumerate(model.parameters()):
        if zero.layout.owner_of(index) == zero.rank:
            param.grad = torch.full_like(param, index + 1.0)
    zero.step()


class ShrinksAllParams(optim.SGD):
    """Shrinks all parameters, also those without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
        return super().step(closure)


def train_with_updates_without_grads(partition: Any) -> None:
    model = make_seeded(small_model)
    zero = make_drop_in(model, partition, ShrinksAllParams)
    for index, param in enumerate(model.parameters()):
        if zero.layout.owner_of(index) == zero.rank:
            param.grad = torch.full_like(param, index + 1.0)
    zero.step()


def train_with_uneven_inputs(partition: Any) -> None:
    net = DistributedDataParallel(make_seeded(mlp))
    zero = make_drop_in(net, partition)
    with Join([net, zero]):
        for number in range(1 + torch.distributed.get_rank()):
            compute_local_grads(net, number)
            zero.step()


def train_with_ddp_hook(partition: Any) -> None:
    net = DistributedDataParallel(make_seeded(mlp))
    zero = make_drop_in(net, partition)
    net.register_comm_hook(None, zero.ddp_hook())
    compute_local_grads(net, 0)
    zero.step()


WHOLE, FLAT = PARTITIONS
CORRECT_PROGRAMS: list[tuple[Callable[[Any], None], list[Any]]] = [
    (train_with_ddp, [WHOLE, FLAT]),
    (train_with_local_clipping, [WHOLE, FLAT]),
    (train_with_unused_params, [WHOLE, FLAT]),
    (train_with_grad_scaler, [WHOLE, FLAT]),
    (train_with_sparse_grads, [WHOLE, FLAT]),
    (train_with_zero_grads_on_other_ranks, [WHOLE, FLAT]),
    (train_with_uneven_inputs, [WHOLE, FLAT]),
    (train_with_grads_on_owner_only, [WHOLE]),
    (train_with_updates_without_grads, [WHOLE]),
    (train_with_ddp_hook, [FLAT]),
]
"""Programs and the partitions that support them."""


@ranks(1, 2, 3)
def test_correct_programs_get_no_warning(ctx: RankContext) -> None:
    for train, partitions in CORRECT_PROGRAMS:
        for partition in partitions:
            with assert_no_warning():
                train(partition)


@ranks(2)
def test_step_without_any_gradient_warns_once(ctx: RankContext) -> None:
    """The optimizer has the parameters of another model than the one that is trained."""
    trained = make_seeded(mlp)
    for zero in (*(make_drop_in(mlp(), partition) for partition in PARTITIONS), shard(mlp(), optim.SGD, lr=0.1)):
        torch.autograd.backward(regression(trained, 0))
        with pytest.warns(UserWarning, match=r"none of the optimizer's 10 parameters has a gradient on any rank"):
            zero.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zero.step()


@ranks(2)
def test_step_with_a_gradient_on_one_rank_does_not_warn_that_there_are_none(ctx: RankContext) -> None:
    model = make_seeded(mlp)
    zero = make_drop_in(model, WholeParams())
    if ctx.rank == 0:
        compute_local_grads(model, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.step()
    assert not [warning for warning in caught if "none of the" in str(warning.message)]
