"""Modes of optimizers: schedule-free ones have other values in the parameters while they train than for evaluation."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from .comm.agreement import Proposal, agreed, compare, raise_failure
from .runtime.inner import ParamGroup
from .runtime.step import Attempt, Engine
from .state.compat import describe_groups


class Modes:
    """`train()` and `eval()`, where the inner optimizer has them. Called on all ranks."""

    engine: Engine
    param_groups: list[ParamGroup]
    initialized: bool

    @property
    def train(self) -> Callable[[], None]:
        """Parameters become those that are trained, on all ranks."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Parameters become those to evaluate and to save, on all ranks."""
        return self._mode("eval")

    def _mode(self, mode: str) -> Callable[[], None]:
        if not self.initialized or not any(member.has_mode(mode) for member in self.engine.inner.members):
            raise AttributeError(f"the optimizer that is sharded has no {mode}()")
        return partial(self._switch, mode)

    @abstractmethod
    def require_settled(self, call: str) -> None:
        """Raise if owners may still change. That of the class that has modes comes first."""

    def _switch(self, mode: str) -> None:
        """Each rank switches what it owns, and all get everything. What fails on one rank is raised on all."""
        engine, groups = self.engine, self.param_groups

        def propose() -> Proposal[Callable[[], None]]:
            self.require_settled(mode)
            engine.check_groups(groups)
            engine.at_rest()
            return Proposal(engine.kept(groups), describe_groups(groups))

        put_back = agreed(engine.comm, f"{mode}()", propose)
        attempt = Attempt()
        attempt.update(lambda: engine.switch(groups, mode))
        verdict = compare(engine.comm, f"the end of {mode}()", b"", attempt.trouble)
        if verdict.trouble:
            put_back()
        engine.spread()()
        if verdict.trouble:
            raise_failure(engine.comm, f"{mode}()", attempt.failure)
