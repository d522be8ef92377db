"""Buffers of a model, kept equal on all ranks."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from ..comm.collectives import Comm
from ..units import Rank


class BufferSync:
    """Brings one rank's buffers to all others: one message for each dtype and device."""

    def __init__(self, comm: Comm, model: torch.nn.Module) -> None:
        self._comm = comm
        # By name, since modules may replace their buffers.
        self._places = [(module, name) for module in model.modules() for name in module._buffers]

    @torch.no_grad()
    def sync(self, source: Rank) -> None:
        """On all ranks, which must have buffers of the same shapes."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in self._buffers() if self._comm.group.size > 1 else ():
            kinds[buffer.dtype, buffer.device].append(buffer)
        for buffers in kinds.values():
            self._send(buffers, source)

    def _buffers(self) -> Iterator[torch.Tensor]:
        for module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.numel():
                yield buffer

    def _send(self, buffers: list[torch.Tensor], source: Rank) -> None:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        self._comm.broadcast(flat, source).wait()
        if self._comm.group.rank != source:
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
