"""Serialize nested values and move them between ranks, without executing code when they are read back.

A value is sent as a header, its structure with meta tensors as placeholders, followed by the bytes of its tensors in
messages of at most `MESSAGE_BYTES`. Both sides derive the same messages from the header.
"""

import io
import pickletools
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, BinaryIO, NamedTuple

import torch

from .._torch_compat import open_archive
from .._types import MIB, Rank
from ..comm.collectives import Comm, view_as_bytes
from ..comm.consensus import Prepared, prepare_all
from ..comm.work import InFlightWindow
from ..errors import CheckpointError, ConfigError, RankMismatchError
from .tensor_utils import dense_flat_view, is_wrapper_subclass, map_inner_tensors, map_tensors, snapshot_to_host

# ---------------------------------------------------------------------------------------------------------------------
# Bytes that `torch.load(weights_only=True)` reads back.


def dumps(value: Any) -> bytes:
    """Serialize `value` with `torch.save`. Raises `CheckpointError` if `loads` could not read it back."""
    try:
        return _dumps_checked(value)
    except Exception as error:
        path, culprit = _find_unserializable(value)
        reason = str(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path}: a {type(culprit).__name__} cannot be sent safely: {reason.rstrip('.')}. Use tensors, numbers, "
            "strings and plain containers, or allow the type with torch.serialization.add_safe_globals on every rank."
        ) from error


def dumps_unchecked(value: Any) -> bytes:
    """Serialize plain containers and numbers, which need no check."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Deserialize the output of `dumps`, with all tensors in host memory."""
    open_torch_archive(io.BytesIO(data))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def open_torch_archive(stream: Any) -> Any:
    """Open a `torch.save` archive with torch's reader, after `check_record_sizes`."""
    check_record_sizes(stream)
    return open_archive(stream)


def check_record_sizes(stream: BinaryIO) -> None:
    """Raise `CheckpointError` unless the records of a `torch.save` archive fit into its bytes. Rewinds the stream.

    Torch never compresses records, but does read compressed ones: 300 KB could become 300 MB.
    Hazard: torch's reader allocates the size that the archive claims for a record, for some as soon as it opens it.
    """
    stream.seek(0, io.SEEK_END)
    file_nbytes = stream.tell()
    try:
        with zipfile.ZipFile(_SizedStream(stream, file_nbytes)) as archive:
            record_nbytes = sum(record.file_size for record in archive.infolist())
    except Exception as error:
        raise CheckpointError(f"expected an archive of torch.save, got another format: {error}") from error
    stream.seek(0)
    if record_nbytes > file_nbytes:
        raise CheckpointError(
            f"expected records of at most {file_nbytes} bytes, the size of the file, got {record_nbytes}"
        )


class _SizedStream(io.RawIOBase):
    """Reads a stream of known size. Hazard: DCP's view of a file ignores the sign of offsets from its end."""

    def __init__(self, stream: BinaryIO, nbytes: int) -> None:
        self._stream, self._nbytes, self._position = stream, nbytes, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        )
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(0, self._nbytes - self._position)
        self._stream.seek(self._position)
        data = self._stream.read(remaining if size is None or size < 0 else min(size, remaining))
        self._position += len(data)
        return data


def extract_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return `value` with meta tensors as placeholders, and its tensors in order.

    Sparse and quantized tensors stay in `value`. Wrapper subclasses stay too, with placeholders for inner tensors.
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
    """Return the path to the innermost value that cannot be serialized, and that value."""
    for key, child in _children(value):
        try:
            _dumps_checked(child)
        except Exception:
            return _find_unserializable(child, f"{path}[{key!r}]")
    return path or "the value itself", value


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


# ---------------------------------------------------------------------------------------------------------------------
# Custom types: allowed by `torch.serialization.add_safe_globals`, on every rank.


def find_custom_types(data: bytes) -> list[str]:
    """Return the names of serialized types that the user allowed in addition to torch's own list."""
    return sorted(_pickled_type_names(data) & _user_safe_globals())


def check_types_allowed(comm: Comm, call: str, used_types: Sequence[str]) -> None:
    """Raise `RankMismatchError` on all ranks if one sends a type that another has not allowed. Call on all ranks.

    Unused types may differ between ranks: many libraries allow their types on import.
    """
    data_parallel = comm.data_parallel
    if comm.is_single_rank or not data_parallel.all_reduce_max([bool(used_types)])[0]:
        return
    required = {name for text in data_parallel.all_gather_text("\n".join(used_types)) for name in text.splitlines()}
    missing = data_parallel.all_gather_text(", ".join(sorted(required - _user_safe_globals())))
    if any(missing):
        reasons = "; ".join(f"rank {rank} has not allowed {names}" for rank, names in enumerate(missing) if names)
        raise RankMismatchError(f"{call}: {reasons}. Call torch.serialization.add_safe_globals on every rank.")


def _user_safe_globals() -> set[str]:
    """Return the names of types that the user, or a library, allowed in addition to torch's own list."""
    allowed = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    return {f"{entry.__module__}.{entry.__qualname__}" for entry in allowed}


def _pickled_type_names(data: bytes) -> set[str]:
    """Return the names of all types that reading `data` requires."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return {
            str(name).replace(" ", ".") for op, name, _ in pickletools.genops(archive.read(path)) if op.name == "GLOBAL"
        }


# ---------------------------------------------------------------------------------------------------------------------
# Packed values: thousands of small tensors in one host buffer per dtype, for few copies and few messages.


PackedValue = dict[str, Any]
"""`outline`: the serialized structure, with references into `flats`, one buffer per dtype; `types`: custom types."""
_TENSOR_TAG = "zeroshard.place"
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_COPY_BATCH_BYTES = 32 * MIB
"""How much is concatenated on a device before it is copied to the host."""


def pack_into_buffers(value: Any) -> PackedValue:
    """Copy `value` to host memory, independent of later changes.

    Raises `CheckpointError` if it could not be read back without executing code.
    """
    packer = _BufferPacker()
    outline = packer.pack(value)
    data = dumps(outline) if packer.has_non_plain_values else dumps_unchecked(outline)
    flats = [_concat_on_host(tensors) for tensors in packer.tensors_by_dtype.values()]
    types = find_custom_types(data) if packer.has_non_plain_values else []
    return {"outline": torch.frombuffer(bytearray(data), dtype=torch.uint8), "flats": flats, "types": types}


def unpack_from_buffers(packed: PackedValue) -> Any:
    """Return the packed value. Its tensors are views of the packed buffers."""
    flats = packed["flats"]

    def view(tensor_ref: tuple[Any, ...]) -> torch.Tensor:
        _, index, start, shape, stride = tensor_ref
        tensor: torch.Tensor = flats[index].as_strided(shape, stride, flats[index].storage_offset() + start)
        return tensor

    return _restore_tensors(loads(bytes(packed["outline"].tolist())), view)


class _BufferPacker:
    def __init__(self) -> None:
        self.tensors_by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self.has_non_plain_values = False
        """Whether the value has more than plain containers, numbers and tensors."""
        self._numel_by_dtype: dict[torch.dtype, int] = defaultdict(int)
        self._buffer_index: dict[torch.dtype, int] = {}

    def pack(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value)
        if cls is dict:
            return {key: self.pack(item) for key, item in value.items()}
        if cls is list or cls is tuple:
            return cls([self.pack(item) for item in value])
        return value if cls in _PLAIN_TYPES else self._pack_non_plain(value)

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        flat = _plain_flat_view(tensor)
        if flat is None:
            return self._pack_non_plain(tensor)
        dtype = tensor.dtype
        index = self._buffer_index.setdefault(dtype, len(self._buffer_index))
        self.tensors_by_dtype.setdefault(dtype, []).append(flat)
        start = self._numel_by_dtype[dtype]
        self._numel_by_dtype[dtype] += flat.numel()
        return (_TENSOR_TAG, index, start, tuple(tensor.shape), tensor.stride())

    def _pack_non_plain(self, value: Any) -> Any:
        self.has_non_plain_values = True
        return snapshot_to_host(value)


def _plain_flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a flat view of a plain tensor; None for other tensors, and for those with gaps."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or is_wrapper_subclass(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return dense_flat_view(tensor) if tensor.numel() else None


def _restore_tensors(value: Any, view: Callable[[tuple[Any, ...]], torch.Tensor]) -> Any:
    cls = type(value)
    if cls is dict:
        return {key: _restore_tensors(item, view) for key, item in value.items()}
    if cls is tuple and value and type(value[0]) is str and value[0] == _TENSOR_TAG:
        return view(value)
    return cls([_restore_tensors(item, view) for item in value]) if cls in (list, tuple) else value


def _concat_on_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    buffer = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="cpu")
    start, free_bytes, batch = 0, _COPY_BATCH_BYTES, list[torch.Tensor]()
    for tensor in tensors:
        if batch and (tensor.device != batch[0].device or tensor.nbytes > free_bytes):
            start, free_bytes = _copy_batch(batch, buffer, start), _COPY_BATCH_BYTES
        batch.append(tensor)
        free_bytes -= tensor.nbytes
    _copy_batch(batch, buffer, start)
    return buffer


def _copy_batch(batch: list[torch.Tensor], buffer: torch.Tensor, start: int) -> int:
    """Copy the batch into `buffer` at `start` and clear it. Return where the next batch starts."""
    target = buffer[start : start + sum(tensor.numel() for tensor in batch)]
    if batch[0].device.type == "cpu":
        torch.cat(batch, out=target)
    else:
        target.copy_(batch[0] if len(batch) == 1 else torch.cat(batch))
    batch.clear()
    return start + target.numel()


# ---------------------------------------------------------------------------------------------------------------------
# Point-to-point transfer.


MESSAGE_BYTES = 4 * MIB
MAX_IN_FLIGHT_MESSAGES = 2


class StateSender:
    """A value ready to be sent. The constructor raises `CheckpointError` if it cannot be serialized."""

    def __init__(self, value: Any) -> None:
        skeleton, self._tensors = extract_tensors(value)
        self._header = dumps(skeleton)
        self.custom_types = find_custom_types(self._header)

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return len(self._header) + sum(tensor.nbytes for tensor in self._tensors)

    def send(self, comm: Comm, to: Rank) -> None:
        """Send to rank `to`, which must call `receive_state`."""
        window = InFlightWindow(MAX_IN_FLIGHT_MESSAGES)
        header = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        window.add(comm.send(torch.tensor([len(header)], device="cpu"), to))
        window.add(comm.send(header, to))
        for message in _split_into_messages(self._tensors):
            window.wait_for_capacity()
            window.add(comm.send(_concat_message(message), to))
        window.drain()


class GatherInput(NamedTuple):
    """One rank's value for `gather_state`, and descriptions that must be equal on all ranks."""

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
    """Gather one value per rank on rank `to`. Call on all ranks; return whether this rank is `to`.

    Rank `to`, a rank of `comm.data_parallel`, calls `on_value` with each value of its own shard group, in rank order,
    as a snapshot in host memory. If a rank cannot make or serialize its value, all ranks raise before anything is sent;
    otherwise all call `on_consensus` first.
    """

    def prepare() -> Prepared[tuple[Any, StateSender]]:
        if not isinstance(to, Integral) or to not in range(comm.data_parallel.group.size):
            raise ConfigError(
                f"{call}: expected to= to be a rank from 0 to {comm.data_parallel.group.size - 1}, got {to!r:.200}"
            )
        value, must_match = make_input()
        return Prepared((value, StateSender(value)), [f"to={to}", *must_match])

    own_value, sender = prepare_all(comm, call, prepare)
    check_types_allowed(comm, call, sender.custom_types)
    on_consensus()
    target = comm.data_parallel.group.to_global(to)
    if target not in comm.group.members:
        return False  # the shard group of `to` has all of the state
    with comm.group.failure_detector.abort_on_error():
        if comm.group.global_rank != target:
            sender.send(comm, comm.group.from_global(target))
            return False
        for rank in range(comm.group.size):
            on_value(snapshot_to_host(own_value) if rank == comm.group.rank else receive_state(comm, Rank(rank)))
    return True


def broadcast_state(comm: Comm, value: Any, source: Rank) -> Any:
    """Send `source`'s value to all ranks of the group, into host memory. Call on all ranks.

    The value must come from `gather_state`, which checked that all ranks can read it.
    """
    if comm.group.rank != source:
        return receive_state(comm, source)
    with comm.group.failure_detector.abort_on_error():
        sender = StateSender(value)
        for rank in range(comm.group.size):
            if rank != source:
                sender.send(comm, Rank(rank))
    return value


def receive_state(comm: Comm, source: Rank) -> Any:
    """Receive what `source` sends with `StateSender.send`, into new host memory."""
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
    for message in _split_into_messages(tensors):
        window.wait_for_capacity()
        _receive_message(comm, source, message, window)
    window.drain()
    return value


Message = list[torch.Tensor]
"""Flat tensors that are sent as one message: a slice of a large tensor, or several small tensors."""


def _split_into_messages(tensors: list[torch.Tensor]) -> Iterator[Message]:
    """Yield messages of at most `MESSAGE_BYTES`.

    Sender and receiver get the same messages, since both know shapes, strides and dtypes.
    """
    small: Message = []
    free_bytes = MESSAGE_BYTES
    for tensor in tensors:
        flat = _flatten_dense(tensor)
        if flat.nbytes > free_bytes and small:
            yield small
            small, free_bytes = [], MESSAGE_BYTES
        if flat.nbytes > MESSAGE_BYTES:
            yield from ([chunk] for chunk in torch.split(flat, MESSAGE_BYTES // flat.element_size()))
        elif flat.nbytes:
            small.append(flat)
            free_bytes -= flat.nbytes
    if small:
        yield small


def _flatten_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor, or a flat copy if it has gaps."""
    flat = dense_flat_view(tensor)
    return tensor.contiguous().view(-1) if flat is None else flat


def _concat_message(message: Message) -> torch.Tensor:
    buffers = [view_as_bytes(flat.cpu()) for flat in message]
    return buffers[0] if len(buffers) == 1 else torch.cat(buffers)


def _receive_message(comm: Comm, source: Rank, message: Message, window: InFlightWindow) -> None:
    buffers = [view_as_bytes(flat) for flat in message]
    if len(buffers) == 1:
        window.add(comm.receive(buffers[0], source))
        return
    staging = torch.empty(sum(buffer.nbytes for buffer in buffers), dtype=torch.uint8, device="cpu")
    sizes = [buffer.nbytes for buffer in buffers]

    def unpack() -> None:
        for buffer, received in zip(buffers, torch.split(staging, sizes), strict=True):
            buffer.copy_(received)

    window.add(comm.receive(staging, source), on_done=unpack)
