"""Copies in host memory."""

from typing import Any

import torch

from ..state.dcp import CutTensor
from ..state.trees import map_tensors


def staged(contents: dict[str, Any]) -> dict[str, Any]:
    """A copy that stays as it is while training goes on."""
    result: dict[str, Any] = map_tensors(contents, _to_host)
    return result


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, CutTensor) or not hasattr(tensor, "to_local"):
        copy = tensor.detach().to("cpu")
        return copy.clone() if tensor.device.type == "cpu" else copy
    return tensor.detach().clone().cpu()
