"""zeroshard: ZeRO optimizer state sharding for PyTorch. One copy of the optimizer across all ranks."""

from . import ddp_hooks
from .config import ZeroConfig
from .errors import (
    BindingError,
    CheckpointError,
    ConfigError,
    LayoutError,
    RankFailedError,
    RankMismatchError,
    ZeroError,
)
from .layout.partition import WholeParams
from .objects import broadcast_object
from .optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "LayoutError",
    "RankFailedError",
    "RankMismatchError",
    "WholeParams",
    "ZeroConfig",
    "ZeroError",
    "ZeroRedundancyOptimizer",
    "broadcast_object",
    "ddp_hooks",
]
