"""Faults that are put into a rank on purpose: what happens, where, on which rank and in which step."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from zeroshard import assembly
from zeroshard.checkpoint import reading, writing
from zeroshard.runtime import param_sync, slots, store
from zeroshard.state import exchange

SLOW = 0.7
"""Seconds, less than any timeout here."""


class Kind(Enum):
    RAISES = "raises an exception"
    KILLED = "is killed (SIGKILL)"
    STOPPED = "is stopped (SIGSTOP)"
    SLOW = "is slow"
    MISSHAPEN = "has a wrong shape"
    CUT = "loses its connections"


class Place(Enum):
    CONSTRUCTOR = "constructor"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    INNER_STEP = "inner step"
    GATHER = "gather"
    CONSOLIDATION = "consolidation"
    SAVE = "save"
    LOAD = "load"


class InjectedError(Exception):
    """What a rank raises on purpose."""


@dataclass(frozen=True)
class Fault:
    kind: Kind
    place: Place
    rank: int
    step: int
    """Steps that have been made before; for a constructor and for a load, which come first, of no meaning."""


class Trap:
    """On the rank of the fault: fires once, at its place, in its step. On others: nothing."""

    def __init__(self, fault: Fault | None, rank: int, store_port: int, tell: Callable[[], None]) -> None:
        """`tell` is called before it happens."""
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._store_port, self._tell = store_port, tell
        self.step = 0
        self.is_armed = self.has_fired = False
        self.inner: Any = None
        """The optimizer that made the last step here."""

    def set(self) -> None:
        """Into the code that all ranks go through. The process is not used for anything else afterwards."""
        self._before(assembly.Assembly, "engine", Place.CONSTRUCTOR)
        self._before(slots.Slot, "_start", Place.REDUCTION)
        self._before(param_sync.ShardSync, "start", Place.GATHER)
        self._before(param_sync.ParamSync, "start", Place.GATHER)
        self._before(exchange.Outbox, "send", Place.CONSOLIDATION)
        self._before(exchange, "receive", Place.CONSOLIDATION)
        self._before(writing._Planner, "transform_object", Place.SAVE)
        self._before(reading.Reading, "_read", Place.LOAD)

    def spring(self, place: Place) -> bool:
        """Whether the caller is to make a wrong shape."""
        fault = self._fault
        if fault is None or self.has_fired or place != fault.place:
            return False
        if place not in (Place.CONSTRUCTOR, Place.LOAD) and self.step < fault.step:
            return False
        self.has_fired = True
        self._tell()
        return self._act(fault.kind)

    def misshapes(self, place: Place) -> bool:
        """As `spring`, for a fault of that kind only."""
        return self._fault is not None and self._fault.kind is Kind.MISSHAPEN and self.spring(place)

    def _act(self, kind: Kind) -> bool:
        if kind is Kind.RAISES:
            raise InjectedError("on purpose")
        if kind is Kind.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is Kind.STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind is Kind.SLOW:
            time.sleep(SLOW)
        if kind is Kind.CUT:
            self._cut_connections()
        return kind is Kind.MISSHAPEN

    def _before(self, owner: Any, name: str, place: Place) -> None:
        original = getattr(owner, name)

        def trapped(*arguments: Any, **options: Any) -> Any:
            if self._can_act(arguments) and self.spring(place):
                arguments = tuple(_misshapen(it) if isinstance(it, _SPOILED) else it for it in arguments)
            return original(*arguments, **options)

        setattr(owner, name, trapped)

    def _can_act(self, arguments: Sequence[Any]) -> bool:
        """A wrong shape needs something that has one."""
        is_shape = self._fault is not None and self._fault.kind is Kind.MISSHAPEN
        return not is_shape or any(isinstance(it, _SPOILED) for it in arguments)

    def _cut_connections(self) -> None:
        """All to other ranks, and not those to the store."""
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] != self._store_port:
                    end.shutdown(socket.SHUT_RDWR)


_SPOILED = (torch.Tensor, reading.Located, store.Shipment)


def _misshapen(value: Any) -> Any:
    """One element too few: of a tensor, of what a file has, of a parameter that another rank sends."""
    if isinstance(value, reading.Located):
        return value._replace(like=value.like[1:] if value.like.dim() else value.like.reshape(1))
    if isinstance(value, store.Shipment):
        parcel: Any = next(it for it in value.parcels if it.owner != dist.get_rank())
        parcel._params = [_misshapen(parcel._params[0].detach()), *parcel._params[1:]]
        return value
    return value.reshape(-1)[1:]
