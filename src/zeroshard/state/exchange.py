"""State from one rank to another: structure first, then the bytes of the tensors in bounded pieces."""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..comm.agreement import Proposal, agreed
from ..comm.collectives import Comm, as_bytes
from ..comm.pending import Window
from ..errors import ConfigError
from ..units import MIB, Rank
from .codec import pack, take_out_tensors, unpack
from .readers import require_readers, types_in
from .trees import dense_memory, map_tensors, snapshot
from .wrapped import on_plain

PIECE_BYTES = 4 * MIB
IN_FLIGHT = 2


class Outbox:
    """A value made ready to be sent. Making it finds what cannot be sent, before anything is."""

    def __init__(self, value: Any) -> None:
        skeleton, self._tensors = take_out_tensors(value)
        self._header = pack(skeleton)
        self.types = types_in(self._header)

    @property
    def nbytes(self) -> int:
        """What it takes on the wire."""
        return len(self._header) + sum(tensor.nbytes for tensor in self._tensors)

    def send(self, comm: Comm, to: Rank) -> None:
        """Pairs with `receive` on rank `to`."""
        window = Window(IN_FLIGHT)
        header = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        window.add(comm.send(torch.tensor([len(header)], device="cpu"), to))
        window.add(comm.send(header, to))
        for piece in _pieces(self._tensors):
            window.make_room()
            window.add(comm.send(_gathered(piece), to))
        window.drain()


class Share(NamedTuple):
    """What one rank gives to a gathering, and what must be equal on all ranks for it."""

    value: Any
    facts: Sequence[str]


def gather(
    comm: Comm,
    call: str,
    share: Callable[[], Share],
    to: Rank,
    *,
    agreed_on: Callable[[], object],
    take: Callable[[Any], object],
) -> bool:
    """Rank `to` gets to `take` every rank's value in the order of ranks, as a snapshot in host memory.

    It counts in `Comm.everyone`, and gets the values of its own group. Called on all ranks; says whether this is rank
    `to`. What cannot be made or sent on one rank is raised on all, before anything is sent; then `agreed_on` is called.
    """

    def propose() -> Proposal[tuple[Any, Outbox]]:
        if not isinstance(to, Integral) or to not in range(comm.everyone.group.size):
            raise ConfigError(f"{call}: to={to!r:.200} is not a rank of a group of {comm.everyone.group.size}")
        value, facts = share()
        return Proposal((value, Outbox(value)), [f"to={to}", *facts])

    mine, outbox = agreed(comm, call, propose)
    require_readers(comm, call, outbox.types)
    agreed_on()
    target = comm.everyone.group.to_global(to)
    if target not in comm.group.members:
        return False  # which has all of it without us
    with comm.group.line.relied_on():
        if comm.group.global_rank != target:
            outbox.send(comm, comm.group.from_global(target))
            return False
        for rank in range(comm.group.size):
            take(snapshot(mine) if rank == comm.group.rank else receive(comm, Rank(rank)))
    return True


def bring_to_all(comm: Comm, value: Any, source: Rank) -> Any:
    """The source's value on all ranks, in host memory of their own. It must be one that was gathered."""
    if comm.group.rank != source:
        return receive(comm, source)
    with comm.group.line.relied_on():
        outbox = Outbox(value)
        for rank in range(comm.group.size):
            if rank != source:
                outbox.send(comm, Rank(rank))
    return value


def receive(comm: Comm, source: Rank) -> Any:
    """What `source` sends from its `Outbox`, in host memory of its own."""
    size = torch.empty(1, dtype=torch.int64, device="cpu")
    comm.receive(size, source).wait()
    buffer = bytearray(int(size.item()))
    comm.receive(torch.frombuffer(buffer, dtype=torch.uint8), source).wait()
    tensors: list[torch.Tensor] = []

    def allocate(meta: torch.Tensor) -> torch.Tensor:
        if not meta.is_meta:
            return meta
        tensors.append(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu"))
        return tensors[-1]

    value = map_tensors(unpack(bytes(buffer)), lambda tensor: on_plain(tensor, allocate))
    window = Window(IN_FLIGHT)
    for piece in _pieces(tensors):
        window.make_room()
        _receive_piece(comm, source, piece, window)
    window.drain()
    return value


Piece = list[torch.Tensor]
"""Flat tensors that make one message: a slice of a large one, or several small ones."""


def _pieces(tensors: list[torch.Tensor]) -> Iterator[Piece]:
    """Cut alike on both sides, since both know shapes, strides and dtypes."""
    small: Piece = []
    room = PIECE_BYTES
    for tensor in tensors:
        flat = _flat(tensor)
        if flat.nbytes > room and small:
            yield small
            small, room = [], PIECE_BYTES
        if flat.nbytes > PIECE_BYTES:
            yield from ([part] for part in torch.split(flat, PIECE_BYTES // flat.element_size()))
        elif flat.nbytes:
            small.append(flat)
            room -= flat.nbytes
    if small:
        yield small


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, or a copy without the gaps in it."""
    memory = dense_memory(tensor)
    return tensor.contiguous().view(-1) if memory is None else memory


def _gathered(piece: Piece) -> torch.Tensor:
    parts = [as_bytes(flat.cpu()) for flat in piece]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _receive_piece(comm: Comm, source: Rank, piece: Piece, window: Window) -> None:
    parts = [as_bytes(flat) for flat in piece]
    if len(parts) == 1:
        window.add(comm.receive(parts[0], source))
        return
    staging = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device="cpu")
    sizes = [part.nbytes for part in parts]

    def distribute() -> None:
        for part, arrived in zip(parts, torch.split(staging, sizes), strict=True):
            part.copy_(arrived)

    window.add(comm.receive(staging, source), then=distribute)
