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
from .layout.partition import FlatShards, WholeParams
from .objects import broadcast_object
from .optimizer import ZeroRedundancyOptimizer
from .policies import KeepFull, KeepShard, MasterWeights, Reduce
from .scaler import GradScaler
from .sharded import ShardedOptimizer, shard

__version__ = "0.1.0"

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "FlatShards",
    "GradScaler",
    "KeepFull",
    "KeepShard",
    "LayoutError",
    "MasterWeights",
    "RankFailedError",
    "RankMismatchError",
    "Reduce",
    "ShardedOptimizer",
    "WholeParams",
    "ZeroConfig",
    "ZeroError",
    "ZeroRedundancyOptimizer",
    "broadcast_object",
    "ddp_hooks",
    "shard",
]
