"""What an optimizer tells of itself: who owns what, what it takes, how long it takes."""

from ..report import Report

__all__ = ["Report"]
