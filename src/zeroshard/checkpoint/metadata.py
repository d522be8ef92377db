"""Metadata of a DCP checkpoint (`torch.distributed.checkpoint`), read without executing code and fully validated.

DCP's reader unpickles arbitrary classes. This one allows only those that DCP metadata consists of, and then checks:

* every element of every tensor is in exactly one chunk (DCP silently leaves elements without a chunk unread),
* each file is as long as its chunks require, and no two values share bytes,
* no file name leads outside the directory.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from reprlib import Repr
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from .._torch_compat import dcp_storage_info_class, dcp_storage_prefix_class, get_layout
from ..comm.process_group import Group
from ..errors import CheckpointError

# ---------------------------------------------------------------------------------------------------------------------
# Unpickling restricted to known classes and opcodes: no file can modify the process.


_ALLOWED_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.LONG4, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)
"""Opcodes that Python uses, since protocol 2, for numbers, strings, plain containers and objects."""

_PICKLE_DISPATCH: dict[int, Callable[..., None]] = vars(pickle._Unpickler)["dispatch"]


class FrozenType(type):
    """Metaclass of classes whose attributes cannot be set.

    Hazard: pickle's opcode BUILD sets attributes of any object: also of classes, functions and shared objects such as
    enum members, which would stay changed for the whole process.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets the attribute '{name}' of {cls.__name__}, which is not allowed")


def make_frozen_type(constructor: Callable[..., Any]) -> type:
    """Return a class that stands for a class or function named in a file; its `__new__` calls `constructor`.

    `constructor` must return a new or immutable object. Pickle creates objects by `__new__` alone and accepts an
    instance of any class.
    """
    return FrozenType("a sealed class", (), {"__slots__": (), "__new__": lambda _, *args: constructor(*args)})


class SafeUnpickler(pickle._Unpickler):
    """Allows only the opcodes of `_ALLOWED_OPCODES`, and needs memory in proportion to the file.

    Hazard: the C unpickler allocates its memo for the largest index in the file: 10 bytes can request 64 GB. Nested
    tuples as dict keys take exponential time to hash, or overflow the stack: `is_allowed_key` rejects them.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]]
    stack: list[Any]

    def is_allowed_key(self, value: Any) -> bool:
        """Return whether `value` may be the key of a dict."""
        return type(value) in (str, int)

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _PICKLE_DISPATCH[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        _PICKLE_DISPATCH[pickle.SETITEMS[0]](self)

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is not str and not self.is_allowed_key(key):
                raise pickle.UnpicklingError(f"expected str and int as dict keys, got {type(key).__name__}")


def _reject_opcode(opcode: int) -> Callable[..., None]:
    def reject(_: SafeUnpickler) -> None:
        raise pickle.UnpicklingError(f"the pickle opcode {bytes([opcode])!r} is not allowed")

    return reject


SafeUnpickler.dispatch = {
    opcode: load if bytes([opcode]) in _ALLOWED_OPCODES else _reject_opcode(opcode)
    for opcode, load in _PICKLE_DISPATCH.items()
}
SafeUnpickler.dispatch |= {
    pickle.SETITEM[0]: SafeUnpickler.load_setitem,
    pickle.SETITEMS[0]: SafeUnpickler.load_setitems,
}


# ---------------------------------------------------------------------------------------------------------------------
# Short representations of untrusted values, for error messages.


class _SafeRepr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 2, 80, 80

    def repr_instance(self, x: Any, level: int) -> str:
        """Show the values of a tuple subclass, and only the class of other objects."""
        if isinstance(x, (bool, float, type(None))):
            return repr(x)
        return self.repr_tuple(tuple(x), level) if isinstance(x, tuple) else f"a {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length()} bits"


def safe_repr(value: Any) -> str:
    """Return a short `repr`.

    Hazard: a tuple that contains the same tuple twice, nested many times, is small in a file and exponentially long in
    full.
    """
    return _SafeRepr().repr(value)


# ---------------------------------------------------------------------------------------------------------------------
# Chunks of a tensor: each element is in exactly one.


_MAX_DIMS = 64


def check_chunks(key: str, tensor: TensorStorageMetadata) -> None:
    """Raise `CheckpointError` unless the chunks cover the tensor exactly, without gaps and overlaps."""
    dtype: Any = tensor.properties.dtype
    if not _is_valid_size(tensor.size) or not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"'{key}' has an invalid size {safe_repr(tensor.size)} or dtype {safe_repr(dtype)}")
    for chunk in tensor.chunks:
        if not _is_chunk_inside(chunk, tensor.size):
            raise CheckpointError(f"a chunk of '{key}' exceeds its size {tuple(tensor.size)}: {_format_chunk(chunk)}")
    # numel() may overflow.
    covered, numel = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
    if covered != numel:
        raise CheckpointError(f"expected chunks of '{key}' with {numel} elements in total, got {covered}")
    if len(tensor.chunks) > 1 and _has_overlap(_chunk_bounds(tensor.chunks)):
        raise CheckpointError(f"chunks of '{key}' overlap")


def _is_valid_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and len(value) <= _MAX_DIMS and min(value, default=0) >= 0


def _is_chunk_inside(chunk: Any, size: Sequence[int]) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not (
        _is_valid_size(chunk.offsets) and _is_valid_size(chunk.sizes)
    ):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(map(lambda offset, length, limit: offset + length <= limit, chunk.offsets, chunk.sizes, size))


def _format_chunk(chunk: Any) -> str:
    return f"size {safe_repr(getattr(chunk, 'sizes', None))} at offset {safe_repr(getattr(chunk, 'offsets', None))}"


class _ChunkBounds(NamedTuple):
    start: tuple[int, ...]
    stop: tuple[int, ...]


def _chunk_bounds(chunks: Iterable[ChunkStorageMetadata]) -> list[_ChunkBounds]:
    """Return the bounds of all chunks that are not empty."""
    return [
        _ChunkBounds(tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in chunks
        if prod(chunk.sizes)
    ]


def _has_overlap(chunk_bounds: Sequence[_ChunkBounds]) -> bool:
    """Return whether two chunks intersect.

    Sweeps along the dimension with the most distinct starts, to compare each chunk with few others.
    """
    dims = range(len(chunk_bounds[0].start)) if chunk_bounds else ()
    dim = max(dims, key=lambda candidate: len({bounds.start[candidate] for bounds in chunk_bounds}), default=0)
    active: list[_ChunkBounds] = []
    for bounds in sorted(chunk_bounds, key=lambda bounds: bounds.start[dim : dim + 1]):
        active = [other for other in active if other.stop[dim] > bounds.start[dim]]
        if any(_intersects(bounds, other) for other in active):
            return True
        active.append(bounds)
    return False


def _intersects(a: _ChunkBounds, b: _ChunkBounds) -> bool:
    return all(map(lambda a_start, a_stop, b_start, b_stop: a_start < b_stop and b_start < a_stop, *a, *b))


# ---------------------------------------------------------------------------------------------------------------------
# The file `.metadata`.


_METADATA_FILE = ".metadata"
_SPARSE_LIST_LIMIT = 1024
"""Lists up to this length may have fewer entries than elements, since empty containers have no entries."""
_MAX_FILE_BYTES = 1 << 63


class _MemFormatEncoding(int, metaclass=FrozenType):
    """Compares equal to the member of torch's enum with the same value."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return int(self) == getattr(other, "value", other)

    __hash__ = int.__hash__


_METADATA_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(dcp_storage_info_class(), dcp_storage_prefix_class()),
)


def _make_dict() -> dict[Any, Any]:
    """Return a plain dict instead of an OrderedDict, whose methods a file could shadow by attributes."""
    return {}


_ALLOWED_GLOBALS: dict[str, type] = {
    **{f"{cls.__module__}.{cls.__name__}": make_frozen_type(partial(object.__new__, cls)) for cls in _METADATA_CLASSES},
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": _MemFormatEncoding,
    "torch.Size": make_frozen_type(torch.Size),
    "torch.serialization._get_layout": make_frozen_type(get_layout),
    "collections.OrderedDict": make_frozen_type(_make_dict),
    # The directory that was passed to the writer. It is not used; its class depends on platform and Python version.
    **{
        f"{module}.{platform}Path": make_frozen_type(lambda *_: None)
        for module in ("pathlib", "pathlib._local")
        for platform in ("Posix", "Windows")
    },
}


def is_dcp_checkpoint(directory: Path) -> bool:
    return (directory / _METADATA_FILE).is_file()


class Entry(NamedTuple):
    """One value of the checkpoint."""

    key: str
    """Flat key in the checkpoint."""
    path: tuple[Any, ...]
    """Keys in the nested dict that was saved."""
    tensor: TensorStorageMetadata | None
    """None if the value is not a tensor."""

    def allocate(self) -> torch.Tensor | None:
        """Return uninitialised memory for the full tensor, or None."""
        return None if self.tensor is None else torch.empty(self.tensor.size, dtype=self.tensor.properties.dtype)

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.size.numel() * self.tensor.properties.dtype.itemsize


class CheckpointMetadata:
    """The entries of a checkpoint, and the file and bytes of each."""

    def __init__(self, directory: Path) -> None:
        """Read and validate `.metadata`. Raises `CheckpointError` if it is missing, unsafe or inconsistent."""
        self.directory = directory
        self.dcp_metadata = _read_metadata(directory)
        try:
            self.entries = _parse_entries(self.dcp_metadata)
            for key, tensor in self._tensor_entries():
                check_chunks(key, tensor)
        except Exception as error:
            raise CheckpointError(
                f"{directory / _METADATA_FILE} is inconsistent: {error}. Load another checkpoint."
            ) from error
        self._check_storage_lengths()
        _check_no_overlaps(directory / _METADATA_FILE, self.dcp_metadata.storage_data.values())

    def under(self, *prefix: Any) -> list[Entry]:
        """Return all entries whose path starts with `prefix`."""
        return [entry for entry in self.entries if entry.path[: len(prefix)] == prefix]

    def min_file_sizes(self) -> dict[str, int]:
        """Return the smallest valid size of each file in the metadata, by file name."""
        sizes: dict[str, int] = {}
        for info in self.dcp_metadata.storage_data.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        return sizes

    def check_files(self) -> None:
        """Raise `CheckpointError` if a file is missing or too short."""
        for name, min_size in self.min_file_sizes().items():
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError(
                    f"{file} is missing: the checkpoint is incomplete. Restore it, or load another checkpoint."
                )
            if file.stat().st_size < min_size:
                raise CheckpointError(
                    f"{file} is truncated: expected {min_size} bytes, got {file.stat().st_size}. Load another "
                    "checkpoint."
                )

    def _tensor_entries(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, tensor) for key, _, tensor in self.entries if tensor is not None)

    def _check_storage_lengths(self) -> None:
        """Raise if a chunk is larger than its bytes in the file, since memory is allocated by the size of chunks."""
        for key, tensor in self._tensor_entries():
            for chunk in tensor.chunks:
                nbytes = prod(chunk.sizes) * tensor.properties.dtype.itemsize
                if nbytes and (length := self.storage_info(MetadataIndex(key, chunk.offsets)).length) < nbytes:
                    raise CheckpointError(
                        f"{self.directory / _METADATA_FILE} is inconsistent: expected {nbytes} bytes for a chunk of "
                        f"'{key}', got {length}. Load another checkpoint."
                    )

    def storage_info(self, index: MetadataIndex) -> Any:
        """Return file, offset and length of a value. Raises `CheckpointError` if it is missing or transformed."""
        info = self.dcp_metadata.storage_data.get(index)
        if info is None or info.transform_descriptors:
            reason = (
                "is missing from its files"
                if info is None
                else f"was written with the transform {safe_repr(info.transform_descriptors)}, expected none"
            )
            raise CheckpointError(f"{self.directory}: a chunk of '{index.fqn}' {reason}. Load another checkpoint.")
        return info


@contextmanager
def dcp_group_kwargs(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the arguments that make DCP use these ranks, and silence its warning about a single rank."""
    if group.size > 1:
        yield {"process_group": group.cpu_group}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": True}


class _MetadataUnpickler(SafeUnpickler):
    def is_allowed_key(self, value: Any) -> bool:
        if type(value) is not MetadataIndex:
            return super().is_allowed_key(value)
        return type(value.fqn) is str and type(value.offset) in (torch.Size, type(None))

    def find_class(self, module: str, name: str) -> Any:
        qualified_name = f"{module}.{name}"
        if qualified_name in _ALLOWED_GLOBALS:
            return _ALLOWED_GLOBALS[qualified_name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {qualified_name}, which checkpoint metadata does not contain")


def _parse_entries(dcp_metadata: Metadata) -> list[Entry]:
    paths = dcp_metadata.planner_data or {}
    entries = [
        Entry(key, tuple(paths.get(key, (key,))), storage if isinstance(storage, TensorStorageMetadata) else None)
        for key, storage in dcp_metadata.state_dict_metadata.items()
    ]
    limit = max(len(entries), _SPARSE_LIST_LIMIT)
    for key, path, _ in entries:
        if not isinstance(key, str) or not all(isinstance(part, str) or _is_list_index(part, limit) for part in path):
            raise CheckpointError(
                f"expected names and list indices as the path of {safe_repr(key)}, got {safe_repr(path)}"
            )
    return entries


def _is_list_index(value: Any, limit: int) -> bool:
    """Return whether `value` is an index of a list no longer than `limit`, which is allocated when it is read."""
    return type(value) is int and 0 <= value < limit


def _read_metadata(directory: Path) -> Metadata:
    file = directory / _METADATA_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{directory} has no {_METADATA_FILE}: it is not a checkpoint, or an incomplete one. Load another."
        )
    try:
        dcp_metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(dcp_metadata, Metadata) or not isinstance(dcp_metadata.storage_data, dict):
        raise CheckpointError(f"{file} is not checkpoint metadata. Load another checkpoint.")
    for info in dcp_metadata.storage_data.values():
        _check_storage_info(file, info)
    return dcp_metadata


def _check_storage_info(file: Path, info: Any) -> None:
    if not isinstance(info, dcp_storage_info_class()):
        raise CheckpointError(f"{file} does not describe a checkpoint in files. Load another checkpoint.")
    reject_path_traversal(file, [getattr(info, "relative_path", None)])
    offset, length = getattr(info, "offset", None), getattr(info, "length", None)
    if not all(type(value) is int and 0 <= value < _MAX_FILE_BYTES for value in (offset, length)):
        raise CheckpointError(f"{file} is inconsistent: {safe_repr(length)} bytes at offset {safe_repr(offset)}")


def _check_no_overlaps(file: Path, storage_infos: Iterable[Any]) -> None:
    """Raise if two values share bytes of a file, since memory is allocated for each: a small file could fill memory."""
    name, end = "", 0
    for info in sorted(storage_infos, key=lambda info: (info.relative_path, info.offset, info.length)):
        if info.relative_path == name and info.length and info.offset < end:
            raise CheckpointError(f"{file} is inconsistent: two values overlap before byte {end} of {safe_repr(name)}")
        name, end = info.relative_path, max(info.offset + info.length, end if info.relative_path == name else 0)


def reject_path_traversal(file: Path, names: Iterable[Any]) -> None:
    """Raise `CheckpointError` if a file name in `file` leads outside its directory."""
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{file} refers to a file outside its directory: {safe_repr(name)}. Load another checkpoint."
            )


def torch_reason(error: BaseException) -> str:
    """Return the cause of an error of `torch.load`, without torch's advice to trust the file."""
    paragraphs = [text.strip() for text in str(error).rpartition("WeightsUnpickler error: ")[2].split("\n\n")]
    boilerplate = ("Weights only load failed", "Check the docu")
    reasons = [text for text in paragraphs if text and not text.startswith(boilerplate)]
    return reasons[0].partition("\n")[0] if reasons else type(error).__name__


def format_failures(error: CheckpointException) -> str:
    """Return what failed on which rank, without torch's stack traces."""
    causes = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
