"""The memory that the inner optimizer updates: this rank's shard of a bucket, or a more precise copy of it."""

from collections.abc import Iterable

import torch

from ..layout.layout import Layout, Piece
from ..policies import MasterWeights
from ..units import Rank
from .segments import Segment
from .store import FlatStore


class ShardMemory:
    """Shards of buckets as they lie in the store."""

    def __init__(self, rank: Rank, store: FlatStore) -> None:
        self._rank, self._store = rank, store
        self._layout = Layout.empty(0)

    def extend(self, layout: Layout) -> None:
        self._layout = layout

    def of(self, bucket: int) -> torch.Tensor:
        """What the inner optimizer is to update."""
        return self.shard(bucket)

    def shard(self, bucket: int) -> torch.Tensor:
        return self._store.buffer(bucket)[slice(*self._layout.buckets[bucket].shards[self._rank])]

    def own(self, piece: Piece) -> torch.Tensor:
        """A piece of this rank as it lies in the store, flat."""
        return self.shard(piece.bucket)[self.span(piece)]

    def precise(self, piece: Piece) -> torch.Tensor | None:  # noqa: ARG002
        """The more precise copy of a piece, if there is one."""
        return None

    def covers(self, bucket: int) -> bool:  # noqa: ARG002
        """Whether there are more precise copies of a bucket."""
        return False

    def before_update(self, params: list[torch.Tensor]) -> None:
        """Take over what was done to parameters since the last update."""

    def after_update(self, segments: Iterable[Segment]) -> None:
        """Bring an update into the parameters' own memory."""

    def remember(self, params: list[torch.Tensor]) -> None:
        """Parameters are now as the last update has left them."""

    def doubt(self) -> None:
        """Parameters may be others than the copies."""

    def span(self, piece: Piece) -> slice:
        """Where a piece lies in its shard."""
        base = self._layout.buckets[piece.bucket].shards[self._rank].start
        return slice(piece.in_bucket.start - base, piece.in_bucket.stop - base)


class MasterMemory(ShardMemory):
    """Copies in another dtype, for buckets that the policy covers.

    A parameter that was changed from outside (a loaded model) is taken over where its value is another one than the
    rounded copy. Changes that autograd does not count, through `param.data`, are not noticed.
    """

    def __init__(self, rank: Rank, store: FlatStore, policy: MasterWeights) -> None:
        super().__init__(rank, store)
        self._policy = policy
        self._copies: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._copies = {bucket: copy for bucket, copy in self._copies.items() if bucket < len(layout.buckets)}

    def of(self, bucket: int) -> torch.Tensor:
        if not self.covers(bucket):
            return self.shard(bucket)
        if bucket not in self._copies:
            self._copies[bucket] = self.shard(bucket).to(self._policy.dtype)
        return self._copies[bucket]

    def covers(self, bucket: int) -> bool:
        return self._policy.covers(self._layout.buckets[bucket].dtype)

    def precise(self, piece: Piece) -> torch.Tensor | None:
        return self.of(piece.bucket)[self.span(piece)] if self.covers(piece.bucket) else None

    @torch.no_grad()
    def before_update(self, params: list[torch.Tensor]) -> None:
        for piece in self._mine():
            if self._versions.get(piece.param) != params[piece.param]._version:
                self._take_over(piece)

    @torch.no_grad()
    def after_update(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if self.covers(segment.bucket):
                self.shard(segment.bucket)[slice(*segment.in_shard)].copy_(segment.param.view(-1))

    def remember(self, params: list[torch.Tensor]) -> None:
        self._versions = {piece.param: params[piece.param]._version for piece in self._mine()}

    def doubt(self) -> None:
        self._versions.clear()

    def _take_over(self, piece: Piece) -> None:
        copy, own = self.of(piece.bucket)[self.span(piece)], self.own(piece)
        copy.copy_(torch.where(copy.to(own.dtype) == own, copy, own.to(copy.dtype)))

    def _mine(self) -> list[Piece]:
        return [
            piece
            for bucket in self._layout.buckets
            for piece in bucket.pieces
            if piece.owner == self._rank and self._policy.covers(bucket.dtype)
        ]
