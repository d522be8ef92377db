"""Test support: run a test body on real gloo ranks."""

from tests.support.pool import RankContext, RankFailures, RankPool, ranks

__all__ = ["RankContext", "RankFailures", "RankPool", "ranks"]
