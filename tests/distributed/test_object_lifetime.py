"""Only the user keeps an optimizer alive, and copies of a model contain no zeroshard objects: in every mode."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.recorded.modes import MODES, Training, compute_loss
from tests.support import RankContext, ranks
from zeroshard import NonFiniteGrads, ZeroConfig, ZeroRedundancyOptimizer, shard

STEPS = 4
KEPT_ALIVE_BY_DDP = ("overlap hook", "overlap hook, interleaved")
"""The hook makes all steps, so a script does not need to keep the optimizer."""
two_rank_modes = pytest.mark.parametrize("name", [name for name in MODES if 2 in MODES[name].world_sizes])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def make_weak_refs(training: Training) -> list[weakref.ref[Any]]:
    """Weak references to the optimizer and all tensors of its state."""
    state = [value for param_state in training.optimizer.state.values() for value in param_state.values()]
    return [weakref.ref(value) for value in [training.optimizer, *state] if not isinstance(value, (int, float))]


def check_optimizer_is_freed(name: str) -> None:
    with no_garbage_collection(), MODES[name].training() as training:
        training.train(STEPS)
        training.values()
        refs, model, net = make_weak_refs(training), training.model, training.net
        del training
        assert len(refs) > 1
        if name in KEPT_ALIVE_BY_DDP:
            assert all(ref() is not None for ref in refs)
            del net
        assert [ref() for ref in refs] == [None] * len(refs)
        torch.autograd.backward(compute_loss(model, STEPS))  # hooks left on the model have no effect
        assert all((param.grad is None) == (key == "unused") for key, param in model.named_parameters())


@ranks(2)
@two_rank_modes
def test_dropping_the_last_reference_frees_the_optimizer(ctx: RankContext, name: str) -> None:
    """The garbage collector, which runs at a different time on each rank, is not needed."""
    check_optimizer_is_freed(name)


@pytest.mark.slow
@ranks(4)
def test_dropping_the_last_reference_frees_a_hybrid_optimizer(ctx: RankContext) -> None:
    check_optimizer_is_freed("hybrid")


class NoZeroshardUnpickler(pickle.Unpickler):
    """Rejects classes and functions of zeroshard."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("zeroshard"), f"{module}.{name} is in the pickle"
        return super().find_class(module, name)


def assert_no_zeroshard_objects(value: object) -> None:
    """Check all objects that are reachable from `value` through instances."""
    seen_ids, pending = {id(value)}, [value]
    while pending:
        current = pending.pop()
        assert not type(current).__module__.startswith("zeroshard"), current
        for referent in gc.get_referents(current):
            is_shared = isinstance(referent, (type, ModuleType, FunctionType, BuiltinFunctionType))
            if id(referent) not in seen_ids and not is_shared:
                seen_ids.add(id(referent))
                pending.append(referent)


def check_copies(model: nn.Module) -> None:
    copied = copy.deepcopy(model)  # must come first: parameters are still in flight
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    restored = NoZeroshardUnpickler(io.BytesIO(pickle.dumps(model))).load()
    NoZeroshardUnpickler(io.BytesIO(pickle.dumps(copied))).load()
    for model_copy in (copied, restored):
        assert_no_zeroshard_objects(model_copy)
        assert all(torch.equal(value, expected[key]) for key, value in model_copy.state_dict().items())
        torch.autograd.backward(compute_loss(model_copy, 0))
        model_copy.zero_grad()
        assert all(param.grad is None for param in model_copy.parameters())


def check_model_copies(name: str) -> None:
    """With parameters in flight, with gradients in flight, and after a second optimizer has superseded the first."""
    with MODES[name].training() as training:
        training.train(STEPS)
        check_copies(training.model)
        torch.autograd.backward(compute_loss(training.net, STEPS))
        check_copies(training.model)
        if training.net is training.model:
            with pytest.raises(AssertionError):
                assert_no_zeroshard_objects(training.model)
            training.optimizer.zero_grad()
            second = MODES[name].build(training.model)
            with pytest.raises(RuntimeError, match=r"a later shard\(\) call took over parameters of this optimizer"):
                training.optimizer.step()
            second.train(1)
            check_copies(training.model)


@ranks(2)
@two_rank_modes
def test_model_copies_contain_no_zeroshard_objects(ctx: RankContext, name: str) -> None:
    check_model_copies(name)


@pytest.mark.slow
@ranks(4)
def test_hybrid_model_copies_contain_no_zeroshard_objects(ctx: RankContext) -> None:
    check_model_copies("hybrid")


@ranks(2)
@pytest.mark.parametrize("use_shard", [False, True])
def test_a_skipped_step_frees_its_closure(ctx: RankContext, use_shard: bool) -> None:
    model = nn.Linear(3, 2)
    config = ZeroConfig(nonfinite=NonFiniteGrads("skip"))
    optimizer = (
        shard(model, torch.optim.SGD, lr=0.1, config=config)
        if use_shard
        else ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, config=config)
    )

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 3)).sum() * float("inf")
        torch.autograd.backward(loss)
        return loss.detach()

    closure_ref = weakref.ref(closure)
    with no_garbage_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(closure)
        assert optimizer.nonfinite.skipped == 1
        del closure
        assert closure_ref() is None
