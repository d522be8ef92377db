"""The state of all ranks as one dict in torch's format, and back."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ._types import Rank
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all
from .engine.base import Engine
from .engine.ddp import DDPOverlap
from .engine.inner import OPTIMIZER_KEY, ParamGroup, has_builtin_load
from .profiling import Phase
from .state import state_dict as compat
from .state.dcp_compat import DcpRequest, StateDictType
from .state.serialization import GatherInput, broadcast_state, gather_state
from .state.state_dict import SavedState, StateAssembler, StateDict
from .state.tensor_utils import map_tensors, snapshot_to_host, tensor_versions


def gather_state_dict(
    engine: Engine,
    groups: Sequence[ParamGroup],
    call: str,
    to: int,
    on_agreed: Callable[[], object] = lambda: None,
    *,
    include_initial: bool = False,
) -> StateDict | None:
    """The unsharded optimizer's dict, as a snapshot on the CPU of rank `to` of `Comm.everyone`; None on the others.

    `agreed_on` is called when all ranks have agreed, before anything is gathered. `initial`: see `part`.
    """
    written: StateDict = {}
    whole, others = StateAssembler(engine.layout.params), dict[Any, Any]()

    def prepare_local_state() -> GatherInput:
        engine.check_groups(groups)
        extra = snapshot_to_host(engine.inner.extra_state())
        written.update({"param_groups": compat.pack_param_groups(groups), **extra})
        facts = [
            *compat.describe_groups(groups),
            f"what the optimizer adds to its dict: {compat.describe_options(extra)}",
        ]
        with engine.temporary_initial_state() if include_initial else nullcontext():
            mine = {record.param: record.to_portable() for record in engine.state_shards()}
        return GatherInput({"params": mine, "others": _collect_global_state(engine)}, facts)

    def merge_local_state(local_state: Any) -> None:
        whole.add(local_state["params"])
        for key, value in local_state["others"].items():
            others.setdefault(key, value)

    with engine.comm.profiler.phase(Phase.GATHER_STATE):
        is_target = gather_state(
            engine.comm, call, prepare_local_state, Rank(to), on_consensus=on_agreed, on_value=merge_local_state
        )
    if not is_target:
        return None
    return {"state": whole.assemble() | others, **written}


def local_state_dict(
    engine: Engine, groups: Sequence[ParamGroup], *, include_initial: bool, as_load_target: bool = False
) -> StateDict:
    """This rank's part of the state, as `torch.distributed.checkpoint` saves it. Every parameter has an entry.

    `initial`: parameters that require gradients and have no state get the one that their first step would begin with,
    in the dict only. `room`: with memory of its own, to be loaded into; else its tensors are the optimizer's own.
    """
    engine.check_groups(groups)
    state: dict[Any, Any] = {spec.index: {} for spec in engine.layout.params}
    with engine.temporary_initial_state() if include_initial else nullcontext():
        for record in engine.state_shards():
            state[record.param] = record.to_dcp(engine.layout.params[record.param], as_load_target=as_load_target)
    return {
        "state": state | _collect_global_state(engine),
        "param_groups": compat.pack_param_groups(groups),
        **snapshot_to_host(engine.inner.extra_state()),
    }


def _collect_global_state(engine: Engine) -> dict[Any, Any]:
    """State that belongs to no parameter."""
    return {key: value for member in engine.inner.local_optimizers for key, value in member.shared_state().items()}


def state_dict_for_dcp(engine: Engine, groups: Sequence[ParamGroup], request: DcpRequest) -> StateDict:
    """What a helper of torch's asks for. On all ranks."""
    if request.state_dict_type is StateDictType.FULL:
        found = all_gather_state_dict(engine, groups, "state_dict")
    elif request.state_dict_type is StateDictType.FULL_ON_RANK0:
        first = engine.comm.data_parallel.group.from_global(0)
        gathered_there = gather_state_dict(engine, groups, "state_dict", to=first, include_initial=True)
        found = gathered_there or {"state": {}, "param_groups": compat.pack_param_groups(groups)}
    else:
        found = local_state_dict(
            engine, groups, include_initial=True, as_load_target=request.state_dict_type is StateDictType.LOAD_TARGET
        )
    found = found if request.needs_param_names else compat.drop_param_names(found)
    return found if len(engine.inner.local_optimizers) == 1 else _strip_optimizer_key(found)


def _strip_optimizer_key(saved: StateDict) -> StateDict:
    """torch's helpers look for every option in the optimizers that they load into, and these have no such names."""
    groups = [{key: value for key, value in group.items() if key != OPTIMIZER_KEY} for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


def all_gather_state_dict(engine: Engine, groups: Sequence[ParamGroup], call: str) -> StateDict:
    """The unsharded optimizer's dict on all ranks, with tensors where the parameters are. Called on all ranks."""
    mine = gather_state_dict(engine, groups, call, to=0, include_initial=True)
    found: StateDict = broadcast_state(engine.comm.data_parallel, mine, Rank(0))
    devices = {spec.index: spec.device for spec in engine.layout.params}
    state = found["state"]
    for index in state.keys() & devices.keys():
        state[index] = map_tensors(state[index], partial(_move_to_param_device, device=devices[index]))
    return found


def _move_to_param_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Step counts stay in host memory, where torch keeps them."""
    return tensor.to(device) if tensor.dim() else tensor


def prepare_load(engine: Engine, saved: StateDict, *, assign: bool) -> Prepared[None]:
    """Load this rank's part of a foreign dict, for all ranks to agree on or to undo."""
    checked = validate_state_dict(engine, saved)
    plainly = all(has_builtin_load(member.optimizer) for member in engine.inner.local_optimizers)
    with compat.as_checkpoint_error() if plainly else nullcontext():  # what a class of others says is left as it is
        return Prepared(
            None, checked.must_match(is_sharded=assign or checked.is_sharded), engine.load_state(checked, assign=assign)
        )


def validate_state_dict(engine: Engine, saved: StateDict) -> SavedState:
    """Raises if it is not one for this optimizer."""
    group_count = sum(len(member.optimizer.param_groups) for member in engine.inner.local_optimizers)
    with compat.as_checkpoint_error():
        found = compat.parse_state_dict(saved, engine.layout.params, group_count, engine.param_shaped_keys)
        engine.inner.check_optimizer_classes(found.groups)
        return found


def run_state_dict_hooks(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """`contents` as the optimizer's state-dict hooks leave it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    result = state_dict
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        result = after(optimizer, result) or result
    return result


def run_load_state_dict_pre_hooks(optimizer: Optimizer, saved: StateDict) -> StateDict:
    """A shallow copy of the caller's dict as the optimizer's load hooks leave it."""
    result = saved.copy() if isinstance(saved, dict) else saved
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = before(optimizer, result) or result
    return result


# ---------------------------------------------------------------------------------------------------------------------
# What a sharded optimizer does with its state: gather it, hand out this rank's part, load.


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
