"""Host memory for what a device has no room for, and the ways to it and back."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..policies import Offload

SMALL = 1024
"""Tensors of fewer elements stay: step counts, for example, which some optimizers want on the device."""


def is_movable(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.numel() >= SMALL


class Hosts:
    """One for each device."""

    def __init__(self, policy: Offload) -> None:
        self._policy = policy
        self._known: dict[torch.device, Host] = {}

    def of(self, device: torch.device) -> "Host":
        if device not in self._known:
            self._known[device] = Host(self._policy, device)
        return self._known[device]

    def finish(self) -> None:
        for host in self._known.values():
            host.finish()


class Host:
    """Copies to and from one device, each way in a stream of its own."""

    def __init__(self, policy: Offload, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._pin = policy.pin and self._cuda
        self._in, self._out = _stream(device), _stream(device)
        self._compute: Any = None

    def room(self, like: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        """Host memory for a tensor: what is known, if it will do, or new."""
        fits = known is not None and (known.shape, known.dtype) == (like.shape, like.dtype)
        if known is not None and fits and (known.is_pinned() or not self._pin):
            return known
        return torch.empty_like(like, device="cpu", pin_memory=self._pin)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pin)

    def on_the_way_in(self) -> AbstractContextManager[Any]:
        """Inside, memory is taken and filled in the stream that brings things in, for use in the present one."""
        if self._in is None:
            return nullcontext()
        self._compute = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._in)

    def bring(self, home: torch.Tensor) -> torch.Tensor:
        """A copy on the device, on its way. To be called `on_the_way_in`."""
        copy = torch.empty_like(home, device=self._device, pin_memory=False)
        copy.copy_(home, non_blocking=True)
        self._keep_for_compute(copy)
        return copy

    def fill(self, target: torch.Tensor, home: torch.Tensor) -> None:
        """As `bring`, into memory that is there."""
        target.copy_(home, non_blocking=True)
        self._keep_for_compute(target)

    def arrival(self) -> Any:
        """To be waited for by who uses what was brought."""
        return self._in.record_event() if self._in is not None else None

    def use(self, arrival: Any) -> None:
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)

    def take(self, value: torch.Tensor, home: torch.Tensor) -> None:
        """Start copying a value to its home. It may be dropped at once."""
        if self._out is None:
            home.copy_(value)
            return
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            home.copy_(value, non_blocking=True)
        value.record_stream(self._out)

    def finish(self) -> None:
        """All that was taken is at home."""
        if self._out is not None:
            self._out.synchronize()

    def _keep_for_compute(self, tensor: torch.Tensor) -> None:
        # Hazard: memory of one stream, used in another, would be given to the next taker too early.
        if self._compute is not None:
            tensor.record_stream(self._compute)


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
