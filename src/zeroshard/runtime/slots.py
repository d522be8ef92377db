"""A bucket as gradients see it, and one round of them on its way."""

from typing import NamedTuple

import torch

from ..comm.ways import Arriving, ShardWay
from ..labels import Clock, Label
from ..layout.layout import Bucket, Layout
from ..policies import sum_dtype
from .packing import Buffer, Grads, Packing, Pool


class Slot:
    """A bucket as gradients see it."""

    def __init__(self, layout: Layout, bucket: Bucket, way: ShardWay, pool: Pool, clock: Clock) -> None:
        self.bucket, self._way, self._pool, self._clock = bucket.index, way, pool, clock
        self.packs = len(bucket.rooms) > 1
        """Gradients are copied together before they are sent."""
        share = 1 / way.ranks
        # What would be rounded more than once, or is sent as it lies, is better multiplied after it was added up.
        exact = pool.dtype == bucket.dtype == sum_dtype(pool.dtype)
        before = share if way.adds_locally and exact and self.packs else 1.0
        self._share_after = share / before
        self.packing = Packing(layout, bucket, pool.dtype, padded=way.equal_shards, share=before)
        self.places = self.packing.places
        self.holds = False
        """Its shard has gradients, to which further ones are added."""
        self.members = [place.param for place in self.places]
        self.expected = self.missing = 0
        """Parameters that train, and those of them of which the gradients are awaited."""
        if self.packs:
            pool.make_room(self.packing.numel)
        self._number = {param: place for place, param in enumerate(self.members)}
        self._filling: Buffer | None = None
        self._put: set[int] = set()
        self._own: Buffer | None = None

    def at_least(self, nbytes: int) -> list[int]:
        """Parameters of so many bytes or more."""
        return [place.param for place in self.places if place.spec.extent * place.spec.dtype.itemsize >= nbytes]

    @property
    def waiting(self) -> list[int]:
        """Parameters whose gradients have been copied already, and wait for the others."""
        return [self.members[place] for place in self._put]

    def put_in(self, param: int, grad: torch.Tensor) -> None:
        """Copy a gradient to where it will be sent from, so that it can be freed."""
        place = self._number[param]
        with self._clock.part(Label.PACK, self.bucket):
            self.packing.put(place, grad, self._buffer())
        self._put.add(place)

    def send(self, grads: Grads, target: "Target", *, ours: bool) -> "Sending":
        """Send them, with those that were put in.

        `ours`: nobody else holds them; else the next backward pass may add to them under way.
        """
        if not self.packs:
            (grad,) = grads = list(grads)
            if ours and (flat := self.packing.as_it_lies(grad)) is not None:
                return self._start(flat, target, None)
        buffer = self._buffer()
        with self._clock.part(Label.PACK, self.bucket):
            flat = self.packing.pack(grads, buffer, self._put)
        self._filling, self._put = None, set()
        return self._start(flat, target, buffer)

    def send_zeros(self, target: "Target") -> "Sending":
        """Send what nobody will use."""
        buffer = self._pool.take(self.packing.numel)
        flat = self.packing.pack([None] * len(self.places), buffer)
        return self._start(flat, target, buffer)._replace(wanted=False)

    def _start(self, flat: torch.Tensor, target: "Target", buffer: Buffer | None) -> "Sending":
        with self._clock.part(Label.SEND_GRADS, self.bucket):
            arriving = self._way.reduce(flat, self.packing.shards, target.memory, self._share_after)
        return Sending(self, arriving, target, buffer)

    def bytes_to_send(self, into: torch.dtype) -> int:
        """What this rank sends of it in a round. `into`: what its shard of gradients is."""
        return self._way.bytes_to_reduce(self.packing.shards, self._pool.dtype, into)

    def filling(self) -> list[torch.Tensor]:
        """Memory that waits for further gradients."""
        return [] if self._filling is None else [self._filling.flat]

    def clear(self, *, to_none: bool) -> None:
        """Forget what was put in, or make it zero."""
        if to_none:
            self._put.clear()
        for place in self._put:
            self.places[place].of(self._buffer().flat).zero_()

    def give_back(self, sending: "Sending") -> None:
        if sending.buffer is not None:
            self._pool.give_back(sending.buffer)

    def as_buffer(self, shard: torch.Tensor) -> Buffer:
        """The shard as something to pack into, with views made once."""
        if self._own is None or self._own.flat is not shard:
            self._own = Buffer(shard)
        return self._own

    def _buffer(self) -> Buffer:
        if self._filling is None:
            self._filling = self._pool.take(self.packing.numel)
        return self._filling


class Target(NamedTuple):
    """Where the average is made."""

    memory: torch.Tensor
    is_shard: bool
    """It is the shard itself; else it has to be brought there."""


class Sending(NamedTuple):
    slot: Slot
    arriving: Arriving
    target: Target
    buffer: Buffer | None
    """What must be given back once it has arrived."""
    wanted: bool = True
    """It was not cleared on the way."""
