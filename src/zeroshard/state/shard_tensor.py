"""ShardTensor: one rank's shard of a tensor, as `torch.distributed.checkpoint` (DCP) saves and loads it.

DCP's protocol for sharded tensors is private. This is the only module that depends on it;
tests/distributed/test_dcp.py fails if a torch release changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._types import Span
from ..layout.chunks import Chunk, split_into_chunks, storage_numel
from .tensor_utils import dense_flat_view, map_tensors

if TYPE_CHECKING:  # importing DCP takes a second, and only saving needs it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten


class ShardTensor(torch.Tensor):
    """A tensor with the full shape that holds only one span of the memory: `local`, a flat tensor.

    It can be saved, loaded into, copied and moved to another device. It does not support computation.
    """

    # Hazard: DCP's staging copies the items of `__dict__` one by one onto the result of `new_empty`.
    local: torch.Tensor
    full_stride: tuple[int, ...]
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], start: int) -> "ShardTensor":
        shard: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        shard.local, shard.full_stride, shard.start = local, tuple(stride), start
        return shard

    def __init__(self, *_: Any) -> None:
        """Do nothing: `__new__` initializes wrapper subclasses."""

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.local.numel())

    @property
    def is_full(self) -> bool:
        return self.local.numel() == storage_numel(self.shape, self.full_stride)

    def to_full(self) -> torch.Tensor:
        """Return the full tensor as a view of `local`. Requires `is_full`."""
        return self.local.as_strided(self.shape, self.full_stride)

    def with_local(self, local: torch.Tensor) -> "ShardTensor":
        return ShardTensor(local, self.shape, self.full_stride, self.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.span
        return f"ShardTensor({tuple(self.shape)}, {self.dtype}, elements {start} to {stop} of its memory)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        copy = memo.setdefault(id(self), self.with_local(self.local.clone()))
        assert isinstance(copy, ShardTensor)
        return copy

    def __reduce_ex__(self, _: Any) -> Any:
        return ShardTensor, (self.local, tuple(self.shape), self.full_stride, self.start)

    # Protocols of torch: wrapper subclasses and DCP.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], (tuple(self.shape), self.full_stride, self.start)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], meta: Any, *_: Any) -> "ShardTensor":
        return ShardTensor(inner["local"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub forgets `func`
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _SUPPORTED_OPS:
            raise NotImplementedError(
                f"{func} is not supported on a ShardTensor, which holds one rank's shard of optimizer state and can "
                "only be saved and loaded. Call full_state_dict() for full tensors."
            )
        return _SUPPORTED_OPS[func](func, *args, **(kwargs or {}))

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_to_chunk_metadata(chunk), properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        return [_to_chunk_metadata(chunk) for chunk in self._chunks()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        for chunk in self._chunks():
            if torch.Size(chunk.offsets) == index.offset:
                return self._view_chunk(chunk)
        raise ValueError(f"expected a chunk of this rank's shard, got {index}")

    def _chunks(self) -> list[Chunk]:
        if 0 in self.shape:  # save an empty tensor as one chunk, which a load can find
            return [Chunk((0,) * len(self.shape), tuple(self.shape))]
        return split_into_chunks(self.shape, self.full_stride, self.span)

    def _view_chunk(self, chunk: Chunk) -> torch.Tensor:
        first = sum(offset * step for offset, step in zip(chunk.offsets, self.full_stride, strict=True)) - self.start
        return self.local.as_strided(chunk.sizes, self.full_stride, self.local.storage_offset() + first)


def make_full_shard(tensor: torch.Tensor) -> ShardTensor:
    """Return a shard that holds all of `tensor`. Other ranks hold nothing of it."""
    memory = dense_flat_view(tensor)
    if memory is None:
        return make_full_shard(tensor.contiguous())
    return ShardTensor(memory, tensor.shape, tensor.stride(), 0)


def make_empty_shard(tensor: torch.Tensor) -> ShardTensor:
    """Return a shard without elements, for a tensor that other ranks own."""
    local = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return ShardTensor(local, tensor.shape, tensor.stride(), 0)


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory behind a `ShardTensor`, and any other tensor unchanged."""
    return tensor.local if isinstance(tensor, ShardTensor) else tensor


def unwrap_full_shards(value: Any) -> Any:
    """Replace shards in `value` that hold the full tensor by plain tensors."""
    return map_tensors(
        value, lambda tensor: tensor.to_full() if isinstance(tensor, ShardTensor) and tensor.is_full else tensor
    )


def _apply_to_local(func: Any, shard: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    return shard.with_local(func(shard.local, *args, **kwargs))


def _new_empty(_: Any, shard: ShardTensor, size: Sequence[int], **kwargs: Any) -> ShardTensor:
    device = kwargs.get("device") or shard.local.device
    local = torch.empty(0, dtype=kwargs.get("dtype") or shard.local.dtype, device=device)
    return ShardTensor(local, size, (1,) * len(size), 0)


def _copy_local(_: Any, target: ShardTensor, source: ShardTensor, *args: Any) -> ShardTensor:
    target.local.copy_(source.local, *args)
    return target


_SUPPORTED_OPS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _apply_to_local,
    _aten.clone.default: _apply_to_local,
    _aten._to_copy.default: _apply_to_local,
    _aten.empty_like.default: _apply_to_local,
    _aten.zeros_like.default: _apply_to_local,
    _aten.new_empty.default: _new_empty,
    _aten.copy_.default: _copy_local,
}


def _to_chunk_metadata(chunk: Chunk) -> "ChunkStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
