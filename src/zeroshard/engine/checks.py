"""Parameters that should be equal on all ranks, and are not: which ones, and on which ranks.

While all is well, one pass over the parameters and one small message. Only where ranks differ do they look for the
parameters, then for the pieces of them, and then tell each other what they have there.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, NoReturn

import torch

from .._logging import log_rank, warn_at_caller
from .._types import format_ranks
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Prepared, Status, exchange_status, fingerprint, prepare_all, raise_failure
from ..config import ConsistencyCheck, NonFiniteGrads
from ..errors import NonFiniteError, ReplicaMismatchError
from ..layout.layout import Layout, ParamShard
from ..profiling import Phase
from ..state.state_dict import flatten_in_memory_order

# ---------------------------------------------------------------------------------------------------------------------
# Gradients that are not finite: found on one rank, known to all, and treated alike.


_MAX_NON_FINITE_SHOWN = 5


@dataclass(frozen=True)
class NonFiniteSteps:
    """Steps with gradients that were not all finite; the same on all ranks."""

    detected: int = 0
    skipped: int = 0
    """How many of these were left out."""
    consecutive: int = 0
    """How many there were since the last step with finite gradients."""
    last_step: int | None = None
    """The latest: `step()` calls are counted from 1, without those that a GradScaler left out."""


class GradSample(NamedTuple):
    """Gradients that this rank has, in one tensor, and how to tell them apart: by parameter."""

    tensor: torch.Tensor
    split_by_param: Callable[[], Iterable[tuple[int, torch.Tensor]]]

    @staticmethod
    def from_grad(param: int, grad: torch.Tensor) -> "GradSample":
        return GradSample(grad, lambda: [(param, grad)])


class NonFiniteCheck:
    """Looks at the gradients of every step before it is made. Called on all ranks."""

    def __init__(self, comm: Comm, policy: NonFiniteGrads) -> None:
        self._comm, self._policy, self._step_count = comm, policy, 0
        self.counts = NonFiniteSteps()

    def should_skip(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None = None
    ) -> bool:
        """Whether the step is to be left out. Raises on all ranks alike, `failure` too: what this one has met with.

        `look`: what this rank has of the gradients that all ranks share.
        """
        self._step_count += 1
        spoiled: list[int] = []
        try:
            spoiled = [] if prior_error is not None else _find_non_finite(list(grad_samples()))
        except Exception as error:
            prior_error = error
        trouble = Failure.NONE if prior_error is None else Failure.FAILED
        call = f"looking at the gradients of step {self._step_count}"
        verdict = exchange_status(self._comm, call, bytes([bool(spoiled)]), trouble)
        if verdict.failure_level:
            raise_failure(self._comm, call, prior_error)
        if not spoiled and verdict.has_same_plan:
            self.counts = replace(self.counts, consecutive=0)
            return False
        return self._apply_policy(layout, set(spoiled))

    def _apply_policy(self, layout: Layout, local_params: set[int]) -> bool:
        flags = bytes(index in local_params for index in range(len(layout.params)))
        union = flags if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_any(flags)
        policy, counts = self._policy, self.counts
        skips = policy.action == "skip"
        self.counts = NonFiniteSteps(
            counts.detected + 1, counts.skipped + skips, counts.consecutive + 1, self._step_count
        )
        names = [layout.params[index].label for index, flag in enumerate(union) if flag]
        what = f"step {self._step_count}: gradients of {_format_param_names(names)} are not finite."
        if policy.action == "raise":
            raise NonFiniteError(f"{what} Nothing was updated. {_NON_FINITE_ADVICE}")
        if policy.max_consecutive is not None and self.counts.consecutive >= policy.max_consecutive:
            raise NonFiniteError(
                f"{what} That is the case for {self.counts.consecutive} steps in a row, and {policy} allows less. "
                f"Nothing was updated. {_NON_FINITE_ADVICE}"
            )
        if self.counts.detected.bit_count() == 1:
            done = "The step is left out" if skips else "The step is made with them"
            warn_at_caller(
                f"{what} {done}, as {policy} says; {_format_count(self.counts.detected)} so far.", RuntimeWarning
            )
        return skips


_NON_FINITE_ADVICE = "Look at the loss and the inputs of this step; a lower learning rate, or clipping, may help."


def _format_param_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NON_FINITE_SHOWN} more" if len(names) > _MAX_NON_FINITE_SHOWN else ""
    return ", ".join(names[:_MAX_NON_FINITE_SHOWN]) + more


def _format_count(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _find_non_finite(samples: Sequence[GradSample]) -> list[int]:
    """Parameters whose gradients here are not all finite."""
    suspects = [lot for lot, fine in zip(samples, _are_finite([it.tensor for it in samples]), strict=True) if not fine]
    # Between its members a lot may hold anything, such as old gradients of parameters that have none now.
    members = [member for lot in suspects for member in lot.split_by_param()]
    fine = _are_finite([grad for _, grad in members])
    return [index for (index, _), flag in zip(members, fine, strict=True) if not flag]


@torch.no_grad()
def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each of them; the host waits once for each dtype and device."""
    flags = [True] * len(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(tensors):
        values = _real_values(tensor)
        if values.numel():
            # The least and the largest are exact, made in one pass, and NaN if there is one.
            kinds.setdefault((values.dtype, values.device), {})[place] = torch.stack(torch.aminmax(values))
    for ends in kinds.values():
        for place, flag in zip(ends, torch.stack(list(ends.values())).isfinite().all(1).tolist(), strict=True):
            flags[place] = flag
    return flags


def _real_values(grad: torch.Tensor) -> torch.Tensor:
    """What a gradient consists of, as real numbers."""
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


# ---------------------------------------------------------------------------------------------------------------------
# Check sums over the bits of tensors, made where these lie and in integers, so that they do not depend on any order.
#
# Bits are read as words of 32. Each word is multiplied by an odd number that depends on its place, and the products are
# added up modulo 2^64. One flipped bit changes its word by a power of 2 below 2^32, and the sum by that times an odd
# number: always by something. Bits are bits, those of a NaN, too. Words of 64 bits would be fewer, but two flips of
# their
# highest bit would cancel out modulo 2^64: a negated parameter in double precision would pass for the same.


WORD_BYTES = 4
"""Bytes."""
CHUNK_WORDS = {"cpu": 1 << 17}
"""What is widened at once: on the CPU so many that they stay in its cache."""
DEFAULT_CHUNK_WORDS = 1 << 22
COALESCE_MAX_BYTES = 64 * 1024
"""Bytes of a tensor that is put together with its neighbours: one sum for many."""
_HASH_MULTIPLIERS = -0x61C8864680B583EB, 0x2545F4914F6CDD1D


class Checksums:
    """Makes check sums, and keeps what it needs for that: memory of a few MiB, whatever the size of the tensors."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._int64_buffers: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def compute(self, tensors: Iterable[torch.Tensor]) -> int:
        """One sum over all of them, in their order. The host waits once."""
        filled = sorted((it.detach() for it in tensors if it.numel()), key=_device_key)
        if not filled:
            return 0
        by_device = [
            self._checksum_on_device(device, list(some)) for device, some in groupby(filled, attrgetter("device"))
        ]
        sums = torch.stack([it.to(by_device[0].device) for it in by_device])
        return int((sums * make_odd_weights(len(sums), sums.device)).sum().item())

    def _checksum_on_device(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        most = CHUNK_WORDS.get(device.type, DEFAULT_CHUNK_WORDS)
        sums = torch.stack([self._checksum_chunk(raw) for raw in _iter_chunks(tensors, most * WORD_BYTES)])
        return (sums * make_odd_weights(len(sums), device)).sum()

    def _checksum_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Of a run of bytes. The last few, if they make no word, count as one each."""
        count, rest = divmod(chunk.numel(), WORD_BYTES)
        self._ensure_capacity(chunk.device, count + rest)
        wide = self._int64_buffers[chunk.device][: count + rest]
        words = chunk[: count * WORD_BYTES]
        # torch reads words only where they would lie in an array of such.
        wide[:count].copy_((words if words.storage_offset() % WORD_BYTES == 0 else words.clone()).view(torch.int32))
        wide[count:].copy_(chunk[count * WORD_BYTES :])
        return wide.mul_(self._weights[chunk.device][: count + rest]).sum()

    def _ensure_capacity(self, device: torch.device, num_words: int) -> None:
        if device not in self._int64_buffers or len(self._int64_buffers[device]) < num_words:
            self._weights[device] = make_odd_weights(num_words, device)
            self._int64_buffers[device] = torch.empty_like(self._weights[device])


def make_odd_weights(count: int, device: torch.device) -> torch.Tensor:
    """The same ones everywhere, each at its place: as if drawn by chance, so that no regular change cancels out."""
    numbers = torch.arange(1, count + 1, device=device, dtype=torch.int64) * _HASH_MULTIPLIERS[0]
    numbers ^= numbers >> 31
    return (numbers * _HASH_MULTIPLIERS[1]) ^ (numbers >> 29) | 1


def _device_key(tensor: torch.Tensor) -> tuple[str, int]:
    return tensor.device.type, tensor.device.index or 0


def _iter_chunks(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    """All bytes of tensors on one device, at most so many at once. Equal ones are cut in the same way."""
    for small, some in groupby(tensors, lambda it: _nbytes(it) <= COALESCE_MAX_BYTES):
        if small:
            yield from _coalesce(some, max_bytes)
        else:
            for tensor in some:
                yield from _split_tensor(tensor, max_bytes)


def _coalesce(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    lot: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if lot and size + _nbytes(tensor) > max_bytes:
            yield torch.cat(lot)
            lot, size = [], 0
        lot.append(_flat_bytes(tensor))
        size += _nbytes(tensor)
    yield torch.cat(lot)


def _split_tensor(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """A tensor whose elements lie in another order than its own is copied, piece by piece."""
    if tensor.is_contiguous():
        yield from torch.split(_flat_bytes(tensor), max_bytes)
    elif _nbytes(tensor) <= max_bytes:
        yield _flat_bytes(tensor)
    else:
        rows = max_bytes // _nbytes(tensor[0])
        for piece in torch.split(tensor, rows) if rows > 1 else tensor:
            yield from _split_tensor(piece, max_bytes)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Are gradients the same on all ranks, as `DistributedDataParallel` makes them? Checked in the first step only.
#
# Every rank computes one number of its gradients and sends it along with what it states in the step anyway. A warning
# is
# all that follows: only the owner's gradient of a parameter is used, so different ones are no proof of a mistake.


SAMPLE_NUMEL = 1 << 16
"""Elements of a gradient that are looked at."""
_SAMPLE_BATCH_NUMEL = 1 << 20
_FIXED_POINT_ONE = 1 << 32
GRAD_TOLERANCE = _FIXED_POINT_ONE >> 8
"""Averages that each rank computes, or clips by a norm that it computes, differ by rounding. Gradients of different
inputs differ by about `_UNIT`, times the noise that they have in relation to their length."""


class GradConsistencyCheck:
    """Compares the gradients of the first step. On all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._is_due = not comm.is_single_rank
        self._rank = comm.data_parallel.group.rank
        self.is_paused = False
        """Ranks without inputs have the gradients of others, or none."""

    def compute_fingerprint(self, params: Sequence[torch.Tensor]) -> int | None:
        """A number that is about the same on all ranks if their gradients of `params` are; None: nothing to compare."""
        if not self._is_due or self.is_paused:
            return None
        try:
            return _project_grads(param.grad for param in params if param.grad is not None)
        except Exception as error:  # no memory, or an odd kind of gradient: no reason to fail
            log_rank(logging.DEBUG, self._rank, "gradients are not compared: %r", error)
            return None

    def warn_on_mismatch(self, status: Status) -> None:
        """Warn if they differ. If ranks have gradients of different parameters, they cannot be compared."""
        if not self._is_due or self.is_paused or status.failure_level:
            return
        self._is_due = False
        if status.has_same_plan and status.measure_range > GRAD_TOLERANCE:
            warn_at_caller(
                "the gradients in param.grad differ between ranks, so each parameter is updated with the gradient of "
                "the one rank that owns it, and not with the average. Wrap the model in DistributedDataParallel, or "
                "use zeroshard.shard(model, ...), which averages gradients itself. If each owner does have the "
                "average, ignore this, or set param.grad to None on the other ranks."
            )


@torch.no_grad()
def _project_grads(grads: Iterable[torch.Tensor]) -> int | None:
    """The direction of dense gradients, along one of pseudo-random signs: scale does not matter."""
    samples: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.layout == torch.strided and grad.numel():
            samples[grad.device].append(_sample_grad(grad.detach()))
    along = square = 0.0
    for device, found in samples.items():
        sums = torch.zeros(2, device=device)
        for some in _iter_batches(found):
            flat = torch.cat(some)
            sums += torch.stack([flat.dot(_make_signs(len(flat), device)), flat.dot(flat)])
        on_device = sums.tolist()
        along, square = along + on_device[0], square + on_device[1]
    if not (math.isfinite(along) and math.isfinite(square) and square > 0):
        return None
    return round(along / math.sqrt(square) * _FIXED_POINT_ONE)


def _sample_grad(grad: torch.Tensor) -> torch.Tensor:
    """Its first elements, in the order of its dimensions: strides may differ from rank to rank."""
    while grad.numel() > SAMPLE_NUMEL:
        row = grad.numel() // len(grad)
        grad = grad[: SAMPLE_NUMEL // row] if row <= SAMPLE_NUMEL else grad[0]
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return real.reshape(-1).float()


def _iter_batches(samples: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    lot: list[torch.Tensor] = []
    size = 0
    for sample in samples:
        lot.append(sample)
        size += sample.numel()
        if size >= _SAMPLE_BATCH_NUMEL:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _make_signs(count: int, device: torch.device) -> torch.Tensor:
    """The same ones everywhere, as if drawn by chance."""
    bits = torch.arange(1, count + 1, device=device, dtype=torch.int64) * 0x2545F4914F6CDD1D
    return ((bits ^ (bits >> 29)) >> 40 & 1).mul_(2).sub_(1).float()


# ---------------------------------------------------------------------------------------------------------------------
# Rows of ranks that hold the same, until an update fails in one of them and the others have made it.


class ReplicaGuard:
    """Whether rows can still be the same, known alike on all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._has_replicas = comm.replicas is not None
        self._failed_call = ""
        """The step since which they are not."""
        self.needs_param_check = False
        """State was loaded since, the same in all rows; whether parameters were is to be looked at."""

    def mark_diverged(self, call: str) -> None:
        """An update has failed on a rank, and was made by its replicas, if there are any."""
        if self._has_replicas:
            self._failed_call, self.needs_param_check = call, False

    def mark_loaded(self) -> Callable[[], None]:
        """All rows have the state that was loaded; returns how to undo it."""
        undo = self.snapshot()
        self._failed_call, self.needs_param_check = "", self.needs_param_check or bool(self._failed_call)
        return undo

    def snapshot(self) -> Callable[[], None]:
        """Returns how to know again what is known now."""
        before = self._failed_call, self.needs_param_check

        def restore() -> None:
            self._failed_call, self.needs_param_check = before

        return restore

    def check_not_diverged(self, step: int) -> None:
        if self._failed_call:
            raise ReplicaMismatchError(
                f"rows of ranks need no longer be the same: {self._failed_call} failed on a rank, and its row has not "
                "made "
                "all of it. Nothing was updated. Load a checkpoint, or state dicts of the model and the optimizer, on "
                "all ranks, and call zero_grad().",
                step=step,
            )


# ---------------------------------------------------------------------------------------------------------------------
# Parameters that should be equal on all ranks, and are not: which ones, and on which ranks.
#
# While all is well, one pass over the parameters and one small message. Only where ranks differ do they look for the
# parameters, then for the pieces of them, and then tell each other what they have there.


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


# ---------------------------------------------------------------------------------------------------------------------
# What is looked at before a step is made: are parameters the same on all ranks, are gradients finite?


class StepChecks:
    """Those that policies ask for, counted. On all ranks alike."""

    def __init__(
        self, comm: Comm, consistency: ConsistencyCheck | None = None, nonfinite: NonFiniteGrads | None = None
    ) -> None:
        self._comm, self._consistency = comm, consistency
        self._nonfinite_check = NonFiniteCheck(comm, nonfinite) if nonfinite else None
        self.num_consistency_checks = 0
        """How often parameters were compared."""

    @property
    def should_check_grads(self) -> bool:
        """Gradients are looked at, and must be there before the optimizer's code runs."""
        return self._nonfinite_check is not None

    @property
    def nonfinite(self) -> NonFiniteSteps:
        return NonFiniteSteps() if self._nonfinite_check is None else self._nonfinite_check.counts

    def is_consistency_check_due(self, step: int) -> bool:
        """Whether parameters are to be compared before this step."""
        return self._consistency is not None and step % self._consistency.every == 0

    def check_consistency(self, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if they have different parameters."""
        self.num_consistency_checks += 1
        with self._comm.profiler.phase(Phase.CHECK_CONSISTENCY):
            check_params_equal(self._comm, layout, params, call, step)

    def should_skip_step(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None
    ) -> bool:
        """Whether the step is not to be made, since gradients are not finite. Raises on all ranks alike."""
        if self._nonfinite_check is None:
            return False
        with self._comm.profiler.phase(Phase.CHECK_NONFINITE):
            return self._nonfinite_check.should_skip(layout, grad_samples, prior_error)
