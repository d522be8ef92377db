"""State from one rank to another: structure first, then the bytes of the tensors in bounded pieces."""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..comm.consensus import Prepared, prepare_all
from ..comm.collectives import Comm, view_as_bytes
from ..comm.work import InFlightWindow
from ..errors import ConfigError
from .._types import MIB, Rank
from .codec import dumps, extract_tensors, loads
from .readers import check_types_allowed, find_custom_types
from .trees import dense_flat_view, map_tensors, snapshot_to_host
from .tensor_utils import map_inner_tensors

MESSAGE_BYTES = 4 * MIB
MAX_IN_FLIGHT_MESSAGES = 2


class StateSender:
    """A value made ready to be sent. Making it finds what cannot be sent, before anything is."""

    def __init__(self, value: Any) -> None:
        skeleton, self._tensors = extract_tensors(value)
        self._header = dumps(skeleton)
        self.custom_types = find_custom_types(self._header)

    @property
    def nbytes(self) -> int:
        """What it takes on the wire."""
        return len(self._header) + sum(tensor.nbytes for tensor in self._tensors)

    def send(self, comm: Comm, to: Rank) -> None:
        """Pairs with `receive` on rank `to`."""
        window = InFlightWindow(MAX_IN_FLIGHT_MESSAGES)
        header = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        window.add(comm.send(torch.tensor([len(header)], device="cpu"), to))
        window.add(comm.send(header, to))
        for piece in _split_into_messages(self._tensors):
            window.wait_for_capacity()
            window.add(comm.send(_concat_message(piece), to))
        window.drain()


class GatherInput(NamedTuple):
    """What one rank gives to a gathering, and what must be equal on all ranks for it."""

    value: Any
    must_match: Sequence[str]


def gather_state(
    comm: Comm,
    call: str,
    make_input: Callable[[], GatherInput],
    to: Rank,
    *,
    on_consensus: Callable[[], object],
    on_value: Callable[[Any], object],
) -> bool:
    """Rank `to` gets to `take` every rank's value in the order of ranks, as a snapshot in host memory.

    It counts in `Comm.everyone`, and gets the values of its own group. Called on all ranks; says whether this is rank
    `to`. What cannot be made or sent on one rank is raised on all, before anything is sent; then `agreed_on` is called.
    """

    def prepare() -> Prepared[tuple[Any, StateSender]]:
        if not isinstance(to, Integral) or to not in range(comm.data_parallel.group.size):
            raise ConfigError(f"{call}: to={to!r:.200} is not a rank of a group of {comm.data_parallel.group.size}")
        value, facts = make_input()
        return Prepared((value, StateSender(value)), [f"to={to}", *facts])

    mine, outbox = prepare_all(comm, call, prepare)
    check_types_allowed(comm, call, outbox.custom_types)
    on_consensus()
    target = comm.data_parallel.group.to_global(to)
    if target not in comm.group.members:
        return False  # which has all of it without us
    with comm.group.failure_detector.abort_on_error():
        if comm.group.global_rank != target:
            outbox.send(comm, comm.group.from_global(target))
            return False
        for rank in range(comm.group.size):
            on_value(snapshot_to_host(mine) if rank == comm.group.rank else receive_state(comm, Rank(rank)))
    return True


def broadcast_state(comm: Comm, value: Any, source: Rank) -> Any:
    """The source's value on all ranks, in host memory of their own. It must be one that was gathered."""
    if comm.group.rank != source:
        return receive_state(comm, source)
    with comm.group.failure_detector.abort_on_error():
        outbox = StateSender(value)
        for rank in range(comm.group.size):
            if rank != source:
                outbox.send(comm, Rank(rank))
    return value


def receive_state(comm: Comm, source: Rank) -> Any:
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

    value = map_tensors(loads(bytes(buffer)), lambda tensor: map_inner_tensors(tensor, allocate))
    window = InFlightWindow(MAX_IN_FLIGHT_MESSAGES)
    for piece in _split_into_messages(tensors):
        window.wait_for_capacity()
        _receive_message(comm, source, piece, window)
    window.drain()
    return value


Message = list[torch.Tensor]
"""Flat tensors that make one message: a slice of a large one, or several small ones."""


def _split_into_messages(tensors: list[torch.Tensor]) -> Iterator[Message]:
    """Cut alike on both sides, since both know shapes, strides and dtypes."""
    small: Message = []
    room = MESSAGE_BYTES
    for tensor in tensors:
        flat = _flatten_dense(tensor)
        if flat.nbytes > room and small:
            yield small
            small, room = [], MESSAGE_BYTES
        if flat.nbytes > MESSAGE_BYTES:
            yield from ([part] for part in torch.split(flat, MESSAGE_BYTES // flat.element_size()))
        elif flat.nbytes:
            small.append(flat)
            room -= flat.nbytes
    if small:
        yield small


def _flatten_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, or a copy without the gaps in it."""
    memory = dense_flat_view(tensor)
    return tensor.contiguous().view(-1) if memory is None else memory


def _concat_message(message: Message) -> torch.Tensor:
    parts = [view_as_bytes(flat.cpu()) for flat in message]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _receive_message(comm: Comm, source: Rank, message: Message, window: InFlightWindow) -> None:
    parts = [view_as_bytes(flat) for flat in message]
    if len(parts) == 1:
        window.add(comm.receive(parts[0], source))
        return
    staging = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device="cpu")
    sizes = [part.nbytes for part in parts]

    def distribute() -> None:
        for part, arrived in zip(parts, torch.split(staging, sizes), strict=True):
            part.copy_(arrived)

    window.add(comm.receive(staging, source), on_done=distribute)
