"""Host memory for offloaded optimizer state, and asynchronous copies between it and the device.

Each device has one stream per direction, so prefetches, computation and write-backs overlap.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..config import CPUOffload

MIN_OFFLOAD_NUMEL = 1024
"""Smaller tensors stay on the device, for example step counts, which some optimizers require there."""


def is_offloadable(value: Any) -> bool:
    """Return whether a value of the optimizer state is worth moving to host memory."""
    return type(value) is torch.Tensor and value.layout == torch.strided and value.numel() >= MIN_OFFLOAD_NUMEL


class HostTransfers:
    """One `HostTransfer` per device, created on first use."""

    def __init__(self, policy: CPUOffload) -> None:
        self._policy = policy
        self._by_device: dict[torch.device, HostTransfer] = {}

    def for_device(self, device: torch.device) -> "HostTransfer":
        if device not in self._by_device:
            self._by_device[device] = HostTransfer(self._policy, device)
        return self._by_device[device]

    def synchronize(self) -> None:
        """Block the host until all write-backs are complete."""
        for host_transfer in self._by_device.values():
            host_transfer.synchronize()


class HostTransfer:
    """Copies between host memory and one device, with one stream per direction (none on the CPU)."""

    def __init__(self, policy: CPUOffload, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._pin_memory = policy.pin and self._is_cuda
        self._h2d_stream, self._d2h_stream = _make_stream(device), _make_stream(device)
        self._compute_stream: Any = None

    def allocate(self, like: torch.Tensor, existing: torch.Tensor | None = None) -> torch.Tensor:
        """Return host memory for a tensor: `existing` if it fits, otherwise a new allocation."""
        fits = existing is not None and (existing.shape, existing.dtype) == (like.shape, like.dtype)
        if existing is not None and fits and (existing.is_pinned() or not self._pin_memory):
            return existing
        return torch.empty_like(like, device="cpu", pin_memory=self._pin_memory)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pin_memory)

    def use_h2d_stream(self) -> AbstractContextManager[Any]:
        """Allocate and copy on the host-to-device stream inside the block, for use on the stream current at entry."""
        if self._h2d_stream is None:
            return nullcontext()
        self._compute_stream = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._h2d_stream)

    def prefetch(self, host_tensor: torch.Tensor) -> torch.Tensor:
        """Start copying to the device and return the copy. Call inside `use_h2d_stream`."""
        device_tensor = torch.empty_like(host_tensor, device=self._device, pin_memory=False)
        device_tensor.copy_(host_tensor, non_blocking=True)
        self._record_compute_stream(device_tensor)
        return device_tensor

    def prefetch_into(self, target: torch.Tensor, host_tensor: torch.Tensor) -> None:
        """Like `prefetch`, into an existing device tensor."""
        target.copy_(host_tensor, non_blocking=True)
        self._record_compute_stream(target)

    def record_prefetch(self) -> Any:
        """Return an event for `wait_event` that covers all prefetches started so far; None on the CPU."""
        return self._h2d_stream.record_event() if self._h2d_stream is not None else None

    def wait_event(self, event: Any) -> None:
        """Make the current stream wait for prefetches, without blocking the host."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def write_back(self, value: torch.Tensor, host_tensor: torch.Tensor) -> None:
        """Start copying a device tensor to host memory. The caller may drop the device tensor immediately."""
        if self._d2h_stream is None:
            host_tensor.copy_(value)
            return
        self._d2h_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._d2h_stream):
            host_tensor.copy_(value, non_blocking=True)
        value.record_stream(self._d2h_stream)

    def synchronize(self) -> None:
        """Block the host until all write-backs are complete."""
        if self._d2h_stream is not None:
            self._d2h_stream.synchronize()

    def _record_compute_stream(self, tensor: torch.Tensor) -> None:
        # Hazard: the tensor is allocated on one stream and used on another. Without `record_stream`, the caching
        # allocator would hand its memory to the next allocation too early.
        if self._compute_stream is not None:
            tensor.record_stream(self._compute_stream)


def _make_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
