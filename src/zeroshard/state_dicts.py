"""The state of all ranks as one dict in torch's format, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .checkpoint import compat
from .checkpoint.compat import StateDict
from .checkpoint.exchange import Share, gather
from .checkpoint.records import Whole
from .checkpoint.trees import snapshot
from .comm.agreement import Proposal
from .runtime.inner import ParamGroup
from .runtime.step import Engine
from .units import Rank


def gathered(
    engine: Engine, groups: Sequence[ParamGroup], call: str, to: int, agreed_on: Callable[[], object] = lambda: None
) -> StateDict | None:
    """The unsharded optimizer's dict, as a snapshot on the CPU of rank `to`; None on the others.

    `agreed_on` is called when all ranks have agreed, before anything is gathered.
    """
    written: StateDict = {}
    whole, others = Whole(engine.layout.params), dict[Any, Any]()

    def share() -> Share:
        engine.check_groups(groups)
        state = engine.inner.optimizer.state
        extra = snapshot(engine.inner.extra())
        written.update({"param_groups": compat.write_groups(groups), **extra})
        facts = [
            *compat.describe_groups(groups),
            f"what the optimizer adds to its dict: {compat.describe_options(extra)}",
        ]
        mine = {record.param: record.portable() for record in engine.records()}
        return Share(
            {"params": mine, "others": {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)}}, facts
        )

    def take(part: Any) -> None:
        whole.add(part["params"])
        for key, value in part["others"].items():
            others.setdefault(key, value)

    if not gather(engine.comm, call, share, Rank(to), agreed_on=agreed_on, take=take):
        return None
    return {"state": whole.state() | others, **written}


def loading(engine: Engine, saved: StateDict, param_shaped: frozenset[str]) -> Proposal[None]:
    """Load this rank's part of a foreign dict, for all ranks to agree on or to undo."""
    checked = compat.read(saved, engine.layout.params, len(engine.inner.optimizer.param_groups), param_shaped)
    facts = checked.facts()
    return Proposal(None, facts, engine.load(checked))


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
