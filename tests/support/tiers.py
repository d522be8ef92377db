"""The fast tier: which variants of a parametrized test run in `make test`.

Many tests run for several world sizes, and some for several configurations too. The fast tier runs one variant of each
and marks the others `slow`; `make test-all` runs them all. The choice is a hash of the test's name and parameters, so
it stays the same from run to run and when tests move, and all world sizes occur in every fast run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

RANK_COUNT = "rank_count"
"""The parameter that holds the world size."""


def sampled(
    name: str, values: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Test], Test]:
    """Parametrize a test like `pytest.mark.parametrize`, but run only one of the values in the fast tier.

    Use it for products of configurations, not for tests about the difference between the values.
    """
    assert "," not in name, f"one parameter at a time, got {name!r}"
    parametrize, sample = pytest.mark.parametrize(name, values, ids=ids), pytest.mark.sampled(name)

    def decorate(test: Test) -> Test:
        decorated: Test = sample(parametrize(test))
        return decorated

    return decorate


def mark_slow_variants(items: Sequence[pytest.Item]) -> None:
    """Leave one variant of each sampled test in the fast tier."""
    variants: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        names = {name for mark in item.iter_markers("sampled") for name in mark.args}
        if names and isinstance(item, pytest.Function):
            other_params = tuple((name, id(value)) for name, value in item.callspec.params.items() if name not in names)
            variants[item.parent, item.originalname, other_params].append(item)
    for group in variants.values():
        chosen = _choose(group)
        for item in group:
            if item is not chosen:
                item.add_marker(pytest.mark.slow)


def _choose(variants: Sequence[pytest.Function]) -> pytest.Function:
    """Choose a variant. Prefer those with several ranks."""
    fast = [item for item in variants if item.get_closest_marker("slow") is None] or variants
    distributed = [item for item in fast if item.callspec.params.get(RANK_COUNT) not in (None, 1)]
    return min(distributed or fast, key=_hash)


def _hash(item: pytest.Function) -> str:
    return sha256(f"{item.originalname}[{item.callspec.id}]".encode()).hexdigest()
