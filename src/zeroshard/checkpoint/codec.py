"""Objects as bytes that can be read back without running code."""

import io
from typing import Any

import torch

from ..errors import CheckpointError
from .trees import dense_memory, map_tensors


def pack(value: Any) -> bytes:
    """`value` as `torch.save` writes it, refused unless `torch.load(weights_only=True)` will take it back."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except Exception as error:
        reason = (
            str(error).split("WeightsUnpickler error: ")[-1].splitlines()[0] if str(error) else type(error).__name__
        )
        raise CheckpointError(
            f"a {type(value).__name__} cannot be sent safely: {reason} "
            "Keep to tensors, numbers, strings and plain containers, or allow its types with "
            "torch.serialization.add_safe_globals on every rank."
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def take_out_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with memory-less stand-ins for its tensors, and the tensors in order, dense."""
    tensors: list[torch.Tensor] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            raise CheckpointError(f"state of layout {tensor.layout} cannot be sent; make it dense")
        dense = tensor if dense_memory(tensor) is not None else tensor.contiguous()
        tensors.append(dense)
        return torch.empty_strided(dense.shape, dense.stride(), dtype=dense.dtype, device="meta")

    return map_tensors(value, stand_in), tensors
