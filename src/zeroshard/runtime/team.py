"""Optimizers of several classes that work as one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import CheckpointError
from ..labels import Clock, Label
from ..state.compat import StateDict
from .inner import ParamGroup, ShardOptimizer

CLASS = "optimizer"
"""The option of a group that names its class, where there are several."""


class Member(Protocol):
    name: str
    numbers: list[int]
    """Of the groups that it has."""
    inner: ShardOptimizer


class Team:
    """This rank's inner optimizers, one for each kind that the user has given. Each sees its own groups only."""

    def __init__(self, members: Sequence[Member], clock: Clock) -> None:
        self._members, self._clock = members, clock

    @property
    def members(self) -> list[ShardOptimizer]:
        return [member.inner for member in self._members]

    def push(self, outer: Sequence[ParamGroup]) -> None:
        for member, groups in self._paired(outer):
            member.inner.push(groups)

    def pull(self, outer: Sequence[ParamGroup]) -> None:
        for member, groups in self._paired(outer):
            member.inner.pull(groups)
            self._set_class(member, groups)

    def pull_added(self, outer: Sequence[ParamGroup], first: int) -> None:
        for member, groups in self._paired(outer):
            member.inner.pull_added(groups, sum(number < first for number in member.numbers))
            self._set_class(member, groups)

    def _set_class(self, member: Member, groups: Sequence[ParamGroup]) -> None:
        for group in groups if len(self._members) > 1 else ():
            group[CLASS] = member.name  # a loaded dict of other origin does not have it

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """All step. A closure is called once, for all of them."""
        if len(self._members) == 1:
            return self._step(self._members[0], *args, **kwargs)
        loss = None
        for closure in args:
            with torch.enable_grad():
                loss = closure()
        for member in self._members:
            self._step(member, **kwargs)
        return loss

    def _step(self, member: Member, *args: Any, **kwargs: Any) -> Any:
        with self._clock.part(Label.INNER_STEP, member.name):
            return member.inner.step(*args, **kwargs)

    def check_classes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Refuse groups of a loaded dict that say that they are of other classes."""
        for member in self._members if len(self._members) > 1 else ():
            for number in member.numbers:
                found = saved[number].get(CLASS, member.name)
                if _class(found) != _class(member.name):
                    raise CheckpointError(
                        f"group {number} of the loaded state dict is of {found}, but {member.name} updates it here. "
                        "Give shard() rules with the classes that it was saved with"
                    )

    def extra(self) -> StateDict:
        """What a class adds to torch's state dict. Those that do are refused where there are several."""
        return self._members[0].inner.extra() if len(self._members) == 1 else {}

    def _paired(self, outer: Sequence[ParamGroup]) -> Iterator[tuple[Member, list[ParamGroup]]]:
        for member in self._members:
            yield member, [outer[number] for number in member.numbers]


def _class(name: str) -> str:
    """Without the number that tells rules of the same class apart."""
    return name.partition(" ")[0]
