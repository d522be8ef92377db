"""`plan`: every way of training, on every number of ranks, side by side."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..config import ZeroConfig
from ..errors import ConfigError
from ..rules import Rule
from ..runtime.inner import Factory
from .peers import FullySharded, Replicated, TorchZero
from .shapes import ModelShape
from .sharded import ZERO1, ZERO2
from .training import Training
from .usage import Estimate, Network

Option = TypeVar("Option", Network, ZeroConfig)
RANKS = (1, 8, 64, 512)
PARTS = ("parameters", "gradients", "state", "masters", "total", "buffers", "activations", "peak", "host")
"""Of `Usage`, as programs read them."""


class Method(Protocol):
    """A way of training."""

    @property
    def name(self) -> str: ...

    def estimate(self, training: Training, ranks: int) -> Estimate: ...


METHODS: tuple[Method, ...] = (Replicated(), TorchZero(), ZERO1, ZERO2, FullySharded())


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
    shard_within: int | None = None
    """Ranks of a row that shares the state, where zeroshard is to have rows."""

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    def __str__(self) -> str:
        return "\n".join([self.title, *map(self._line, self.estimates)])

    @property
    def title(self) -> str:
        rows = "" if self.shard_within is None else f", in rows of {self.shard_within} ranks"
        return f"{self.model.name}: {self.model.elements:,} parameters, {self.optimizer}, {self.precision}{rows}"

    def of(self, method: str, ranks: int) -> Estimate:
        """The one of a method, such as "zeroshard 2"."""
        for it in self.estimates:
            if (it.method, it.ranks) == (method, ranks):
                return it
        known = sorted({it.method for it in self.estimates}), sorted({it.ranks for it in self.estimates})
        raise KeyError(f"no estimate of {method!r} on {ranks} ranks, but of {known[0]} on {known[1]}")

    def fits(self, it: Estimate) -> bool | None:
        """Whether its peak is within the memory that was said."""
        return None if self.memory is None else it.usage.peak <= self.memory

    def least_ranks(self) -> dict[str, int | None]:
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
            "model": {"name": self.model.name, "parameters": self.model.elements, "tensors": len(self.model.params)},
            "optimizer": self.optimizer,
            "precision": self.precision,
            "network": asdict(self.network),
            "memory": self.memory,
            "shard_within": self.shard_within,
            "estimates": [self._row(it) for it in self.estimates],
            "least_ranks": self.least_ranks() if self.memory is not None else None,
        }

    def _row(self, it: Estimate) -> dict[str, Any]:
        return {
            "method": it.method,
            "ranks": it.ranks,
            **{part: getattr(it.usage, part) for part in PARTS},
            "peak_phase": it.usage.peak_phase,
            "balance": it.balance,
            **it.traffic._asdict(),
            "second_copy_sent": it.copies,
            "fits": self.fits(it),
        }

    def _line(self, it: Estimate) -> str:
        verdict = {None: "", True: "  fits", False: "  does not fit"}[self.fits(it)]
        return f"{it.ranks:>5} ranks  {it.method:<12} {it.usage.peak / 1e9:>9.2f} GB a rank at most{verdict}"


def plan(
    model: torch.nn.Module | ModelShape,
    optimizer_class: Factory | Sequence[Rule],
    *,
    ranks: int | Iterable[int] = RANKS,
    config: ZeroConfig | None = None,
    memory: float | None = None,
    activations: float = 0,
    device: str = "cuda",
    network: Network | None = None,
    shard_within: int | None = None,
    **defaults: Any,
) -> Plan:
    """How much memory a rank needs, by part, and what travels, for DDP, torch's ZeRO, zeroshard and FSDP2.

    Nothing is allocated and nobody is asked: the model may be on the meta device. What the optimizer keeps is measured
    by stepping it on tensors without memory.

    Args:
        model: what is to be trained, in the dtype that it is to be trained in.
        optimizer_class: as for `shard`; also a list of `Rule`s.
        ranks: a number of them, or several.
        config: as for `shard`. Its `master_dtype` counts for all methods, its other options for zeroshard.
        memory: bytes that a GPU has, to say what fits.
        activations: bytes that they take on a rank, which no planner can know.
        device: where the model is to be, "cuda" or "cpu".
        network: bandwidth and latency between ranks.
        shard_within: as for `shard`: rows of so many ranks share the state, and every row has all of it.
        defaults: everything else goes to `optimizer_class`.
    """
    where = (torch.device(device), _given("network", network, Network()), _bytes("activations", activations))
    settings = _given("config", config, ZeroConfig())
    training = Training(_shape_of(model), optimizer_class, defaults, settings, *where, shard_within)
    numbers, limit = _checked(ranks), None if memory is None else _bytes("memory", memory)
    training.check()
    estimates = [method.estimate(training, number) for number in numbers for method in METHODS]
    words = _in_words(training.model, settings)
    return Plan(training.model, training.name, words, tuple(estimates), training.network, limit, shard_within)


def _shape_of(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"plan() takes a torch.nn.Module, not a {type(model).__name__}")
    return ModelShape.of(model)


def _given(name: str, value: Any, default: Option) -> Option:
    if value is not None and not isinstance(value, type(default)):
        raise TypeError(f"plan({name}=...) takes a {type(default).__name__}, not a {type(value).__name__}")
    return default if value is None else value


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"plan({name}=...) takes a number of bytes, such as 80e9, not {value!r}")
    return round(value)


def _checked(ranks: Any) -> list[int]:
    numbers = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    wrong = [it for it in numbers if isinstance(it, bool) or not isinstance(it, int) or it < 1]
    if wrong or not numbers:
        raise ConfigError(f"plan(ranks=...) takes numbers of 1 or more, not {wrong[0] if wrong else 'none'!r}")
    return sorted(set(numbers))


def _in_words(model: ModelShape, config: ZeroConfig) -> str:
    found: Mapping[torch.dtype, None] = dict.fromkeys(it.dtype for it in model.params)
    dtypes = " and ".join(str(it).removeprefix("torch.") for it in found)
    return dtypes if config.master_dtype is None else f"{dtypes} with {str(config.master_dtype)[6:]} masters"
