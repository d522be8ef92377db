"""`plan`: estimate every training method on every number of ranks, side by side."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._formatting import format_bytes
from ..config import ZeroConfig
from ..engine.inner import OptimizerConstructor
from ..errors import ConfigError
from ..rules import ParamRule
from .baselines import estimate_ddp, estimate_fsdp2, estimate_torch_zero
from .estimate import Estimate, Network, TrainingSetup, estimate_zeroshard
from .shapes import ModelShape

DEFAULT_RANKS = (1, 8, 64, 512)
MEMORY_FIELDS = ("parameters", "gradients", "state", "masters", "total", "buffers", "activations", "peak", "host")
"""Attributes of `MemoryEstimate` in the JSON output."""


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
        lines = [f"{self.model.name}: {self.headline}"]
        for estimate in self.estimates:
            fits = {None: "", True: "  fits", False: "  does not fit"}[self.fits(estimate)]
            peak = estimate.memory.peak / 1e9
            lines.append(f"{estimate.ranks:>5} ranks  {estimate.method:<12} {peak:>9.2f} GB peak per rank{fits}")
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        """Model size, optimizer and precision. The model's name is untrusted text and not included."""
        frozen = self.model.numel - sum(param.numel for param in self.model.trainable_params)
        parts = [f"{self.model.numel:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")]
        parts += [f"{format_bytes(self.model.buffer_bytes)} of buffers"] * bool(self.model.buffer_bytes)
        groups = f"; zeroshard in shard groups of {self.shard_group_size} ranks" if self.shard_group_size else ""
        return ", ".join([*parts, self.optimizer, self.precision]) + groups

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(estimate.method for estimate in self.estimates))

    @property
    def rank_counts(self) -> list[int]:
        return sorted({estimate.ranks for estimate in self.estimates})

    def estimate_for(self, method: str, ranks: int) -> Estimate:
        """Return the estimate of a method, such as "zeroshard 2". Raises KeyError if it was not planned."""
        for estimate in self.estimates:
            if (estimate.method, estimate.ranks) == (method, ranks):
                return estimate
        raise KeyError(f"no estimate of {method!r} on {ranks} ranks: got {self.methods} on {self.rank_counts}")

    def fits(self, estimate: Estimate) -> bool | None:
        """Return whether the peak fits into the given memory; None if no memory was given."""
        return None if self.memory is None else estimate.memory.peak <= self.memory

    def min_ranks(self) -> dict[str, int | None]:
        """Return the smallest planned number of ranks on which each method fits, or None."""
        fitting = [(estimate.method, estimate.ranks) for estimate in self.estimates if self.fits(estimate)]
        return {
            name: min((ranks for method, ranks in fitting if method == name), default=None) for name in self.methods
        }

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON, in bytes and seconds."""
        return {
            "model": {"name": self.model.name, "parameters": self.model.numel, "tensors": len(self.model.params)},
            "optimizer": self.optimizer,
            "precision": self.precision,
            "network": asdict(self.network),
            "memory": self.memory,
            "shard_group_size": self.shard_group_size,
            "estimates": [
                {
                    "method": estimate.method,
                    "ranks": estimate.ranks,
                    **{name: getattr(estimate.memory, name) for name in MEMORY_FIELDS},
                    "peak_phase": estimate.memory.peak_phase,
                    "balance": estimate.state_imbalance,
                    **estimate.traffic._asdict(),
                    "peer_checkpoint_sent": estimate.peer_checkpoint_bytes,
                    "fits": self.fits(estimate),
                }
                for estimate in self.estimates
            ],
            "min_ranks": self.min_ranks() if self.memory is not None else None,
        }

    def explain(self) -> list[str]:
        """Return sentences on what fits, on the network time, and on what the numbers do not include."""
        return [*self._describe_fit(), *self._describe_peer_checkpoints(), self._describe_network(), self.exclusions]

    def _describe_fit(self) -> list[str]:
        """Describe from how many ranks each method fits: "With 80 GB per rank: DDP never, FSDP2 from 64 ranks."."""
        if self.memory is None:
            return []
        methods = []
        for method, ranks in self.min_ranks().items():
            always = ranks == self.rank_counts[0]
            methods.append(f"{method} {'never' if ranks is None else 'always' if always else f'from {ranks:,} ranks'}")
        planned = ", ".join(f"{ranks:,}" for ranks in self.rank_counts)
        before = "" if any(estimate.memory.activations for estimate in self) else ", before activations"
        noun = "rank" if planned == "1" else "ranks"
        return [f"With {format_bytes(self.memory)} per rank, on {planned} {noun}{before}: {', '.join(methods)}."]

    def _describe_peer_checkpoints(self) -> list[str]:
        sent = {estimate.ranks: estimate.peer_checkpoint_bytes for estimate in self if estimate.peer_checkpoint_bytes}
        numbers = ", ".join(f"{format_bytes(nbytes)} on {ranks:,} ranks" for ranks, nbytes in sent.items())
        return [f"A peer checkpoint sends {numbers}. Host memory includes the next one in flight."] * bool(sent)

    def _describe_network(self) -> str:
        within = f" ({format_bytes(self.network.within)}/s inside a shard group)" if self.network.within else ""
        return (
            f"Network time of a step without any overlap, at {format_bytes(self.network.bandwidth)}/s{within} and "
            f"{self.network.latency * 1e6:g} us per message, with log2 N sequential messages per collective: a lower "
            "bound."
        )

    @property
    def exclusions(self) -> str:
        nbytes = max(estimate.memory.activations for estimate in self)
        counted = f"Backward includes {format_bytes(nbytes)} of activations. " if nbytes else ""
        activations = "" if nbytes else "activations (see --activations), "
        return (
            f"{counted}Not included: {activations}fragmentation of the allocator, and the CUDA context (about 0.5 GB)."
        )


def plan(
    model: torch.nn.Module | ModelShape,
    optimizer_class: OptimizerConstructor | Sequence[ParamRule],
    *,
    ranks: int | Iterable[int] = DEFAULT_RANKS,
    config: ZeroConfig | None = None,
    memory: float | None = None,
    activations: float = 0,
    autocast: torch.dtype | None = None,
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
        autocast: dtype of `torch.autocast` around the forward pass. Backward needs the casts of all matrices, which
            are added to the activations.
        device: device of training, "cuda" or "cpu".
        network: bandwidth and latency between ranks.
        shard_group_size: as for `shard`: groups of this many ranks shard the state, and each group holds all of it.
        defaults: options of `optimizer_class`.

    Raises:
        ConfigError: for invalid arguments, or if constructing the optimizer would raise it.
    """
    types = (("network", network, Network), ("config", config, ZeroConfig), ("autocast", autocast, torch.dtype))
    for name, value, expected in types:
        if not isinstance(value, (expected, type(None))):
            raise TypeError(f"expected plan({name}=...) to be a {expected.__name__}, got a {type(value).__name__}")
    if not isinstance(model, (torch.nn.Module, ModelShape)):
        raise TypeError(f"expected plan() to get a torch.nn.Module, got a {type(model).__name__}")
    shape = ModelShape.from_module(model) if isinstance(model, torch.nn.Module) else model
    training = TrainingSetup(
        *(shape, optimizer_class, defaults, config or ZeroConfig(), torch.device(device), network or Network()),
        activations=_validate_bytes("activations", activations) + _cast_bytes(shape, autocast),
        shard_group_size=shard_group_size,
    )
    memory_bytes = None if memory is None else _validate_bytes("memory", memory)
    estimates: list[Estimate] = []
    for count in _validate_ranks(ranks):
        estimates += [estimate_ddp(training, count), estimate_torch_zero(training, count)]
        estimates += [*estimate_zeroshard(training, count), estimate_fsdp2(training, count)]
    optimizer = " + ".join(spec.name for spec in training.optimizer_specs)
    precision = _format_precision(shape, training.config.master_dtype, autocast)
    return Plan(shape, optimizer, precision, tuple(estimates), training.network, memory_bytes, shard_group_size)


def _cast_bytes(model: ModelShape, autocast: torch.dtype | None) -> int:
    """Return the bytes of parameters cast by autocast: one cast of every matrix is saved for backward."""
    if autocast is None:
        return 0
    cast = [param for param in model.params if len(param.shape) > 1 and param.dtype.itemsize > autocast.itemsize]
    return sum(param.numel for param in cast) * autocast.itemsize


def _validate_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"expected plan({name}=...) to be a number of bytes such as 80e9, got {value!r}")
    return round(value)


def _validate_ranks(ranks: Any) -> list[int]:
    counts = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise ConfigError(f"expected plan(ranks=...) to be positive numbers of ranks, got {ranks!r}")
    return sorted(set(counts))


def _format_precision(model: ModelShape, master_dtype: torch.dtype | None, autocast: torch.dtype | None) -> str:
    names = " and ".join(dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in model.params))
    masters = f" with {str(master_dtype).removeprefix('torch.')} masters" if master_dtype else ""
    return names + masters + (f" with {str(autocast).removeprefix('torch.')} autocast" if autocast else "")
