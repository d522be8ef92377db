"""zeroshard: ZeRO-1 and ZeRO-2 for PyTorch. Optimizer state and gradients are sharded across data-parallel ranks."""

from typing import TYPE_CHECKING, Any

from . import ddp_hooks
from .config import ConsistencyCheck, CPUOffload, NonFiniteGrads, PeerCheckpoint, ZeroConfig
from .errors import (
    BindingError,
    CheckpointError,
    ConfigError,
    LayoutError,
    NonFiniteError,
    RankFailedError,
    RankLostError,
    RankMismatchError,
    ReplicaMismatchError,
    ZeroError,
)
from .grad_scaler import GradScaler
from .layout.partition import FlatShards, WholeParams
from .optimizer import ZeroRedundancyOptimizer
from .rules import ParamRule, matrix_params, remaining_params
from .shard import ShardedOptimizer, shard
from .torch_patch import replace_torch
from .zero_redundancy_optimizer import (
    broadcast_object as broadcast_object,  # not in `__all__`: torch has it as a private name
)

if TYPE_CHECKING:
    from . import checkpoint
    from . import peer_checkpoint as peer_checkpoint
    from . import planner as planner
    from . import report as report

__version__ = "0.1.0"

__all__ = [
    "BindingError",
    "CPUOffload",
    "CheckpointError",
    "ConfigError",
    "ConsistencyCheck",
    "FlatShards",
    "GradScaler",
    "LayoutError",
    "NonFiniteError",
    "NonFiniteGrads",
    "ParamRule",
    "PeerCheckpoint",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
    "ReplicaMismatchError",
    "ShardedOptimizer",
    "WholeParams",
    "ZeroConfig",
    "ZeroError",
    "ZeroRedundancyOptimizer",
    "checkpoint",
    "ddp_hooks",
    "matrix_params",
    "remaining_params",
    "replace_torch",
    "shard",
]


_LAZY = {"checkpoint", "peer_checkpoint", "planner", "report"}
"""Modules that are imported on first use: most programs need few of them, and importing `checkpoint` is slow."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.{name}")
