"""Where the gradients of a step come from.

`ParamGrads` uses `param.grad` in place, where DDP or the user has averaged it. Flat shards need one flat gradient shard
per bucket: `LocalGrads` copies them from `param.grad`, and `GradReducer` (grad_reducer.py) reduce-scatters gradients
itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from .._torch_compat import foreach_copy_
from ..comm.collectives import Comm
from ..config import MasterWeightPolicy
from ..errors import RankMismatchError
from ..layout.layout import Bucket, Layout, ParamShard
from ..state.state_dict import flatten_in_memory_order
from .checks import GradConsistencyCheck
from .step import Step


class GradSource(ABC):
    """Completes the gradients of a step, and knows which parameters have one."""

    name: ClassVar[str]
    """All ranks must use the same source: they compare the names."""
    reduces = False
    """Whether this source averages gradients over ranks. Otherwise the user, or DDP, has done so before the step."""
    agrees_before_update = True
    """Whether ranks compare, before the update, which gradients each of them has."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._params: list[torch.Tensor] = []

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Add the buckets that `layout` has beyond the current ones. `params` are all parameters, old and new."""
        self._params = list(params)

    @abstractmethod
    def prepare(self) -> bytes:
        """Prepare `complete`, and return the signature: bytes that are equal on ranks with the same gradients.

        Only called if `agrees_before_update`. Does not raise: errors of this rank are raised by `complete`, on all
        ranks.
        """

    @abstractmethod
    def complete(self, step: Step, *, signatures_match: bool) -> None:
        """Complete the gradients of a step and set `step.grad_mask`. Call on all ranks; raises on all ranks.

        `signatures_match`: `prepare` has returned the same signature on all ranks.
        """

    @property
    def has_sent(self) -> bool:
        """Whether gradients have been sent since they were last completed."""
        return False

    def clear(self, *, set_to_none: bool) -> None:  # noqa: B027 (nothing, by default)
        """Clear gradients outside `param.grad`, as a part of `zero_grad`. Sends buckets that other ranks wait for."""

    def grad_tensors(self) -> list[torch.Tensor]:
        """Return this rank's shards of reduced gradients, after `complete`; none if gradients are in `param.grad`."""
        return []

    @abstractmethod
    def shard(self, bucket_index: int) -> torch.Tensor:
        """Return this rank's gradient shard of a bucket."""

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing, by default)
        """Remove placeholders for sharded gradients from `param.grad`, which `zero_grad` would otherwise use."""

    def mark_scaled(self) -> None:  # noqa: B027 (nothing, by default)
        """Record that gradients are about to be changed in place: clipped, or multiplied to unscale them."""

    def mark_stepped(self, *, was_applied: bool) -> None:  # noqa: B027 (nothing, by default)
        """Record that a step has ended; `was_applied` is False if it was skipped or failed."""

    def shard_tensors(self) -> list[torch.Tensor]:
        """Return the allocated shards, for memory reports."""
        return []

    def staging_buffers(self) -> list[torch.Tensor]:
        """Return the buffers in which gradients are packed and received, for memory reports."""
        return []

    def bytes_to_send(self) -> int | None:
        """Return the bytes that this rank sends to reduce all gradients once; None if others reduce them."""
        return None


class ParamGrads(GradSource):
    """The gradients in `param.grad`, averaged and equal on all ranks, as DDP leaves them. Each owner uses its own.

    Ranks compare nothing before the update. They exchange one status message after it.
    """

    name = "gradients in param.grad"
    agrees_before_update = False

    def __init__(self, comm: Comm, grad_consistency: GradConsistencyCheck) -> None:
        super().__init__(comm)
        self._grad_consistency = grad_consistency

    def prepare(self) -> bytes:
        return b""

    def complete(self, step: Step, *, signatures_match: bool) -> None:  # noqa: ARG002
        # Hazard: some optimizers clear gradients in their step, so record them before it.
        step.grad_mask = bytes([param.grad is not None for param in self._params])
        step.grad_projection = self._grad_consistency.compute_projection(self._params)

    def shard(self, bucket_index: int) -> torch.Tensor:
        raise AssertionError(f"gradients of bucket {bucket_index} are not sharded")


class ShardedGradSource(GradSource):
    """One flat gradient shard per bucket. Shards keep their contents until `clear`, as `param.grad` does in torch."""

    def __init__(self, comm: Comm, masters: MasterWeightPolicy | None) -> None:
        super().__init__(comm)
        self._masters = masters
        self._layout = Layout.empty(comm.group.size)
        self._shards: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        self._layout = layout

    def shard_tensors(self) -> list[torch.Tensor]:
        return list(self._shards.values())

    def shard(self, bucket_index: int) -> torch.Tensor:
        """Return this rank's gradient shard of a bucket, allocated as zeros on first use."""
        if bucket_index not in self._shards:
            bucket = self._layout.buckets[bucket_index]
            length = bucket.shards[self._comm.group.rank].length
            self._shards[bucket_index] = torch.zeros(length, dtype=self._grad_dtype(bucket), device=bucket.device)
        return self._shards[bucket_index]

    def _grad_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._masters.dtype if self._masters and self._masters.covers(bucket.dtype) else bucket.dtype


class LocalGrads(ShardedGradSource):
    """Copies shards from `param.grad`, which is already averaged and equal on all ranks, as DDP leaves it."""

    name = "gradients in param.grad"

    def prepare(self) -> bytes:
        return self._local_grad_mask()

    def complete(self, step: Step, *, signatures_match: bool) -> None:
        step.grad_mask = self._local_grad_mask() if signatures_match else self._resolve_by_owners()
        # Hazard: a rank out of memory must not raise alone. The next status exchange of the step tells all ranks.
        step.outcome.run(lambda: self._copy_to_shards(step.grad_mask))

    def _local_grad_mask(self) -> bytes:
        return bytes([param.grad is not None for param in self._params])

    @torch.no_grad()
    def _copy_to_shards(self, grad_mask: bytes) -> None:
        for bucket in self._layout.buckets:
            self._copy_to_shard(bucket, grad_mask)

    def _resolve_by_owners(self) -> bytes:
        """Let the owners of each parameter decide whether it has a gradient. Call on all ranks.

        Raises `RankMismatchError` on all ranks if the owners of a parameter disagree.
        """
        rank = self._comm.group.rank
        owned = set(self._layout.params_owned_by(rank))
        local_mask = self._local_grad_mask()
        grad_mask = self._comm.all_reduce_any(bytes(flag and i in owned for i, flag in enumerate(local_mask)))
        missing = next((i for i in owned if grad_mask[i] and not local_mask[i]), None)
        problem = "" if missing is None else f"rank {rank} has no gradient of {self._layout.params[missing].label}"
        if self._comm.all_reduce_max([bool(problem)])[0]:
            problems = "; ".join(filter(None, self._comm.all_gather_text(problem)))
            raise RankMismatchError(
                f"step: {problems}, but other ranks have one. Average gradients over all ranks before step()."
            )
        return grad_mask

    def _copy_to_shard(self, bucket: Bucket, grad_mask: bytes) -> None:
        targets, sources = [], []
        for shard in bucket.param_shards_of_rank(self._comm.group.rank):
            if grad_mask[shard.param] and shard.in_param.length:
                grad = self._params[shard.param].grad
                assert grad is not None
                targets.append(self._shard_view(bucket, shard))
                sources.append(flatten_in_memory_order(grad, self._layout.params[shard.param])[slice(*shard.in_param)])
        if targets:
            foreach_copy_(targets, sources)

    def _shard_view(self, bucket: Bucket, param_shard: ParamShard) -> torch.Tensor:
        base = bucket.shards[param_shard.owner].start
        return self.shard(bucket.index)[param_shard.in_bucket.start - base : param_shard.in_bucket.stop - base]
