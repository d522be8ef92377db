"""The key-value store through which ranks find each other, on the loopback interface only."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

LOOPBACK = "127.0.0.1"


def open_store() -> TCPStore:
    """Serve a store on a free port."""
    # A store that opens its own socket listens on every interface.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False)
