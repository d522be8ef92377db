"""What a sharded optimizer does with its state: gather it, hand out this rank's part, load."""

from typing import NamedTuple

from torch.optim import Optimizer

from . import state_dicts
from .adapters.ddp import Overlap
from .comm.agreement import Proposal, agreed
from .comm.collectives import Comm
from .labels import Label
from .runtime.step import Engine
from .state.compat import StateDict
from .state.trees import versions


class _Snapshot(NamedTuple):
    contents: StateDict
    steps: int
    versions: list[int]
    """Of its tensors, to notice when somebody changes one."""


class Stateful(Optimizer):
    """Every method is called on all ranks.

    `state_dict` and `load_state_dict` are not here: `super(ZeroRedundancyOptimizer, optimizer).state_dict()` must reach
    torch's, as it does from torch's class.
    """

    engine: Engine
    _comm: Comm
    _overlap: Overlap | None
    _snapshot: _Snapshot | None = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all state on rank `to` of the group, for `state_dict()` there. Called on all ranks."""
        self.require_settled("consolidate_state_dict")

        def forget() -> None:
            """An older snapshot goes before the new one comes: the target never holds both."""
            if self._comm.everyone.group.rank == to:
                self._forget_snapshot()

        contents = state_dicts.gathered(self.engine, self.param_groups, "consolidate_state_dict", to, forget)
        if contents is not None:
            self._snapshot = _Snapshot(contents, self.engine.steps, versions(contents))

    def full_state_dict(self, to: int = 0) -> StateDict | None:
        """Gather all state and return it on rank `to`, None on the others. Called on all ranks; nothing is kept."""
        self.require_settled("full_state_dict")
        contents = state_dicts.gathered(self.engine, self.param_groups, "full_state_dict", to)
        return None if contents is None else state_dicts.through_save_hooks(self, contents)

    def sharded_state_dict(self) -> StateDict:
        """This rank's part of the state, for `torch.distributed.checkpoint`: nothing is gathered, nothing is copied.

        In the format of the unsharded optimizer. State that is cut appears in the shape of its parameter, and knows
        which part of it is here; DCP saves it so that it loads at any world size. Called on all ranks.

        DCP also loads into this dict. So parameters that require gradients and were never updated are in it with the
        state that their first step would begin with, as with torch's helpers. The optimizer does not keep that.
        """
        self.require_settled("sharded_state_dict")
        return state_dicts.part(self.engine, self.param_groups, initial=True)

    def _check_state_dict(self, state_dict: StateDict) -> None:
        """Raise if it is not one for this optimizer, whatever the values of its tensors."""
        state_dicts.checked_dict(self.engine, state_dict)

    def _load(self, state_dict: StateDict, *, adopt: bool) -> None:
        self.require_settled("load_state_dict")

        def propose() -> Proposal[None]:
            saved = state_dicts.through_load_hooks(self, state_dict)
            return state_dicts.loading(self.engine, saved, adopt=adopt)

        with self._comm.clock.part(Label.LOAD):
            agreed(self._comm, "load_state_dict", propose)
        self.engine.inner.pull(self.param_groups)
        self._forget_snapshot()
        self.forget_copies()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def forget_copies(self) -> None:
        """Second copies, if there are any: they are not of what was loaded."""

    def _forget_snapshot(self) -> None:
        self._snapshot = None

    def _age_snapshot(self) -> None:
        """Count a step that only this rank makes."""
        if self._snapshot is not None:
            self._snapshot = self._snapshot._replace(steps=self._snapshot.steps - 1)

    def require_settled(self, call: str) -> None:
        """Raise if owners may still change."""
        if self._overlap is not None and not self._overlap.settled:
            raise RuntimeError(
                f"{call}() needs to know who owns what, and DDP's buckets settle only in its first backward passes: "
                f"call it after {self._overlap.warmup_passes} of them"
            )
