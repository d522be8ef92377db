"""Host memory for what a device has no room for, and the ways to it and back."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..config import CPUOffload

MIN_OFFLOAD_NUMEL = 1024
"""Tensors of fewer elements stay: step counts, for example, which some optimizers want on the device."""


def is_offloadable(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.numel() >= MIN_OFFLOAD_NUMEL


class HostTransfers:
    """One for each device."""

    def __init__(self, policy: CPUOffload) -> None:
        self._policy = policy
        self._by_device: dict[torch.device, HostTransfer] = {}

    def for_device(self, device: torch.device) -> "HostTransfer":
        if device not in self._by_device:
            self._by_device[device] = HostTransfer(self._policy, device)
        return self._by_device[device]

    def synchronize(self) -> None:
        for host in self._by_device.values():
            host.synchronize()


class HostTransfer:
    """Copies to and from one device, each way in a stream of its own."""

    def __init__(self, policy: CPUOffload, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._pin_memory = policy.pin and self._is_cuda
        self._h2d_stream, self._d2h_stream = _make_stream(device), _make_stream(device)
        self._compute_stream: Any = None

    def allocate(self, like: torch.Tensor, existing: torch.Tensor | None = None) -> torch.Tensor:
        """Host memory for a tensor: what is known, if it will do, or new."""
        fits = existing is not None and (existing.shape, existing.dtype) == (like.shape, like.dtype)
        if existing is not None and fits and (existing.is_pinned() or not self._pin_memory):
            return existing
        return torch.empty_like(like, device="cpu", pin_memory=self._pin_memory)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pin_memory)

    def use_h2d_stream(self) -> AbstractContextManager[Any]:
        """Inside, memory is taken and filled in the stream that brings things in, for use in the present one."""
        if self._h2d_stream is None:
            return nullcontext()
        self._compute_stream = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._h2d_stream)

    def prefetch(self, host_tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, on its way. To be called `on_the_way_in`."""
        copy = torch.empty_like(host_tensor, device=self._device, pin_memory=False)
        copy.copy_(host_tensor, non_blocking=True)
        self._record_compute_stream(copy)
        return copy

    def prefetch_into(self, target: torch.Tensor, host_tensor: torch.Tensor) -> None:
        """As `bring`, into memory that is there."""
        target.copy_(host_tensor, non_blocking=True)
        self._record_compute_stream(target)

    def record_prefetch(self) -> Any:
        """To be waited for by who uses what was brought."""
        return self._h2d_stream.record_event() if self._h2d_stream is not None else None

    def wait_event(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def write_back(self, value: torch.Tensor, host_tensor: torch.Tensor) -> None:
        """Start copying a value to its home. It may be dropped at once."""
        if self._d2h_stream is None:
            host_tensor.copy_(value)
            return
        self._d2h_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._d2h_stream):
            host_tensor.copy_(value, non_blocking=True)
        value.record_stream(self._d2h_stream)

    def synchronize(self) -> None:
        """All that was taken is at home."""
        if self._d2h_stream is not None:
            self._d2h_stream.synchronize()

    def _record_compute_stream(self, tensor: torch.Tensor) -> None:
        # Hazard: memory of one stream, used in another, would be given to the next taker too early.
        if self._compute_stream is not None:
            tensor.record_stream(self._compute_stream)


def _make_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
