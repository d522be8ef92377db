"""The state of all ranks as one dict in torch's format, and back."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from .comm.consensus import Prepared
from .profiling import Phase
from .engine.inner import ParamGroup
from .engine.loading import has_builtin_load
from .engine.base import Engine
from .engine.team import OPTIMIZER_KEY
from .state import state_dict as compat
from .state.dcp_compat import DcpRequest, StateDictType
from .state.state_dict import SavedState, StateDict
from .state.serialization import GatherInput, broadcast_state, gather_state
from .state.records import StateAssembler
from .state.trees import map_tensors, snapshot_to_host
from ._types import Rank


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
