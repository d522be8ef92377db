"""Will it fit, on how many ranks, and what does the network pay? Computed from shapes, before anything runs."""

from .plan import Plan, plan
from .usage import Network

__all__ = ["Network", "Plan", "plan"]
