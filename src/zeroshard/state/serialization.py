"""State from one rank to another: structure first, then the bytes of the tensors in bounded pieces."""

import io
import pickletools
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .._types import MIB, Rank
from ..comm.collectives import Comm, view_as_bytes
from ..comm.consensus import Prepared, prepare_all
from ..comm.work import InFlightWindow
from ..errors import CheckpointError, ConfigError, RankMismatchError
from .tensor_utils import dense_flat_view, is_wrapper_subclass, map_inner_tensors, map_tensors, snapshot_to_host

# ---------------------------------------------------------------------------------------------------------------------
# Objects as bytes that can be read back without running code.


def dumps(value: Any) -> bytes:
    """`value` as `torch.save` writes it, refused unless `torch.load(weights_only=True)` will take it back."""
    try:
        return _dumps_checked(value)
    except Exception as error:
        where, part = _find_unserializable(value)
        reason = str(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{where}: a {type(part).__name__} cannot be sent safely: {reason} "
            "Keep to tensors, numbers, strings and plain containers, or allow its types with "
            "torch.serialization.add_safe_globals on every rank."
        ) from error


def dumps_unchecked(value: Any) -> bytes:
    """`value` of plain containers and numbers, which need no trial."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What was packed, with all tensors in host memory."""
    open_torch_archive(io.BytesIO(data))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def open_torch_archive(stream: Any) -> Any:
    """Torch's reader of what `torch.save` wrote. Raises if its records take more memory than they have in the file.

    Torch never compresses them, but reads some that are: 300 KB would become 300 MB. Old versions do not tell sizes.
    """
    reader: Any = torch._C.PyTorchFileReader(stream)
    stream.seek(0, io.SEEK_END)
    stored = stream.tell()
    stream.seek(0)
    sizes = map(reader.get_record_size, reader.get_all_records()) if hasattr(reader, "get_record_size") else ()
    if (unpacked := sum(sizes)) > stored:
        raise CheckpointError(f"its records take {unpacked} bytes, and it has {stored}")
    return reader


def extract_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with memory-less stand-ins for its tensors, and the tensors in order.

    Sparse tensors and others without plain memory stay where they are. Of those that are made of others, these are
    taken out.
    """
    tensors: list[torch.Tensor] = []

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach()
        tensor = tensor.detach().resolve_conj().resolve_neg()
        tensors.append(tensor)
        if dense_flat_view(tensor) is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return map_tensors(value, lambda tensor: map_inner_tensors(tensor, to_meta)), tensors


def _dumps_checked(value: Any) -> bytes:
    data = dumps_unchecked(value)
    loads(data)
    return data


def _find_unserializable(value: Any, path: str = "") -> tuple[str, Any]:
    """The smallest part of `value` that cannot be packed, and the path to it."""
    for key, part in _children(value):
        try:
            _dumps_checked(part)
        except Exception:
            return _find_unserializable(part, f"{path}[{key!r}]")
    return path or "the value itself", value


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


# ---------------------------------------------------------------------------------------------------------------------
# Can those who receive it read it? Types beyond torch's own must be allowed on every rank.


def find_custom_types(data: bytes) -> list[str]:
    """Names of the types in it that torch's own list does not have, and the user has allowed."""
    return sorted(_pickled_type_names(data) & _user_safe_globals())


def check_types_allowed(comm: Comm, call: str, used_types: Sequence[str]) -> None:
    """Raise on all ranks if one of them sends a type that another has not allowed. Called on all ranks.

    What ranks have allowed and nobody uses may differ: many libraries allow their types when they are imported.
    """
    everyone = comm.data_parallel
    if comm.is_single_rank or not everyone.all_reduce_max([bool(used_types)])[0]:
        return
    wanted = {name for text in everyone.all_gather_text("\n".join(used_types)) for name in text.splitlines()}
    lacking = everyone.all_gather_text(", ".join(sorted(wanted - _user_safe_globals())))
    if any(lacking):
        told = "; ".join(f"rank {rank} has not allowed {names}" for rank, names in enumerate(lacking) if names)
        raise RankMismatchError(f"{call}: {told}. Call torch.serialization.add_safe_globals on every rank.")


def _user_safe_globals() -> set[str]:
    """What the user, or a library, has allowed beyond torch's own list."""
    allowed = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    return {f"{entry.__module__}.{entry.__qualname__}" for entry in allowed}


def _pickled_type_names(data: bytes) -> set[str]:
    """Of the types that are needed to read it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return {
            str(name).replace(" ", ".") for op, name, _ in pickletools.genops(archive.read(path)) if op.name == "GLOBAL"
        }


# ---------------------------------------------------------------------------------------------------------------------
# Nested values with thousands of tensors as a few long ones: copied to host memory, and sent, in a few pieces.


PackedValue = dict[str, Any]
_TENSOR_TAG = "zeroshard.place"
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_COPY_BATCH_BYTES = 32 * MIB
"""What is put together on a device at once."""


def pack_into_buffers(value: Any) -> PackedValue:
    """A copy in host memory that nothing changes later: an outline of it, as bytes, with places in `flats`.

    Raises if it could not be read back without running code.
    """
    packing = _BufferPacker()
    outline = packing.pack(value)
    data = dumps(outline) if packing.has_non_plain_values else dumps_unchecked(outline)
    flats = [_concat_on_host(parts) for parts in packing.tensors_by_dtype.values()]
    types = find_custom_types(data) if packing.has_non_plain_values else []
    return {"outline": torch.frombuffer(bytearray(data), dtype=torch.uint8), "flats": flats, "types": types}


def unpack_from_buffers(packed: PackedValue) -> Any:
    """The value, whose tensors are views of those in `flats`."""
    flats = packed["flats"]

    def view(tensor_ref: tuple[Any, ...]) -> torch.Tensor:
        _, kind, start, shape, stride = tensor_ref
        tensor: torch.Tensor = flats[kind].as_strided(shape, stride, flats[kind].storage_offset() + start)
        return tensor

    return _restore_tensors(loads(bytes(packed["outline"].tolist())), view)


class _BufferPacker:
    def __init__(self) -> None:
        self.tensors_by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self.has_non_plain_values = False
        """There is more in it than plain containers, numbers and tensors."""
        self._numel_by_dtype: dict[torch.dtype, int] = defaultdict(int)
        self._buffer_index: dict[torch.dtype, int] = {}

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value)
        if kind is dict:
            return {key: self.pack(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind([self.pack(item) for item in value])
        return value if kind in _PLAIN_TYPES else self._pack_non_plain(value)

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        memory = _plain_flat_view(tensor)
        if memory is None:
            return self._pack_non_plain(tensor)
        dtype = tensor.dtype
        number = self._buffer_index.setdefault(dtype, len(self._buffer_index))
        self.tensors_by_dtype.setdefault(dtype, []).append(memory)
        start = self._numel_by_dtype[dtype]
        self._numel_by_dtype[dtype] += memory.numel()
        return (_TENSOR_TAG, number, start, tuple(tensor.shape), tensor.stride())

    def _pack_non_plain(self, value: Any) -> Any:
        self.has_non_plain_values = True
        return snapshot_to_host(value)


def _plain_flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The flat memory of a plain tensor; None for others, and for what has gaps."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or is_wrapper_subclass(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return dense_flat_view(tensor) if tensor.numel() else None


def _restore_tensors(value: Any, view: Callable[[tuple[Any, ...]], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _restore_tensors(item, view) for key, item in value.items()}
    if kind is tuple and value and type(value[0]) is str and value[0] == _TENSOR_TAG:
        return view(value)
    return kind([_restore_tensors(item, view) for item in value]) if kind in (list, tuple) else value


def _concat_on_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.empty(sum(part.numel() for part in tensors), dtype=tensors[0].dtype, device="cpu")
    start, room, batch = 0, _COPY_BATCH_BYTES, list[torch.Tensor]()
    for part in tensors:
        if batch and (part.device != batch[0].device or part.nbytes > room):
            start, room = _copy_batch(batch, flat, start), _COPY_BATCH_BYTES
        batch.append(part)
        room -= part.nbytes
    _copy_batch(batch, flat, start)
    return flat


def _copy_batch(batch: list[torch.Tensor], buffer: torch.Tensor, start: int) -> int:
    """Copies, and empties the batch; where the next begins."""
    target = buffer[start : start + sum(part.numel() for part in batch)]
    if batch[0].device.type == "cpu":
        torch.cat(batch, out=target)
    else:
        target.copy_(batch[0] if len(batch) == 1 else torch.cat(batch))
    batch.clear()
    return start + target.numel()


# ---------------------------------------------------------------------------------------------------------------------
# State from one rank to another: structure first, then the bytes of the tensors in bounded pieces.


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
