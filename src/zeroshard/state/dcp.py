"""A rank's part of a tensor, as `torch.distributed.checkpoint` saves and loads it.

The only file that knows torch's protocol for that, which is private; tests/ranks/test_dcp.py fails where a version of
torch changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..layout.boxes import Box, boxes, extent
from ..units import Span
from .trees import dense_memory, map_tensors

if TYPE_CHECKING:  # DCP takes a second to import, and who never saves does not need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten


class CutTensor(torch.Tensor):
    """Has the shape of the whole, and of its memory a span: `local`, flat.

    It can be saved, loaded into, copied and moved. It cannot be computed with.
    """

    # Hazard: staging copies what is in `__dict__`, one by one, onto what `new_empty` returned.
    local: torch.Tensor
    steps: tuple[int, ...]
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], start: int) -> "CutTensor":
        made: CutTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.steps, made.start = local, tuple(stride), start
        return made

    def __init__(self, *_: Any) -> None:
        """All is done in `__new__`, as torch wants it."""

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.local.numel())

    @property
    def is_whole(self) -> bool:
        return self.local.numel() == extent(self.shape, self.steps)

    def uncut(self) -> torch.Tensor:
        """The whole tensor, if this is all of it."""
        return self.local.as_strided(self.shape, self.steps)

    def with_local(self, local: torch.Tensor) -> "CutTensor":
        return CutTensor(local, self.shape, self.steps, self.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CutTensor({tuple(self.shape)}, {self.dtype}, elements {self.start} to {self.span.stop} of its memory)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "CutTensor":
        copy = memo.setdefault(id(self), self.with_local(self.local.clone()))
        assert isinstance(copy, CutTensor)
        return copy

    def __reduce_ex__(self, _: Any) -> Any:
        return CutTensor, (self.local, tuple(self.shape), self.steps, self.start)

    # ---- torch's protocol

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], (tuple(self.shape), self.steps, self.start)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], meta: Any, *_: Any) -> "CutTensor":
        return CutTensor(inner["local"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub forgets `func`
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _POSSIBLE:
            raise NotImplementedError(
                f"{func}: this tensor is a rank's part of an optimizer's state, made to be saved and loaded only. "
                "full_state_dict() has whole tensors."
            )
        return _POSSIBLE[func](func, *args, **(kwargs or {}))

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        for box in self._boxes():
            if torch.Size(box.offsets) == index.offset:
                return self._view(box)
        raise ValueError(f"{index} is no part of what this rank has of it")

    def _boxes(self) -> list[Box]:
        if 0 in self.shape:  # a tensor of no elements is one box, so that it is there when it is loaded
            return [Box((0,) * len(self.shape), tuple(self.shape))]
        return boxes(self.shape, self.steps, self.span)

    def _view(self, box: Box) -> torch.Tensor:
        first = sum(offset * step for offset, step in zip(box.offsets, self.steps, strict=True)) - self.start
        return self.local.as_strided(box.sizes, self.steps, self.local.storage_offset() + first)


def whole(tensor: torch.Tensor) -> CutTensor:
    """A tensor that one rank has all of, and the others nothing."""
    memory = dense_memory(tensor)
    if memory is None:
        return whole(tensor.contiguous())
    return CutTensor(memory, tensor.shape, tensor.stride(), 0)


def nothing_of(tensor: torch.Tensor) -> CutTensor:
    """What a rank has of a tensor that belongs to others."""
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return CutTensor(nothing, tensor.shape, tensor.stride(), 0)


def uncut(value: Any) -> Any:
    """Plain tensors in the place of those of which a rank has everything, wherever they are in `value`."""
    return map_tensors(value, lambda it: it.uncut() if isinstance(it, CutTensor) and it.is_whole else it)


def _on_local(func: Any, whole: CutTensor, *args: Any, **kwargs: Any) -> CutTensor:
    return whole.with_local(func(whole.local, *args, **kwargs))


def _new_empty(_: Any, whole: CutTensor, size: Sequence[int], **kwargs: Any) -> CutTensor:
    device = kwargs.get("device") or whole.local.device
    nothing = torch.empty(0, dtype=kwargs.get("dtype") or whole.local.dtype, device=device)
    return CutTensor(nothing, size, (1,) * len(size), 0)


def _copy(_: Any, target: CutTensor, source: CutTensor, *args: Any) -> CutTensor:
    target.local.copy_(source.local, *args)
    return target


_POSSIBLE: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _on_local,
    _aten.clone.default: _on_local,
    _aten._to_copy.default: _on_local,
    _aten.empty_like.default: _on_local,
    _aten.zeros_like.default: _on_local,
    _aten.new_empty.default: _new_empty,
    _aten.copy_.default: _copy,
}


def _chunk(box: Box) -> "ChunkStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
