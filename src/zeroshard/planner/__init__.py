"""Estimate per-rank memory and communication volume from shapes, without allocating anything."""

from .estimate import Network
from .plan import Plan, plan

__all__ = ["Network", "Plan", "plan"]
