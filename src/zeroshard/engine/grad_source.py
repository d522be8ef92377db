"""The source of this rank's gradient shards.

`LocalGrads` copies them from `param.grad`, where DDP or the user has averaged them. `GradReducer` (grad_reducer.py)
reduce-scatters gradients itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from .._torch_compat import foreach_copy_
from ..comm.collectives import Comm
from ..config import MasterWeights
from ..errors import RankMismatchError
from ..layout.layout import Bucket, Layout, ParamShard
from ..state.state_dict import flatten_in_memory_order


class GradSource(ABC):
    """One flat gradient shard per bucket. Shards keep their contents until `clear`, as `param.grad` does in torch."""

    source_name: ClassVar[str]
    """Compared across ranks before `synchronize`: all must use the same source."""

    @property
    def is_reducing(self) -> bool:
        """Whether gradients have been sent since the last `synchronize`."""
        return False

    def __init__(self, comm: Comm, masters: MasterWeights | None) -> None:
        self._comm, self._masters = comm, masters
        self._layout = Layout.empty(comm.group.size)
        self._params: list[torch.Tensor] = []
        self._shards: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Add the buckets that `layout` has beyond the current ones. `params` are all parameters, old and new."""
        self._layout, self._params = layout, list(params)

    @abstractmethod
    def signature(self) -> bytes:
        """Return bytes that are equal on all ranks with gradients of the same parameters, to compare across ranks."""

    @abstractmethod
    def synchronize(self, *, signatures_match: bool) -> bytes:
        """Complete the shards of all buckets and return a flag per parameter: whether it has a gradient.

        Call on all ranks, after a comparison of `signature`; `signatures_match` is its result.
        """

    @abstractmethod
    def clear(self, *, set_to_none: bool) -> None:
        """Discard or zero the shards. `zero_grad` calls this in addition to clearing `param.grad`."""

    @abstractmethod
    def grad_tensors(self) -> list[torch.Tensor]:
        """Return all gradients that this rank holds. Valid after `synchronize`."""

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing, by default)
        """Remove placeholders of sharded gradients from `param.grad`."""

    def mark_scaled(self) -> None:  # noqa: B027 (nothing, by default)
        """Record that the caller is about to clip or unscale the gradients in place."""

    def mark_stepped(self, *, was_applied: bool) -> None:  # noqa: B027 (nothing, by default)
        """Record that a step has ended; `was_applied` is False if it was skipped or failed."""

    def shard_tensors(self) -> list[torch.Tensor]:
        """Return the allocated shards, for memory reports."""
        return list(self._shards.values())

    def staging_buffers(self) -> list[torch.Tensor]:
        """Return the buffers in which gradients are packed and received, for memory reports."""
        return []

    def bytes_to_send(self) -> int:
        """Return the bytes that this rank sends to reduce all gradients once."""
        return 0

    def shard(self, bucket_index: int) -> torch.Tensor:
        """Return this rank's gradient shard of a bucket, allocated as zeros on first use."""
        if bucket_index not in self._shards:
            bucket = self._layout.buckets[bucket_index]
            length = bucket.shards[self._comm.group.rank].length
            self._shards[bucket_index] = torch.zeros(length, dtype=self._grad_dtype(bucket), device=bucket.device)
        return self._shards[bucket_index]

    def _grad_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._masters.dtype if self._masters and self._masters.covers(bucket.dtype) else bucket.dtype


class LocalGrads(GradSource):
    """Copies shards from `param.grad`, which is already averaged and equal on all ranks, as DDP leaves it."""

    source_name = "param.grad"

    def signature(self) -> bytes:
        return bytes([param.grad is not None for param in self._params])

    @torch.no_grad()
    def synchronize(self, *, signatures_match: bool) -> bytes:
        grad_mask = self.signature() if signatures_match else self._resolve_by_owners()
        for bucket in self._layout.buckets:
            self._copy_to_shard(bucket, grad_mask)
        return grad_mask

    def clear(self, *, set_to_none: bool) -> None:
        pass

    def grad_tensors(self) -> list[torch.Tensor]:
        return [param.grad for param in self._params if param.grad is not None]

    def _resolve_by_owners(self) -> bytes:
        """Let the owners of each parameter decide whether it has a gradient. Call on all ranks.

        Raises `RankMismatchError` on all ranks if the owners of a parameter disagree.
        """
        rank = self._comm.group.rank
        owned = set(self._layout.params_owned_by(rank))
        local_mask = self.signature()
        grad_mask = self._comm.all_reduce_any(bytes(flag and i in owned for i, flag in enumerate(local_mask)))
        missing = next((i for i in owned if grad_mask[i] and not local_mask[i]), None)
        problem = "" if missing is None else f"rank {rank} has no gradient of {self._layout.params[missing].label}"
        if self._comm.all_reduce_max([bool(problem)])[0]:
            problems = "; ".join(filter(None, self._comm.all_gather_text(problem)))
            raise RankMismatchError(
                f"step: {problems}, but other ranks do. Reduce gradients over all ranks before step()."
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
