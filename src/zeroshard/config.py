"""`ZeroConfig` and its policies: every option of the sharded optimizers beyond torch's own signature.

All objects here are frozen dataclasses that validate themselves on construction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, TypeVar

import torch

from ._tracebacks import install as shorten_printed_tracebacks
from .errors import ConfigError
from .layout.partition import FlatShards, Partitioner, WholeParams

# ---------------------------------------------------------------------------------------------------------------------
# Policies: the values of `ZeroConfig` options.


@dataclass(frozen=True)
class ReducePolicy:
    """How gradients are averaged: `ZeroConfig`'s `reduce_dtype` and `deterministic_reduce`.

    Args:
        dtype: Dtype in which gradients are sent; they are accumulated in at least float32. Defaults to the dtype of
            the parameter, regardless of its `grad_dtype`. Partial sums that are reduced across replicas keep the
            precision in which they were accumulated.
        fixed_order: Always sum in rank order.
    """

    dtype: torch.dtype | None = None
    fixed_order: bool = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are sent. Complex and narrower dtypes are not converted."""
        if self.dtype is None or not dtype.is_floating_point or dtype.itemsize <= self.dtype.itemsize:
            return dtype
        return self.dtype


@dataclass(frozen=True)
class MasterWeightPolicy:
    """Master weights of `dtype`, sharded across ranks, for parameters of lower precision.

    The update runs in `dtype`, and its result is rounded once to the dtype of the parameter.
    """

    dtype: torch.dtype = torch.float32

    def covers(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize


@dataclass(frozen=True)
class CPUOffload:
    """Keep optimizer state and master weights in host memory; the step copies them to the GPU bucket by bucket.

    Args:
        device: Where to keep them. Only `"cpu"` is supported.
        pin: Use pinned memory, which lets copies overlap with updates.

    Raises:
        ConfigError: If `device` or `pin` has an unsupported value.
    """

    device: str = "cpu"
    pin: bool = True

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise ConfigError(f'expected CPUOffload(device="cpu"), got {self.device!r}')
        if not isinstance(self.pin, bool):
            raise ConfigError(f"expected CPUOffload(pin=True) or CPUOffload(pin=False), got {self.pin!r}")


@dataclass(frozen=True)
class ConsistencyCheck:
    """Compare all parameters bitwise across ranks every `every` steps, before the step updates anything.

    A mismatch raises `ReplicaMismatchError` on all ranks and names the ranks and parameters. A check costs one pass
    over the parameters and one small message.

    A mismatch persists until a step sends the parameter again: then all ranks receive the owner's value, right or
    wrong. With `every=1` the check therefore finds every bit flip in a parameter. With a larger `every` it finds
    mismatches that occurred since the last step, that recur, or that no step has overwritten since.

    The check cannot find wrong results that a rank computes for its own shard, or corrupted state, master weights and
    gradients that only one rank holds: these lead to the same parameters on all ranks.

    Args:
        every: Number of steps between two checks, at least 1.

    Raises:
        ConfigError: If `every` is not a positive integer.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(
                f"expected ConsistencyCheck(every=...) to be a positive number of steps, got {self.every!r}"
            )


@dataclass(frozen=True)
class NonFiniteGrads:
    """What `step()` does when an averaged gradient is inf or NaN on any rank. All ranks act the same way.

    `optimizer.nonfinite` counts these steps, and the first, second, fourth, eighth, ... one emits a warning. Steps that
    a GradScaler skips do not count. A closure is called before any code of the optimizer runs.

    Args:
        action: `"skip"` skips the step: parameters, state, step counts and options do not change, and `step()` returns
            None. `"raise"` raises `NonFiniteError` on all ranks and changes nothing. `"warn"` performs the step with
            these gradients.
        max_consecutive: With `"skip"`, raise `NonFiniteError` after this many such steps in a row.

    Raises:
        ConfigError: If an argument has an unsupported value, or `max_consecutive` is given without `"skip"`.
    """

    action: Literal["skip", "raise", "warn"]
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, str) or self.action not in ("skip", "raise", "warn"):
            raise ConfigError(
                f'expected NonFiniteGrads(action=...) to be "skip", "raise" or "warn", got {self.action!r}'
            )
        if self.max_consecutive is None:
            return
        if (
            isinstance(self.max_consecutive, bool)
            or not isinstance(self.max_consecutive, int)
            or self.max_consecutive < 1
        ):
            raise ConfigError(
                "expected NonFiniteGrads(max_consecutive=...) to be a positive number of steps, got "
                f"{self.max_consecutive!r}"
            )
        if self.action != "skip":
            raise ConfigError(
                f'NonFiniteGrads(max_consecutive=...) counts skipped steps: it needs action="skip", got {self.action!r}'
            )


@dataclass(frozen=True)
class PeerCheckpoint:
    """Keep a copy of each rank's state shard in the memory of a rank in another failure domain.

    When a rank is lost, `zeroshard.peer_checkpoint.restore_from_peers` rebuilds the full state from these copies,
    without reading a file.

    Args:
        every: Number of steps between two snapshots, at least 1.
        failure_domain_size: Number of consecutive ranks that fail together. By default the ranks of one host form a
            failure domain; on a single host each rank is its own.

    Raises:
        ConfigError: If an argument is not a positive integer.
    """

    every: int = 10
    failure_domain_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(
                f"expected PeerCheckpoint(every=...) to be a positive number of steps, got {self.every!r}"
            )
        if self.failure_domain_size is not None and (
            type(self.failure_domain_size) is not int or self.failure_domain_size < 1
        ):
            raise ConfigError(
                "expected PeerCheckpoint(failure_domain_size=...) to be a positive number of ranks or None, got "
                f"{self.failure_domain_size!r}"
            )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# ---------------------------------------------------------------------------------------------------------------------
# `ZeroConfig`.


_REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_SUGGESTION_CUTOFF = 0.75
"""Minimum `difflib` similarity of a suggested option: typos and longer forms, not words that merely look alike."""

Config = TypeVar("Config")


def _suggest_options(cls: type[Config]) -> type[Config]:
    """Make an unknown option raise `TypeError` with the closest valid name, or all names if none is close."""
    original_init, names = cls.__init__, [option.name for option in fields(cls)]  # type: ignore[arg-type]

    @wraps(original_init)
    def checked_init(self: Config, *args: Any, **options: Any) -> None:
        shorten_printed_tracebacks()  # config errors often come before any optimizer exists
        for name in options:
            if name not in names:
                close = get_close_matches(name, names, n=1, cutoff=_SUGGESTION_CUTOFF)
                hint = f"Did you mean {close[0]!r}?" if close else f"Its options are {', '.join(names)}."
                raise TypeError(f"{cls.__name__}() has no option {name!r}. {hint}")
        original_init(self, *args, **options)

    cls.__init__ = checked_init  # type: ignore[assignment]
    return cls


@_suggest_options
@dataclass(frozen=True)
class ZeroConfig:
    """Options of `shard` and `ZeroRedundancyOptimizer`.

    `stage=2`, `overlap_param_gather` and `broadcast_buffers` need access to the model, so only `shard` accepts them.

    Args:
        stage: 1 shards optimizer state (ZeRO-1), 2 also shards gradients (ZeRO-2). Defaults to 2 for `shard` and to 1
            for `ZeroRedundancyOptimizer`, the only stage that works under DDP. With stage 2 a gradient is freed when
            its bucket is sent, and `param.grad` is a placeholder that raises when used. With stage 1 `param.grad` is
            kept and holds the sum of this rank's own backward passes, not the average.
        partition: How parameters are assigned to ranks. Defaults to `WholeParams()` for `ZeroRedundancyOptimizer`, as
            in torch. `shard` defaults to `FlatShards()` where the optimizer can update parts of a parameter.
        reduce_dtype: Dtype in which gradients are sent; they are accumulated in at least float32. Defaults to the dtype
            of the parameter. Partial sums that are reduced across replicas keep the precision in which they were
            accumulated.
        deterministic_reduce: Always sum gradients in rank order, independent of timing and of the backend's algorithms.
            CPU tensors are always summed in rank order. With NCCL this costs the memory of one more bucket. Backends
            that can only reduce whole buckets (gloo with CUDA tensors), and NCCL for whole parameters, sum in an order
            of their own, which is always the same.
        master_dtype: Keep master weights of this dtype, sharded across ranks, for parameters of lower precision. The
            update runs in this dtype and is rounded once.
        offload: Keep optimizer state and master weights in host memory between steps.
        consistency_check: Periodically verify that all ranks hold the same parameters.
        nonfinite: What to do with a step whose gradients are not all finite. By default they are not checked.
        peer_checkpoint: Keep a copy of each rank's shard on another rank, to rebuild it when a rank is lost.
        overlap_param_gather: All-gather parameters during the next forward pass instead of at the end of `step()`.
        broadcast_buffers: Broadcast rank 0's buffers after each step. As in DDP, also broadcast them before a training
            forward pass that follows another one without a step in between.
        allow_mixed_dtypes: Allow parameters of several dtypes in one `ZeroRedundancyOptimizer`; `shard` always does.

    Raises:
        ConfigError: If an option has an unsupported value.
        TypeError: If an option does not exist; the message suggests a similar name or lists all.
    """

    stage: Literal[1, 2] | None = None
    partition: Partitioner | None = None
    reduce_dtype: torch.dtype | None = None
    deterministic_reduce: bool = False
    master_dtype: torch.dtype | None = None
    offload: CPUOffload | None = None
    consistency_check: ConsistencyCheck | None = None
    nonfinite: NonFiniteGrads | None = None
    peer_checkpoint: PeerCheckpoint | None = None
    overlap_param_gather: bool = False
    broadcast_buffers: bool = True
    allow_mixed_dtypes: bool = False

    def __post_init__(self) -> None:
        self._check_stage()
        partition = self.partition
        if partition is not None and (isinstance(partition, type) or not callable(getattr(partition, "extend", None))):
            raise ConfigError(
                f"expected ZeroConfig(partition=...) to be a partitioner such as FlatShards(), got {partition!r}"
            )
        self._check_dtypes()
        self._require("offload", (CPUOffload, type(None)), "CPUOffload(...) or None")
        self._require("consistency_check", (ConsistencyCheck, type(None)), "ConsistencyCheck(...) or None")
        self._require("nonfinite", (NonFiniteGrads, type(None)), "NonFiniteGrads(...) or None")
        self._require("peer_checkpoint", (PeerCheckpoint, type(None)), "PeerCheckpoint(...) or None")
        for name in ("deterministic_reduce", "overlap_param_gather", "broadcast_buffers", "allow_mixed_dtypes"):
            self._require(name, (bool,), "True or False")

    @property
    def _reduce_policy(self) -> ReducePolicy:
        return ReducePolicy(self.reduce_dtype, self.deterministic_reduce)

    @property
    def _master_policy(self) -> MasterWeightPolicy | None:
        return None if self.master_dtype is None else MasterWeightPolicy(self.master_dtype)

    def _describe(self) -> tuple[str, ...]:
        """Return one line per option. Lines of equal options are equal on all ranks."""
        return tuple(
            f"ZeroConfig({option.name}={_describe_option(getattr(self, option.name))})" for option in fields(self)
        )

    def _check_stage(self) -> None:
        if self.stage is None or (type(self.stage) is int and self.stage in (1, 2)):
            return
        fsdp = ". ZeRO-3 also shards parameters: use torch's fully_shard (FSDP2)" if _is_three(self.stage) else ""
        raise ConfigError(f"expected ZeroConfig(stage=...) to be 1, 2 or None, got {self.stage!r}{fsdp}")

    def _check_dtypes(self) -> None:
        wire, master = self.reduce_dtype, self.master_dtype
        if wire is not None and not (isinstance(wire, torch.dtype) and wire in _REDUCE_DTYPES):
            raise ConfigError(
                f"expected ZeroConfig(reduce_dtype=...) to be a floating-point dtype of at least 16 bits, got {wire!r}"
            )
        if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
            raise ConfigError(f"expected ZeroConfig(master_dtype=...) to be a floating-point dtype, got {master!r}")

    def _require(self, name: str, types: tuple[type, ...], expected: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, types):
            raise ConfigError(f"expected ZeroConfig({name}=...) to be {expected}, got {value!r}")


_POLICIES = (FlatShards, WholeParams, CPUOffload, ConsistencyCheck, NonFiniteGrads, PeerCheckpoint)

_CONFIG_FIELDS = {option.name for option in fields(ZeroConfig)}


def reject_config_options(factory: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a `ZeroConfig` option is among the options of an optimizer class."""
    for name, value in options.items():
        if isinstance(value, (ZeroConfig, *_POLICIES)) or (
            name in _CONFIG_FIELDS and not _accepts_keyword(factory, name)
        ):
            correct = "config=..." if isinstance(value, ZeroConfig) else f"config=ZeroConfig({name}={value!r})"
            raise ConfigError(f"{name}={value!r} is a zeroshard option, not an optimizer argument: pass {correct}")


def _is_three(stage: object) -> bool:
    return type(stage) is int and stage == 3


def _accepts_keyword(factory: Callable[..., object], name: str) -> bool:
    try:
        params = signature(factory).parameters
    except (TypeError, ValueError):  # no signature is available
        return True
    return name in params or any(param.kind is Parameter.VAR_KEYWORD for param in params.values())


def _describe_option(value: object) -> str:
    # The default repr contains an address, which differs between ranks.
    has_stable_repr = value is None or isinstance(value, (bool, int, torch.dtype))
    has_stable_repr = has_stable_repr or (is_dataclass(value) and not isinstance(value, type))
    return repr(value) if has_stable_repr else type(value).__qualname__
