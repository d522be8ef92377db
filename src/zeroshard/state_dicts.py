"""The state of all ranks as one dict in torch's format, and back."""

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from .checkpoint import compat
from .checkpoint.compat import StateDict
from .checkpoint.exchange import Share, gather
from .checkpoint.trees import snapshot
from .comm.agreement import Proposal
from .runtime.inner import ParamGroup
from .runtime.loading import load
from .runtime.step import Engine
from .units import Rank


def gathered(
    engine: Engine, groups: Sequence[ParamGroup], call: str, to: int, agreed_on: Callable[[], object] = lambda: None
) -> StateDict | None:
    """The unsharded optimizer's dict, as a snapshot on the CPU of rank `to`; None on the others.

    `agreed_on` is called when all ranks have agreed, before anything is gathered.
    """
    written: StateDict = {}

    def share() -> Share:
        engine.check_groups(groups)
        state = engine.inner.optimizer.state
        owned = engine.owned(engine.comm.group.rank)
        # A look at the state of another rank's parameter leaves an empty entry in a defaultdict: not ours to send.
        by_param = {index: state[param] for index, param in owned.items() if param in state}
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        extra = snapshot(engine.inner.extra())
        written.update({"param_groups": compat.write_groups(groups), **extra})
        facts = [
            *compat.describe_groups(groups),
            f"what the optimizer adds to its dict: {compat.describe_options(extra)}",
        ]
        return Share({"params": by_param, "others": others}, facts)

    shares = gather(engine.comm, call, share, Rank(to), agreed_on)
    if shares is None:
        return None
    by_param = {key: value for part in shares for key, value in part["params"].items()}
    others = {key: value for part in reversed(shares) for key, value in part["others"].items()}
    return {"state": dict(sorted(by_param.items())) | others, **written}


def loading(engine: Engine, saved: StateDict, param_shaped: frozenset[str]) -> Proposal[None]:
    """Load this rank's part of a foreign dict, for all ranks to agree on or to undo."""
    checked = compat.read(saved, engine.layout.params, len(engine.inner.optimizer.param_groups), param_shaped)
    facts = checked.facts()
    undo = load(engine.inner.optimizer, compat.local_dict(checked, _owned_by_group(engine)))
    return Proposal(None, facts, undo)


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


def _owned_by_group(engine: Engine) -> list[list[int]]:
    owned: list[list[int]] = [[] for _ in engine.inner.optimizer.param_groups]
    for index in engine.layout.owned_by(engine.comm.group.rank):
        owned[engine.layout.params[index].group].append(index)
    return owned
