"""What a sharded optimizer does with its state: gather it, hand out this rank's part, load."""

from typing import NamedTuple

from torch.optim import Optimizer

from .engine.ddp import DDPOverlap
from .comm.consensus import Prepared, prepare_all
from .comm.collectives import Comm
from .profiling import Phase
from .engine.base import Engine
from .state.state_dict import StateDict
from .state.trees import tensor_versions
from .state_dict_mixin import gather_state_dict, local_state_dict, prepare_load, run_load_state_dict_pre_hooks, run_state_dict_hooks, validate_state_dict


class _ConsolidatedState(NamedTuple):
    state_dict: StateDict
    num_steps: int
    tensor_versions: list[int]
    """Of its tensors, to notice when somebody changes one."""


class StateDictMixin(Optimizer):
    """Every method is called on all ranks.

    `state_dict` and `load_state_dict` are not here: `super(ZeroRedundancyOptimizer, optimizer).state_dict()` must reach
    torch's, as it does from torch's class.
    """

    _engine: Engine
    _comm: Comm
    _ddp_overlap: DDPOverlap | None
    _consolidated_state: _ConsolidatedState | None = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all state on rank `to` of the group, for `state_dict()` there. Called on all ranks."""
        self._require_final_layout("consolidate_state_dict")

        def discard_previous() -> None:
            """An older snapshot goes before the new one comes: the target never holds both."""
            if self._comm.data_parallel.group.rank == to:
                self._discard_consolidated_state()

        contents = gather_state_dict(self._engine, self.param_groups, "consolidate_state_dict", to, discard_previous)
        if contents is not None:
            self._consolidated_state = _ConsolidatedState(contents, self._engine.steps, tensor_versions(contents))

    def full_state_dict(self, to: int = 0) -> StateDict | None:
        """Gather all state and return it on rank `to`, None on the others. Called on all ranks; nothing is kept."""
        self._require_final_layout("full_state_dict")
        contents = gather_state_dict(self._engine, self.param_groups, "full_state_dict", to)
        return None if contents is None else run_state_dict_hooks(self, contents)

    def sharded_state_dict(self) -> StateDict:
        """This rank's part of the state, for `torch.distributed.checkpoint`: nothing is gathered, nothing is copied.

        In the format of the unsharded optimizer. State that is cut appears in the shape of its parameter, and knows
        which part of it is here; DCP saves it so that it loads at any world size. Called on all ranks.

        DCP also loads into this dict. So parameters that require gradients and were never updated are in it with the
        state that their first step would begin with, as with torch's helpers. The optimizer does not keep that.
        """
        self._require_final_layout("sharded_state_dict")
        return local_state_dict(self._engine, self.param_groups, include_initial=True)

    def _check_state_dict(self, state_dict: StateDict) -> None:
        """Raise if it is not one for this optimizer, whatever the values of its tensors."""
        validate_state_dict(self._engine, state_dict)

    def _load_state_dict(self, state_dict: StateDict, *, assign: bool) -> None:
        self._require_final_layout("load_state_dict")

        def prepare() -> Prepared[None]:
            saved = run_load_state_dict_pre_hooks(self, state_dict)
            return prepare_load(self._engine, saved, assign=assign)

        with self._comm.profiler.phase(Phase.LOAD_STATE):
            prepare_all(self._comm, "load_state_dict", prepare)
        self._engine.inner.pull_options(self.param_groups)
        self._discard_consolidated_state()
        self._invalidate_peer_snapshots()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _invalidate_peer_snapshots(self) -> None:
        """Second copies, if there are any: they are not of what was loaded."""

    def _discard_consolidated_state(self) -> None:
        self._consolidated_state = None

    def _count_local_step(self) -> None:
        """Count a step that only this rank makes."""
        if self._consolidated_state is not None:
            self._consolidated_state = self._consolidated_state._replace(
                num_steps=self._consolidated_state.num_steps - 1
            )

    def _require_final_layout(self, call: str) -> None:
        """Raise if owners may still change."""
        if self._ddp_overlap is not None and not self._ddp_overlap.is_initialized:
            raise RuntimeError(
                f"{call}() needs to know who owns what, and DDP's buckets settle only in its first backward passes: "
                f"call it after {self._ddp_overlap.warmup_passes} of them"
            )
