"""Nobody but the user keeps an optimizer alive, and copies of a model contain nothing of ours: in every mode."""

from __future__ import annotations

import copy
import gc
import io
import pickle
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

STEPS = 4
KEPT_ALIVE_BY_DDP = ("overlap hook", "overlap hook, interleaved")
"""The hook makes all steps, so a script need not keep the optimizer."""
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
    """The optimizer and all tensors of its state."""
    state = [value for entry in training.optimizer.state.values() for value in entry.values()]
    return [weakref.ref(it) for it in [training.optimizer, *state] if not isinstance(it, (int, float))]


def check_optimizer_is_freed(name: str) -> None:
    with no_garbage_collection(), MODES[name].training() as training:
        training.train(STEPS)
        training.values()
        watched, model, net = make_weak_refs(training), training.model, training.net
        del training
        assert len(watched) > 1
        if name in KEPT_ALIVE_BY_DDP:
            assert all(it() is not None for it in watched)
            del net
        assert [it() for it in watched] == [None] * len(watched)
        torch.autograd.backward(compute_loss(model, STEPS))  # what is left on the model harms nobody
        assert all((param.grad is None) == (key == "unused") for key, param in model.named_parameters())


@ranks(2)
@two_rank_modes
def test_dropping_the_last_reference_frees_the_optimizer(ctx: RankContext, name: str) -> None:
    """And not when the garbage collector runs, which is at another time on each rank."""
    check_optimizer_is_freed(name)


@pytest.mark.slow
@ranks(4)
def test_dropping_the_last_reference_frees_a_hybrid_optimizer(ctx: RankContext) -> None:
    check_optimizer_is_freed("hybrid")


class NoZeroshardUnpickler(pickle.Unpickler):
    """Refuses classes and functions of ours."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("zeroshard"), f"{module}.{name} is in the pickle"
        return super().find_class(module, name)


def assert_no_zeroshard_objects(value: object) -> None:
    """In all that can be reached from it through instances."""
    seen, waiting = {id(value)}, [value]
    while waiting:
        found = waiting.pop()
        assert not type(found).__module__.startswith("zeroshard"), found
        for it in gc.get_referents(found):
            is_shared = isinstance(it, (type, ModuleType, FunctionType, BuiltinFunctionType))
            if id(it) not in seen and not is_shared:
                seen.add(id(it))
                waiting.append(it)


def check_copies(model: nn.Module) -> None:
    copied = copy.deepcopy(model)  # before anything else waits for parameters in flight
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    restored = NoZeroshardUnpickler(io.BytesIO(pickle.dumps(model))).load()
    NoZeroshardUnpickler(io.BytesIO(pickle.dumps(copied))).load()
    for it in (copied, restored):
        assert_no_zeroshard_objects(it)
        assert all(torch.equal(value, expected[key]) for key, value in it.state_dict().items())
        torch.autograd.backward(compute_loss(it, 0))
        it.zero_grad()
        assert all(param.grad is None for param in it.parameters())


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
            again = MODES[name].build(training.model)
            with pytest.raises(RuntimeError, match="another optimizer was made by shard"):
                training.optimizer.step()
            again.train(1)
            check_copies(training.model)


@ranks(2)
@two_rank_modes
def test_model_copies_contain_no_zeroshard_objects(ctx: RankContext, name: str) -> None:
    check_model_copies(name)


@pytest.mark.slow
@ranks(4)
def test_hybrid_model_copies_contain_no_zeroshard_objects(ctx: RankContext) -> None:
    check_model_copies("hybrid")
