"""Checks before a step: gradients are finite, gradients and parameters are the same on all ranks.

`StepChecks` runs those that the config asks for. All ranks make the same checks in the same order and come to the same
result: they skip the step, raise or continue together.
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

from .._formatting import format_count, format_names, format_ranks
from .._logging import log_rank, warn_at_caller
from .._types import group_ranks
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Prepared, Status, exchange_status, fingerprint, prepare_all, raise_failure
from ..config import ConsistencyCheck, NonFiniteGrads
from ..errors import NonFiniteError, ReplicaMismatchError
from ..layout.layout import Layout, ParamShard
from ..profiling import Phase, StepProfiler
from ..state.state_dict import flatten_in_memory_order

# ---------------------------------------------------------------------------------------------------------------------
# Non-finite gradients: detected on any rank, handled the same way on all of them.


_MAX_NON_FINITE_SHOWN = 5


@dataclass(frozen=True)
class NonFiniteSteps:
    """Counts of steps with non-finite gradients. They are the same on all ranks."""

    detected: int = 0
    skipped: int = 0
    """How many of the detected steps were skipped."""
    consecutive: int = 0
    """Detected steps since the last step with finite gradients."""
    last_step: int | None = None
    """The latest detected step. `step()` calls are counted from 1, without those that a GradScaler skipped."""


class GradSample(NamedTuple):
    """A tensor with gradients of one or more parameters, and a function that splits it by parameter."""

    tensor: torch.Tensor
    split_by_param: Callable[[], Iterable[tuple[int, torch.Tensor]]]

    @staticmethod
    def from_grad(param: int, grad: torch.Tensor) -> "GradSample":
        return GradSample(grad, lambda: [(param, grad)])


class NonFiniteCheck:
    """Checks the gradients before every step. Collective: call on all ranks."""

    def __init__(self, comm: Comm, policy: NonFiniteGrads) -> None:
        self._comm, self._policy, self._step_count = comm, policy, 0
        self.counts = NonFiniteSteps()

    def should_skip(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None = None
    ) -> bool:
        """Return whether to skip the step. Call on all ranks; all return the same or raise.

        Args:
            layout: The layout of all parameters.
            grad_samples: Returns the gradients that this rank holds.
            prior_error: An error that this rank met before the check. It is raised on all ranks.

        Raises:
            NonFiniteError: The policy is to raise, or too many consecutive steps had non-finite gradients.
        """
        self._step_count += 1
        non_finite: list[int] = []
        try:
            non_finite = [] if prior_error is not None else _find_non_finite(list(grad_samples()))
        except Exception as error:
            prior_error = error
        failure = Failure.NONE if prior_error is None else Failure.FAILED
        call = f"checking the gradients of step {self._step_count}"
        status = exchange_status(self._comm, call, bytes([bool(non_finite)]), failure)
        if status.failure_level:
            raise_failure(self._comm, call, prior_error)
        if not non_finite and status.has_same_payload:
            self.counts = replace(self.counts, consecutive=0)
            return False
        return self._apply_policy(layout, set(non_finite))

    def _apply_policy(self, layout: Layout, local_params: set[int]) -> bool:
        """Warn, skip or raise, on all ranks. `local_params` have non-finite gradients on this rank."""
        local_flags = bytes(index in local_params for index in range(len(layout.params)))
        flags = local_flags if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_any(local_flags)
        policy, counts = self._policy, self.counts
        should_skip = policy.action == "skip"
        self.counts = NonFiniteSteps(
            counts.detected + 1, counts.skipped + should_skip, counts.consecutive + 1, self._step_count
        )
        names = [layout.params[index].label for index, flag in enumerate(flags) if flag]
        problem = f"step {self._step_count}: gradients of {format_names(names, _MAX_NON_FINITE_SHOWN)} are not finite."
        if policy.action == "raise":
            raise NonFiniteError(f"{problem} Nothing was updated. {_NON_FINITE_ADVICE}")
        if policy.max_consecutive is not None and self.counts.consecutive >= policy.max_consecutive:
            raise NonFiniteError(
                f"{problem} That is {self.counts.consecutive} steps in a row, and {policy} allows fewer. Nothing was "
                f"updated. {_NON_FINITE_ADVICE}"
            )
        if self.counts.detected.bit_count() == 1:
            action = "The step is skipped" if should_skip else "The step is applied anyway"
            warn_at_caller(
                f"{problem} {action}, as {policy} says; {_format_count(self.counts.detected)} so far.", RuntimeWarning
            )
        return should_skip


_NON_FINITE_ADVICE = "Check the loss and the inputs of this step; a lower learning rate or gradient clipping may help."


def _format_count(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _find_non_finite(samples: Sequence[GradSample]) -> list[int]:
    """Return the parameters whose gradients on this rank are not all finite."""
    sample_flags = _are_finite([sample.tensor for sample in samples])
    suspects = [sample for sample, is_finite in zip(samples, sample_flags, strict=True) if not is_finite]
    # A sample may hold anything between its gradients, such as old gradients of parameters that have none now.
    grads = [grad for sample in suspects for grad in sample.split_by_param()]
    grad_flags = _are_finite([grad for _, grad in grads])
    return [param for (param, _), is_finite in zip(grads, grad_flags, strict=True) if not is_finite]


@torch.no_grad()
def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it is finite. The host synchronizes once per dtype and device."""
    flags = [True] * len(tensors)
    by_dtype_and_device: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        values = _real_values(tensor)
        if values.numel():
            # Minimum and maximum are exact, take one pass, and are NaN if any element is.
            minmax = torch.stack(torch.aminmax(values))
            by_dtype_and_device.setdefault((values.dtype, values.device), {})[index] = minmax
    for minmaxes in by_dtype_and_device.values():
        finite = torch.stack(list(minmaxes.values())).isfinite().all(1).tolist()
        for index, flag in zip(minmaxes, finite, strict=True):
            flags[index] = flag
    return flags


def _real_values(grad: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a (possibly sparse or complex) gradient as real numbers."""
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


# ---------------------------------------------------------------------------------------------------------------------
# Checksums over the bits of tensors, computed on their device in integers, so they do not depend on summation order.
#
# Tensors are read as 32-bit words. Each word is multiplied by an odd number that depends on its position; the products
# are added modulo 2^64. A flipped bit changes its word by a power of 2 below 2^32, and the sum by that times an odd
# number, which is never 0. The bits of a NaN count like any others. There would be half as many 64-bit words, but two
# flips of their highest bits would cancel out modulo 2^64: a negated float64 parameter would go unnoticed.


WORD_BYTES = 4
CHUNK_WORDS = {"cpu": 1 << 17}
"""Words that are widened to 64 bits at once, by device type: on the CPU few enough to stay in cache."""
DEFAULT_CHUNK_WORDS = 1 << 22
COALESCE_MAX_BYTES = 64 * 1024
"""Tensors up to this size are concatenated with their neighbours, and summed together."""
_HASH_MULTIPLIERS = -0x61C8864680B583EB, 0x2545F4914F6CDD1D


class Checksums:
    """Computes checksums. Its buffers are reused and take a few MiB, whatever the size of the tensors."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._int64_buffers: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def compute(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return one checksum over all tensors, which depends on their order. The host synchronizes once."""
        non_empty = sorted((tensor.detach() for tensor in tensors if tensor.numel()), key=_device_key)
        if not non_empty:
            return 0
        by_device = [
            self._checksum_on_device(device, list(on_device))
            for device, on_device in groupby(non_empty, attrgetter("device"))
        ]
        sums = torch.stack([checksum.to(by_device[0].device) for checksum in by_device])
        return int((sums * make_odd_weights(len(sums), sums.device)).sum().item())

    def _checksum_on_device(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        max_bytes = CHUNK_WORDS.get(device.type, DEFAULT_CHUNK_WORDS) * WORD_BYTES
        sums = torch.stack([self._checksum_chunk(chunk) for chunk in _iter_chunks(tensors, max_bytes)])
        return (sums * make_odd_weights(len(sums), device)).sum()

    def _checksum_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the checksum of a tensor of bytes. Each byte after the last complete word counts as a word."""
        num_words, num_rest = divmod(chunk.numel(), WORD_BYTES)
        total = num_words + num_rest
        self._ensure_capacity(chunk.device, total)
        wide = self._int64_buffers[chunk.device][:total]
        words = chunk[: num_words * WORD_BYTES]
        # `view(torch.int32)` requires a storage offset that is a multiple of the word size.
        wide[:num_words].copy_((words if words.storage_offset() % WORD_BYTES == 0 else words.clone()).view(torch.int32))
        wide[num_words:].copy_(chunk[num_words * WORD_BYTES :])
        return wide.mul_(self._weights[chunk.device][:total]).sum()

    def _ensure_capacity(self, device: torch.device, num_words: int) -> None:
        if device not in self._int64_buffers or len(self._int64_buffers[device]) < num_words:
            self._weights[device] = make_odd_weights(num_words, device)
            self._int64_buffers[device] = torch.empty_like(self._weights[device])


def make_odd_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return pseudo-random odd weights, the same on all ranks, so that regular changes do not cancel out."""
    numbers = torch.arange(1, count + 1, device=device, dtype=torch.int64) * _HASH_MULTIPLIERS[0]
    numbers ^= numbers >> 31
    return (numbers * _HASH_MULTIPLIERS[1]) ^ (numbers >> 29) | 1


def _device_key(tensor: torch.Tensor) -> tuple[str, int]:
    return tensor.device.type, tensor.device.index or 0


def _iter_chunks(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of tensors on one device, at most `max_bytes` at once. Only shapes decide where to split."""
    for is_small, run in groupby(tensors, lambda tensor: _nbytes(tensor) <= COALESCE_MAX_BYTES):
        if is_small:
            yield from _coalesce(run, max_bytes)
        else:
            for tensor in run:
                yield from _split_tensor(tensor, max_bytes)


def _coalesce(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    batch: list[torch.Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if batch and batch_bytes + _nbytes(tensor) > max_bytes:
            yield torch.cat(batch)
            batch, batch_bytes = [], 0
        batch.append(_flat_bytes(tensor))
        batch_bytes += _nbytes(tensor)
    yield torch.cat(batch)


def _split_tensor(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a large tensor. One that is not contiguous is copied, one chunk at a time."""
    # Hazard: only the shape may decide where to split. Strides can differ between ranks.
    if _nbytes(tensor) <= max_bytes:
        yield _flat_bytes(tensor)
    else:
        num_rows = max_bytes // _nbytes(tensor[0])
        for rows in torch.split(tensor, num_rows) if num_rows > 1 else tensor:
            yield from _split_tensor(rows, max_bytes)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Gradient consistency: are gradients the same on all ranks, as after DDP? Checked in the first step only.
#
# Every rank reduces its gradients to one number and sends it with the status that ranks exchange in a step anyway. A
# mismatch only warns: a parameter's owner uses its own gradient, so other gradients on other ranks may be intended.


SAMPLE_NUMEL = 1 << 16
"""Elements per gradient that are compared, at most."""
_SAMPLE_BATCH_NUMEL = 1 << 20
_FIXED_POINT_ONE = 1 << 32
GRAD_TOLERANCE = _FIXED_POINT_ONE >> 8
"""Averages that each rank computes, or clips by a norm that it computes, differ by rounding. Gradients of different
inputs differ by about `_FIXED_POINT_ONE` times their noise-to-norm ratio."""


class GradConsistencyCheck:
    """Compares the gradients of the first step between ranks, and notices if there are none. Call on all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._is_due = not comm.is_single_rank
        self._rank = comm.data_parallel.group.rank
        self.is_paused = False
        """Set while ranks that ran out of inputs have joined: these have the gradients of others, or none."""

    def compute_projection(self, params: Sequence[torch.Tensor]) -> int | None:
        """Return a number that is about equal on all ranks if their gradients are; None: nothing to compare."""
        if not self._is_due or self.is_paused:
            return None
        try:
            return _project_grads(param.grad for param in params if param.grad is not None)
        except Exception as error:  # out of memory, or an unusual kind of gradient: no reason to fail
            log_rank(logging.DEBUG, self._rank, "gradients are not compared: %r", error)
            return None

    def warn_on_mismatch(self, status: Status, update_mask: bytes) -> None:
        """Warn if no parameter is updated, or if gradients differ.

        They are not compared if ranks have gradients of different parameters.
        """
        if not self._is_due or self.is_paused or status.failure_level:
            return
        self._is_due = False
        if status.has_same_payload and not any(update_mask):
            warn_at_caller(
                f"none of the optimizer's {format_count(len(update_mask), 'parameter')} has a gradient on any rank, so "
                "nothing is updated. Pass the parameters of the model that you train, and call backward() before "
                "step()."
            )
        if status.has_same_payload and status.measure_spread > GRAD_TOLERANCE:
            warn_at_caller(
                "gradients in param.grad differ between ranks, so each parameter is updated with the gradient of "
                "its owner instead of the average. Wrap the model in DistributedDataParallel, or use "
                "zeroshard.shard(model, ...), which averages gradients. If only owners are supposed to have the "
                "average, set param.grad to None on the other ranks."
            )


@torch.no_grad()
def _project_grads(grads: Iterable[torch.Tensor]) -> int | None:
    """Project normalized dense gradients onto pseudo-random signs; return the result in fixed point.

    The scale of the gradients does not matter. Returns None if there are none, or if they are zero or not finite.
    """
    samples: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.layout == torch.strided and grad.numel():
            samples[grad.device].append(_sample_grad(grad.detach()))
    projection = squared_norm = 0.0
    for device, on_device in samples.items():
        sums = torch.zeros(2, device=device)
        for batch in _iter_batches(on_device):
            flat = torch.cat(batch)
            sums += torch.stack([flat.dot(_make_signs(len(flat), device)), flat.dot(flat)])
        device_projection, device_squared_norm = sums.tolist()
        projection, squared_norm = projection + device_projection, squared_norm + device_squared_norm
    if not (math.isfinite(projection) and math.isfinite(squared_norm) and squared_norm > 0):
        return None
    return round(projection / math.sqrt(squared_norm) * _FIXED_POINT_ONE)


def _sample_grad(grad: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a gradient in logical order: strides may differ between ranks."""
    while grad.numel() > SAMPLE_NUMEL:
        row_numel = grad.numel() // len(grad)
        grad = grad[: SAMPLE_NUMEL // row_numel] if row_numel <= SAMPLE_NUMEL else grad[0]
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return real.reshape(-1).float()


def _iter_batches(samples: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    batch_numel = 0
    for sample in samples:
        batch.append(sample)
        batch_numel += sample.numel()
        if batch_numel >= _SAMPLE_BATCH_NUMEL:
            yield batch
            batch, batch_numel = [], 0
    if batch:
        yield batch


def _make_signs(count: int, device: torch.device) -> torch.Tensor:
    """Return pseudo-random signs (-1.0 or 1.0), the same on all ranks."""
    bits = torch.arange(1, count + 1, device=device, dtype=torch.int64) * 0x2545F4914F6CDD1D
    return ((bits ^ (bits >> 29)) >> 40 & 1).mul_(2).sub_(1).float()


# ---------------------------------------------------------------------------------------------------------------------
# Replicas: with hybrid sharding, shard groups hold the same state until a step fails in one of them only.


class ReplicaGuard:
    """Tracks whether shard groups may have diverged. All ranks have the same information."""

    def __init__(self, comm: Comm) -> None:
        self._has_replicas = comm.replicas is not None
        self._failed_call = ""
        """The step since which shard groups may differ; empty if they are the same."""
        self.needs_param_check = False
        """State was loaded after they diverged, the same in all shard groups. Parameters must still be compared."""

    def mark_diverged(self, call: str) -> None:
        """Record that a step failed on a rank but may have been applied by its replicas, if there are any."""
        if self._has_replicas:
            self._failed_call, self.needs_param_check = call, False

    def mark_loaded(self) -> Callable[[], None]:
        """Record that all shard groups have loaded the same state. Return a function that undoes it."""
        undo = self.snapshot()
        self._failed_call, self.needs_param_check = "", self.needs_param_check or bool(self._failed_call)
        return undo

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present values."""
        saved = self._failed_call, self.needs_param_check

        def restore() -> None:
            self._failed_call, self.needs_param_check = saved

        return restore

    def check_not_diverged(self, step: int) -> None:
        """Raise `ReplicaMismatchError` if shard groups may have diverged."""
        if self._failed_call:
            raise ReplicaMismatchError(
                f"shard groups may have diverged: {self._failed_call} failed on a rank, so its shard group was "
                "updated only partially. Nothing was updated now. Load a checkpoint on all ranks and call "
                "zero_grad().",
                step=step,
            )


# ---------------------------------------------------------------------------------------------------------------------
# Parameter consistency: are replicated parameters bit-identical on all ranks, and if not, which ones differ where?
#
# If all are equal, this takes one pass over the parameters and one small message. Otherwise ranks search for the
# parameters that differ, then for the shards of these, and then all-gather fingerprints of those shards.


_FINGERPRINTS_PER_MESSAGE = 512
_MAX_MISMATCHES_SHOWN = 5


def check_params_equal(comm: Comm, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
    """Raise `ReplicaMismatchError` on all ranks if parameters differ between them. Collective; changes nothing."""
    if comm.is_single_rank:
        return
    checksums, checksum, local_error = Checksums(), 0, None
    try:
        checksum = checksums.compute(params)
    except Exception as error:
        local_error = error
    failure = Failure.NONE if local_error is None else Failure.FAILED
    status = exchange_status(comm, f"comparing parameters in {call}", _checksum_to_bytes(checksum), failure)
    if status.failure_level:
        raise_failure(comm, call, local_error)
    if not status.has_same_payload:
        _MismatchSearch(comm, layout, params, checksums, call).raise_mismatch(step)


class Mismatch(NamedTuple):
    """A parameter that differs between ranks, judged by the shards that were inspected."""

    param: int
    reference_ranks: tuple[int, ...]
    """Ranks with the value of the majority or, without a majority, with the owner's value."""
    mismatched_ranks: tuple[int, ...]
    has_majority: bool


class _MismatchSearch:
    """Searches for the parameters and ranks that differ. Methods are collective: call on all ranks."""

    def __init__(
        self, comm: Comm, layout: Layout, params: Sequence[torch.Tensor], checksums: Checksums, call: str
    ) -> None:
        self._comm, self._layout, self._params, self._checksums, self._call = comm, layout, params, checksums, call

    def raise_mismatch(self, step: int | None) -> NoReturn:
        """Find out what differs and raise `ReplicaMismatchError`, on all ranks."""
        differing = self._find_differing(self._compute_fingerprints(lambda: self._params))
        mismatches = [self._inspect_param(param) for param in differing[:_MAX_MISMATCHES_SHOWN]]
        names = tuple(self._layout.params[param].name or f"parameter {param}" for param in differing)
        ranks = tuple(sorted({rank for mismatch in mismatches for rank in mismatch.mismatched_ranks}))
        text = self._format_error(mismatches, len(differing)) if mismatches else _TRANSIENT_MISMATCH
        raise ReplicaMismatchError(f"{self._call}: {text}", step=step, ranks=ranks, params=names)

    def _inspect_param(self, param: int) -> Mismatch:
        """Compare the first shards of a parameter that differ between ranks."""
        shards = self._layout.param_shards(param)
        fingerprints = self._compute_fingerprints(lambda: map(self._shard_of_param, shards))
        differing = self._find_differing(fingerprints)[:_MAX_MISMATCHES_SHOWN]
        local = [f"{fingerprints[i]:x}{'*' * (shards[i].owner == self._comm.group.rank)}" for i in differing]
        reported = [text.split() for text in self._comm.data_parallel.all_gather_text(" ".join(local), max_bytes=256)]
        results = [find_majority([texts[i] for texts in reported]) for i in range(len(differing))]
        mismatched = sorted({rank for _, others, _ in results for rank in others})
        reference = set(range(self._comm.data_parallel.group.size)).difference(mismatched)
        has_majority = all(is_majority for *_, is_majority in results)
        return Mismatch(param, tuple(sorted(reference)), tuple(mismatched), has_majority)

    def _find_differing(self, fingerprints: Sequence[int]) -> list[int]:
        """Return the indices at which fingerprints differ between ranks: the maximum is not the minimum."""
        differing: list[int] = []
        for start in range(0, len(fingerprints), _FINGERPRINTS_PER_MESSAGE):
            batch = fingerprints[start : start + _FINGERPRINTS_PER_MESSAGE]
            maxima = self._comm.data_parallel.all_reduce_max([signed for value in batch for signed in (value, -value)])
            differing += [start + i for i in range(len(batch)) if maxima[2 * i] != -maxima[2 * i + 1]]
        return differing

    def _compute_fingerprints(self, get_tensors: Callable[[], Iterable[torch.Tensor]]) -> list[int]:
        """Return the fingerprint of each tensor on this rank. A failure on one rank (out of memory) raises on all."""

        def prepare() -> Prepared[list[int]]:
            checksums = [self._checksums.compute([tensor]) for tensor in get_tensors()]
            return Prepared([fingerprint(_checksum_to_bytes(checksum)) for checksum in checksums])

        return prepare_all(self._comm, f"searching for differences in {self._call}", prepare)

    def _shard_of_param(self, param_shard: ParamShard) -> torch.Tensor:
        spec, param = self._layout.params[param_shard.param], self._params[param_shard.param].detach()
        if param_shard.in_param.length == spec.storage_numel:
            return param
        return flatten_in_memory_order(param, spec)[slice(*param_shard.in_param)]

    def _format_error(self, mismatches: Sequence[Mismatch], count: int) -> str:
        lines = [self._format_mismatch(mismatch) for mismatch in mismatches]
        more = f"; and {count - len(lines)} more" if count > len(lines) else ""
        note = "" if all(mismatch.has_majority for mismatch in mismatches) else f" {_NO_MAJORITY_NOTE}"
        lead = f"{count} of {len(self._params)} parameters are not the same on all ranks"
        return f"{lead}: {'; '.join(lines)}{more}.{note} {_MISMATCH_ADVICE}"

    def _format_mismatch(self, mismatch: Mismatch) -> str:
        label, bucket = self._layout.params[mismatch.param].label, self._layout.bucket_of(mismatch.param)
        if not mismatch.reference_ranks:
            return f"{label} in bucket {bucket}, where every rank differs from the others in some shard"
        verb = "differs" if len(mismatch.mismatched_ranks) == 1 else "differ"
        mismatched, reference = format_ranks(mismatch.mismatched_ranks), format_ranks(mismatch.reference_ranks)
        return f"{label} in bucket {bucket}, where {mismatched} {verb} from {reference}"


def find_majority(reported: Sequence[str]) -> tuple[list[int], list[int], bool]:
    """Return the ranks that are right, the ranks that are wrong, and whether a majority decided that.

    `reported` is each rank's fingerprint of a shard, followed by "*" on the owners of the shard. If several values are
    equally frequent, the one with most owners is right.
    """
    groups = group_ranks(text.rstrip("*") for text in reported).values()
    max_count = max(map(len, groups))
    candidates = [ranks for ranks in groups if len(ranks) == max_count]
    right = max(candidates, key=lambda ranks: sum(reported[rank].endswith("*") for rank in ranks))
    wrong = [rank for rank in range(len(reported)) if rank not in right]
    return right, wrong, len(candidates) == 1


_NO_MAJORITY_NOTE = "Where no value has a majority, the owner's value is taken as correct."
_MISMATCH_ADVICE = (
    "Nothing was updated. Load the last checkpoint, and check what is special about those ranks: faulty memory, or "
    "code that changes parameters on them only."
)
_TRANSIENT_MISMATCH = (
    "parameters differed between ranks, but no longer when they were compared again: the memory of a rank is "
    "faulty, or another thread changes parameters. Nothing was updated."
)


def _checksum_to_bytes(checksum: int) -> bytes:
    return checksum.to_bytes(8, "big", signed=True)


# ---------------------------------------------------------------------------------------------------------------------
# All checks before a step.


class StepChecks:
    """Runs the checks that the config asks for, and counts them. Same calls on all ranks.

    To add a check of gradients, write a class like `NonFiniteCheck`: it exchanges one status message, so that all ranks
    come to the same result and a rank that has failed before raises on all of them. Add its policy to `ZeroConfig`
    (with a check in `__post_init__`) and to `_POLICIES` (config.py), pass it to this class and reject it where it has
    no effect (build.py), call the check in `should_skip_step` inside a `Phase` of its own (profiling.py), and set
    `should_check_grads` for it. If it counts anything, show that in report.py.
    """

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        consistency: ConsistencyCheck | None = None,
        nonfinite: NonFiniteGrads | None = None,
    ) -> None:
        self._comm, self._profiler, self._consistency = comm, profiler, consistency
        self._nonfinite_check = NonFiniteCheck(comm, nonfinite) if nonfinite else None
        self.num_consistency_checks = 0
        """How many times parameters were compared."""

    @property
    def should_check_grads(self) -> bool:
        """Whether gradients are checked, and so must be reduced before the optimizer's code runs."""
        return self._nonfinite_check is not None

    @property
    def nonfinite(self) -> NonFiniteSteps:
        return NonFiniteSteps() if self._nonfinite_check is None else self._nonfinite_check.counts

    def is_consistency_check_due(self, step: int) -> bool:
        """Return whether to compare parameters before this step."""
        return self._consistency is not None and step % self._consistency.every == 0

    def check_consistency(self, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if parameters differ between them. Call on all ranks."""
        self.num_consistency_checks += 1
        with self._profiler.phase(Phase.CHECK_CONSISTENCY):
            check_params_equal(self._comm, layout, params, call, step)

    def should_skip_step(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None
    ) -> bool:
        """Return whether a check of the gradients asks to skip the step. Call on all ranks; see `NonFiniteCheck`."""
        if self._nonfinite_check is None:
            return False
        with self._profiler.phase(Phase.CHECK_NONFINITE):
            return self._nonfinite_check.should_skip(layout, grad_samples, prior_error)
