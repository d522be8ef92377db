"""Checkpoints that are there complete or not at all, and load on any number of ranks."""

from .loading import Loaded, latest, load
from .saving import Saving, save

__all__ = ["Loaded", "Saving", "latest", "load", "save"]
