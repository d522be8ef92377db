"""Parse the arguments of `zeroshard plan` into a `PlanRequest` and an `OptimizerChoice`."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch

from ..config import CPUOffload, PeerCheckpoint, ZeroConfig
from ..errors import ConfigError, ZeroError
from ..layout.partition import FlatShards
from ..rules import ParamRule, matrix_params, remaining_params
from .estimate import Network
from .plan import Plan, plan
from .shapes import ModelShape, import_object

# ---------------------------------------------------------------------------------------------------------------------
# Quantities with units.


_BYTE_UNITS = {
    "": Decimal(1),
    "b": Decimal(1),
    **{f"{letter}b": Decimal(1000) ** power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": Decimal(1024) ** power for power, letter in enumerate("kmgt", 1)},
}
_BIT_UNITS = {
    f"{letter}{word}": Decimal(1000) ** power / 8 for power, letter in enumerate("kmgt", 1) for word in ("bit", "bps")
}
_SHORT_BITS_PATTERN = re.compile(r"(?<=\d)(\s*[KkMmGgTt])b(?=\s*(/s)?\s*$)")
"""In 400Gb/s, the lower-case b means bits."""
_TIME_UNITS = {
    "s": Decimal(1),
    **{f"{letter}s": Decimal(1000) ** -power for letter, power in zip("muµn", (1, 2, 2, 3), strict=True)},
}
_QUANTITY_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([a-zµ]*)\s*", re.IGNORECASE)
_MAX_RANKS = 65_536


def parse_bytes(option: str, text: str) -> int:
    """Parse a size such as 80GB, 80GiB or 512MB."""
    return round(_parse_quantity(option, text, _BYTE_UNITS, "80GB or 80GiB"))


def parse_bandwidth(option: str, text: str) -> float:
    """Parse a bandwidth such as 50GB/s, 400Gbit/s or 400Gb/s into bytes per second."""
    text = _SHORT_BITS_PATTERN.sub(r"\1bit", text)
    bandwidth = _parse_quantity(option, text.removesuffix("/s"), {**_BYTE_UNITS, **_BIT_UNITS}, "50GB/s or 400Gbit/s")
    if not bandwidth:
        raise ConfigError(f"{option} {text}: expected more than nothing, such as 50GB/s")
    return bandwidth


def parse_seconds(option: str, text: str) -> float:
    """Parse a duration such as 10us or 1ms."""
    return _parse_quantity(option, text, _TIME_UNITS, "10us or 1ms")


def _parse_quantity(option: str, text: str, units: dict[str, Decimal], example: str) -> float:
    match = _QUANTITY_PATTERN.fullmatch(text)
    lacks_unit = match is not None and not match[2] and float(match[1]) > 0
    if match is None or lacks_unit or match[2].lower() not in units:
        raise ConfigError(f"{option} {text!r} is no quantity: expected a number and a unit, such as {example}")
    return float(Decimal(match[1]) * units[match[2].lower()])


def parse_ranks(text: str) -> list[int]:
    """Parse numbers of ranks such as 8,64,512. A range such as 1-4096 stands for the powers of two in it."""
    counts: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ConfigError(f"--ranks {text!r} has {part!r}: expected numbers such as 8,64,512, or 1-4096")
        counts |= _powers_of_two(int(first), int(last)) if dash else {int(first)}
    if not counts or min(counts) < 1 or max(counts) > _MAX_RANKS:
        raise ConfigError(
            f"--ranks {text!r}: expected numbers from 1 to {_MAX_RANKS:,}; a range such as 1-4096 stands for the "
            "powers of two in it, of which there must be one"
        )
    return sorted(counts)


def _powers_of_two(first: int, last: int) -> set[int]:
    return {2**power for power in range(40) if first <= 2**power <= last}


def format_bytes(nbytes: float) -> str:
    """Format in decimal units, such as 31.4 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            value = nbytes / size
            return f"{value:,.0f} {unit}" if value >= 999.5 or value == round(value) else f"{value:.3g} {unit}"
    return f"{nbytes:,.0f} B"


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0" if not seconds else f"{seconds * 1e9:.3g} ns"


# ---------------------------------------------------------------------------------------------------------------------
# Requests.


PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp16+fp32": (torch.float16, torch.float32),
}
"""Dtype of parameters, and of master weights if there are any."""
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MUON_ADAMW = "muon+adamw"
_MUON_EXCLUDED_WORDS = ("embed", "head", "wte", "wpe")
"""Words in the names of matrices that Muon should not update: embeddings and heads."""


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer by name: of torch.optim, an importable class, or `muon+adamw`, which stands for two with rules."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name.lower() == MUON_ADAMW and self.options:
            raise ConfigError(
                f"--options {self.options} belong to one class, and {MUON_ADAMW} are two: give one, or none"
            )

    def resolve(self, model: ModelShape) -> Any:
        """Return the optimizer class, or the rules, for `plan`."""
        return _muon_adamw_rules(model) if self.name.lower() == MUON_ADAMW else resolve_optimizer_class(self.name)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan`, except optimizer and precision."""

    model: ModelShape
    ranks: Sequence[int]
    config: ZeroConfig
    memory: int | None
    activations: int
    network: Network
    shard_group_size: int | None = None

    def make_plan(self, optimizer: OptimizerChoice, precision: str | None, ranks: Sequence[int] | None = None) -> Plan:
        """Make the plan. `precision=None` keeps the dtypes of the model; `ranks` replaces the requested ones."""
        model, config = self.model, self.config
        if precision is not None:
            dtype, master_dtype = _parse_precision(precision)
            model, config = model.cast(dtype), replace(config, master_dtype=master_dtype)
        arguments: dict[str, Any] = {
            "ranks": ranks or self.ranks,
            "config": config,
            "memory": self.memory,
            "network": self.network,
            "shard_group_size": self.shard_group_size,
        }
        optimizer_class = optimizer.resolve(model)
        try:
            return plan(model, optimizer_class, activations=self.activations, **arguments, **optimizer.options)
        except (ZeroError, TypeError):
            raise
        except Exception as error:  # user-defined optimizers may raise anything
            raise ConfigError(
                f"{optimizer.name} cannot be stepped to see what it keeps: {type(error).__name__}: {error}"
            ) from error


def resolve_optimizer_class(name: str) -> Any:
    """Return the class of a name such as `AdamW`, `package.module:Class` or `file.py:Class`."""
    optimizer_class = import_object(name, "a class of optimizers") if ":" in name else getattr(torch.optim, name, None)
    if optimizer_class is None:
        similar = [candidate for candidate in dir(torch.optim) if candidate.lower() == name.lower()]
        raise ConfigError(
            f"--optimizer {name!r} is no class of torch.optim, such as {(similar or ['AdamW'])[0]}. Expected one of "
            f"these, {MUON_ADAMW}, package.module:Class or file.py:Class"
        )
    if (
        not isinstance(optimizer_class, type)
        or not issubclass(optimizer_class, torch.optim.Optimizer)
        or optimizer_class is torch.optim.Optimizer
    ):
        raise ConfigError(f"--optimizer {name!r} is {optimizer_class!r}: expected a class of optimizers, such as AdamW")
    return optimizer_class


def parse_options(text: str | None) -> dict[str, Any]:
    """Parse options such as `lr=1e-3,betas=(0.9,0.95)`. Values are literals: no code is run."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("a value without a name")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        if len(options) < len(call.keywords):
            raise ValueError("a name twice, or none")
        return options
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ConfigError(
            f"--options {text!r} cannot be read: expected name=value,..., such as lr=1e-3,nesterov=True"
        ) from error


def make_config(*, peer_checkpoint: bool, offload: bool, bucket: str | None, reduce: str | None) -> ZeroConfig:
    if reduce is not None and reduce not in REDUCE_DTYPES:
        raise ConfigError(f"--reduce {reduce!r}: expected one of {', '.join(REDUCE_DTYPES)}")
    return ZeroConfig(
        partition=None if bucket is None else FlatShards(bucket_bytes=parse_bytes("--bucket", bucket)),
        reduce_dtype=REDUCE_DTYPES[reduce] if reduce else None,
        offload=CPUOffload() if offload else None,
        peer_checkpoint=PeerCheckpoint() if peer_checkpoint else None,
    )


def make_network(bandwidth: str, latency: str, within: str | None) -> Network:
    within_bandwidth = None if within is None else parse_bandwidth("--bandwidth-within", within)
    return Network(parse_bandwidth("--bandwidth", bandwidth), parse_seconds("--latency", latency), within_bandwidth)


def _parse_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    if name not in PRECISIONS:
        raise ConfigError(f"--precision {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _muon_adamw_rules(model: ModelShape) -> list[ParamRule]:
    """Return rules for Muon and AdamW. Excluded words without a match are dropped, since they would cause warnings."""
    words = [
        word
        for word in _MUON_EXCLUDED_WORDS
        if any(
            not matrix_params((word,))(param.name, param.to_meta_param())
            for param in model.params
            if len(param.shape) == 2
        )
    ]
    chosen = matrix_params(tuple(words))
    is_muon = [chosen(param.name, param.to_meta_param()) for param in model.params]
    rules = [ParamRule(chosen, torch.optim.Muon), ParamRule(remaining_params, torch.optim.AdamW)]
    return [rule for rule, is_used in zip(rules, (any(is_muon), not all(is_muon)), strict=True) if is_used]
