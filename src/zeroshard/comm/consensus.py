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

from .._logging import log_rank
from .._types import format_ranks
from ..errors import RankFailedError, RankLostError, RankMismatchError
from ..profiling import Phase
from .collectives import Comm, encode_text

T = TypeVar("T")

_SAME_CALLS_HINT = (
    "All ranks are to make the same calls in the same order: look for a condition such as `if rank == 0:`, for a loop "
    "that is longer on some ranks (Join is for those), or for an error that one rank has caught."
)
_MUST_MATCH_HINT = (
    "This is to be the same on all ranks: look for what depends on the rank, such as an option, a file, an order, or a "
    "learning rate that one has changed by itself."
)


class Failure(IntEnum):
    """How bad it is, for a rank or for all of them."""

    NONE = 0
    FAILED = 1
    """Something was raised; the rank can still take part in what follows."""
    CANNOT_CONTINUE = 2
    """The rank cannot take part."""


class Status(NamedTuple):
    failure_level: Failure
    has_same_plan: bool
    has_same_options: bool = True
    measure_range: int = 0
    """By how much the ranks that have stated a `measure` differ."""


_NO_MEASURE = -(1 << 62)


def exchange_status(
    comm: Comm,
    call: str,
    plan: bytes,
    failure_level: Failure = Failure.NONE,
    *,
    options: bytes = b"",
    measure: int | None = None,
) -> Status:
    """State `call`, `plan`, `options` and `trouble`; learn the worst trouble and what is equal on all ranks.

    `measure`: a number below 2^61 that is nearly equal on all ranks that state one.
    Ranks in different calls raise `RankMismatchError`, all of them.
    """
    if comm.is_single_rank:
        return Status(failure_level, True)
    comm.data_parallel.group.failure_detector.set_activity(f"agreeing on {call}")
    marks = [fingerprint(call.encode()), fingerprint(plan), fingerprint(options)]
    with comm.profiler.phase(Phase.CONSENSUS):
        limits = (_NO_MEASURE, _NO_MEASURE) if measure is None else (measure, -measure)
        worst, *most = comm.data_parallel.all_reduce_max(
            [failure_level, *(signed for mark in marks for signed in (mark, -mark)), *limits]
        )
    if most[0] != -most[1]:
        _raise_mismatch(comm, "the ranks are in different calls.", call, _SAME_CALLS_HINT)
    spread = most[6] + most[7] if most[6] > _NO_MEASURE else 0
    verdict = Status(Failure(worst), most[2] == -most[3], most[4] == -most[5], spread)
    log_rank(logging.DEBUG, comm.data_parallel.group.rank, "all ranks are in %s: %s", call, verdict)
    return verdict


class EncodedOptions(NamedTuple):
    """Options that must be equal on all ranks, compared as bytes; in words only where they differ."""

    data: bytes = b""
    describe: Callable[[], Sequence[str]] = list


def check_all_equal(
    comm: Comm,
    call: str,
    must_match: Sequence[str],
    error: BaseException | None = None,
    *,
    summary: str = "",
    options: EncodedOptions | None = None,
) -> None:
    """Return if all ranks make the same `call` with the same `facts` and none failed; else raise on all.

    A rank that failed raises its own error, the others raise `RankFailedError`. Different facts raise
    `RankMismatchError` with the first that differs, after `counts` if those differ. So do different `options`.
    """
    trouble = Failure.NONE if error is None else Failure.FAILED
    options = options or EncodedOptions()
    verdict = exchange_status(comm, call, encode_text("\n".join([summary, *must_match])), trouble, options=options.data)
    if verdict.failure_level:
        raise_failure(comm, call, error)
    if not verdict.has_same_plan:
        raise_first_mismatch(comm, call, must_match, summary)
    if not verdict.has_same_options:
        raise_first_mismatch(comm, call, options.describe())


def _no_rollback() -> None:
    pass


@dataclass(frozen=True)
class Prepared(Generic[T]):
    """What a rank has prepared and could still take back."""

    value: T
    must_match: Sequence[str] = ()
    rollback: Callable[[], object] = _no_rollback
    summary: str = ""
    """How much there is of what the facts are about: one missing on a rank shifts all that follow."""
    options: EncodedOptions | None = None


@contextmanager
def rollback_on_error(rollback: Callable[[], object]) -> Iterator[None]:
    """What is prepared inside is taken back if it cannot be completed."""
    try:
        yield
    except BaseException:
        rollback()
        raise


def prepare_all(comm: Comm, call: str, prepare: Callable[[], Prepared[T]]) -> T:
    """What `propose` prepared, once all ranks have prepared the same; else raise on all and take it back.

    A `propose` that raises must have left nothing behind.
    """
    proposal, failure = None, None
    try:
        proposal = prepare()
    except Exception as error:
        failure = error
    with rollback_on_error(_no_rollback if proposal is None else proposal.rollback):
        if proposal is None:
            check_all_equal(comm, call, (), failure)
        else:
            check_all_equal(comm, call, proposal.must_match, summary=proposal.summary, options=proposal.options)
    assert proposal is not None
    return proposal.value


def raise_failure(comm: Comm, call: str, error: BaseException | None, *, consequence: str = "") -> NoReturn:
    """Raise on every rank, once a `Verdict` said that one failed. `then`: what became of the others, in a sentence."""
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    try:
        reports = [mine] if comm.is_single_rank else comm.data_parallel.all_gather_text(mine)
    except RankLostError:
        if error is None:
            raise
    if error is not None:
        raise error
    failed = [f"rank {rank} failed: {report}" for rank, report in enumerate(reports) if report]
    raise RankFailedError(f"{call}: " + "; ".join(failed) + (f". {consequence}" if consequence else ""))


def fingerprint(data: bytes) -> int:
    """62 bits, so that it and its negative fit into what ranks exchange."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


def raise_first_mismatch(comm: Comm, call: str, must_match: Sequence[str], summary: str = "") -> NoReturn:
    """Find the shortest prefix of facts that differs: a few small collectives, whatever the number of facts."""
    same, different = 0, comm.data_parallel.all_reduce_max([len(must_match)])[0]
    while different - same > 1:
        middle = (same + different) // 2
        mark = fingerprint(encode_text("\n".join(must_match[:middle])))
        high, low = comm.data_parallel.all_reduce_max([mark, -mark])
        same, different = (middle, different) if high == -low else (same, middle)
    mine = must_match[different - 1] if different <= len(must_match) else "nothing more"
    counted = _gather_ranks_by_text(comm, summary)
    lead = f" {_format_ranks_by_text(counted)}. The first difference:" if len(counted) > 1 else ""
    _raise_mismatch(comm, f"{call}: the ranks disagree.{lead}", mine, _MUST_MATCH_HINT)


def _raise_mismatch(comm: Comm, problem: str, own_text: str, hint: str) -> NoReturn:
    raise RankMismatchError(f"{problem} {_format_ranks_by_text(_gather_ranks_by_text(comm, own_text))}. {hint}")


def _gather_ranks_by_text(comm: Comm, own_text: str) -> dict[str, list[int]]:
    """What ranks say, each with those that say it."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(comm.data_parallel.all_gather_text(own_text)):
        holders[text].append(rank)
    return holders


def _format_ranks_by_text(ranks_by_text: dict[str, list[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())
