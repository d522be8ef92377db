"""Optimizers of several classes that work as one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import CheckpointError
from ..profiling import Phase, StepProfiler
from ..state.state_dict import StateDict
from .inner import LocalOptimizer, ParamGroup

OPTIMIZER_KEY = "optimizer"
"""The option of a group that names its class, where there are several."""


class CompositeMember(Protocol):
    name: str
    group_ids: list[int]
    """Of the groups that it has."""
    inner: LocalOptimizer


class CompositeOptimizer:
    """This rank's inner optimizers, one for each kind that the user has given. Each sees its own groups only."""

    def __init__(self, members: Sequence[CompositeMember], profiler: StepProfiler) -> None:
        self._members, self._profiler = members, profiler

    @property
    def local_optimizers(self) -> list[LocalOptimizer]:
        return [member.inner for member in self._members]

    def push_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.push_options(groups)

    def pull_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.pull_options(groups)
            self._set_optimizer_key(member, groups)

    def pull_added_options(self, outer_groups: Sequence[ParamGroup], first_group: int) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.pull_added_options(groups, sum(number < first_group for number in member.group_ids))
            self._set_optimizer_key(member, groups)

    def _set_optimizer_key(self, member: CompositeMember, groups: Sequence[ParamGroup]) -> None:
        for group in groups if len(self._members) > 1 else ():
            group[OPTIMIZER_KEY] = member.name  # a loaded dict of other origin does not have it

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """All step. A closure is called once, for all of them."""
        if len(self._members) == 1:
            return self._step_member(self._members[0], *args, **kwargs)
        loss = None
        for closure in args:
            with torch.enable_grad():
                loss = closure()
        for member in self._members:
            self._step_member(member, **kwargs)
        return loss

    def _step_member(self, member: CompositeMember, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.phase(Phase.INNER_STEP, member.name):
            return member.inner.step(*args, **kwargs)

    def check_optimizer_classes(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse groups of a loaded dict that say that they are of other classes."""
        for member in self._members if len(self._members) > 1 else ():
            for number in member.group_ids:
                found = saved_groups[number].get(OPTIMIZER_KEY, member.name)
                if _strip_rule_number(found) != _strip_rule_number(member.name):
                    raise CheckpointError(
                        f"group {number} of the loaded state dict is of {found}, but {member.name} updates it here. "
                        "Give shard() rules with the classes that it was saved with"
                    )

    def extra_state(self) -> StateDict:
        """What a class adds to torch's state dict. Those that do are refused where there are several."""
        return self._members[0].inner.extra_state() if len(self._members) == 1 else {}

    def _iter_members(self, outer_groups: Sequence[ParamGroup]) -> Iterator[tuple[CompositeMember, list[ParamGroup]]]:
        for member in self._members:
            yield member, [outer_groups[number] for number in member.group_ids]


def _strip_rule_number(name: str) -> str:
    """Without the number that tells rules of the same class apart."""
    return name.partition(" ")[0]
