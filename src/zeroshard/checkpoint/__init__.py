"""Checkpoints that are there complete or not at all, and load on any number of ranks."""

from .load import LoadResult, latest, load
from .save import SaveHandle, async_save, save

__all__ = ["LoadResult", "SaveHandle", "async_save", "latest", "load", "save"]
