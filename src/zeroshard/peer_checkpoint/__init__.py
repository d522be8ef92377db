"""In-memory checkpoints: each rank stores a snapshot of its shard on a peer, from which a lost rank is restored."""

from .restore import restore_from_peers
from .snapshot import PeerSnapshots

__all__ = ["PeerSnapshots", "restore_from_peers"]
