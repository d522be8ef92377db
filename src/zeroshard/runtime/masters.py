"""The memory that the inner optimizer updates: this rank's shard of a bucket, or a more precise copy of it."""

from collections.abc import Iterable, Sequence

import torch

from ..labels import Clock, Label
from ..layout.layout import Layout, Piece
from ..policies import MasterWeights
from ..units import Rank, Span
from .host import Host, Hosts
from .segments import Segment
from .store import FlatStore


def memory_of(
    rank: Rank, store: FlatStore, masters: MasterWeights | None, hosts: Hosts | None, clock: Clock
) -> "ShardMemory":
    """The kind of memory that policies ask for."""
    if masters is None:
        return ShardMemory(rank, store, hosts)
    if hosts is None:
        return MasterMemory(rank, store, masters, clock)
    return HostMasters(rank, store, masters, clock, hosts)


class ShardMemory:
    """Shards of buckets as they lie in the store."""

    def __init__(self, rank: Rank, store: FlatStore, hosts: Hosts | None = None) -> None:
        """`hosts`: state rests there, not where the parameters are."""
        self.rank, self._store, self.hosts = rank, store, hosts
        self._layout = Layout.empty(0)

    def extend(self, layout: Layout) -> None:
        self._layout = layout

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A part of a shard, which the inner optimizer is to update."""
        return self.of(bucket)[slice(*span)].as_strided(shape, stride)

    def of(self, bucket: int) -> torch.Tensor:
        """What the inner optimizer is to update."""
        return self.shard(bucket)

    def zeros(self, bucket: int, span: slice, dtype: torch.dtype) -> torch.Tensor:
        """Memory for state of a part of a shard, where state rests."""
        like = self.shard(bucket)[span]
        if self.hosts is None:
            return torch.zeros_like(like, dtype=dtype)
        return self.hosts.of(like.device).zeros(like.numel(), dtype)

    def shard(self, bucket: int) -> torch.Tensor:
        return self._store.buffer(bucket)[slice(*self._layout.buckets[bucket].shards[self.rank])]

    def own(self, piece: Piece) -> torch.Tensor:
        """A piece of this rank as it lies in the store, flat."""
        return self.shard(piece.bucket)[self.span(piece)]

    def precise(self, piece: Piece) -> torch.Tensor | None:  # noqa: ARG002
        """The more precise copy of a piece, if there is one."""
        return None

    def covers(self, bucket: int) -> bool:  # noqa: ARG002
        """Whether there are more precise copies of a bucket."""
        return False

    def copies(self) -> list[torch.Tensor]:
        """All more precise copies, where they rest."""
        return []

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
        base = self._layout.buckets[piece.bucket].shards[self.rank].start
        return slice(piece.in_bucket.start - base, piece.in_bucket.stop - base)


class MasterMemory(ShardMemory):
    """Copies in another dtype, for buckets that the policy covers.

    A parameter that was changed from outside (a loaded model) is taken over where its value is another one than the
    rounded copy. Changes that autograd does not count, through `param.data`, are not noticed.
    """

    def __init__(
        self, rank: Rank, store: FlatStore, policy: MasterWeights, clock: Clock, hosts: Hosts | None = None
    ) -> None:
        super().__init__(rank, store, hosts)
        self._policy, self._clock = policy, clock
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

    def copies(self) -> list[torch.Tensor]:
        return list(self._copies.values())

    @torch.no_grad()
    def before_update(self, params: list[torch.Tensor]) -> None:
        for piece in self._mine():
            if self._versions.get(piece.param) != params[piece.param]._version:
                self._take_over(piece)

    @torch.no_grad()
    def after_update(self, segments: Iterable[Segment]) -> None:
        with self._clock.part(Label.ROUND):
            for segment in segments:
                if self.covers(segment.bucket):
                    self.shard(segment.bucket)[slice(*segment.in_shard)].copy_(segment.param.view(-1))

    def remember(self, params: list[torch.Tensor]) -> None:
        self._versions = {piece.param: params[piece.param]._version for piece in self._mine()}

    def doubt(self) -> None:
        self._versions.clear()

    def _take_over(self, piece: Piece) -> None:
        copy = self.precise(piece)
        assert copy is not None, "of those that there are copies of"
        own = self.own(piece).to(copy.device)
        copy.copy_(torch.where(copy.to(own.dtype) == own, copy, own.to(copy.dtype)))

    def _mine(self) -> list[Piece]:
        return [
            piece
            for bucket in self._layout.buckets
            if self._policy.covers(bucket.dtype)
            for piece in bucket.pieces_of(self.rank)
        ]


class HostMasters(MasterMemory):
    """Copies that rest in host memory. On the device they have memory from `fetch` to `stow` only."""

    hosts: Hosts

    def __init__(self, rank: Rank, store: FlatStore, policy: MasterWeights, clock: Clock, hosts: Hosts) -> None:
        super().__init__(rank, store, policy, clock, hosts)
        self._homes: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._homes = {bucket: home for bucket, home in self._homes.items() if bucket in self._copies}

    def of(self, bucket: int) -> torch.Tensor:
        if self.covers(bucket) and bucket not in self._copies:
            copy = super().of(bucket)
            self._homes[bucket] = self.hosts.of(copy.device).room(copy).copy_(copy)
            _free(copy)
        return super().of(bucket)

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        if not self.covers(bucket) or self._is_here(bucket):
            return super().view(bucket, span, shape, stride)
        copy = self.of(bucket)
        _make_room(copy)  # a view of what has no memory cannot be made
        part = super().view(bucket, span, shape, stride)
        _free(copy)
        return part

    def after_update(self, segments: Iterable[Segment]) -> None:
        """Those that are here. The others have been here, and were brought there then."""
        here = (it for it in segments if self.covers(it.bucket) and self._is_here(it.bucket))
        super().after_update(here)

    def precise(self, piece: Piece) -> torch.Tensor | None:
        if not self.covers(piece.bucket):
            return None
        self.of(piece.bucket)
        return self._homes[piece.bucket][self.span(piece)]

    def copies(self) -> list[torch.Tensor]:
        return list(self._homes.values())

    def fetch(self, bucket: int, host: Host) -> None:
        """Start bringing the copies of a bucket to the device."""
        if self.covers(bucket):
            _make_room(self._copies[bucket])
            host.fill(self._copies[bucket], self._homes[bucket])

    def stow(self, bucket: int, host: Host) -> None:
        """Start bringing them back."""
        if self.covers(bucket):
            host.take(self._copies[bucket], self._homes[bucket])
            _free(self._copies[bucket])

    def _is_here(self, bucket: int) -> bool:
        return self.of(bucket).untyped_storage().nbytes() > 0


def _make_room(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


def _free(tensor: torch.Tensor) -> None:
    """Give back its memory. Views of it stay, and must not be used."""
    tensor.untyped_storage().resize_(0)
