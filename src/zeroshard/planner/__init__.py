"""Estimate memory and communication per rank from shapes, before anything runs."""

from .estimate import Network
from .plan import Plan, plan

__all__ = ["Network", "Plan", "plan"]
