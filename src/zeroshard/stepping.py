"""How a step is driven: plainly, by a GradScaler, or with ranks that ran out of inputs."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .adapters.join import UnevenStep, share_options
from .comm.agreement import Proposal, agreed
from .comm.collectives import Comm
from .labels import Label
from .runtime import amp
from .runtime.flat import FlatEngine
from .runtime.inner import ParamGroup
from .runtime.step import Closure, Engine
from .units import Rank


class Steered(Protocol):
    """An optimizer as users hold it."""

    param_groups: list[ParamGroup]
    engine: Engine

    def before_uneven_step(self, source: Rank) -> None:
        """Called on all ranks before a step that some only shadow; `source` is one that still trains."""

    def after_step(self) -> None:
        """Called on all ranks when all have made a step, or have skipped it."""


class Stepping:
    """Steps an engine for the optimizer that users hold."""

    def __init__(self, outer: "Steered", comm: Comm) -> None:
        # The optimizer holds this, and shall be freed when its user drops it.
        self._outer: Any = weakref.proxy(outer)
        self._comm = comm
        self._cleared = False
        self._checked = False
        self._steps = 0

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._outer.engine
        return engine

    def start_join(self) -> None:
        self._cleared = False

    def step(self, closure: Closure | None, kwargs: dict[str, Any], *, uneven: bool, joined: bool) -> Any:
        """`uneven`: some ranks may only shadow the step; `joined`: this one does."""
        with self._comm.clock.step():
            result = self._make_step(closure, kwargs, uneven=uneven, joined=joined)
            self._outer.after_step()
            return result

    def _make_step(self, closure: Closure | None, kwargs: dict[str, Any], *, uneven: bool, joined: bool) -> Any:
        try:
            self._look_for_drift()
            self._engine.grad_check.paused = uneven
            if uneven and not self._comm.is_alone:
                run = self._uneven_reduced if self._engine.reduces else self._uneven
                return run(closure, kwargs, joined=joined)
            if amp.drives(self._outer) and self._skips(uneven=False):
                return None
            return self._engine.run(self._outer.param_groups, closure, kwargs)
        except BaseException:
            amp.forget(self._outer)  # GradScaler takes back what it set only after a step that returns
            raise
        finally:
            self._checked = False
            amp.forget(*self._optimizers)

    def _look_for_drift(self) -> None:
        """In the same steps on all ranks: all of them make each, if only as a shadow or to skip it."""
        self._steps += 1
        if self._engine.looks.are_due(self._steps):
            self._engine.check_drift(f"before step {self._steps}", self._steps)

    def spread_grads(
        self, call: str, given: Callable[[], list[str]] = list, *, uneven: bool
    ) -> list[torch.Tensor] | None:
        """This rank's part of gradients that are spread over ranks, to be clipped or unscaled; None if all of them are
        in `param.grad`. `given`: as for `settle`."""
        engine = self._engine
        if not isinstance(engine, FlatEngine) or not engine.reduces:
            return None
        if uneven:  # Hazard: ranks without inputs make no such call, so that none can be agreed on
            raise RuntimeError(f"{call} cannot be used inside Join where gradients are spread over ranks")
        engine.settle(call, self._outer.param_groups, given)
        engine.grads.note_scaling()
        return engine.grads.tensors()

    def unscale(self, grads: list[torch.Tensor], inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        self._checked = True
        with self._comm.clock.part(Label.UNSCALE):
            return amp.unscale_jointly(grads, inverse_scale, self._comm)

    def _uneven(self, closure: Closure | None, kwargs: dict[str, Any], *, joined: bool) -> Any:
        engine, groups = self._engine, self._outer.param_groups
        uneven = UnevenStep(engine, groups, kwargs, joined=joined, cleared=self._cleared)
        try:
            if closure is not None:
                return engine.run(groups, uneven.lending(closure), kwargs)
            survey = uneven.survey(scaled=amp.drives(self._outer))
            if survey.scaled and self._skips(uneven=True):
                return None
            uneven.lend(survey)
            shadow = uneven.borrowing() if survey.closure else None
            return engine.run(groups, shadow, uneven.kwargs)
        finally:
            uneven.end()
            self._cleared = joined

    def _uneven_reduced(self, closure: Closure | None, kwargs: dict[str, Any], *, joined: bool) -> Any:
        """Ranks without inputs have no gradients, and need none: they own slices of those of the others."""

        def allowed() -> Proposal[None]:
            if amp.drives(self._outer) or closure is not None:
                raise RuntimeError(
                    "inside Join, step() takes neither a closure nor a GradScaler where gradients are spread"
                )
            return Proposal(None)

        agreed(self._comm, "a step inside Join", allowed)
        training = share_options(self._comm, self._outer.param_groups, current=not joined)
        self._outer.before_uneven_step(training[-1])  # the rank whose buffers DDP broadcasts, too
        if not joined:
            return self._engine.run(self._outer.param_groups, None, kwargs)
        self._drop_grads()
        if not self._engine.is_reducing:  # else they are what DDP has shadowed
            self._engine.clear_grads(to_none=True)
        try:
            return self._engine.run(self._outer.param_groups, None, kwargs)
        finally:
            self._drop_grads()
            self._engine.clear_grads(to_none=True)

    def _drop_grads(self) -> None:
        """Those in `param.grad` are of this rank's last own step."""
        self._engine.drop_placeholders()
        for param in self._engine.params:
            param.grad = None

    def _skips(self, *, uneven: bool) -> bool:
        engine = self._engine
        # Kernels that skip by themselves would leave it open whether gradients that are not finite are the guard's.
        fused = self._optimizers if not engine.looks.at_gradients else None
        if isinstance(engine, FlatEngine) and engine.reduces:
            return amp.skips_jointly(self._outer, fused, engine.grads.tensors(), self._comm, checked=self._checked)
        return amp.skips(self._outer, fused, engine.params, self._comm, uneven=uneven)

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self._engine.inner.members]
