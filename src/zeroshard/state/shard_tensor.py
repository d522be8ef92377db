"""A rank's part of a tensor, as `torch.distributed.checkpoint` saves and loads it.

The only file that knows torch's protocol for that, which is private; tests/ranks/test_dcp.py fails where a version of
torch changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._types import Span
from ..layout.chunks import Chunk, split_into_chunks, storage_numel
from .tensor_utils import dense_flat_view, map_tensors

if TYPE_CHECKING:  # DCP takes a second to import, and who never saves does not need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten


class ShardTensor(torch.Tensor):
    """Has the shape of the whole, and of its memory a span: `local`, flat.

    It can be saved, loaded into, copied and moved. It cannot be computed with.
    """

    # Hazard: staging copies what is in `__dict__`, one by one, onto what `new_empty` returned.
    local: torch.Tensor
    full_stride: tuple[int, ...]
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], start: int) -> "ShardTensor":
        made: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.full_stride, made.start = local, tuple(stride), start
        return made

    def __init__(self, *_: Any) -> None:
        """All is done in `__new__`, as torch wants it."""

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.local.numel())

    @property
    def is_full(self) -> bool:
        return self.local.numel() == storage_numel(self.shape, self.full_stride)

    def to_full(self) -> torch.Tensor:
        """The whole tensor, if this is all of it."""
        return self.local.as_strided(self.shape, self.full_stride)

    def with_local(self, local: torch.Tensor) -> "ShardTensor":
        return ShardTensor(local, self.shape, self.full_stride, self.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CutTensor({tuple(self.shape)}, {self.dtype}, elements {self.start} to {self.span.stop} of its memory)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        copy = memo.setdefault(id(self), self.with_local(self.local.clone()))
        assert isinstance(copy, ShardTensor)
        return copy

    def __reduce_ex__(self, _: Any) -> Any:
        return ShardTensor, (self.local, tuple(self.shape), self.full_stride, self.start)

    # ---- torch's protocol

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
                f"{func}: this tensor is a rank's part of an optimizer's state, made to be saved and loaded only. "
                "full_state_dict() has whole tensors."
            )
        return _SUPPORTED_OPS[func](func, *args, **(kwargs or {}))

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_to_chunk_metadata(box), properties=properties, size=self.shape),
            )
            for box in self._chunks()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        return [_to_chunk_metadata(box) for box in self._chunks()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        for box in self._chunks():
            if torch.Size(box.offsets) == index.offset:
                return self._view_chunk(box)
        raise ValueError(f"{index} is no part of what this rank has of it")

    def _chunks(self) -> list[Chunk]:
        if 0 in self.shape:  # a tensor of no elements is one box, so that it is there when it is loaded
            return [Chunk((0,) * len(self.shape), tuple(self.shape))]
        return split_into_chunks(self.shape, self.full_stride, self.span)

    def _view_chunk(self, chunk: Chunk) -> torch.Tensor:
        first = sum(offset * step for offset, step in zip(chunk.offsets, self.full_stride, strict=True)) - self.start
        return self.local.as_strided(chunk.sizes, self.full_stride, self.local.storage_offset() + first)


def make_full_shard(tensor: torch.Tensor) -> ShardTensor:
    """A tensor that one rank has all of, and the others nothing."""
    memory = dense_flat_view(tensor)
    if memory is None:
        return make_full_shard(tensor.contiguous())
    return ShardTensor(memory, tensor.shape, tensor.stride(), 0)


def make_empty_shard(tensor: torch.Tensor) -> ShardTensor:
    """What a rank has of a tensor that belongs to others."""
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return ShardTensor(nothing, tensor.shape, tensor.stride(), 0)


def unwrap_full_shards(value: Any) -> Any:
    """Plain tensors in the place of those of which a rank has everything, wherever they are in `value`."""
    return map_tensors(value, lambda it: it.to_full() if isinstance(it, ShardTensor) and it.is_full else it)


def _apply_to_local(func: Any, shard: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    return shard.with_local(func(shard.local, *args, **kwargs))


def _new_empty(_: Any, shard: ShardTensor, size: Sequence[int], **kwargs: Any) -> ShardTensor:
    device = kwargs.get("device") or shard.local.device
    nothing = torch.empty(0, dtype=kwargs.get("dtype") or shard.local.dtype, device=device)
    return ShardTensor(nothing, size, (1,) * len(size), 0)


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
