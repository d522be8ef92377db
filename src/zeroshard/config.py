"""Options beyond torch's signature, in one frozen object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter, signature

from .errors import ConfigError
from .layout.partition import FlatShards, Partitioner, WholeParams
from .policies import Drift, KeepFull, KeepShard, MasterWeights, NonFinite, Offload, Reduce, Retention, SecondCopy


@dataclass(frozen=True)
class ZeroConfig:
    """How to shard.

    partition: who owns what. By default `ZeroRedundancyOptimizer` takes `WholeParams()`, as torch's class does, and
        `shard` takes `FlatShards()` where the optimizer can be cut.
    retention: what is kept of gradients once they are reduced: `KeepShard()` (ZeRO-2) or `KeepFull()` (ZeRO-1).
    reduce: how gradients are averaged.
    masters: update parameters of less precision in this one, and round once.
    offload: where state and master weights rest between steps, if not on the GPU.
    drift: every so many steps, look whether all ranks have the same parameters.
    nonfinite: what becomes of a step whose gradients are not all finite; by default nobody looks.
    second_copy: keep each rank's share on another rank as well, from which it is rebuilt when a rank is lost.
    overlap_gather: parameters come back while the next forward pass runs, instead of at the end of `step()`.
    sync_buffers: make the buffers of the model those of rank 0 after each step, and on DDP's schedule before forward
        passes with gradients that follow each other without a step.
    mixed_dtypes: allow parameters of several dtypes in one `ZeroRedundancyOptimizer`; `shard` always does.

    `retention`, `overlap_gather` and `sync_buffers` are for `shard`, which sees the model.
    """

    partition: Partitioner | None = None
    retention: Retention = field(default_factory=KeepShard)
    reduce: Reduce = field(default_factory=Reduce)
    masters: MasterWeights | None = None
    offload: Offload | None = None
    drift: Drift | None = None
    nonfinite: NonFinite | None = None
    second_copy: SecondCopy | None = None
    overlap_gather: bool = False
    sync_buffers: bool = True
    mixed_dtypes: bool = False

    def __post_init__(self) -> None:
        partition = self.partition
        if partition is not None and (isinstance(partition, type) or not callable(getattr(partition, "extend", None))):
            raise ConfigError(f"ZeroConfig(partition=...) takes a partitioner such as FlatShards(), not {partition!r}")
        self._require("retention", (KeepShard, KeepFull), "KeepShard() or KeepFull()")
        self._require("reduce", (Reduce,), "a Reduce(...)")
        self._require("masters", (MasterWeights, type(None)), "MasterWeights(...) or None")
        self._require("offload", (Offload, type(None)), "Offload(...) or None")
        self._require("drift", (Drift, type(None)), "Drift(...) or None")
        self._require("nonfinite", (NonFinite, type(None)), "NonFinite(...) or None")
        self._require("second_copy", (SecondCopy, type(None)), "SecondCopy(...) or None")
        for name in ("overlap_gather", "sync_buffers", "mixed_dtypes"):
            self._require(name, (bool,), "True or False")

    def describe(self) -> tuple[str, ...]:
        """A line for each option, equal on ranks where it is; a plain object's repr would hold its address."""
        return tuple(f"ZeroConfig({it.name}={_describe(getattr(self, it.name))})" for it in fields(self))

    def _require(self, name: str, types: tuple[type, ...], wanted: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, types):
            raise ConfigError(f"ZeroConfig({name}=...) takes {wanted}, not {value!r}")


_POLICIES = (
    *(FlatShards, WholeParams, KeepShard, KeepFull, Reduce),
    *(MasterWeights, Offload, Drift, NonFinite, SecondCopy),
)

_OURS = {it.name for it in fields(ZeroConfig)}


def refuse_policies(factory: Callable[..., object], options: Mapping[str, object]) -> None:
    """Options of an optimizer class among which one of ours has got, or one of another library."""
    for name, value in options.items():
        if isinstance(value, (ZeroConfig, *_POLICIES)) or (name in _OURS and not _takes(factory, name)):
            right = "config=..." if isinstance(value, ZeroConfig) else f"config=ZeroConfig({name}=...)"
            raise ConfigError(f"{name}={value!r} is no option of an optimizer class: give {right} to the sharded one")
        if name == "stage" and not _takes(factory, name):
            raise ConfigError(
                f"stage={value!r} is no option of an optimizer class: zeroshard.shard is ZeRO-2, and ZeRO-1 with "
                "config=ZeroConfig(retention=KeepFull())"
            )


def _takes(factory: Callable[..., object], name: str) -> bool:
    try:
        params = signature(factory).parameters
    except (TypeError, ValueError):  # it does not say
        return True
    return name in params or any(it.kind is Parameter.VAR_KEYWORD for it in params.values())


def _describe(value: object) -> str:
    plain = value is None or isinstance(value, bool) or (is_dataclass(value) and not isinstance(value, type))
    return repr(value) if plain else type(value).__qualname__
