"""A directory that `torch.distributed.checkpoint` wrote, read without running code from it.

torch's own reader unpickles whatever the files say. Here only the classes that make up DCP's metadata are known, values
are read as `torch.load(weights_only=True)` reads them, and no name in the metadata leads outside the directory.
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
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ..comm.process_group import Group
from ..errors import CheckpointError

# ---------------------------------------------------------------------------------------------------------------------
# What an unpickler may hand out, and what it may be told to do, so that nothing in a file can change the process.


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
"""What Python has written since protocol 2 for numbers, texts, plain containers and objects."""

_PICKLE_DISPATCH: dict[int, Callable[..., None]] = vars(pickle._Unpickler)["dispatch"]


class FrozenType(type):
    # Pickle sets attributes of whatever it was handed, by its opcode BUILD: also of classes and functions, and of
    # objects that the process shares, like members of enums. They would stay changed for the whole process.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes '{name}' of {cls.__name__}")


def make_frozen_type(constructor: Callable[..., Any]) -> type:
    """In a file it is a class or a function; it makes what `make` returns, which must be a new object or unchangeable.

    Pickle makes objects by `__new__` alone, and takes them whatever they are.
    """
    return FrozenType("a sealed class", (), {"__slots__": (), "__new__": lambda _, *given: constructor(*given)})


class SafeUnpickler(pickle._Unpickler):
    """Knows the opcodes that are needed, and takes no more memory than its file has.

    Hazard: the one in C makes a list as long as the largest number that a file gives to a value, 64 GB for 10 bytes.
    And a tuple of tuples of tuples that is the key of a dict is hashed without end, or until the stack overflows.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]]
    stack: list[Any]

    def is_allowed_key(self, value: Any) -> bool:
        """Whether it may be the key of a dict."""
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
                raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")


def _reject_opcode(opcode: int) -> Callable[..., None]:
    def reject(_: SafeUnpickler) -> None:
        raise pickle.UnpicklingError(f"it has the opcode {bytes([opcode])!r}, which nothing here needs")

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
# Values of files in errors: short, whatever they are.


class _SafeRepr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 2, 80, 80

    def repr_instance(self, x: Any, level: int) -> str:
        """Of a tuple of a class of its own, its values; of others not more than what they are."""
        if isinstance(x, (bool, float, type(None))):
            return repr(x)
        return self.repr_tuple(tuple(x), level) if isinstance(x, tuple) else f"a {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length()} bits"


def safe_repr(value: Any) -> str:
    """Hazard: a tuple of tuples of tuples, each twice the same, is short in a file, and without end written out."""
    return _SafeRepr().repr(value)


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint's metadata say of a tensor: every element of it is in exactly one chunk.
#
# Where none is torch reads nothing, and says nothing.


_MAX_DIMS = 64
"""That a tensor may have."""


def check_chunks(key: str, tensor: TensorStorageMetadata) -> None:
    dtype: Any = tensor.properties.dtype
    if not _is_valid_size(tensor.size) or not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"'{key}' is of size {safe_repr(tensor.size)} and dtype {safe_repr(dtype)}")
    for chunk in tensor.chunks:
        if not _is_chunk_inside(chunk, tensor.size):
            raise CheckpointError(
                f"'{key}' has the size {tuple(tensor.size)}, but a part that goes beyond: {_format_chunk(chunk)}"
            )
    # Not numel(), which overflows.
    there, all_of_it = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
    if there != all_of_it:
        raise CheckpointError(f"'{key}' has {all_of_it} elements, but parts with {there} of them")
    if len(tensor.chunks) > 1 and _has_overlap(_chunk_bounds(tensor.chunks)):
        raise CheckpointError(f"'{key}' has parts that overlap")


def _is_valid_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and len(value) <= _MAX_DIMS and min(value, default=0) >= 0


def _is_chunk_inside(chunk: Any, size: Sequence[int]) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not (
        _is_valid_size(chunk.offsets) and _is_valid_size(chunk.sizes)
    ):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(map(lambda first, count, most: first + count <= most, chunk.offsets, chunk.sizes, size))


def _format_chunk(chunk: Any) -> str:
    return f"{safe_repr(getattr(chunk, 'sizes', None))} from {safe_repr(getattr(chunk, 'offsets', None))} on"


class _ChunkBounds(NamedTuple):
    start: tuple[int, ...]
    stop: tuple[int, ...]


def _chunk_bounds(chunks: Iterable[ChunkStorageMetadata]) -> list[_ChunkBounds]:
    ends = ((it, tuple(a + b for a, b in zip(it.offsets, it.sizes, strict=True))) for it in chunks if prod(it.sizes))
    return [_ChunkBounds(tuple(it.offsets), end) for it, end in ends]


def _has_overlap(chunk_bounds: Sequence[_ChunkBounds]) -> bool:
    """Goes along the dimension that is cut most often, so that each box is compared with few others."""
    dims = range(len(chunk_bounds[0].start)) if chunk_bounds else ()
    dim = max(dims, key=lambda it: len({box.start[it] for box in chunk_bounds}), default=0)
    near: list[_ChunkBounds] = []
    for box in sorted(chunk_bounds, key=lambda it: it.start[dim : dim + 1]):
        near = [other for other in near if other.stop[dim] > box.start[dim]]
        if any(_intersects(box, other) for other in near):
            return True
        near.append(box)
    return False


def _intersects(a: _ChunkBounds, b: _ChunkBounds) -> bool:
    return all(map(lambda first, end, start, stop: first < stop and start < end, *a, *b))


# ---------------------------------------------------------------------------------------------------------------------
# A directory that `torch.distributed.checkpoint` wrote, read without running code from it.
#
# torch's own reader unpickles whatever the files say. Here only the classes that make up DCP's metadata are known,
# values
# are read as `torch.load(weights_only=True)` reads them, and no name in the metadata leads outside the directory.


_METADATA_FILE = ".metadata"
_SPARSE_LIST_LIMIT = 1024
"""Of which most elements may be missing, since they were empty."""
_MAX_FILE_BYTES = 1 << 63
"""Of a file."""


class _MemFormatEncoding(int, metaclass=FrozenType):
    """Equals a member of the enum that torch compares it with."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return int(self) == getattr(other, "value", other)

    __hash__ = int.__hash__


_METADATA_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(filesystem._StorageInfo, filesystem._StoragePrefix),
)


def _make_dict() -> dict[Any, Any]:
    """In the place of an ordered one, which takes attributes: they would come before its methods."""
    return {}


_ALLOWED_GLOBALS: dict[str, type] = {
    **{f"{it.__module__}.{it.__name__}": make_frozen_type(partial(object.__new__, it)) for it in _METADATA_CLASSES},
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": _MemFormatEncoding,
    "torch.Size": make_frozen_type(torch.Size),
    "torch.serialization._get_layout": make_frozen_type(torch.serialization._get_layout),
    "collections.OrderedDict": make_frozen_type(_make_dict),
    # The directory as it was given to the writer; never looked at. Its class depends on system and version.
    **{
        f"{module}.{kind}Path": make_frozen_type(lambda *_: None)
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows")
    },
}


def is_dcp_checkpoint(directory: Path) -> bool:
    return (directory / _METADATA_FILE).is_file()


class Entry(NamedTuple):
    """One value in the archive."""

    key: str
    path: tuple[Any, ...]
    """Where it was in the nested dict that was saved."""
    tensor: TensorStorageMetadata | None
    """None for what is not a tensor."""

    def allocate(self) -> torch.Tensor | None:
        """New memory for the whole of it, if it is a tensor."""
        return None if self.tensor is None else torch.empty(self.tensor.size, dtype=self.tensor.properties.dtype)

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.size.numel() * self.tensor.properties.dtype.itemsize


class CheckpointMetadata:
    """What is in a directory, and where."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dcp_metadata = _read_metadata(directory)
        try:
            self.entries = _parse_entries(self.dcp_metadata)
            for key, tensor in self._tensor_entries():
                check_chunks(key, tensor)
        except Exception as error:
            raise CheckpointError(f"{directory / _METADATA_FILE} contradicts itself: {error}") from error
        self._check_storage_lengths()
        _check_no_overlaps(directory / _METADATA_FILE, self.dcp_metadata.storage_data.values())

    def under(self, *prefix: Any) -> list[Entry]:
        """All entries whose path begins like that."""
        return [entry for entry in self.entries if entry.path[: len(prefix)] == prefix]

    def min_file_sizes(self) -> dict[str, int]:
        """All files that the metadata names, and how long they must be at least."""
        found: dict[str, int] = {}
        for info in self.dcp_metadata.storage_data.values():
            found[info.relative_path] = max(found.get(info.relative_path, 0), info.offset + info.length)
        return found

    def check_files(self) -> None:
        """All that was saved is there, as far as sizes can tell."""
        for name, least in self.min_file_sizes().items():
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing: the checkpoint is incomplete. Restore it, or load another.")
            if file.stat().st_size < least:
                raise CheckpointError(
                    f"{file} is truncated: it has {file.stat().st_size} bytes, and {least} were written. Load another "
                    "checkpoint."
                )

    def _tensor_entries(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, tensor) for key, _, tensor in self.entries if tensor is not None)

    def _check_storage_lengths(self) -> None:
        """Memory is made for what the metadata say: no tensor may be larger than what was written of it."""
        for key, tensor in self._tensor_entries():
            for chunk in tensor.chunks:
                least = prod(chunk.sizes) * tensor.properties.dtype.itemsize
                if least and (length := self.storage_info(MetadataIndex(key, chunk.offsets)).length) < least:
                    raise CheckpointError(
                        f"{self.directory / _METADATA_FILE} contradicts itself: a part of '{key}' has {least} bytes, "
                        f"but {length} in its file"
                    )

    def storage_info(self, index: MetadataIndex) -> Any:
        """In which file a value lies, from which byte on, and for how many."""
        place = self.dcp_metadata.storage_data.get(index)
        if place is None or place.transform_descriptors:
            reason = (
                "is not in its files" if place is None else f"was written with {safe_repr(place.transform_descriptors)}"
            )
            raise CheckpointError(f"{self.directory}: a part of '{index.fqn}' {reason}")
        return place


@contextmanager
def dcp_group_kwargs(group: Group) -> Iterator[dict[str, Any]]:
    """How to call DCP on these ranks. On one alone it warns that there are no others."""
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
        full = f"{module}.{name}"
        if full in _ALLOWED_GLOBALS:
            return _ALLOWED_GLOBALS[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {full}, which is no part of a checkpoint's metadata")


def _parse_entries(dcp_metadata: Metadata) -> list[Entry]:
    paths = dcp_metadata.planner_data or {}
    entries = [
        Entry(key, tuple(paths.get(key, (key,))), it if isinstance(it, TensorStorageMetadata) else None)
        for key, it in dcp_metadata.state_dict_metadata.items()
    ]
    most = max(len(entries), _SPARSE_LIST_LIMIT)
    for key, path, _ in entries:
        if not isinstance(key, str) or not all(isinstance(it, str) or _is_list_index(it, most) for it in path):
            raise CheckpointError(f"{safe_repr(key)} was at {safe_repr(path)}")
    return entries


def _is_list_index(value: Any, limit: int) -> bool:
    """A place in a list, which is made that long when it is read."""
    return type(value) is int and 0 <= value < limit


def _read_metadata(directory: Path) -> Metadata:
    file = directory / _METADATA_FILE
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {_METADATA_FILE}: it is no checkpoint, or an incomplete one")
    try:
        found = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{file} is not the metadata of a checkpoint")
    for info in found.storage_data.values():
        _check_storage_info(file, info)
    return found


def _check_storage_info(file: Path, info: Any) -> None:
    if not isinstance(info, filesystem._StorageInfo):
        raise CheckpointError(f"{file} is not the metadata of a checkpoint in files")
    reject_path_traversal(file, [getattr(info, "relative_path", None)])
    offset, length = getattr(info, "offset", None), getattr(info, "length", None)
    if not all(type(it) is int and 0 <= it < _MAX_FILE_BYTES for it in (offset, length)):
        raise CheckpointError(f"{file} contradicts itself: {safe_repr(length)} bytes from byte {safe_repr(offset)} on")


def _check_no_overlaps(file: Path, storage_infos: Iterable[Any]) -> None:
    """Memory is made for every value: many in one place would take many times the memory that their file has."""
    name, end = "", 0
    for info in sorted(storage_infos, key=lambda it: (it.relative_path, it.offset, it.length)):
        if info.relative_path == name and info.length and info.offset < end:
            raise CheckpointError(f"{file} contradicts itself: two values begin before byte {end} of {safe_repr(name)}")
        name, end = info.relative_path, max(info.offset + info.length, end if info.relative_path == name else 0)


def reject_path_traversal(file: Path, names: Iterable[Any]) -> None:
    """`file` names other files, of its own directory."""
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(f"{file} names a file outside its directory: {safe_repr(name)}")


def torch_reason(error: BaseException) -> str:
    """What torch could not read, without its advice, which is to trust the file."""
    parts = [part.strip() for part in str(error).rpartition("WeightsUnpickler error: ")[2].split("\n\n")]
    told = [part for part in parts if part and not part.startswith(("Weights only load failed", "Check the docu"))]
    return told[0].partition("\n")[0] if told else type(error).__name__


def format_failures(error: CheckpointException) -> str:
    """What went wrong on which rank, without the traces that torch puts in front."""
    reasons = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(it).__name__}: {it}" for rank, it in reasons.items())
