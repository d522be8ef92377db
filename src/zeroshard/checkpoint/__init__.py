"""Atomic checkpoints that load on any number of ranks."""

from .loader import LoadResult, latest, load
from .saver import SaveHandle, async_save, save

__all__ = ["LoadResult", "SaveHandle", "async_save", "latest", "load", "save"]
