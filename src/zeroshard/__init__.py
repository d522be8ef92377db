"""zeroshard: ZeRO optimizer state sharding for PyTorch. One copy of the optimizer across all ranks."""

from typing import TYPE_CHECKING, Any

from . import ddp_hooks
from .config import ZeroConfig
from .errors import (
    BindingError,
    CheckpointError,
    ConfigError,
    DriftError,
    LayoutError,
    NonFiniteError,
    RankFailedError,
    RankLostError,
    RankMismatchError,
    ZeroError,
)
from .layout.partition import FlatShards, WholeParams
from .measuring import measure_cost
from .objects import broadcast_object as broadcast_object  # not in `__all__`: torch has it as a private name
from .optimizer import ZeroRedundancyOptimizer
from .planning.plan import Plan, plan
from .planning.usage import Network
from .policies import Drift, NonFinite, Offload, SecondCopy
from .recovery import restore
from .replacing import replace_torch
from .reporting.report import Report
from .rules import Rule, everything_else, matrices
from .scaler import GradScaler
from .second_copy import Copies
from .sharded import ShardedOptimizer, shard

if TYPE_CHECKING:
    from . import checkpoint

__version__ = "0.1.0.dev0"

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "Copies",
    "Drift",
    "DriftError",
    "FlatShards",
    "GradScaler",
    "LayoutError",
    "Network",
    "NonFinite",
    "NonFiniteError",
    "Offload",
    "Plan",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
    "Report",
    "Rule",
    "SecondCopy",
    "ShardedOptimizer",
    "WholeParams",
    "ZeroConfig",
    "ZeroError",
    "ZeroRedundancyOptimizer",
    "checkpoint",
    "ddp_hooks",
    "everything_else",
    "matrices",
    "measure_cost",
    "plan",
    "replace_torch",
    "restore",
    "shard",
]


def __getattr__(name: str) -> Any:
    """`zeroshard.checkpoint` is imported on use: what it needs of torch takes a second."""
    if name != "checkpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.checkpoint")
