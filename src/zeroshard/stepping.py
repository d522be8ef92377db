"""How a step is driven: plainly, by a GradScaler, or with ranks that ran out of inputs."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .engine.join import JoinedStep, broadcast_options
from .comm.consensus import Prepared, prepare_all
from .comm.collectives import Comm
from .profiling import Phase
from .engine import amp
from .engine.flat_engine import FlatShardEngine
from .engine.inner import ParamGroup
from .engine.base import Closure, Engine
from ._types import Rank


class SteppableOptimizer(Protocol):
    """An optimizer as users hold it."""

    param_groups: list[ParamGroup]
    _engine: Engine

    def _before_join_step(self, source: Rank) -> None:
        """Called on all ranks before a step that some only shadow; `source` is one that still trains."""

    def _after_step(self) -> None:
        """Called on all ranks when all have made a step, or have skipped it."""


class StepDriver:
    """Steps an engine for the optimizer that users hold."""

    def __init__(self, optimizer: "SteppableOptimizer", comm: Comm) -> None:
        # The optimizer holds this, and shall be freed when its user drops it.
        self._optimizer: Any = weakref.proxy(optimizer)
        self._comm = comm
        self._has_cleared_grads = False
        self._has_checked_inf = False
        self._num_steps = 0

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._optimizer._engine
        return engine

    def start_join(self) -> None:
        self._has_cleared_grads = False

    def step(self, closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool, is_joined: bool) -> Any:
        """`uneven`: some ranks may only shadow the step; `joined`: this one does."""
        with self._comm.profiler.step():
            result = self._run_step(closure, kwargs, in_join=in_join, is_joined=is_joined)
            self._optimizer._after_step()
            return result

    def _run_step(self, closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool, is_joined: bool) -> Any:
        try:
            self._check_consistency_if_due()
            self._engine.grad_check.is_paused = in_join
            if in_join and not self._comm.is_single_rank:
                run = self._step_with_join_sharded if self._engine.reduces_grads else self._step_with_join
                return run(closure, kwargs, is_joined=is_joined)
            if amp.is_scaler_step(self._optimizer) and self._should_skip_step(in_join=False):
                return None
            return self._engine.step(self._optimizer.param_groups, closure, kwargs)
        except BaseException:
            amp.clear_scaler_attrs(self._optimizer)  # GradScaler takes back what it set only after a step that returns
            raise
        finally:
            self._has_checked_inf = False
            amp.clear_scaler_attrs(*self._inner_optimizers)

    def _check_consistency_if_due(self) -> None:
        """In the same steps on all ranks: all of them make each, if only as a shadow or to skip it."""
        self._num_steps += 1
        if self._engine.checks.is_consistency_check_due(self._num_steps):
            self._engine.check_consistency(f"before step {self._num_steps}", self._num_steps)

    def synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list, *, in_join: bool
    ) -> list[torch.Tensor] | None:
        """This rank's part of gradients that are spread over ranks, to be clipped or unscaled; None if all of them are
        in `param.grad`. `given`: as for `settle`."""
        engine = self._engine
        if not isinstance(engine, FlatShardEngine) or not engine.reduces_grads:
            return None
        if in_join:  # Hazard: ranks without inputs make no such call, so that none can be agreed on
            raise RuntimeError(f"{call} cannot be used inside Join where gradients are spread over ranks")
        engine.synchronize_grads(call, self._optimizer.param_groups, read_arguments)
        engine.grads.mark_scaled()
        return engine.grads.grad_tensors()

    def unscale(self, grads: list[torch.Tensor], inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        self._has_checked_inf = True
        with self._comm.profiler.phase(Phase.UNSCALE_GRADS):
            return amp.unscale_sharded_grads(grads, inverse_scale, self._comm)

    def _step_with_join(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        engine, groups = self._engine, self._optimizer.param_groups
        uneven = JoinedStep(engine, groups, kwargs, is_joined=is_joined, has_cleared_grads=self._has_cleared_grads)
        try:
            if closure is not None:
                return engine.step(groups, uneven.wrap_closure(closure), kwargs)
            survey = uneven.gather_status(has_grad_scaler=amp.is_scaler_step(self._optimizer))
            if survey.has_grad_scaler and self._should_skip_step(in_join=True):
                return None
            uneven.exchange_step_inputs(survey)
            shadow = uneven.make_joined_closure() if survey.has_closure else None
            return engine.step(groups, shadow, uneven.kwargs)
        finally:
            uneven.finish()
            self._has_cleared_grads = is_joined

    def _step_with_join_sharded(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        """Ranks without inputs have no gradients, and need none: they own slices of those of the others."""

        def prepare() -> Prepared[None]:
            if amp.is_scaler_step(self._optimizer) or closure is not None:
                raise RuntimeError(
                    "inside Join, step() takes neither a closure nor a GradScaler where gradients are spread"
                )
            return Prepared(None)

        prepare_all(self._comm, "a step inside Join", prepare)
        training = broadcast_options(self._comm, self._optimizer.param_groups, is_current=not is_joined)
        self._optimizer._before_join_step(training[-1])  # the rank whose buffers DDP broadcasts, too
        if not is_joined:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        self._clear_param_grads()
        if not self._engine.is_reducing:  # else they are what DDP has shadowed
            self._engine.clear_grads(set_to_none=True)
        try:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        finally:
            self._clear_param_grads()
            self._engine.clear_grads(set_to_none=True)

    def _clear_param_grads(self) -> None:
        """Those in `param.grad` are of this rank's last own step."""
        self._engine.drop_placeholders()
        for param in self._engine.params:
            param.grad = None

    def _should_skip_step(self, *, in_join: bool) -> bool:
        engine = self._engine
        # Kernels that skip by themselves would leave it open whether gradients that are not finite are the guard's.
        fused = self._inner_optimizers if not engine.checks.should_check_grads else None
        if isinstance(engine, FlatShardEngine) and engine.reduces_grads:
            return amp.should_skip_sharded_step(
                self._optimizer, fused, engine.grads.grad_tensors(), self._comm, is_inf_checked=self._has_checked_inf
            )
        return amp.should_skip_step(self._optimizer, fused, engine.params, self._comm, is_join_enabled=in_join)

    @property
    def _inner_optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self._engine.inner.local_optimizers]
