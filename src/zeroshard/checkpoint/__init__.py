"""Checkpoints that are there complete or not at all, and load on any number of ranks."""

from .loading import Loaded, latest, load
from .saving import Saving, async_save, save

__all__ = ["Loaded", "Saving", "async_save", "latest", "load", "save"]
