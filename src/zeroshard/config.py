"""Options beyond torch's signature, in one frozen object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ClassVar, Literal, TypeVar

import torch

from .errors import ConfigError
from .layout.partition import FlatShards, Partitioner, WholeParams

# ---------------------------------------------------------------------------------------------------------------------
# What the options of `ZeroConfig` stand for: frozen objects that check themselves.


@dataclass(frozen=True)
class ZeroStage1:
    """ZeRO-1: `param.grad` stays and holds the sum of this rank's own backward passes, not the average.

    Reduced gradients must not be changed there: the step raises on all ranks. To edit gradients, accumulate them inside
    `no_sync()` and edit them before the step.
    """

    frees: ClassVar[bool] = False


@dataclass(frozen=True)
class ZeroStage2:
    """ZeRO-2: a gradient is freed when its bucket is sent, and each owner keeps its shard of the average.

    Further backward passes add to that shard: every pass is reduced, and gradients never take more than 1/N. Inside
    `no_sync()` they accumulate in `param.grad` at full size, and nothing is sent.
    """

    frees: ClassVar[bool] = True


ZeroStage = ZeroStage1 | ZeroStage2


@dataclass(frozen=True)
class Reduce:
    """How the gradients of all ranks become their average: `reduce_dtype` and `deterministic_reduce` of `ZeroConfig`.

    dtype: gradients are rounded to it and sent in it; sums are made in float32 at least. By default the dtype of the
        parameter, whatever its `grad_dtype`. Partial sums that are reduced across replicas keep the precision in which
        they were made.
    fixed_order: always add in rank order.
    """

    dtype: torch.dtype | None = None
    fixed_order: bool = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are sent. Complex and small ones are sent as they are."""
        if self.dtype is None or not dtype.is_floating_point or dtype.itemsize <= self.dtype.itemsize:
            return dtype
        return self.dtype


@dataclass(frozen=True)
class MasterWeights:
    """Parameters of lower precision are updated in `dtype`, sharded across ranks, and rounded once."""

    dtype: torch.dtype = torch.float32

    def covers(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize


@dataclass(frozen=True)
class CPUOffload:
    """State and master weights rest in host memory, and come to the GPU bucket by bucket when they are updated.

    pin: in memory that the GPU can reach by itself, so that copies and updates overlap.
    """

    device: str = "cpu"
    pin: bool = True

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise ConfigError(f'CPUOffload(device=...) takes "cpu", not {self.device!r}')
        if not isinstance(self.pin, bool):
            raise ConfigError(f"CPUOffload(pin=...) takes True or False, not {self.pin!r}")


@dataclass(frozen=True)
class ConsistencyCheck:
    """Every so many steps all ranks compare all bits of all parameters, before the step updates anything.

    A difference raises `ReplicaMismatchError` on all ranks, which names ranks and parameters. It costs one pass over
    the parameters and one small message.

    A difference lasts until a step sends the parameter: what its owner has then comes to all, right or wrong. So
    `every=1` sees each bit that a parameter loses; a larger number sees what has happened since the last step, what
    happens again and again, and what no step has sent since. Never seen is what a rank computes wrongly of its own
    part, or loses of state, master weights and gradients that it alone has: the result is the same on all ranks.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"ConsistencyCheck(every=...) takes a number of steps, 1 or more, not {self.every!r}")


@dataclass(frozen=True)
class NonFiniteGrads:
    """What becomes of a step whose averaged gradients are not all finite, on any rank: all ranks do the same.

    then: "skip" leaves the step out: parameters, state, step counts and options stay, and `step()` returns None.
        "raise" raises `NonFiniteError` on all ranks, and nothing has changed. "warn" makes the step with them.
    most: with "skip", so many in a row raise `NonFiniteError`.

    They are counted in `optimizer.nonfinite`, and the first, second, fourth, ... is warned of. A step that a GradScaler
    leaves out is not among them. A closure is called before any code of the optimizer runs.
    """

    action: Literal["skip", "raise", "warn"]
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, str) or self.action not in ("skip", "raise", "warn"):
            raise ConfigError(f'NonFiniteGrads(...) takes "skip", "raise" or "warn", not {self.action!r}')
        if self.max_consecutive is None:
            return
        if (
            isinstance(self.max_consecutive, bool)
            or not isinstance(self.max_consecutive, int)
            or self.max_consecutive < 1
        ):
            raise ConfigError(
                f"NonFiniteGrads(max_consecutive=...) takes a number of steps, 1 or more, not {self.max_consecutive!r}"
            )
        if self.action != "skip":
            raise ConfigError(
                'NonFiniteGrads(max_consecutive=...) counts steps that are left out: it goes with "skip", not '
                f"{self.action!r}"
            )


@dataclass(frozen=True)
class PeerCheckpoint:
    """Each rank's share of the state is also kept in the memory of a rank of another failure domain.

    After the loss of a rank `zeroshard.peer_checkpoint.restore_from_peers` rebuilds everything from
    these copies, without a file.

    every: so many steps lie between two copies.
    apart: how many consecutive ranks fail together. By default those that run on one host do; where there is but one,
        each rank is on its own.
    """

    every: int = 10
    failure_domain_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(f"PeerCheckpoint(every=...) takes a number of steps from 1 on, not {self.every!r}")
        if self.failure_domain_size is not None and (
            type(self.failure_domain_size) is not int or self.failure_domain_size < 1
        ):
            raise ConfigError(
                "PeerCheckpoint(failure_domain_size=...) takes a number of ranks from 1 on, or None, not "
                f"{self.failure_domain_size!r}"
            )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of this dtype are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# ---------------------------------------------------------------------------------------------------------------------
# Options beyond torch's signature, in one frozen object.


_REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Config = TypeVar("Config")


def _suggest_options(cls: type[Config]) -> type[Config]:
    """Make an unknown option raise `TypeError` with the closest valid name."""
    plain, known = cls.__init__, [it.name for it in fields(cls)]  # type: ignore[arg-type]

    @wraps(plain)
    def checked(self: Config, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(known)}"
                raise TypeError(f"{cls.__name__}() has no option {name!r}; {hint}")
        plain(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_suggest_options
@dataclass(frozen=True)
class ZeroConfig:
    """How to shard.

    stage: 1 shards optimizer state (ZeRO-1), 2 also gradients (ZeRO-2). By default `shard` uses 2 and
        `ZeroRedundancyOptimizer` 1, the only stage that works under DDP. With stage 2 a gradient is freed when its
        bucket is sent, and `param.grad` is a placeholder that raises when it is used. With stage 1 `param.grad` stays
        and holds the sum of this rank's own backward passes, not the average.
    partition: who owns what. By default `ZeroRedundancyOptimizer` takes `WholeParams()`, as torch's class does, and
        `shard` takes `FlatShards()` where the optimizer can be cut.
    reduce_dtype: the dtype in which gradients are sent; sums are made in float32 at least. By default the dtype of the
        parameter. Partial sums that are reduced across replicas keep the precision in which they were made.
    deterministic_reduce: always add gradients in rank order, so that results do not depend on timing or on the
        backend's algorithms. CPU tensors are added in rank order in any case. With NCCL it costs the memory of another
        bucket. Backends that can only reduce whole buckets (gloo with CUDA tensors), and NCCL for whole parameters, add
        in their own order, which is always the same.
    master_dtype: keep master weights of this dtype, sharded across ranks, for parameters of lower precision: they are
        updated in it and rounded once.
    offload: where state and master weights rest between steps, if not on the GPU.
    drift: every so many steps, look whether all ranks have the same parameters.
    nonfinite: what becomes of a step whose gradients are not all finite; by default nobody looks.
    peer_checkpoint: keep each rank's share on another rank as well, from which it is rebuilt when a rank is lost.
    overlap_param_gather: parameters come back while the next forward pass runs, instead of at the end of `step()`.
    broadcast_buffers: make the buffers of the model those of rank 0 after each step, and on DDP's schedule before
        forward passes with gradients that follow each other without a step.
    allow_mixed_dtypes: allow parameters of several dtypes in one `ZeroRedundancyOptimizer`; `shard` always does.

    `stage=2`, `overlap_param_gather` and `broadcast_buffers` are for `shard`, which sees the model.
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
            raise ConfigError(f"ZeroConfig(partition=...) takes a partitioner such as FlatShards(), not {partition!r}")
        self._check_dtypes()
        self._require("offload", (CPUOffload, type(None)), "CPUOffload(...) or None")
        self._require("consistency_check", (ConsistencyCheck, type(None)), "ConsistencyCheck(...) or None")
        self._require("nonfinite", (NonFiniteGrads, type(None)), "NonFiniteGrads(...) or None")
        self._require("peer_checkpoint", (PeerCheckpoint, type(None)), "PeerCheckpoint(...) or None")
        for name in ("deterministic_reduce", "overlap_param_gather", "broadcast_buffers", "allow_mixed_dtypes"):
            self._require(name, (bool,), "True or False")

    @property
    def _stage_policy(self) -> ZeroStage:
        return ZeroStage1() if self.stage == 1 else ZeroStage2()

    @property
    def _reduce_policy(self) -> Reduce:
        return Reduce(self.reduce_dtype, self.deterministic_reduce)

    @property
    def _master_policy(self) -> MasterWeights | None:
        return None if self.master_dtype is None else MasterWeights(self.master_dtype)

    def describe(self) -> tuple[str, ...]:
        """A line for each option, equal on ranks where it is; a plain object's repr would hold its address."""
        return tuple(f"ZeroConfig({it.name}={_describe_option(getattr(self, it.name))})" for it in fields(self))

    def _check_stage(self) -> None:
        if self.stage is None or (type(self.stage) is int and self.stage in (1, 2)):
            return
        fsdp = ". ZeRO-3 also shards parameters: use torch's fully_shard (FSDP2)" if _is_three(self.stage) else ""
        raise ConfigError(f"ZeroConfig(stage=...) takes 1, 2 or None, not {self.stage!r}{fsdp}")

    def _check_dtypes(self) -> None:
        wire, master = self.reduce_dtype, self.master_dtype
        if wire is not None and not (isinstance(wire, torch.dtype) and wire in _REDUCE_DTYPES):
            raise ConfigError(
                f"ZeroConfig(reduce_dtype=...) takes a floating-point dtype of 16 bits or more, not {wire!r}"
            )
        if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
            raise ConfigError(f"ZeroConfig(master_dtype=...) takes a floating-point dtype, not {master!r}")

    def _require(self, name: str, types: tuple[type, ...], expected: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, types):
            raise ConfigError(f"ZeroConfig({name}=...) takes {expected}, not {value!r}")


_POLICIES = (FlatShards, WholeParams, CPUOffload, ConsistencyCheck, NonFiniteGrads, PeerCheckpoint)

_CONFIG_FIELDS = {it.name for it in fields(ZeroConfig)}


def reject_config_options(factory: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise if an option of ours is among those of an optimizer class."""
    for name, value in options.items():
        if isinstance(value, (ZeroConfig, *_POLICIES)) or (
            name in _CONFIG_FIELDS and not _accepts_keyword(factory, name)
        ):
            right = "config=..." if isinstance(value, ZeroConfig) else f"config=ZeroConfig({name}=...)"
            raise ConfigError(f"{name}={value!r} is not an option of an optimizer class: pass {right} instead")


def _is_three(stage: object) -> bool:
    return type(stage) is int and stage == 3


def _accepts_keyword(factory: Callable[..., object], name: str) -> bool:
    try:
        params = signature(factory).parameters
    except (TypeError, ValueError):  # it does not say
        return True
    return name in params or any(it.kind is Parameter.VAR_KEYWORD for it in params.values())


def _describe_option(value: object) -> str:
    plain = value is None or isinstance(value, (bool, int, torch.dtype))
    plain = plain or (is_dataclass(value) and not isinstance(value, type))
    return repr(value) if plain else type(value).__qualname__
