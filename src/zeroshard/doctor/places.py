"""Where the ranks of a job are: pure, from what all of them have told."""

from collections import defaultdict
from collections.abc import Sequence

from .facts import RankInfo


def ranks_by_host(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """The ranks of each host, by its name."""
    found: dict[str, list[int]] = defaultdict(list)
    for it in rank_infos:
        found[it.host].append(it.rank)
    return dict(found)


def ranks_by_node(rank_infos: Sequence[RankInfo]) -> list[list[int]]:
    """Ranks that one torchrun has started, which numbers them one after the other; else those of a host."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for it in rank_infos:
        found[it.host, it.rank - it.local_rank if it.local_rank >= 0 else -1].append(it.rank)
    return list(found.values())


def has_equal_nodes(rank_infos: Sequence[RankInfo]) -> bool:
    """Whether state can be shared within each of several nodes: all have as many ranks, and more than one."""
    found = ranks_by_node(rank_infos)
    sizes, stated = set(map(len, found)), {it.local_size for it in rank_infos}
    starts = all(it.local_rank >= 0 for it in rank_infos)
    return starts and len(found) > 1 and len(sizes) == 1 and sizes == stated and sizes != {1}


def find_shared_gpus(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """GPUs that several ranks would use, by name, with these ranks."""
    users: dict[str, list[RankInfo]] = defaultdict(list)
    for it in rank_infos:
        if it.gpu is not None:
            users[it.gpu.identity].append(it)
    return {
        f"{them[0].host} cuda:{them[0].gpu.index}": [it.rank for it in them]
        for them in users.values()
        if len(them) > 1 and them[0].gpu is not None
    }


def choose_backend(rank_infos: Sequence[RankInfo]) -> str:
    """NCCL where every rank has a GPU of its own and nobody has asked for gloo. The same on all ranks."""
    own = all(it.gpu is not None for it in rank_infos) and not find_shared_gpus(rank_infos)
    return "nccl" if own and all(it.backend in ("", "nccl") for it in rank_infos) else "gloo"
