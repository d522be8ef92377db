"""Test support: run a test body on real gloo ranks."""

from tests.support.decorators import ranks
from tests.support.pool import RankPool
from tests.support.protocol import RankContext
from tests.support.report import RankFailures

__all__ = ["RankContext", "RankFailures", "RankPool", "ranks"]
