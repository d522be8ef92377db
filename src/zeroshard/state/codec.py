"""Objects as bytes that can be read back without running code."""

import io
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import CheckpointError
from .trees import dense_flat_view, map_tensors
from .tensor_utils import map_inner_tensors


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
