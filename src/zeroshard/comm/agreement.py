"""Ranks that disagree, and ranks that fail, are found here: one small collective a call.

Every rank states the call it is in, a fingerprint of what it is about to do, and whether it failed. All
statements have the same length, so that ranks in different calls still understand each other. Ranks are those of
`Comm.everyone`.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, NoReturn, TypeVar

from ..errors import RankFailedError, RankLostError, RankMismatchError
from ..labels import Label
from ..notices import log
from ..units import name_ranks
from .collectives import Comm, encoded

T = TypeVar("T")

_SAME_CALLS = (
    "All ranks are to make the same calls in the same order: look for a condition such as `if rank == 0:`, for a loop "
    "that is longer on some ranks (Join is for those), or for an error that one rank has caught."
)
_SAME_FACTS = (
    "This is to be the same on all ranks: look for what depends on the rank, such as an option, a file, an order, or a "
    "learning rate that one has changed by itself."
)


class Trouble(IntEnum):
    """How bad it is, for a rank or for all of them."""

    NONE = 0
    FAILED = 1
    """Something was raised; the rank can still take part in what follows."""
    UNFIT = 2
    """The rank cannot take part."""


class Verdict(NamedTuple):
    trouble: Trouble
    same_plan: bool
    same_options: bool = True
    spread: int = 0
    """By how much the ranks that have stated a `measure` differ."""


_NO_MEASURE = -(1 << 62)


def compare(
    comm: Comm,
    call: str,
    plan: bytes,
    trouble: Trouble = Trouble.NONE,
    *,
    options: bytes = b"",
    measure: int | None = None,
) -> Verdict:
    """State `call`, `plan`, `options` and `trouble`; learn the worst trouble and what is equal on all ranks.

    `measure`: a number below 2^61 that is nearly equal on all ranks that state one.
    Ranks in different calls raise `RankMismatchError`, all of them.
    """
    if comm.is_alone:
        return Verdict(trouble, True)
    comm.everyone.group.line.at(f"agreeing on {call}")
    marks = [fingerprint(call.encode()), fingerprint(plan), fingerprint(options)]
    with comm.clock.part(Label.AGREE):
        limits = (_NO_MEASURE, _NO_MEASURE) if measure is None else (measure, -measure)
        worst, *most = comm.everyone.maximum(
            [trouble, *(signed for mark in marks for signed in (mark, -mark)), *limits]
        )
    if most[0] != -most[1]:
        _raise_mismatch(comm, "the ranks are in different calls.", call, _SAME_CALLS)
    spread = most[6] + most[7] if most[6] > _NO_MEASURE else 0
    verdict = Verdict(Trouble(worst), most[2] == -most[3], most[4] == -most[5], spread)
    log(logging.DEBUG, comm.everyone.group.rank, "all ranks are in %s: %s", call, verdict)
    return verdict


class Options(NamedTuple):
    """Options that must be equal on all ranks, compared as bytes; in words only where they differ."""

    data: bytes = b""
    describe: Callable[[], Sequence[str]] = list


def agree(
    comm: Comm,
    call: str,
    facts: Sequence[str],
    failure: BaseException | None = None,
    *,
    counts: str = "",
    options: Options | None = None,
) -> None:
    """Return if all ranks make the same `call` with the same `facts` and none failed; else raise on all.

    A rank that failed raises its own error, the others raise `RankFailedError`. Different facts raise
    `RankMismatchError` with the first that differs, after `counts` if those differ. So do different `options`.
    """
    trouble = Trouble.NONE if failure is None else Trouble.FAILED
    options = options or Options()
    verdict = compare(comm, call, encoded("\n".join([counts, *facts])), trouble, options=options.data)
    if verdict.trouble:
        raise_failure(comm, call, failure)
    if not verdict.same_plan:
        raise_first_difference(comm, call, facts, counts)
    if not verdict.same_options:
        raise_first_difference(comm, call, options.describe())


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Proposal(Generic[T]):
    """What a rank has prepared and could still take back."""

    value: T
    facts: Sequence[str] = ()
    undo: Callable[[], object] = _nothing
    counts: str = ""
    """How much there is of what the facts are about: one missing on a rank shifts all that follow."""
    options: Options | None = None


@contextmanager
def undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """What is prepared inside is taken back if it cannot be completed."""
    try:
        yield
    except BaseException:
        undo()
        raise


def agreed(comm: Comm, call: str, propose: Callable[[], Proposal[T]]) -> T:
    """What `propose` prepared, once all ranks have prepared the same; else raise on all and take it back.

    A `propose` that raises must have left nothing behind.
    """
    proposal, failure = None, None
    try:
        proposal = propose()
    except Exception as error:
        failure = error
    with undone_on_failure(_nothing if proposal is None else proposal.undo):
        if proposal is None:
            agree(comm, call, (), failure)
        else:
            agree(comm, call, proposal.facts, counts=proposal.counts, options=proposal.options)
    assert proposal is not None
    return proposal.value


def raise_failure(comm: Comm, call: str, failure: BaseException | None, *, then: str = "") -> NoReturn:
    """Raise on every rank, once a `Verdict` said that one failed. `then`: what became of the others, in a sentence."""
    mine = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        reports = [mine] if comm.is_alone else comm.everyone.share(mine)
    except RankLostError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    failed = [f"rank {rank} failed: {report}" for rank, report in enumerate(reports) if report]
    raise RankFailedError(f"{call}: " + "; ".join(failed) + (f". {then}" if then else ""))


def fingerprint(data: bytes) -> int:
    """62 bits, so that it and its negative fit into what ranks exchange."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


def raise_first_difference(comm: Comm, call: str, facts: Sequence[str], counts: str = "") -> NoReturn:
    """Find the shortest prefix of facts that differs: a few small collectives, whatever the number of facts."""
    same, different = 0, comm.everyone.maximum([len(facts)])[0]
    while different - same > 1:
        middle = (same + different) // 2
        mark = fingerprint(encoded("\n".join(facts[:middle])))
        high, low = comm.everyone.maximum([mark, -mark])
        same, different = (middle, different) if high == -low else (same, middle)
    mine = facts[different - 1] if different <= len(facts) else "nothing more"
    counted = _sides(comm, counts)
    lead = f" {_in_words(counted)}. The first difference:" if len(counted) > 1 else ""
    _raise_mismatch(comm, f"{call}: the ranks disagree.{lead}", mine, _SAME_FACTS)


def _raise_mismatch(comm: Comm, problem: str, mine: str, remedy: str) -> NoReturn:
    raise RankMismatchError(f"{problem} {_in_words(_sides(comm, mine))}. {remedy}")


def _sides(comm: Comm, mine: str) -> dict[str, list[int]]:
    """What ranks say, each with those that say it."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(comm.everyone.share(mine)):
        holders[text].append(rank)
    return holders


def _in_words(sides: dict[str, list[int]]) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in sides.items())
