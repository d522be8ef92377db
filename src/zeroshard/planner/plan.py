"""`plan`: every way of training, on every number of ranks, side by side."""

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
"""Of `Usage`, as programs read them."""


class Method(Protocol):
    """A way of training."""

    @property
    def name(self) -> str: ...

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate: ...


METHODS: tuple[Method, ...] = (DDPBaseline(), TorchZeroBaseline(), ZERO1, ZERO2, FSDP2Baseline())


@dataclass(frozen=True)
class Plan:
    """What `plan` returns: an estimate for each method and number of ranks."""

    model: ModelShape
    optimizer: str
    precision: str
    estimates: tuple[Estimate, ...]
    network: Network
    memory: int | None = None
    """Bytes that a GPU has, if that was said."""
    shard_group_size: int | None = None
    """Ranks of a row that shares the state, where zeroshard is to have rows."""

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    def __str__(self) -> str:
        return "\n".join([self.title, *map(self._format_line, self.estimates)])

    @property
    def title(self) -> str:
        rows = "" if self.shard_group_size is None else f", in rows of {self.shard_group_size} ranks"
        return f"{self.model.name}: {self.model.numel:,} parameters, {self.optimizer}, {self.precision}{rows}"

    def estimate_for(self, method: str, ranks: int) -> Estimate:
        """The one of a method, such as "zeroshard 2"."""
        for it in self.estimates:
            if (it.method, it.ranks) == (method, ranks):
                return it
        known = sorted({it.method for it in self.estimates}), sorted({it.ranks for it in self.estimates})
        raise KeyError(f"no estimate of {method!r} on {ranks} ranks, but of {known[0]} on {known[1]}")

    def fits(self, estimate: Estimate) -> bool | None:
        """Whether its peak is within the memory that was said."""
        return None if self.memory is None else estimate.memory.peak <= self.memory

    def min_ranks(self) -> dict[str, int | None]:
        """For each method, the fewest of the planned ranks on which it fits; None if on none of them."""
        fitting: dict[str, int | None] = {it.method: None for it in self.estimates}
        for it in self.estimates:
            least = fitting[it.method]
            if self.fits(it) and (least is None or it.ranks < least):
                fitting[it.method] = it.ranks
        return fitting

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes and seconds."""
        return {
            "model": {"name": self.model.name, "parameters": self.model.numel, "tensors": len(self.model.params)},
            "optimizer": self.optimizer,
            "precision": self.precision,
            "network": asdict(self.network),
            "memory": self.memory,
            "shard_group_size": self.shard_group_size,
            "estimates": [self._estimate_as_dict(it) for it in self.estimates],
            "least_ranks": self.min_ranks() if self.memory is not None else None,
        }

    def _estimate_as_dict(self, estimate: Estimate) -> dict[str, Any]:
        return {
            "method": estimate.method,
            "ranks": estimate.ranks,
            **{part: getattr(estimate.memory, part) for part in MEMORY_FIELDS},
            "peak_phase": estimate.memory.peak_phase,
            "balance": estimate.state_imbalance,
            **estimate.traffic._asdict(),
            "peer_checkpoint_sent": estimate.peer_checkpoint_bytes,
            "fits": self.fits(estimate),
        }

    def _format_line(self, estimate: Estimate) -> str:
        verdict = {None: "", True: "  fits", False: "  does not fit"}[self.fits(estimate)]
        peak = estimate.memory.peak / 1e9
        return f"{estimate.ranks:>5} ranks  {estimate.method:<12} {peak:>9.2f} GB a rank at most{verdict}"


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
    """How much memory a rank needs, by part, and what travels, for DDP, torch's ZeRO, zeroshard and FSDP2.

    Nothing is allocated and nobody is asked: the model may be on the meta device. What the optimizer keeps is measured
    by stepping it on tensors without memory.

    Args:
        model: what is to be trained, in the dtype that it is to be trained in.
        optimizer_class: as for `shard`; also a list of `ParamRule`s.
        ranks: a number of them, or several.
        config: as for `shard`. Its `master_dtype` counts for all methods, its other options for zeroshard.
        memory: bytes that a GPU has, to say what fits.
        activations: bytes that they take on a rank, which no planner can know.
        device: where the model is to be, "cuda" or "cpu".
        network: bandwidth and latency between ranks.
        shard_group_size: as for `shard`: rows of so many ranks share the state, and every row has all of it.
        defaults: everything else goes to `optimizer_class`.
    """
    where = (
        torch.device(device),
        _validate_type("network", network, Network()),
        _validate_bytes("activations", activations),
    )
    settings = _validate_type("config", config, ZeroConfig())
    training = TrainingSetup(_to_model_shape(model), optimizer_class, defaults, settings, *where, shard_group_size)
    numbers, limit = _validate_ranks(ranks), None if memory is None else _validate_bytes("memory", memory)
    training.validate()
    estimates = [method.estimate(training, number) for number in numbers for method in METHODS]
    words = _format_precision(training.model, settings)
    return Plan(
        training.model, training.optimizer_name, words, tuple(estimates), training.network, limit, shard_group_size
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
    numbers = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    wrong = [it for it in numbers if isinstance(it, bool) or not isinstance(it, int) or it < 1]
    if wrong or not numbers:
        raise ConfigError(f"plan(ranks=...) takes numbers of 1 or more, not {wrong[0] if wrong else 'none'!r}")
    return sorted(set(numbers))


def _format_precision(model: ModelShape, config: ZeroConfig) -> str:
    found: Mapping[torch.dtype, None] = dict.fromkeys(it.dtype for it in model.params)
    dtypes = " and ".join(str(it).removeprefix("torch.") for it in found)
    return dtypes if config.master_dtype is None else f"{dtypes} with {str(config.master_dtype)[6:]} masters"
