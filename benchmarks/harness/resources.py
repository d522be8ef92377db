"""Bytes that a process sends and memory that it uses, as the kernel counts them."""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20

_ACKED_AT = 120
"""Offset in `struct tcp_info` of the number of bytes that the peer has acknowledged (64 bits)."""

_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of malloc.h."""


def sent_bytes() -> int:
    """Return the payload bytes that all TCP connections of this process have sent and the peers have acknowledged."""
    return sum(_acknowledged(connection) for connection in _connections())


def return_freed_memory() -> None:
    """From now on, return blocks of 1 MiB and more to the system as soon as they are freed.

    By default the allocator keeps more and more of them. The peak then depends more on the allocator than on the memory
    in use.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MIB)


def reset_peak() -> int:
    """Reset the peak of resident memory. Return the current bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise new allocations could reuse freed memory and not show
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak of resident memory since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _connections() -> Iterator[socket.socket]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # was closed after it was listed
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


def _acknowledged(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    (acknowledged,) = struct.unpack_from("Q", info, _ACKED_AT)
    return int(acknowledged)
