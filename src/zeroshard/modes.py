"""Modes of optimizers: schedule-free ones have other values in the parameters while they train than for evaluation."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from .comm.consensus import Prepared, exchange_status, prepare_all, raise_failure
from .engine.inner import ParamGroup
from .engine.base import Engine, StepOutcome
from .state.state_dict import describe_groups


class TrainEvalMixin:
    """`train()` and `eval()`, where the inner optimizer has them. Called on all ranks."""

    _engine: Engine
    param_groups: list[ParamGroup]
    initialized: bool

    @property
    def train(self) -> Callable[[], None]:
        """Parameters become those that are trained, on all ranks."""
        return self._mode_setter("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Parameters become those to evaluate and to save, on all ranks."""
        return self._mode_setter("eval")

    def _mode_setter(self, mode: str) -> Callable[[], None]:
        if not self.initialized or not any(member.has_mode(mode) for member in self._engine.inner.local_optimizers):
            raise AttributeError(f"the optimizer that is sharded has no {mode}()")
        return partial(self._set_mode, mode)

    @abstractmethod
    def _require_final_layout(self, call: str) -> None:
        """Raise if owners may still change. That of the class that has modes comes first."""

    def _set_mode(self, mode: str) -> None:
        """Each rank switches what it owns, and all get everything. What fails on one rank is raised on all."""
        engine, groups = self._engine, self.param_groups

        def prepare() -> Prepared[Callable[[], None]]:
            self._require_final_layout(mode)
            engine.check_groups(groups)
            engine.wait_until_idle()
            return Prepared(engine.snapshot(groups), describe_groups(groups))

        put_back = prepare_all(engine.comm, f"{mode}()", prepare)
        attempt = StepOutcome()
        attempt.run(lambda: engine.set_mode(groups, mode))
        verdict = exchange_status(engine.comm, f"the end of {mode}()", b"", attempt.failure)
        if verdict.failure_level:
            put_back()
        engine.broadcast_params()()
        if verdict.failure_level:
            raise_failure(engine.comm, f"{mode}()", attempt.error)
