"""The state of all ranks as one dict in torch's format, and back."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from .comm.agreement import Proposal
from .labels import Label
from .runtime.inner import ParamGroup
from .runtime.loading import loads_as_torch_does
from .runtime.step import Engine
from .runtime.team import CLASS
from .state import compat
from .state.callers import Asked, Wanted
from .state.compat import SavedState, StateDict
from .state.exchange import Share, bring_to_all, gather
from .state.records import Whole
from .state.trees import map_tensors, snapshot
from .units import Rank


def gathered(
    engine: Engine,
    groups: Sequence[ParamGroup],
    call: str,
    to: int,
    agreed_on: Callable[[], object] = lambda: None,
    *,
    initial: bool = False,
) -> StateDict | None:
    """The unsharded optimizer's dict, as a snapshot on the CPU of rank `to` of `Comm.everyone`; None on the others.

    `agreed_on` is called when all ranks have agreed, before anything is gathered. `initial`: see `part`.
    """
    written: StateDict = {}
    whole, others = Whole(engine.layout.params), dict[Any, Any]()

    def share() -> Share:
        engine.check_groups(groups)
        extra = snapshot(engine.inner.extra())
        written.update({"param_groups": compat.write_groups(groups), **extra})
        facts = [
            *compat.describe_groups(groups),
            f"what the optimizer adds to its dict: {compat.describe_options(extra)}",
        ]
        with engine.with_initial_state() if initial else nullcontext():
            mine = {record.param: record.portable() for record in engine.records()}
        return Share({"params": mine, "others": _shared(engine)}, facts)

    def take(part: Any) -> None:
        whole.add(part["params"])
        for key, value in part["others"].items():
            others.setdefault(key, value)

    with engine.comm.clock.part(Label.GATHER):
        is_target = gather(engine.comm, call, share, Rank(to), agreed_on=agreed_on, take=take)
    if not is_target:
        return None
    return {"state": whole.state() | others, **written}


def part(engine: Engine, groups: Sequence[ParamGroup], *, initial: bool, room: bool = False) -> StateDict:
    """This rank's part of the state, as `torch.distributed.checkpoint` saves it. Every parameter has an entry.

    `initial`: parameters that require gradients and have no state get the one that their first step would begin with,
    in the dict only. `room`: with memory of its own, to be loaded into; else its tensors are the optimizer's own.
    """
    engine.check_groups(groups)
    state: dict[Any, Any] = {spec.index: {} for spec in engine.layout.params}
    with engine.with_initial_state() if initial else nullcontext():
        for record in engine.records():
            state[record.param] = record.part(engine.layout.params[record.param], room=room)
    return {
        "state": state | _shared(engine),
        "param_groups": compat.write_groups(groups),
        **snapshot(engine.inner.extra()),
    }


def _shared(engine: Engine) -> dict[Any, Any]:
    """State that belongs to no parameter."""
    return {key: value for member in engine.inner.members for key, value in member.shared().items()}


def wanted(engine: Engine, groups: Sequence[ParamGroup], asked: Asked) -> StateDict:
    """What a helper of torch's asks for. On all ranks."""
    if asked.wanted is Wanted.EVERYTHING:
        found = everywhere(engine, groups, "state_dict")
    elif asked.wanted is Wanted.EVERYTHING_ON_ONE:
        first = engine.comm.everyone.group.from_global(0)
        gathered_there = gathered(engine, groups, "state_dict", to=first, initial=True)
        found = gathered_there or {"state": {}, "param_groups": compat.write_groups(groups)}
    else:
        found = part(engine, groups, initial=True, room=asked.wanted is Wanted.ROOM)
    found = found if asked.names else compat.nameless(found)
    return found if len(engine.inner.members) == 1 else _without_classes(found)


def _without_classes(saved: StateDict) -> StateDict:
    """torch's helpers look for every option in the optimizers that they load into, and these have no such names."""
    groups = [{key: value for key, value in group.items() if key != CLASS} for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


def everywhere(engine: Engine, groups: Sequence[ParamGroup], call: str) -> StateDict:
    """The unsharded optimizer's dict on all ranks, with tensors where the parameters are. Called on all ranks."""
    mine = gathered(engine, groups, call, to=0, initial=True)
    found: StateDict = bring_to_all(engine.comm.everyone, mine, Rank(0))
    devices = {spec.index: spec.device for spec in engine.layout.params}
    state = found["state"]
    for index in state.keys() & devices.keys():
        state[index] = map_tensors(state[index], partial(_moved, device=devices[index]))
    return found


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Step counts stay in host memory, where torch keeps them."""
    return tensor.to(device) if tensor.dim() else tensor


def loading(engine: Engine, saved: StateDict, *, adopt: bool) -> Proposal[None]:
    """Load this rank's part of a foreign dict, for all ranks to agree on or to undo."""
    checked = checked_dict(engine, saved)
    plainly = all(loads_as_torch_does(member.optimizer) for member in engine.inner.members)
    with compat.told_as_unfit() if plainly else nullcontext():  # what a class of others says is left as it is
        return Proposal(None, checked.facts(is_part=adopt or checked.is_part), engine.load(checked, adopt=adopt))


def checked_dict(engine: Engine, saved: StateDict) -> SavedState:
    """Raises if it is not one for this optimizer."""
    group_count = sum(len(member.optimizer.param_groups) for member in engine.inner.members)
    with compat.told_as_unfit():
        found = compat.read(saved, engine.layout.params, group_count, engine.param_shaped)
        engine.inner.check_classes(found.groups)
        return found


def through_save_hooks(optimizer: Optimizer, contents: StateDict) -> StateDict:
    """`contents` as the optimizer's state-dict hooks leave it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    result = contents
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        result = after(optimizer, result) or result
    return result


def through_load_hooks(optimizer: Optimizer, saved: StateDict) -> StateDict:
    """A shallow copy of the caller's dict as the optimizer's load hooks leave it."""
    result = saved.copy() if isinstance(saved, dict) else saved
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = before(optimizer, result) or result
    return result
