"""Peer placement: each snapshot is stored on another rank, in another failure domain if possible, and evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.peer_checkpoint.placement import assign_peers, ranks_stored_on


def test_single_rank_stores_its_own_snapshot() -> None:
    assert assign_peers(["here"]) == [0]
    assert ranks_stored_on([0], 0) == []


@pytest.mark.parametrize("size", [2, 3, 5])
def test_next_rank_is_peer_within_one_domain(size: int) -> None:
    assert assign_peers(["here"] * size) == [*range(1, size), 0]


def test_peer_is_in_next_domain() -> None:
    assert assign_peers([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert assign_peers([0, 0, 1, 1, 2, 2]) == [2, 3, 4, 5, 0, 1]


def test_ranks_of_a_domain_may_be_interleaved() -> None:
    assert assign_peers(["a", "b", "a", "b"]) == [1, 0, 3, 2]


def test_majority_domain_is_spread_over_the_others() -> None:
    peers = assign_peers([0, 0, 0, 0, 0, 1, 1])
    assert peers == [5, 6, 5, 6, 5, 0, 1]
    assert ranks_stored_on(peers, 5) == [0, 2, 4]
    assert ranks_stored_on(peers, 4) == []


@given(st.lists(st.integers(0, 4), min_size=2, max_size=24))
def test_peers_are_in_other_domains_and_balanced(domains: list[int]) -> None:
    peers = assign_peers(domains)
    counts, largest = Counter(peers), max(Counter(domains).values())
    outside = len(domains) - largest
    for rank, peer in enumerate(peers):
        assert peer != rank
        assert domains[peer] != domains[rank] or len(set(domains)) == 1
    expected_max = 1 if outside == 0 or largest <= outside else -(-largest // outside)
    assert max(counts.values()) == expected_max
    assert sorted(stored for rank in range(len(domains)) for stored in ranks_stored_on(peers, rank)) == list(
        range(len(domains))
    )
