"""Atomic checkpoints that load on any number of ranks."""

from importlib.util import find_spec

if find_spec("numpy") is None:
    # Hazard: torch.distributed.checkpoint exchanges plans through numpy. Without it the first save on several ranks
    # would fail on one rank, hours into a job, and leave the others waiting.
    raise ModuleNotFoundError(
        "zeroshard.checkpoint needs numpy, which torch.distributed.checkpoint uses. Install it: pip install numpy",
        name="numpy",
    )

from .loader import LoadResult, latest, load
from .saver import SaveHandle, async_save, save

__all__ = ["LoadResult", "SaveHandle", "async_save", "latest", "load", "save"]
