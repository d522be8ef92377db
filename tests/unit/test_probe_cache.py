"""What probes find out about an optimizer class is remembered while nothing changes that could change the answer."""

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


class Probe:
    """Counts how often it is asked."""

    def __init__(self, answer: Callable[[OptimizerFactory], str] = lambda recipe: recipe.name) -> None:
        self.calls = 0
        self._answer = answer
        self.ask = memoize_probe(on_failure="failed")(self._probe)

    def _probe(self, recipe: OptimizerFactory) -> str:
        self.calls += 1
        return self._answer(recipe)

    def is_cached(self, recipe: OptimizerFactory) -> bool:
        before = self.calls
        self.ask(recipe)
        return self.calls == before


def recipe(
    factory: Callable[..., Optimizer] = SGD, *, group: dict[str, Any] | None = None, **defaults: Any
) -> OptimizerFactory:
    group = {"params": [torch.nn.Parameter(torch.ones(2, 3))], **(group or {})}
    return OptimizerFactory(factory, [group], False, {"lr": 0.1, **defaults})


def with_param(param: torch.Tensor, **attributes: Any) -> OptimizerFactory:
    vars(param).update(attributes)
    return recipe(group={"params": [param]})


def test_equal_recipes_are_probed_once() -> None:
    probe = Probe()
    assert probe.ask(recipe()) == "SGD"
    assert probe.is_cached(recipe())
    assert probe.is_cached(recipe(group={"params": [torch.nn.Parameter(torch.zeros(5, 7)) for _ in range(9)]}))
    assert probe.ask(recipe()) == "SGD"


CHANGES: dict[str, Callable[[], OptimizerFactory]] = {
    "class": lambda: recipe(torch.optim.Adam),
    "partial": lambda: recipe(partial(SGD, momentum=0.9)),
    "default": lambda: recipe(momentum=0.9),
    "type of a default": lambda: recipe(momentum=0),
    "tensor": lambda: recipe(lr=torch.tensor(0.1)),
    "tensor value": lambda: recipe(lr=torch.tensor(0.2)),
    "tensor dtype": lambda: recipe(lr=torch.tensor(0.1, dtype=torch.float64)),
    "group option": lambda: recipe(group={"lr": 0.2}),
    "group key": lambda: recipe(group={"name": "head"}),
    "names": lambda: recipe(group={"param_names": ["a"]}),
    "two groups": lambda: OptimizerFactory(SGD, recipe().groups * 2, False, {"lr": 0.1}),
    "plain": lambda: OptimizerFactory(SGD, recipe().groups, True, {"lr": 0.1}),
    "dims": lambda: with_param(torch.nn.Parameter(torch.ones(3))),
    "dtype": lambda: with_param(torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))),
    "device": lambda: with_param(torch.nn.Parameter(torch.ones(2, 3, device="meta"))),
    "attribute": lambda: with_param(torch.nn.Parameter(torch.ones(2, 3)), lr_scale=2.0),
    "attribute value": lambda: with_param(torch.nn.Parameter(torch.ones(2, 3)), lr_scale=3.0),
}


def test_whatever_can_change_an_answer_is_part_of_the_key() -> None:
    """Each recipe differs from all others, and is found again."""
    probe = Probe()
    probe.ask(recipe())
    for name, make in CHANGES.items():
        assert not probe.is_cached(make()), name
        assert probe.is_cached(make()), name


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
def test_global_flags_are_part_of_the_key(flag: str) -> None:
    probe, one = Probe(), recipe()
    probe.ask(one)
    with FLAGS[flag]():
        assert not probe.is_cached(one)


def test_a_class_that_changes_is_probed_again() -> None:
    class Own(SGD):
        nesterov_by_default = False

    probe = Probe()
    probe.ask(recipe(Own))
    Own.nesterov_by_default = True
    assert not probe.is_cached(recipe(Own))
    setattr(Own, "step", lambda *_: None)  # noqa: B010 (mypy refuses the assignment)
    assert not probe.is_cached(recipe(Own))
    assert probe.is_cached(recipe(Own))


def scale_by_two(self: Any, closure: Any = None) -> None:
    self.scale = 2.0


def test_code_that_is_replaced_in_place_is_probed_again() -> None:
    """As reloading a module in a notebook does it."""

    def step(self: Any, closure: Any = None) -> None:
        self.scale = 1.0

    probe, own = Probe(), type("Own", (SGD,), {"step": step})
    probe.ask(recipe(own))
    assert probe.is_cached(recipe(own))
    step.__code__ = scale_by_two.__code__
    assert not probe.is_cached(recipe(own))


SCALE = 1.0


class ReadsGlobal(SGD):
    def step(self, closure: Any = None) -> Any:
        self.scale = SCALE
        return super().step(closure)


def test_a_global_value_that_a_method_reads_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe()
    probe.ask(recipe(ReadsGlobal))
    assert probe.is_cached(recipe(ReadsGlobal))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not probe.is_cached(recipe(ReadsGlobal))


class NotReferable(SGD):
    """Its property runs what no weak reference can be made to."""

    first_group = property(attrgetter("param_groups"))


def test_any_class_can_be_probed() -> None:
    probe = Probe()
    assert probe.ask(recipe(NotReferable)) == "NotReferable"
    assert not probe.is_cached(recipe(NotReferable))


def test_nothing_is_kept_of_what_happens_inside_a_dispatch_mode() -> None:
    probe = Probe()
    with FlopCounterMode(display=False):
        probe.ask(recipe())
        assert not probe.is_cached(recipe())


def make_sgd(params: Any, **options: Any) -> SGD:
    return SGD(params, **options)


def test_factories_and_options_that_cannot_be_compared_are_probed_every_time() -> None:
    probe = Probe()
    for one in (recipe(make_sgd), recipe(schedule=object())):
        probe.ask(one)
        assert not probe.is_cached(one)


def test_a_class_can_be_collected() -> None:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    probe_traits(recipe(Own))
    gone = weakref.ref(Own)
    del Own
    gc.collect()
    assert gone() is None


def test_failures_are_not_kept() -> None:
    """Memory may have run out, on this rank and only now."""

    def fail(_: OptimizerFactory) -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    probe = Probe(fail)
    assert probe.ask(recipe()) == "failed"
    assert not probe.is_cached(recipe())


def test_a_self_test_that_runs_out_of_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(SGD, "step", full)
        assert probe_traits(recipe(momentum=0.9)) == OptimizerTraits()
    assert probe_traits(recipe(momentum=0.9)).param_shaped_keys == {"momentum_buffer"}


def test_old_answers_make_room() -> None:
    counting = Probe()
    for number in range(probe.MAX_ANSWERS_PER_CLASS + 1):
        counting.ask(recipe(lr=float(number)))
    assert counting.is_cached(recipe(lr=1.0))
    assert not counting.is_cached(recipe(lr=0.0))
