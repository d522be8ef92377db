"""The probe cache: results are reused until something changes that could affect them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.engine import probe
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import OptimizerTraits, memoize_probe, probe_traits


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    probe.clear_probe_cache()


class CountingProbe:
    """A memoized probe that counts its calls."""

    def __init__(self, answer: Callable[[OptimizerFactory], str] = lambda factory: factory.name) -> None:
        self.calls = 0
        self._answer = answer
        self.ask = memoize_probe(on_failure="failed")(self._probe)

    def _probe(self, factory: OptimizerFactory) -> str:
        self.calls += 1
        return self._answer(factory)

    def is_cached(self, factory: OptimizerFactory) -> bool:
        before = self.calls
        self.ask(factory)
        return self.calls == before


def make_factory(
    factory: Callable[..., Optimizer] = SGD, *, group: dict[str, Any] | None = None, **defaults: Any
) -> OptimizerFactory:
    group = {"params": [torch.nn.Parameter(torch.ones(2, 3))], **(group or {})}
    return OptimizerFactory(factory, [group], False, {"lr": 0.1, **defaults})


def make_factory_for(param: torch.Tensor, **attributes: Any) -> OptimizerFactory:
    vars(param).update(attributes)
    return make_factory(group={"params": [param]})


def test_equal_factories_are_probed_once() -> None:
    counting = CountingProbe()
    assert counting.ask(make_factory()) == "SGD"
    assert counting.is_cached(make_factory())
    assert counting.is_cached(make_factory(group={"params": [torch.nn.Parameter(torch.zeros(5, 7)) for _ in range(9)]}))
    assert counting.ask(make_factory()) == "SGD"


DIFFERENT_FACTORIES: dict[str, Callable[[], OptimizerFactory]] = {
    "class": lambda: make_factory(torch.optim.Adam),
    "partial": lambda: make_factory(partial(SGD, momentum=0.9)),
    "default": lambda: make_factory(momentum=0.9),
    "type of a default": lambda: make_factory(momentum=0),
    "tensor": lambda: make_factory(lr=torch.tensor(0.1)),
    "tensor value": lambda: make_factory(lr=torch.tensor(0.2)),
    "tensor dtype": lambda: make_factory(lr=torch.tensor(0.1, dtype=torch.float64)),
    "group option": lambda: make_factory(group={"lr": 0.2}),
    "group key": lambda: make_factory(group={"name": "head"}),
    "names": lambda: make_factory(group={"param_names": ["a"]}),
    "two groups": lambda: OptimizerFactory(SGD, make_factory().groups * 2, False, {"lr": 0.1}),
    "plain": lambda: OptimizerFactory(SGD, make_factory().groups, True, {"lr": 0.1}),
    "dims": lambda: make_factory_for(torch.nn.Parameter(torch.ones(3))),
    "dtype": lambda: make_factory_for(torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))),
    "device": lambda: make_factory_for(torch.nn.Parameter(torch.ones(2, 3, device="meta"))),
    "attribute": lambda: make_factory_for(torch.nn.Parameter(torch.ones(2, 3)), lr_scale=2.0),
    "attribute value": lambda: make_factory_for(torch.nn.Parameter(torch.ones(2, 3)), lr_scale=3.0),
}


def test_cache_key_covers_all_inputs() -> None:
    """Each factory misses the cache the first time and hits it the second time."""
    counting = CountingProbe()
    counting.ask(make_factory())
    for name, make in DIFFERENT_FACTORIES.items():
        assert not counting.is_cached(make()), name
        assert counting.is_cached(make()), name


def default_dtype() -> AbstractContextManager[None]:
    torch.set_default_dtype(torch.float64)
    return nullcontext()


def deterministic() -> AbstractContextManager[None]:
    torch.use_deterministic_algorithms(True)
    return nullcontext()


def matmul_precision() -> AbstractContextManager[None]:
    torch.set_float32_matmul_precision("medium")
    return nullcontext()


FLAGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "matmul precision": matmul_precision,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture
def _restored_flags() -> Any:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.usefixtures("_restored_flags")
@pytest.mark.parametrize("flag", FLAGS)
def test_cache_key_covers_global_flags(flag: str) -> None:
    counting, factory = CountingProbe(), make_factory()
    counting.ask(factory)
    with FLAGS[flag]():
        assert not counting.is_cached(factory)


def test_modified_class_is_probed_again() -> None:
    class CustomSGD(SGD):
        nesterov_by_default = False

    counting = CountingProbe()
    counting.ask(make_factory(CustomSGD))
    CustomSGD.nesterov_by_default = True
    assert not counting.is_cached(make_factory(CustomSGD))
    setattr(CustomSGD, "step", lambda *_: None)  # noqa: B010 (mypy refuses the assignment)
    assert not counting.is_cached(make_factory(CustomSGD))
    assert counting.is_cached(make_factory(CustomSGD))


def scale_by_two(self: Any, closure: Any = None) -> None:
    self.scale = 2.0


def test_replaced_code_is_probed_again() -> None:
    """Reloading a module in a notebook does this."""

    def step(self: Any, closure: Any = None) -> None:
        self.scale = 1.0

    counting, custom_class = CountingProbe(), type("Own", (SGD,), {"step": step})
    counting.ask(make_factory(custom_class))
    assert counting.is_cached(make_factory(custom_class))
    step.__code__ = scale_by_two.__code__
    assert not counting.is_cached(make_factory(custom_class))


SCALE = 1.0


class ReadsGlobal(SGD):
    def step(self, closure: Any = None) -> Any:
        self.scale = SCALE
        return super().step(closure)


def test_cache_key_covers_globals_read_by_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingProbe()
    counting.ask(make_factory(ReadsGlobal))
    assert counting.is_cached(make_factory(ReadsGlobal))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not counting.is_cached(make_factory(ReadsGlobal))


class NotReferable(SGD):
    """Its property calls an object that does not support weak references."""

    first_group = property(attrgetter("param_groups"))


def test_class_without_weak_references_is_probed_uncached() -> None:
    counting = CountingProbe()
    assert counting.ask(make_factory(NotReferable)) == "NotReferable"
    assert not counting.is_cached(make_factory(NotReferable))


def test_nothing_is_cached_inside_a_dispatch_mode() -> None:
    counting = CountingProbe()
    with FlopCounterMode(display=False):
        counting.ask(make_factory())
        assert not counting.is_cached(make_factory())


def make_sgd(params: Any, **options: Any) -> SGD:
    return SGD(params, **options)


def test_incomparable_factories_and_options_are_not_cached() -> None:
    counting = CountingProbe()
    for factory in (make_factory(make_sgd), make_factory(schedule=object())):
        counting.ask(factory)
        assert not counting.is_cached(factory)


def test_cache_does_not_keep_classes_alive() -> None:
    class CustomSGD(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    probe_traits(make_factory(CustomSGD))
    class_ref = weakref.ref(CustomSGD)
    del CustomSGD
    gc.collect()
    assert class_ref() is None


def test_failures_are_not_cached() -> None:
    """The failure may be temporary and local to this rank, such as running out of memory."""

    def fail(_: OptimizerFactory) -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    counting = CountingProbe(fail)
    assert counting.ask(make_factory()) == "failed"
    assert not counting.is_cached(make_factory())


def test_probe_is_repeated_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(SGD, "step", run_out_of_memory)
        assert probe_traits(make_factory(momentum=0.9)) == OptimizerTraits()
    assert probe_traits(make_factory(momentum=0.9)).param_shaped_keys == {"momentum_buffer"}


def test_oldest_answer_is_evicted() -> None:
    counting = CountingProbe()
    for number in range(probe.MAX_ANSWERS_PER_CLASS + 1):
        counting.ask(make_factory(lr=float(number)))
    assert counting.is_cached(make_factory(lr=1.0))
    assert not counting.is_cached(make_factory(lr=0.0))
