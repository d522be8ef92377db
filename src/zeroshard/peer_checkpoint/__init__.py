"""In-memory checkpoints: a copy of each rank's shards on another rank, and recovery from the copies."""

from .restore import restore_from_peers
from .snapshot import PeerSnapshots

__all__ = ["PeerSnapshots", "restore_from_peers"]
