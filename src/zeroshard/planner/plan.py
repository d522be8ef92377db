"""`plan`: estimate every training method on every number of ranks, side by side."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..config import ZeroConfig
from ..engine.inner import OptimizerConstructor
from ..errors import ConfigError
from ..rules import ParamRule
from .baselines import DDPBaseline, FSDP2Baseline, TorchZeroBaseline
from .estimate import ZERO1, ZERO2, Estimate, Network, TrainingSetup
from .shapes import ModelShape

Option = TypeVar("Option", Network, ZeroConfig)
DEFAULT_RANKS = (1, 8, 64, 512)
MEMORY_FIELDS = ("parameters", "gradients", "state", "masters", "total", "buffers", "activations", "peak", "host")
"""Attributes of `MemoryEstimate` in the JSON output."""


class Method(Protocol):
    """A training method that can be estimated."""

    @property
    def name(self) -> str: ...

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate: ...


METHODS: tuple[Method, ...] = (DDPBaseline(), TorchZeroBaseline(), ZERO1, ZERO2, FSDP2Baseline())


@dataclass(frozen=True)
class Plan:
    """The estimates of all methods on all numbers of ranks. Iterates over them."""

    model: ModelShape
    optimizer: str
    precision: str
    estimates: tuple[Estimate, ...]
    network: Network
    memory: int | None = None
    """Bytes of GPU memory, if given."""
    shard_group_size: int | None = None
    """Size of zeroshard's shard groups, if not all ranks."""

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    def __str__(self) -> str:
        return "\n".join([self.title, *map(self._format_line, self.estimates)])

    @property
    def title(self) -> str:
        groups = "" if self.shard_group_size is None else f", in shard groups of {self.shard_group_size} ranks"
        return f"{self.model.name}: {self.model.numel:,} parameters, {self.optimizer}, {self.precision}{groups}"

    def estimate_for(self, method: str, ranks: int) -> Estimate:
        """Return the estimate of a method, such as "zeroshard 2". Raises KeyError if it was not planned."""
        for estimate in self.estimates:
            if (estimate.method, estimate.ranks) == (method, ranks):
                return estimate
        planned = (
            sorted({estimate.method for estimate in self.estimates}),
            sorted({estimate.ranks for estimate in self.estimates}),
        )
        raise KeyError(f"no estimate of {method!r} on {ranks} ranks, but of {planned[0]} on {planned[1]}")

    def fits(self, estimate: Estimate) -> bool | None:
        """Return whether the peak fits into the given memory; None if no memory was given."""
        return None if self.memory is None else estimate.memory.peak <= self.memory

    def min_ranks(self) -> dict[str, int | None]:
        """Return the smallest planned number of ranks on which each method fits, or None."""
        fitting: dict[str, int | None] = {estimate.method: None for estimate in self.estimates}
        for estimate in self.estimates:
            smallest = fitting[estimate.method]
            if self.fits(estimate) and (smallest is None or estimate.ranks < smallest):
                fitting[estimate.method] = estimate.ranks
        return fitting

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON, in bytes and seconds."""
        return {
            "model": {"name": self.model.name, "parameters": self.model.numel, "tensors": len(self.model.params)},
            "optimizer": self.optimizer,
            "precision": self.precision,
            "network": asdict(self.network),
            "memory": self.memory,
            "shard_group_size": self.shard_group_size,
            "estimates": [self._estimate_as_dict(estimate) for estimate in self.estimates],
            "min_ranks": self.min_ranks() if self.memory is not None else None,
        }

    def _estimate_as_dict(self, estimate: Estimate) -> dict[str, Any]:
        return {
            "method": estimate.method,
            "ranks": estimate.ranks,
            **{name: getattr(estimate.memory, name) for name in MEMORY_FIELDS},
            "peak_phase": estimate.memory.peak_phase,
            "balance": estimate.state_imbalance,
            **estimate.traffic._asdict(),
            "peer_checkpoint_sent": estimate.peer_checkpoint_bytes,
            "fits": self.fits(estimate),
        }

    def _format_line(self, estimate: Estimate) -> str:
        fits = {None: "", True: "  fits", False: "  does not fit"}[self.fits(estimate)]
        peak = estimate.memory.peak / 1e9
        return f"{estimate.ranks:>5} ranks  {estimate.method:<12} {peak:>9.2f} GB a rank at most{fits}"


def plan(
    model: torch.nn.Module | ModelShape,
    optimizer_class: OptimizerConstructor | Sequence[ParamRule],
    *,
    ranks: int | Iterable[int] = DEFAULT_RANKS,
    config: ZeroConfig | None = None,
    memory: float | None = None,
    activations: float = 0,
    device: str = "cuda",
    network: Network | None = None,
    shard_group_size: int | None = None,
    **defaults: Any,
) -> Plan:
    """Estimate per-rank memory and communication volume of DDP, torch's ZeRO, zeroshard and FSDP2.

    Does not allocate or communicate: the model may be on the meta device, and no process group is needed. Optimizer
    state is measured by stepping the optimizer on meta tensors.

    Args:
        model: the model, in the dtype in which it will be trained.
        optimizer_class: as for `shard`; also a list of `ParamRule`s.
        ranks: one number of ranks, or several.
        config: as for `shard`. `master_dtype` applies to all methods, the other options to zeroshard.
        memory: bytes of GPU memory, to report what fits.
        activations: bytes of activations per rank, which the planner cannot know.
        device: device of training, "cuda" or "cpu".
        network: bandwidth and latency between ranks.
        shard_group_size: as for `shard`: groups of this many ranks shard the state, and each group holds all of it.
        defaults: options of `optimizer_class`.

    Raises:
        ConfigError: for invalid arguments, or if constructing the optimizer would raise it.
    """
    placement = (
        torch.device(device),
        _validate_type("network", network, Network()),
        _validate_bytes("activations", activations),
    )
    settings = _validate_type("config", config, ZeroConfig())
    training = TrainingSetup(_to_model_shape(model), optimizer_class, defaults, settings, *placement, shard_group_size)
    rank_counts, memory_bytes = _validate_ranks(ranks), None if memory is None else _validate_bytes("memory", memory)
    training.validate()
    estimates = [method.estimate(training, count) for count in rank_counts for method in METHODS]
    precision = _format_precision(training.model, settings)
    return Plan(
        training.model,
        training.optimizer_name,
        precision,
        tuple(estimates),
        training.network,
        memory_bytes,
        shard_group_size,
    )


def _to_model_shape(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"plan() takes a torch.nn.Module, not a {type(model).__name__}")
    return ModelShape.from_module(model)


def _validate_type(name: str, value: Any, default: Option) -> Option:
    if value is not None and not isinstance(value, type(default)):
        raise TypeError(f"plan({name}=...) takes a {type(default).__name__}, not a {type(value).__name__}")
    return default if value is None else value


def _validate_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"plan({name}=...) takes a number of bytes, such as 80e9, not {value!r}")
    return round(value)


def _validate_ranks(ranks: Any) -> list[int]:
    counts = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    invalid = [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if invalid or not counts:
        raise ConfigError(f"plan(ranks=...) takes numbers of 1 or more, not {invalid[0] if invalid else 'none'!r}")
    return sorted(set(counts))


def _format_precision(model: ModelShape, config: ZeroConfig) -> str:
    unique: Mapping[torch.dtype, None] = dict.fromkeys(param.dtype for param in model.params)
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in unique)
    return names if config.master_dtype is None else f"{names} with {str(config.master_dtype)[6:]} masters"
