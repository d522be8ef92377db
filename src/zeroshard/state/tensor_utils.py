"""Tensors that are made of others: quantized state, for example, of codes and scales.

Their classes need not know how to be cloned, cut or joined. They say what is inside them (`__tensor_flatten__`, as
torch wants it of classes that are compiled), and that are plain tensors.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CheckpointError

InnerTensors = dict[str, torch.Tensor]


def is_wrapper_subclass(value: Any) -> TypeGuard[torch.Tensor]:
    """Not what is a part of a tensor: a DTensor, or a rank's piece, which know how to be copied and saved."""
    is_part = hasattr(value, "to_local") or hasattr(value, "is_full")
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and not is_part


def inner_tensors(value: Any) -> InnerTensors:
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def rebuild_subclass(like: Any, inner: Mapping[str, torch.Tensor], shape: Sequence[int] | None = None) -> torch.Tensor:
    """One of the class of `like`, of other tensors; of another shape, if that is given."""
    _, context = like.__tensor_flatten__()
    size, before = torch.Size(like.shape if shape is None else shape), tuple(like.shape)
    if isinstance(context, (list, tuple)):
        context = [size if isinstance(it, tuple) and tuple(it) == before else it for it in context]
    contiguous = torch.empty(size, device="meta").stride()
    made: torch.Tensor = type(like).__tensor_unflatten__(dict(inner), context, size, contiguous)
    return made


def map_inner_tensors(value: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A plain tensor changed; one that is made of others, made of them changed.

    Hazard: a `change` that called itself would be a cycle, and keep what it refers to alive.
    """
    if not is_wrapper_subclass(value):
        return fn(value)
    return rebuild_subclass(value, {name: map_inner_tensors(it, fn) for name, it in inner_tensors(value).items()})


def flatten_subclasses(state: Any) -> Any:
    """The state of a parameter with the insides of its values in their place, flat, as files have them."""
    if not isinstance(state, dict):
        return state
    return {key: _flat_inner_tensors(value) if is_wrapper_subclass(value) else value for key, value in state.items()}


def _flat_inner_tensors(value: torch.Tensor) -> InnerTensors:
    return {name: it.reshape(-1) for name, it in inner_tensors(value).items()}


def slice_subclass(value: torch.Tensor, start: int, stop: int, shared_inner_names: frozenset[str]) -> torch.Tensor:
    """Elements `start` to `stop` of it, flat. `common`: what of its insides all pieces have in common."""
    found = inner_tensors(value)
    for name in found.keys() - shared_inner_names:
        per = elements_per_inner(value.numel(), found[name])
        if start % per or stop % per:
            raise CheckpointError(
                f"elements {start} to {stop} of a {type(value).__name__} cannot be taken out of it: its {name} is of "
                f"blocks of {per}. Use WholeParams() to load it."
            )
        found[name] = found[name].reshape(-1)[start // per : stop // per]
    return rebuild_subclass(value, found, (stop - start,))


def concat_subclass_shards(
    shards: Sequence[torch.Tensor], shape: Sequence[int], shared_inner_names: frozenset[str]
) -> torch.Tensor:
    """One of that shape, of flat pieces in order."""
    first, parts = shards[0], [inner_tensors(piece) for piece in shards]
    found = {
        name: it if name in shared_inner_names else torch.cat([part[name] for part in parts])
        for name, it in parts[0].items()
    }
    for name, it in parts[0].items():
        if name not in shared_inner_names and it.shape == first.shape:
            found[name] = found[name].view(torch.Size(shape))
    return rebuild_subclass(first, found, shape)


def elements_per_inner(numel: int, inner: torch.Tensor) -> int:
    """How many elements of a tensor one of an inner tensor stands for."""
    per = numel // max(1, inner.numel())
    if per * inner.numel() != numel:
        raise CheckpointError(f"an inner tensor of {inner.numel()} elements cannot be divided as one of {numel} is")
    return per


# ---------------------------------------------------------------------------------------------------------------------
# Walking through the values that optimizers keep as state.


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
