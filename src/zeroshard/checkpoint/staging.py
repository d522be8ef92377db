"""Copies in host memory."""

from typing import Any

import torch

from ..state.shard_tensor import ShardTensor
from ..state.trees import map_tensors


def copy_to_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy that stays as it is while training goes on."""
    result: dict[str, Any] = map_tensors(state_dict, _copy_tensor_to_host)
    return result


def _copy_tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardTensor) or not hasattr(tensor, "to_local"):
        copy = tensor.detach().to("cpu")
        return copy.clone() if tensor.device.type == "cpu" else copy
    return tensor.detach().clone().cpu()
