"""Helpers for wrapper subclasses (tensors made of inner tensors) and for nested containers of tensors.

Quantized optimizer state, for example, is a subclass with inner tensors of codes and scales. Such classes often cannot
be cloned, sliced or concatenated, but `__tensor_flatten__`, which torch.compile requires, gives their inner tensors,
and those are plain.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from .._torch_compat import is_traceable_wrapper_subclass
from ..errors import CheckpointError

InnerTensors = dict[str, torch.Tensor]


def is_wrapper_subclass(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is made of inner tensors. Excludes DTensor and ShardTensor, which copy themselves."""
    is_shard = hasattr(value, "to_local") or hasattr(value, "is_full")
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and not is_shard


def inner_tensors(value: Any) -> InnerTensors:
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def rebuild_subclass(like: Any, inner: Mapping[str, torch.Tensor], shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return a tensor of the class of `like` with other inner tensors, and with `shape` if given."""
    _, context = like.__tensor_flatten__()
    size, old_shape = torch.Size(like.shape if shape is None else shape), tuple(like.shape)
    if isinstance(context, (list, tuple)):
        context = [size if isinstance(item, tuple) and tuple(item) == old_shape else item for item in context]
    contiguous = torch.empty(size, device="meta").stride()
    rebuilt: torch.Tensor = type(like).__tensor_unflatten__(dict(inner), context, size, contiguous)
    return rebuilt


def map_inner_tensors(value: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `fn(value)` for a plain tensor; rebuild a wrapper subclass from its inner tensors, mapped by `fn`.

    Hazard: an `fn` that recursed into itself would be a reference cycle and keep what it refers to alive.
    """
    if not is_wrapper_subclass(value):
        return fn(value)
    return rebuild_subclass(value, {name: map_inner_tensors(inner, fn) for name, inner in inner_tensors(value).items()})


def flatten_subclasses(state: Any) -> Any:
    """Replace wrapper subclasses in a parameter's state by dicts of their flat inner tensors, as files store them."""
    if not isinstance(state, dict):
        return state
    return {key: _flat_inner_tensors(value) if is_wrapper_subclass(value) else value for key, value in state.items()}


def _flat_inner_tensors(value: torch.Tensor) -> InnerTensors:
    return {name: inner.reshape(-1) for name, inner in inner_tensors(value).items()}


def slice_subclass(value: torch.Tensor, start: int, stop: int, shared_inner_names: frozenset[str]) -> torch.Tensor:
    """Return elements `start` to `stop` as a flat tensor of the same class.

    `shared_inner_names` are inner tensors that all slices have in common. Raises `CheckpointError` if a bound lies
    inside a block of an inner tensor.
    """
    inner = inner_tensors(value)
    for name in inner.keys() - shared_inner_names:
        block = elements_per_inner(value.numel(), inner[name])
        if start % block or stop % block:
            raise CheckpointError(
                f"elements {start} to {stop} of a {type(value).__name__} cannot be sliced: expected multiples of "
                f"{block}, the block size of its '{name}'. Load it with ZeroConfig(partition=WholeParams())."
            )
        inner[name] = inner[name].reshape(-1)[start // block : stop // block]
    return rebuild_subclass(value, inner, (stop - start,))


def concat_subclass_shards(
    shards: Sequence[torch.Tensor], shape: Sequence[int], shared_inner_names: frozenset[str]
) -> torch.Tensor:
    """Concatenate flat shards, in order, to a tensor of `shape`."""
    first, inner_by_shard = shards[0], [inner_tensors(shard) for shard in shards]
    joined = {
        name: tensor if name in shared_inner_names else torch.cat([inner[name] for inner in inner_by_shard])
        for name, tensor in inner_by_shard[0].items()
    }
    for name, tensor in inner_by_shard[0].items():
        if name not in shared_inner_names and tensor.shape == first.shape:
            joined[name] = joined[name].view(torch.Size(shape))
    return rebuild_subclass(first, joined, shape)


def elements_per_inner(numel: int, inner: torch.Tensor) -> int:
    """Return how many elements of a tensor one element of an inner tensor represents (the block size)."""
    block = numel // max(1, inner.numel())
    if block * inner.numel() != numel:
        raise CheckpointError(
            f"expected the {inner.numel()} elements of an inner tensor to divide {numel}, the size of the outer one"
        )
    return block


# ---------------------------------------------------------------------------------------------------------------------
# Nested containers of tensors.


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Copy nested containers with `fn(tensor)` for each tensor. Containers keep their types, other values stay."""
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
    """Return all plain tensors in `value`, including the inner tensors of wrapper subclasses."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, lambda tensor: map_inner_tensors(tensor, collect))
    return tensors


def snapshot_to_host(value: Any) -> Any:
    """Return a deep copy in host memory, independent of later changes."""
    return map_tensors(deepcopy_except_tensors(value), lambda tensor: map_inner_tensors(tensor, _detach_to_host))


def tensor_versions(value: Any) -> list[int]:
    """Return autograd's version counter of each tensor, which every in-place change increments."""
    versions: list[int] = []
    map_tensors(value, lambda tensor: versions.append(tensor._version))
    return versions


def deepcopy_except_tensors(value: Any) -> Any:
    """Deep-copy everything except tensors, which the copy shares."""
    memo: dict[int, Any] = {}
    map_tensors(value, lambda tensor: memo.setdefault(id(tensor), tensor))
    return copy.deepcopy(value, memo)


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return map_inner_tensors(tensor, torch.clone)


def _detach_to_host(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()


def dense_flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a flat view of a tensor's memory, in memory order; None if its strides leave gaps."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def allocate_state(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    param_shape: tuple[int, ...],
    param_stride: tuple[int, ...],
) -> torch.Tensor:
    """Return memory for a state tensor, with the strides that an optimizer would give it; scalars are on the CPU."""
    if not shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if shape != param_shape:
        return torch.empty(shape, dtype=dtype, device=device)
    # Hazard: fused kernels walk through the memory of a parameter and of its state together. With other strides
    # (channels_last weights) they would combine elements that do not belong together.
    like = torch.empty_strided(shape, param_stride, dtype=dtype, device="meta")
    return torch.empty_like(like, device=device)
