"""Estimate memory and communication per rank from shapes, before anything runs."""

from .plan import Plan, plan
from .usage import Network

__all__ = ["Network", "Plan", "plan"]
