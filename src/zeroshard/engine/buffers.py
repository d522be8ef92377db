"""Buffers of a model, and parameters that no optimizer holds, made equal on all ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm.collectives import Comm
from ..errors import ConfigError
from .._types import Rank


class ModelBuffers:
    """Brings one rank's buffers to all others."""

    def __init__(self, comm: Comm, model: torch.nn.Module) -> None:
        self._comm = comm
        # By name, since modules may replace their buffers. One that is none may become a cache of each rank's own.
        named = [(module, name, it) for module in model.modules() for name, it in module._buffers.items()]
        self._locations = [(module, name) for module, name, it in named if it is not None]

    @property
    def needs_broadcast(self) -> bool:
        """And another rank to bring them to."""
        return bool(self._locations) and self._comm.group.size > 1

    def broadcast(self, source: Rank) -> None:
        """On all ranks, which must have buffers of the same shapes."""
        broadcast_coalesced(self._comm, self._iter_buffers(), source)

    def _iter_buffers(self) -> Iterator[torch.Tensor]:
        for module, name in self._locations:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.numel():
                yield buffer


def describe_for_broadcast(comm: Comm, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What must be equal on all ranks for `make_equal`. Raises where a tensor cannot travel."""
    if comm.group.size > 1:
        for name, tensor in tensors.items():
            _validate_for_broadcast(comm, name, tensor)
    # Each device has messages of its own, whatever its number is on this rank.
    devices = list(dict.fromkeys(tensor.device for tensor in tensors.values()))
    which = {it: it.type + (f" ({n} of {len(devices)} devices)" if n > 1 else "") for n, it in enumerate(devices, 1)}
    return [f"{name}: {it.dtype} {tuple(it.shape)} on {which[it.device]}" for name, it in tensors.items()]


def _validate_for_broadcast(comm: Comm, name: str, tensor: torch.Tensor) -> None:
    """Hazard: only ranks that receive a tensor write to it, so that these alone would raise."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a nested tensor" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0, because it is {kind}. Make it dense, for example with to_dense() "
            "or dequantize(), or keep it as a plain attribute of the module, not as a buffer."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0, because it is a {type(tensor.data).__name__}. Make it a plain "
            "tensor, or keep it as a plain attribute of the module, not as a buffer."
        )
    if tensor.numel() and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(
            f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), as "
            "expand() makes them, so it cannot receive the values of rank 0. Give it memory of its own with clone() or "
            "contiguous()."
        )
    if tensor.numel() and not comm.group.supports_device(tensor.device):
        raise ConfigError(f"the backend of the process group cannot carry {name} on {tensor.device}")


@torch.no_grad()
def broadcast_coalesced(comm: Comm, tensors: Iterable[torch.Tensor], source: Rank) -> None:
    """On all ranks: tensors become those of `source`; one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors if comm.group.size > 1 else ():
        kinds[tensor.dtype, tensor.device].append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        comm.broadcast(flat, source).wait()
        if comm.group.rank != source:
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                # As in DDP autograd does not count it: a pass whose backward is yet to come has used the tensor.
                tensor.data.copy_(part.view(tensor.shape))
