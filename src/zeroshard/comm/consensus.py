"""Consensus before a change is committed: one small all-reduce per call finds ranks that disagree or fail.

Every rank contributes a fingerprint of the call it is in, a fingerprint of what it is about to do, and whether it
failed. All contributions have the same length, so ranks in different calls can still be compared. A problem raises on
all ranks, instead of hanging some of them. The ranks are those of `Comm.data_parallel`.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, NoReturn, TypeVar

from .._formatting import format_error, format_ranks_by_text
from .._logging import log_rank
from .._tracebacks import mark_explained_by
from .._types import group_ranks
from ..errors import RankFailedError, RankLostError, RankMismatchError
from ..profiling import Phase
from .collectives import Comm, encode_text

T = TypeVar("T")

_SAME_CALLS_HINT = (
    "All ranks must make the same calls in the same order: look for a call under `if rank == 0:`, a loop that is "
    "longer on some ranks (use Join for those), or an error that one rank has caught."
)
_MUST_MATCH_HINT = (
    "These values must be equal on all ranks: look for a learning rate, option, model, file or order that depends on "
    "the rank."
)


class Failure(IntEnum):
    """How severe a failure is, on one rank or on the worst one."""

    NONE = 0
    FAILED = 1
    """The rank raised an error, but can still take part in collectives."""
    CANNOT_SEND_PARAMS = 2
    """The rank's parameters cannot be sent, for example because they were moved. It still exchanges its status."""


class Status(NamedTuple):
    """What all ranks know after `exchange_status`: the same values on every rank."""

    failure_level: Failure
    has_same_payload: bool
    has_same_options: bool = True
    measure_spread: int = 0
    """The largest `measure` minus the smallest, over the ranks that passed one."""


_NO_MEASURE = -(1 << 62)


def exchange_status(
    comm: Comm,
    call: str,
    payload: bytes,
    failure_level: Failure = Failure.NONE,
    *,
    options: bytes = b"",
    measure: int | None = None,
    in_training_step: bool = True,
) -> Status:
    """Compare `call`, `payload` and `options` across ranks, and find the worst failure. All ranks must call.

    Args:
        comm: its `data_parallel` ranks take part.
        call: the call this rank is in, for comparison and for messages.
        payload: an encoding of what this rank is about to do, compared as a fingerprint.
        failure_level: whether this rank failed.
        options: an encoding of the options, compared separately from `payload`.
        measure: a number below 2^61 that should be nearly equal on all ranks that pass one.
        in_training_step: the call is part of a training step, and not of a save, for example.

    Raises:
        RankMismatchError: the ranks are in different calls (on all ranks).
    """
    if comm.is_single_rank:
        return Status(failure_level, True)
    detector = comm.data_parallel.group.failure_detector
    if in_training_step:
        detector.set_activity(call)
    else:
        detector.set_activity(call, call=re.sub(r"\d+", "", call))
    fingerprints = [fingerprint(call.encode()), fingerprint(payload), fingerprint(options)]
    with comm.consensus_profiler.phase(Phase.CONSENSUS):
        limits = (_NO_MEASURE, _NO_MEASURE) if measure is None else (measure, -measure)
        # The maxima of x and -x cancel if and only if x is equal on all ranks.
        worst, *maxima = comm.data_parallel.all_reduce_max(
            [failure_level, *(signed for value in fingerprints for signed in (value, -value)), *limits]
        )
    same_call, same_payload, same_options = (maxima[i] == -maxima[i + 1] for i in (0, 2, 4))
    max_measure, negative_min_measure = maxima[6:]
    if not same_call:
        raise _make_mismatch(comm, "the ranks are in different calls.", call, _SAME_CALLS_HINT)
    measure_spread = max_measure + negative_min_measure if max_measure > _NO_MEASURE else 0
    status = Status(Failure(worst), same_payload, same_options, measure_spread)
    log_rank(logging.DEBUG, comm.data_parallel.group.rank, "all ranks are in %s: %s", call, status)
    return status


class EncodedOptions(NamedTuple):
    """Options that must be equal on all ranks: compared as bytes, and described only if they differ."""

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
    """Return if all ranks make the same `call` with equal `must_match` and none failed; otherwise raise on all ranks.

    Args:
        comm: its `data_parallel` ranks must all call.
        call: the call this rank is in.
        must_match: one line per fact that must be equal on all ranks.
        error: the error of this rank, if it failed.
        summary: how many facts there are, for the message: a fact missing on one rank shifts all that follow.
        options: options that must be equal on all ranks.

    Raises:
        RankFailedError: another rank failed. A rank that failed raises its own `error`.
        RankMismatchError: `must_match`, `summary` or `options` differ. The message shows the first difference.
    """
    failure = Failure.NONE if error is None else Failure.FAILED
    options = options or EncodedOptions()
    status = exchange_status(
        comm,
        call,
        encode_text("\n".join([summary, *must_match])),
        failure,
        options=options.data,
        in_training_step=False,
    )
    if status.failure_level:
        raise_failure(comm, call, error)
    if not status.has_same_payload:
        raise_first_mismatch(comm, call, must_match, summary)
    if not status.has_same_options:
        raise_first_mismatch(comm, call, options.describe())


def _no_rollback() -> None:
    pass


@dataclass(frozen=True)
class Prepared(Generic[T]):
    """A value that a rank has prepared and can still roll back. For the fields see `check_all_equal`."""

    value: T
    must_match: Sequence[str] = ()
    rollback: Callable[[], object] = _no_rollback
    summary: str = ""
    options: EncodedOptions | None = None


@contextmanager
def rollback_on_error(rollback: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls `rollback` if its body raises."""
    try:
        yield
    except BaseException:
        rollback()
        raise


def prepare_all(comm: Comm, call: str, prepare: Callable[[], Prepared[T]]) -> T:
    """Call `prepare` and return its value if all ranks prepared the same; otherwise roll back and raise on all ranks.

    A `prepare` that raises must undo its own changes. All ranks must call.
    """
    prepared, failure = None, None
    try:
        prepared = prepare()
    except Exception as error:
        failure = error
    with rollback_on_error(_no_rollback if prepared is None else prepared.rollback):
        if prepared is None:
            check_all_equal(comm, call, (), failure)
        else:
            check_all_equal(comm, call, prepared.must_match, summary=prepared.summary, options=prepared.options)
    assert prepared is not None
    return prepared.value


def raise_failure(comm: Comm, call: str, error: BaseException | None, *, consequence: str = "") -> NoReturn:
    """Raise on every rank after a `Status` with a failure. All ranks must call.

    A rank that failed raises its own `error`, the others `RankFailedError`. `consequence` is a sentence for the latter.
    """
    own_report = "" if error is None else format_error(error)
    reports: list[str] = []
    try:
        reports = comm.data_parallel.all_gather_text(own_report)
    except RankLostError:
        if error is None:
            raise
    if error is not None:
        rank = comm.data_parallel.group.rank
        first = reports.index(reports[rank]) if len(reports) > rank else rank
        if first < rank:
            mark_explained_by(error, first)
        raise error
    failed = "; ".join(f"rank {rank} failed: {report}" for rank, report in enumerate(reports) if report)
    raise RankFailedError(f"{call}: {failed.rstrip('.')}. {consequence}" if consequence else f"{call}: {failed}")


def fingerprint(data: bytes) -> int:
    """Return a 62-bit hash: it and its negative fit into an int64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


def raise_first_mismatch(
    comm: Comm, call: str, must_match: Sequence[str], summary: str = "", *, consequence: str = ""
) -> NoReturn:
    """Raise `RankMismatchError` with the first fact that differs, found by bisection. All ranks must call.

    The search takes a number of small collectives that is logarithmic in the number of facts. `consequence` is a
    sentence for the end of the message.
    """
    same, different = 0, comm.data_parallel.all_reduce_max([len(must_match)])[0]
    while different - same > 1:
        middle = (same + different) // 2
        prefix = fingerprint(encode_text("\n".join(must_match[:middle])))
        high, low = comm.data_parallel.all_reduce_max([prefix, -prefix])
        same, different = (middle, different) if high == -low else (same, middle)
    own_text = must_match[different - 1] if different <= len(must_match) else "nothing more"
    summaries = group_ranks(comm.data_parallel.all_gather_text(summary))
    lead = f" {format_ranks_by_text(summaries)}. The first difference:" if len(summaries) > 1 else ""
    error = _make_mismatch(
        comm, f"{call}: the ranks disagree.{lead}", own_text, " ".join(filter(None, [_MUST_MATCH_HINT, consequence]))
    )
    if comm.data_parallel.group.rank > 0:
        mark_explained_by(error, 0)
    raise error


def _make_mismatch(comm: Comm, problem: str, own_text: str, hint: str) -> RankMismatchError:
    """Return the error of this rank. Call on all ranks."""
    texts = format_ranks_by_text(group_ranks(comm.data_parallel.all_gather_text(own_text)))
    return RankMismatchError(f"{problem} {texts}. {hint}")
