"""Parameters that should be equal on all ranks, and are not: which ones, and on which ranks.

While all is well, one pass over the parameters and one small message. Only where ranks differ do they look for the
parameters, then for the pieces of them, and then tell each other what they have there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ..comm.consensus import Failure, Prepared, exchange_status, fingerprint, prepare_all, raise_failure
from ..comm.collectives import Comm
from ..errors import ReplicaMismatchError
from ..layout.layout import Layout, ParamShard
from ..state.records import flatten_in_memory_order
from .._types import format_ranks
from .checksums import Checksums

_FINGERPRINTS_PER_MESSAGE = 512
_MAX_MISMATCHES_SHOWN = 5


def check_params_equal(comm: Comm, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
    """Raise `ReplicaMismatchError` on all ranks if parameters differ between them. On all ranks; changes nothing."""
    if comm.is_single_rank:
        return
    sums, total, failure = Checksums(), 0, None
    try:
        total = sums.compute(params)
    except Exception as error:
        failure = error
    trouble = Failure.NONE if failure is None else Failure.FAILED
    verdict = exchange_status(comm, f"comparing parameters in {call}", _checksum_to_bytes(total), trouble)
    if verdict.failure_level:
        raise_failure(comm, call, failure)
    if not verdict.has_same_plan:
        _MismatchSearch(comm, layout, params, sums, call).raise_mismatch(step)


class Mismatch(NamedTuple):
    """A parameter that differs, or what was looked at of it."""

    param: int
    reference_ranks: tuple[int, ...]
    """Ranks that have what most have or, without a majority, what the owner has."""
    mismatched_ranks: tuple[int, ...]
    has_majority: bool
    """There was a majority."""


class _MismatchSearch:
    """Ranks differ: where? Every method is called on all of them."""

    def __init__(
        self, comm: Comm, layout: Layout, params: Sequence[torch.Tensor], checksums: Checksums, call: str
    ) -> None:
        self._comm, self._layout, self._params, self._checksums, self._call = comm, layout, params, checksums, call

    def raise_mismatch(self, step: int | None) -> NoReturn:
        differing = self._find_differing(self._compute_fingerprints(lambda: self._params))
        findings = [self._inspect_param(param) for param in differing[:_MAX_MISMATCHES_SHOWN]]
        names = tuple(self._layout.params[param].name or f"parameter {param}" for param in differing)
        wrong = tuple(sorted({rank for finding in findings for rank in finding.mismatched_ranks}))
        text = self._format_error(findings, len(differing)) if findings else _TRANSIENT_MISMATCH
        raise ReplicaMismatchError(f"{self._call}: {text}", step=step, ranks=wrong, params=names)

    def _inspect_param(self, param: int) -> Mismatch:
        """What ranks have of its first pieces that differ."""
        pieces = self._layout.param_shards(param)
        marks = self._compute_fingerprints(lambda: map(self._shard_of_param, pieces))
        chosen = self._find_differing(marks)[:_MAX_MISMATCHES_SHOWN]
        mine = [f"{marks[i]:x}{'*' * (pieces[i].owner == self._comm.group.rank)}" for i in chosen]
        stated = [text.split() for text in self._comm.data_parallel.all_gather_text(" ".join(mine), max_bytes=256)]
        judged = [find_majority([text[place] for text in stated]) for place in range(len(chosen))]
        wrong = sorted({rank for _, others, _ in judged for rank in others})
        right = set(range(self._comm.data_parallel.group.size)).difference(wrong)
        return Mismatch(param, tuple(sorted(right)), tuple(wrong), all(sure for *_, sure in judged))

    def _find_differing(self, fingerprints: Sequence[int]) -> list[int]:
        """Places at which ranks have different ones."""
        found: list[int] = []
        for start in range(0, len(fingerprints), _FINGERPRINTS_PER_MESSAGE):
            some = fingerprints[start : start + _FINGERPRINTS_PER_MESSAGE]
            most = self._comm.data_parallel.all_reduce_max([signed for mark in some for signed in (mark, -mark)])
            found += [start + i for i in range(len(some)) if most[2 * i] != -most[2 * i + 1]]
        return found

    def _compute_fingerprints(self, get_tensors: Callable[[], Iterable[torch.Tensor]]) -> list[int]:
        """What this rank has of each. What fails on one rank, for want of memory, is raised on all."""

        def prepare() -> Prepared[list[int]]:
            return Prepared([fingerprint(_checksum_to_bytes(self._checksums.compute([it]))) for it in get_tensors()])

        return prepare_all(self._comm, f"looking for differences in {self._call}", prepare)

    def _shard_of_param(self, param_shard: ParamShard) -> torch.Tensor:
        spec, param = self._layout.params[param_shard.param], self._params[param_shard.param].detach()
        if param_shard.in_param.length == spec.storage_numel:
            return param
        return flatten_in_memory_order(param, spec)[slice(*param_shard.in_param)]

    def _format_error(self, mismatches: Sequence[Mismatch], count: int) -> str:
        lines = [self._format_mismatch(finding) for finding in mismatches]
        more = f"; and {count - len(lines)} more" if count > len(lines) else ""
        unsure = "" if all(it.has_majority for it in mismatches) else f" {_NO_MAJORITY_NOTE}"
        lead = f"{count} of {len(self._params)} parameters are not the same on all ranks"
        return f"{lead}: {'; '.join(lines)}{more}.{unsure} {_MISMATCH_ADVICE}"

    def _format_mismatch(self, mismatch: Mismatch) -> str:
        label, bucket = self._layout.params[mismatch.param].label, self._layout.bucket_of(mismatch.param)
        if not mismatch.reference_ranks:
            return f"{label} in bucket {bucket}, of which every rank has lost a part"
        verb = "differs" if len(mismatch.mismatched_ranks) == 1 else "differ"
        wrong, right = format_ranks(mismatch.mismatched_ranks), format_ranks(mismatch.reference_ranks)

        return f"{label} in bucket {bucket}, where {wrong} {verb} from {right}"


def find_majority(reported: Sequence[str]) -> tuple[list[int], list[int], bool]:
    """Which ranks are right, which are wrong, and whether that is sure, given what each has of a piece. A star behind
    it marks those of the owner: without a majority, that one is right."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(reported):
        sides[text.rstrip("*")].append(rank)
    most = max(map(len, sides.values()))
    largest = [ranks for ranks in sides.values() if len(ranks) == most]
    right = max(largest, key=lambda ranks: sum(reported[rank].endswith("*") for rank in ranks))
    wrong = [rank for rank in range(len(reported)) if rank not in right]
    return right, wrong, len(largest) == 1


_NO_MAJORITY_NOTE = (
    "Where no value has a majority of ranks, the rank that owns that part of the parameter is taken to be right."
)
_MISMATCH_ADVICE = (
    "Nothing was updated. Load the last checkpoint, and look at what those ranks have of their own: memory that lost "
    "bits, or code that changed parameters there alone."
)
_TRANSIENT_MISMATCH = (
    "the parameters of the ranks differed, and when all looked again they did not: a rank's memory is unsteady, or "
    "another thread changes parameters. Nothing was updated."
)


def _checksum_to_bytes(checksum: int) -> bytes:
    return checksum.to_bytes(8, "big", signed=True)
