"""Which rank keeps the second copy of which: one in another failure domain, wherever there is one."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence


def assign_peers(failure_domains: Sequence[Hashable]) -> list[int]:
    """For each rank the one that keeps its copy. `domains`: what fails together with each rank, a host for example.

    Every rank keeps one copy. Only where a domain has more than half of the ranks, all others share its copies evenly.
    A rank that is alone keeps its own.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, domain in enumerate(failure_domains):
        members[domain].append(rank)
    largest = max(members.values(), key=len)
    ring = [rank for domain in members.values() for rank in domain]
    if len(members) == 1:
        return _rotate(ring, 1)
    if 2 * len(largest) <= len(ring):
        # One turn by the largest domain leads out of every domain, and never round into it again.
        return _rotate(ring, len(largest))
    others = [rank for rank in ring if failure_domains[rank] != failure_domains[largest[0]]]
    found = {rank: others[place % len(others)] for place, rank in enumerate(largest)}
    found |= dict(zip(others, largest, strict=False))
    return [found[rank] for rank in range(len(ring))]


def ranks_stored_on(peers: Sequence[int], rank: int) -> list[int]:
    """The other ranks whose copies a rank keeps."""
    return [other for other, keeper in enumerate(peers) if keeper == rank != other]


def max_shards_per_rank(world_size: int, failure_domain_size: int | None) -> int:
    """How many shares a rank holds at most, its own among them. `apart` consecutive ranks fail together; None is
    unknown, and then each keeps one for another."""
    found = assign_peers([rank // (failure_domain_size or 1) for rank in range(world_size)])
    kept = Counter(keeper for rank, keeper in enumerate(found) if keeper != rank)
    return 1 + max(kept.values(), default=0)


def _rotate(ring: Sequence[int], offset: int) -> list[int]:
    found = {rank: ring[(place + offset) % len(ring)] for place, rank in enumerate(ring)}
    return [found[rank] for rank in range(len(ring))]
