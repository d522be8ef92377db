"""Walking through the values that optimizers keep as state."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from .tensor_utils import map_inner_tensors


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of nested containers with every tensor changed; containers keep their types, other values stay."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        clone = copy.copy(value)
        for key, item in value.items():
            clone[key] = map_tensors(item, fn)
        return clone
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def collect_plain_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in it; of one that is made of others, these."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, lambda tensor: map_inner_tensors(tensor, note))
    return found


def snapshot_to_host(value: Any) -> Any:
    """A copy on the CPU that nothing changes later."""
    return map_tensors(deepcopy_except_tensors(value), lambda tensor: map_inner_tensors(tensor, _detach_to_host))


def tensor_versions(value: Any) -> list[int]:
    """A number for each tensor that changes when the tensor is changed in place."""
    found: list[int] = []
    map_tensors(value, lambda tensor: found.append(tensor._version))
    return found


def deepcopy_except_tensors(value: Any) -> Any:
    """Deep copies of everything but tensors."""
    memo: dict[int, Any] = {}
    map_tensors(value, lambda tensor: memo.setdefault(id(tensor), tensor))
    return copy.deepcopy(value, memo)


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return map_inner_tensors(tensor, torch.clone)


def _detach_to_host(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()


def dense_flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor as one flat alias in the order it lies there; None if its strides leave gaps."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))
