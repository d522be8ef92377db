"""Choose the peer that stores each rank's snapshot: in another failure domain, if there is one."""

from collections import Counter
from collections.abc import Hashable, Sequence

from .._types import group_ranks


def assign_peers(failure_domains: Sequence[Hashable]) -> list[int]:
    """Return the peer that stores the snapshot of each rank.

    Ranks with equal failure domains, hosts for example, are expected to fail together. Each rank stores one snapshot
    for another. If one domain has more than half of the ranks, the ranks outside it share its snapshots evenly. A
    single rank is its own peer.
    """
    members = group_ranks(failure_domains)
    largest = max(members.values(), key=len)
    ring = [rank for domain in members.values() for rank in domain]
    if len(members) == 1:
        return _rotate(ring, 1)
    if 2 * len(largest) <= len(ring):
        # Rotating by the size of the largest domain leaves every domain and cannot wrap around into it again.
        return _rotate(ring, len(largest))
    others = [rank for rank in ring if failure_domains[rank] != failure_domains[largest[0]]]
    peers = {rank: others[position % len(others)] for position, rank in enumerate(largest)}
    peers |= dict(zip(others, largest, strict=False))
    return [peers[rank] for rank in range(len(ring))]


def ranks_stored_on(peers: Sequence[int], rank: int) -> list[int]:
    """Return the other ranks whose snapshots `rank` stores."""
    return [other for other, peer in enumerate(peers) if peer == rank != other]


def max_shards_per_rank(world_size: int, failure_domain_size: int | None) -> int:
    """Return how many shards a rank stores at most, including its own.

    `failure_domain_size` consecutive ranks fail together; if None (unknown), each rank stores one for another.
    """
    peers = assign_peers([rank // (failure_domain_size or 1) for rank in range(world_size)])
    stored = Counter(peer for rank, peer in enumerate(peers) if peer != rank)
    return 1 + max(stored.values(), default=0)


def _rotate(ring: Sequence[int], offset: int) -> list[int]:
    peers = {rank: ring[(position + offset) % len(ring)] for position, rank in enumerate(ring)}
    return [peers[rank] for rank in range(len(ring))]
