"""The memory that the inner optimizer updates: this rank's shard of a bucket, or a more precise copy of it."""

from collections.abc import Iterable, Sequence

import torch

from ..profiling import Phase, StepProfiler
from ..layout.layout import Layout, ParamShard
from ..policies import MasterWeights
from .._types import Rank, Span
from .host_buffers import HostTransfer, HostTransfers
from .flat_params import FlatParam
from .param_store import FlatParamBuffers


def make_storage(
    rank: Rank,
    param_store: FlatParamBuffers,
    masters: MasterWeights | None,
    host_transfers: HostTransfers | None,
    profiler: StepProfiler,
) -> "ShardStorage":
    """The kind of memory that policies ask for."""
    if masters is None:
        return ShardStorage(rank, param_store, host_transfers)
    if host_transfers is None:
        return MasterStorage(rank, param_store, masters, profiler)
    return OffloadedMasterStorage(rank, param_store, masters, profiler, host_transfers)


class ShardStorage:
    """Shards of buckets as they lie in the store."""

    def __init__(self, rank: Rank, param_store: FlatParamBuffers, host_transfers: HostTransfers | None = None) -> None:
        """`hosts`: state rests there, not where the parameters are."""
        self.rank, self._param_store, self.host_transfers = rank, param_store, host_transfers
        self._layout = Layout.empty(0)

    def extend(self, layout: Layout) -> None:
        self._layout = layout

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A part of a shard, which the inner optimizer is to update."""
        return self.update_target(bucket)[slice(*span)].as_strided(shape, stride)

    def update_target(self, bucket: int) -> torch.Tensor:
        """What the inner optimizer is to update."""
        return self.shard(bucket)

    def allocate_state(self, bucket: int, span: slice, dtype: torch.dtype) -> torch.Tensor:
        """Memory for state of a part of a shard, where state rests."""
        like = self.shard(bucket)[span]
        if self.host_transfers is None:
            return torch.zeros_like(like, dtype=dtype)
        return self.host_transfers.for_device(like.device).zeros(like.numel(), dtype)

    def shard(self, bucket: int) -> torch.Tensor:
        return self._param_store.buffer(bucket)[slice(*self._layout.buckets[bucket].shards[self.rank])]

    def param_view(self, param_shard: ParamShard) -> torch.Tensor:
        """A piece of this rank as it lies in the store, flat."""
        return self.shard(param_shard.bucket)[self.slice_in_shard(param_shard)]

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:  # noqa: ARG002
        """The more precise copy of a piece, if there is one."""
        return None

    def has_master(self, bucket: int) -> bool:  # noqa: ARG002
        """Whether there are more precise copies of a bucket."""
        return False

    def master_tensors(self) -> list[torch.Tensor]:
        """All more precise copies, where they rest."""
        return []

    def sync_user_edits(self, params: list[torch.Tensor]) -> None:
        """Take over what was done to parameters since the last update."""

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Bring an update into the parameters' own memory."""

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        """Parameters are now as the last update has left them."""

    def invalidate_masters(self) -> None:
        """Parameters may be others than the copies."""

    def slice_in_shard(self, param_shard: ParamShard) -> slice:
        """Where a piece lies in its shard."""
        base = self._layout.buckets[param_shard.bucket].shards[self.rank].start
        return slice(param_shard.in_bucket.start - base, param_shard.in_bucket.stop - base)


class MasterStorage(ShardStorage):
    """Copies in another dtype, for buckets that the policy covers.

    A parameter that was changed from outside (a loaded model) is taken over where its value is another one than the
    rounded copy. Changes that autograd does not count, through `param.data`, are not noticed.
    """

    def __init__(
        self,
        rank: Rank,
        param_store: FlatParamBuffers,
        policy: MasterWeights,
        profiler: StepProfiler,
        host_transfers: HostTransfers | None = None,
    ) -> None:
        super().__init__(rank, param_store, host_transfers)
        self._policy, self._profiler = policy, profiler
        self._masters: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._masters = {bucket: copy for bucket, copy in self._masters.items() if bucket < len(layout.buckets)}

    def update_target(self, bucket: int) -> torch.Tensor:
        if not self.has_master(bucket):
            return self.shard(bucket)
        if bucket not in self._masters:
            self._masters[bucket] = self.shard(bucket).to(self._policy.dtype)
        return self._masters[bucket]

    def has_master(self, bucket: int) -> bool:
        return self._policy.covers(self._layout.buckets[bucket].dtype)

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:
        return (
            self.update_target(param_shard.bucket)[self.slice_in_shard(param_shard)]
            if self.has_master(param_shard.bucket)
            else None
        )

    def master_tensors(self) -> list[torch.Tensor]:
        return list(self._masters.values())

    @torch.no_grad()
    def sync_user_edits(self, params: list[torch.Tensor]) -> None:
        for piece in self._owned_param_shards():
            if self._versions.get(piece.param) != params[piece.param]._version:
                self._refresh_master(piece)

    @torch.no_grad()
    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        with self._profiler.phase(Phase.ROUND_MASTER_WEIGHTS):
            for segment in flat_params:
                if self.has_master(segment.bucket):
                    self.shard(segment.bucket)[slice(*segment.in_shard)].copy_(segment.param.view(-1))

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        self._versions = {piece.param: params[piece.param]._version for piece in self._owned_param_shards()}

    def invalidate_masters(self) -> None:
        self._versions.clear()

    def _refresh_master(self, param_shard: ParamShard) -> None:
        copy = self.master_view(param_shard)
        assert copy is not None, "of those that there are copies of"
        own = self.param_view(param_shard).to(copy.device)
        copy.copy_(torch.where(copy.to(own.dtype) == own, copy, own.to(copy.dtype)))

    def _owned_param_shards(self) -> list[ParamShard]:
        return [
            piece
            for bucket in self._layout.buckets
            if self._policy.covers(bucket.dtype)
            for piece in bucket.param_shards_of_rank(self.rank)
        ]


class OffloadedMasterStorage(MasterStorage):
    """Copies that rest in host memory. On the device they have memory from `fetch` to `stow` only."""

    host_transfers: HostTransfers

    def __init__(
        self,
        rank: Rank,
        param_store: FlatParamBuffers,
        policy: MasterWeights,
        profiler: StepProfiler,
        host_transfers: HostTransfers,
    ) -> None:
        super().__init__(rank, param_store, policy, profiler, host_transfers)
        self._host_masters: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._host_masters = {bucket: home for bucket, home in self._host_masters.items() if bucket in self._masters}

    def update_target(self, bucket: int) -> torch.Tensor:
        if self.has_master(bucket) and bucket not in self._masters:
            copy = super().update_target(bucket)
            self._host_masters[bucket] = self.host_transfers.for_device(copy.device).allocate(copy).copy_(copy)
            _free_memory(copy)
        return super().update_target(bucket)

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        if not self.has_master(bucket) or self._is_on_device(bucket):
            return super().view(bucket, span, shape, stride)
        copy = self.update_target(bucket)
        _allocate_memory(copy)  # a view of what has no memory cannot be made
        part = super().view(bucket, span, shape, stride)
        _free_memory(copy)
        return part

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Those that are here. The others have been here, and were brought there then."""
        here = (it for it in flat_params if self.has_master(it.bucket) and self._is_on_device(it.bucket))
        super().write_params(here)

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:
        if not self.has_master(param_shard.bucket):
            return None
        self.update_target(param_shard.bucket)
        return self._host_masters[param_shard.bucket][self.slice_in_shard(param_shard)]

    def master_tensors(self) -> list[torch.Tensor]:
        return list(self._host_masters.values())

    def prefetch(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start bringing the copies of a bucket to the device."""
        if self.has_master(bucket):
            _allocate_memory(self._masters[bucket])
            host_transfer.prefetch_into(self._masters[bucket], self._host_masters[bucket])

    def write_back(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start bringing them back."""
        if self.has_master(bucket):
            host_transfer.write_back(self._masters[bucket], self._host_masters[bucket])
            _free_memory(self._masters[bucket])

    def _is_on_device(self, bucket: int) -> bool:
        return self.update_target(bucket).untyped_storage().nbytes() > 0


def _allocate_memory(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


def _free_memory(tensor: torch.Tensor) -> None:
    """Give back its memory. Views of it stay, and must not be used."""
    tensor.untyped_storage().resize_(0)
