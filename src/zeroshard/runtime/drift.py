"""Parameters that should be equal on all ranks, and are not: which ones, and on which ranks.

While all is well, one pass over the parameters and one small message. Only where ranks differ do they look for the
parameters, then for the pieces of them, and then tell each other what they have there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ..comm.agreement import Proposal, Trouble, agreed, compare, fingerprint, raise_failure
from ..comm.collectives import Comm
from ..errors import DriftError
from ..layout.layout import Layout, Piece
from ..state.records import in_memory_order
from ..units import name_ranks
from .checksums import Checksums

_AT_ONCE = 512
_MOST_SHOWN = 5


def require_equal_params(
    comm: Comm, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None
) -> None:
    """Raise `DriftError` on all ranks if parameters differ between them. On all ranks; changes nothing."""
    if comm.is_alone:
        return
    sums, total, failure = Checksums(), 0, None
    try:
        total = sums.total(params)
    except Exception as error:
        failure = error
    trouble = Trouble.NONE if failure is None else Trouble.FAILED
    verdict = compare(comm, f"comparing parameters in {call}", _as_bytes(total), trouble)
    if verdict.trouble:
        raise_failure(comm, call, failure)
    if not verdict.same_plan:
        _Search(comm, layout, params, sums, call).tell(step)


class Finding(NamedTuple):
    """A parameter that differs, or what was looked at of it."""

    param: int
    right: tuple[int, ...]
    """Ranks that have what most have or, without a majority, what the owner has."""
    wrong: tuple[int, ...]
    is_sure: bool
    """There was a majority."""


class _Search:
    """Ranks differ: where? Every method is called on all of them."""

    def __init__(self, comm: Comm, layout: Layout, params: Sequence[torch.Tensor], sums: Checksums, call: str) -> None:
        self._comm, self._layout, self._params, self._sums, self._call = comm, layout, params, sums, call

    def tell(self, step: int | None) -> NoReturn:
        differing = self._differing(self._marks(lambda: self._params))
        findings = [self._look_at(param) for param in differing[:_MOST_SHOWN]]
        names = tuple(self._layout.params[param].name or f"parameter {param}" for param in differing)
        wrong = tuple(sorted({rank for finding in findings for rank in finding.wrong}))
        text = self._in_words(findings, len(differing)) if findings else _GONE
        raise DriftError(f"{self._call}: {text}", step=step, ranks=wrong, params=names)

    def _look_at(self, param: int) -> Finding:
        """What ranks have of its first pieces that differ."""
        pieces = self._layout.pieces_of_param(param)
        marks = self._marks(lambda: map(self._part, pieces))
        chosen = self._differing(marks)[:_MOST_SHOWN]
        mine = [f"{marks[i]:x}{'*' * (pieces[i].owner == self._comm.group.rank)}" for i in chosen]
        stated = [text.split() for text in self._comm.everyone.share(" ".join(mine), most=256)]
        judged = [judge([text[place] for text in stated]) for place in range(len(chosen))]
        wrong = sorted({rank for _, others, _ in judged for rank in others})
        right = set(range(self._comm.everyone.group.size)).difference(wrong)
        return Finding(param, tuple(sorted(right)), tuple(wrong), all(sure for *_, sure in judged))

    def _differing(self, marks: Sequence[int]) -> list[int]:
        """Places at which ranks have different ones."""
        found: list[int] = []
        for start in range(0, len(marks), _AT_ONCE):
            some = marks[start : start + _AT_ONCE]
            most = self._comm.everyone.maximum([signed for mark in some for signed in (mark, -mark)])
            found += [start + i for i in range(len(some)) if most[2 * i] != -most[2 * i + 1]]
        return found

    def _marks(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> list[int]:
        """What this rank has of each. What fails on one rank, for want of memory, is raised on all."""

        def propose() -> Proposal[list[int]]:
            return Proposal([fingerprint(_as_bytes(self._sums.total([it]))) for it in tensors()])

        return agreed(self._comm, f"looking for differences in {self._call}", propose)

    def _part(self, piece: Piece) -> torch.Tensor:
        spec, param = self._layout.params[piece.param], self._params[piece.param].detach()
        if piece.in_param.length == spec.extent:
            return param
        return in_memory_order(param, spec)[slice(*piece.in_param)]

    def _in_words(self, findings: Sequence[Finding], count: int) -> str:
        lines = [self._line(finding) for finding in findings]
        more = f"; and {count - len(lines)} more" if count > len(lines) else ""
        unsure = "" if all(it.is_sure for it in findings) else f" {_UNSURE}"
        lead = f"{count} of {len(self._params)} parameters are not the same on all ranks"
        return f"{lead}: {'; '.join(lines)}{more}.{unsure} {_WHAT_TO_DO}"

    def _line(self, finding: Finding) -> str:
        label, bucket = self._layout.params[finding.param].label, self._layout.bucket_of(finding.param)
        if not finding.right:
            return f"{label} in bucket {bucket}, of which every rank has lost a part"
        verb = "differs" if len(finding.wrong) == 1 else "differ"
        return f"{label} in bucket {bucket}, where {name_ranks(finding.wrong)} {verb} from {name_ranks(finding.right)}"


def judge(stated: Sequence[str]) -> tuple[list[int], list[int], bool]:
    """Which ranks are right, which are wrong, and whether that is sure, given what each has of a piece. A star behind
    it marks those of the owner: without a majority, that one is right."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(stated):
        sides[text.rstrip("*")].append(rank)
    most = max(map(len, sides.values()))
    largest = [ranks for ranks in sides.values() if len(ranks) == most]
    right = max(largest, key=lambda ranks: sum(stated[rank].endswith("*") for rank in ranks))
    wrong = [rank for rank in range(len(stated)) if rank not in right]
    return right, wrong, len(largest) == 1


_UNSURE = "Where no value has a majority of ranks, the rank that owns that part of the parameter is taken to be right."
_WHAT_TO_DO = (
    "Nothing was updated. Load the last checkpoint, and look at what those ranks have of their own: memory that lost "
    "bits, or code that changed parameters there alone."
)
_GONE = (
    "the parameters of the ranks differed, and when all looked again they did not: a rank's memory is unsteady, or "
    "another thread changes parameters. Nothing was updated."
)


def _as_bytes(total: int) -> bytes:
    return total.to_bytes(8, "big", signed=True)
