"""The decorator that turns a test function into one that runs on several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from typing import Any

import pytest

from tests.support.pool import DEFAULT_TIMEOUT, RankPool
from tests.support.report import RankFailures

START_ALLOWANCE = 60.0


def ranks(*world_sizes: int, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body, whose first argument is a `RankContext`, on all ranks of each world size.

    The other arguments are fixtures and parameters as usual, and must be picklable.
    """
    sizes = pytest.mark.parametrize("rank_count", world_sizes, ids=[f"{size}ranks" for size in world_sizes])
    limit = pytest.mark.timeout(timeout + START_ALLOWANCE)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(rank_pool: RankPool, rank_count: int, **arguments: Any) -> None:
            try:
                rank_pool.run(body, rank_count, timeout, arguments)
            except RankFailures as failures:
                raise pytest.fail.Exception(str(failures), pytrace=False) from None

        vars(test).update(__rank_body__=body, __signature__=_without_context(body))
        marked: Callable[..., None] = limit(sizes(test))
        return marked

    return decorate


def _without_context(body: Callable[..., None]) -> inspect.Signature:
    _, *arguments = inspect.signature(body).parameters.values()
    needed = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("rank_pool", "rank_count")]
    return inspect.Signature([*needed, *arguments])
