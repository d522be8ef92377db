"""Where this rank's slices of the gradients come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..comm.collectives import Comm
from ..config import MasterWeights
from ..errors import RankMismatchError
from ..layout.layout import Bucket, Layout, ParamShard
from ..state.state_dict import flatten_in_memory_order


class GradSource(ABC):
    """One flat shard of gradients a bucket. They stay until `clear`, as gradients do in torch."""

    source_name: ClassVar[str]
    """Said to the other ranks before gradients are settled: all must have the same."""

    @property
    def is_reducing(self) -> bool:
        """Gradients have been sent since they were last settled."""
        return False

    def __init__(self, comm: Comm, masters: MasterWeights | None) -> None:
        self._comm, self._masters = comm, masters
        self._layout = Layout.empty(comm.group.size)
        self._params: list[torch.Tensor] = []
        self._shards: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Take in the buckets that `layout` has beyond the present ones. `params` are all parameters."""
        self._layout, self._params = layout, list(params)

    @abstractmethod
    def signature(self) -> bytes:
        """What this rank has, in a form that is equal on ranks that have gradients of the same parameters."""

    @abstractmethod
    def synchronize(self, *, signatures_match: bool) -> bytes:
        """All gradients are where they belong; a flag for each parameter that has one. On all ranks.

        `same`: all ranks made the same statement.
        """

    @abstractmethod
    def clear(self, *, set_to_none: bool) -> None:
        """What `zero_grad` does beyond `param.grad`."""

    @abstractmethod
    def grad_tensors(self) -> list[torch.Tensor]:
        """All gradients that this rank has, once they are settled."""

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing, by default)
        """Remove what stands in `param.grad` for gradients that are elsewhere."""

    def mark_scaled(self) -> None:  # noqa: B027 (nothing, by default)
        """They are about to be clipped or unscaled where they are."""

    def mark_stepped(self, *, was_applied: bool) -> None:  # noqa: B027 (nothing, by default)
        """A step has used the gradients, or was left out, or has failed."""

    def shard_tensors(self) -> list[torch.Tensor]:
        """The memory of this rank's slices."""
        return list(self._shards.values())

    def staging_buffers(self) -> list[torch.Tensor]:
        """Memory in which gradients are brought together, and received."""
        return []

    def bytes_to_send(self) -> int:
        """What this rank sends when all gradients travel once."""
        return 0

    def shard(self, bucket_index: int) -> torch.Tensor:
        """This rank's slice of a bucket's gradients; zeros where nothing came."""
        if bucket_index not in self._shards:
            it = self._layout.buckets[bucket_index]
            length = it.shards[self._comm.group.rank].length
            self._shards[bucket_index] = torch.zeros(length, dtype=self._grad_dtype(it), device=it.device)
        return self._shards[bucket_index]

    def _grad_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._masters.dtype if self._masters and self._masters.covers(bucket.dtype) else bucket.dtype


class LocalGrads(GradSource):
    """`param.grad` is complete and equal on all ranks, as DDP makes it: a slice is copied when it is needed."""

    source_name = "param.grad"

    def signature(self) -> bytes:
        return bytes([param.grad is not None for param in self._params])

    @torch.no_grad()
    def synchronize(self, *, signatures_match: bool) -> bytes:
        present = self.signature() if signatures_match else self._resolve_by_owners()
        for bucket in self._layout.buckets:
            self._copy_to_shard(bucket, present)
        return present

    def clear(self, *, set_to_none: bool) -> None:
        pass

    def grad_tensors(self) -> list[torch.Tensor]:
        return [param.grad for param in self._params if param.grad is not None]

    def _resolve_by_owners(self) -> bytes:
        """Which gradients there are differs from rank to rank: those that own a parameter decide, if they agree."""
        owned = set(self._layout.params_owned_by(self._comm.group.rank))
        mine = self.signature()
        present = self._comm.all_reduce_any(bytes(flag and i in owned for i, flag in enumerate(mine)))
        lacking = next((i for i in owned if present[i] and not mine[i]), None)
        problem = (
            "" if lacking is None else f"rank {self._comm.group.rank} has no gradient of {self._param_label(lacking)}"
        )
        if self._comm.all_reduce_max([bool(problem)])[0]:
            who = "; ".join(filter(None, self._comm.all_gather_text(problem)))
            raise RankMismatchError(f"step: {who}, and others have. Reduce gradients over all ranks before step().")
        return present

    def _param_label(self, index: int) -> str:
        return self._layout.params[index].label

    def _copy_to_shard(self, bucket: Bucket, grad_mask: bytes) -> None:
        targets, sources = [], []
        for piece in bucket.param_shards_of_rank(self._comm.group.rank):
            if grad_mask[piece.param] and piece.in_param.length:
                grad = self._params[piece.param].grad
                assert grad is not None
                targets.append(self._shard_view(bucket, piece))
                sources.append(flatten_in_memory_order(grad, self._layout.params[piece.param])[slice(*piece.in_param)])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _shard_view(self, bucket: Bucket, param_shard: ParamShard) -> torch.Tensor:
        base = bucket.shards[param_shard.owner].start
        return self.shard(bucket.index)[param_shard.in_bucket.start - base : param_shard.in_bucket.stop - base]
