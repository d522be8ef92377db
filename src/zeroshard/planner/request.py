"""What a user wants to have planned, from the words of the command line."""

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
# Numbers with units, as people write them and as they read them.


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
"""400Gb/s are bits: there a small b is no slip of the hand."""
_TIME_UNITS = {
    "s": Decimal(1),
    **{f"{letter}s": Decimal(1000) ** -power for letter, power in zip("muµn", (1, 2, 2, 3), strict=True)},
}
_QUANTITY_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([a-zµ]*)\s*", re.IGNORECASE)
_MAX_RANKS = 65_536


def parse_bytes(option: str, text: str) -> int:
    """80GB, 80GiB, 512MB."""
    return round(_parse_quantity(option, text, _BYTE_UNITS, "80GB or 80GiB"))


def parse_bandwidth(option: str, text: str) -> float:
    """Bytes a second: 50GB/s, 400Gbit/s, 400Gb/s."""
    text = _SHORT_BITS_PATTERN.sub(r"\1bit", text)
    found = _parse_quantity(option, text.removesuffix("/s"), {**_BYTE_UNITS, **_BIT_UNITS}, "50GB/s or 400Gbit/s")
    if not found:
        raise ConfigError(f"{option} {text}: expected more than nothing, such as 50GB/s")
    return found


def parse_seconds(option: str, text: str) -> float:
    """10us, 1ms."""
    return _parse_quantity(option, text, _TIME_UNITS, "10us or 1ms")


def _parse_quantity(option: str, text: str, units: dict[str, Decimal], example: str) -> float:
    match = _QUANTITY_PATTERN.fullmatch(text)
    bare = match is not None and not match[2] and float(match[1]) > 0
    if match is None or bare or match[2].lower() not in units:
        raise ConfigError(f"{option} {text!r} is no quantity: expected a number and a unit, such as {example}")
    return float(Decimal(match[1]) * units[match[2].lower()])


def parse_ranks(text: str) -> list[int]:
    """8,64,512; 1-4096 are the powers of two from the one to the other."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ConfigError(f"--ranks {text!r} has {part!r}: expected numbers such as 8,64,512, or 1-4096")
        found |= _powers_of_two(int(first), int(last)) if dash else {int(first)}
    if not found or min(found) < 1 or max(found) > _MAX_RANKS:
        raise ConfigError(
            f"--ranks {text!r}: expected numbers from 1 to {_MAX_RANKS:,}; a range such as 1-4096 stands for the "
            "powers of two in it, of which there must be one"
        )
    return sorted(found)


def _powers_of_two(first: int, last: int) -> set[int]:
    return {2**power for power in range(40) if first <= 2**power <= last}


def format_bytes(nbytes: float) -> str:
    """Short, in decimal units: 31.4 GB."""
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
# What a user wants to have planned, from the words of the command line.


PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp16+fp32": (torch.float16, torch.float32),
}
"""Dtypes of parameters, and of more precise copies of them."""
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MUON_ADAMW = "muon+adamw"
_MUON_EXCLUDED_WORDS = ("embed", "head", "wte", "wpe")
"""Words in names of matrices that are not Muon's: embeddings and heads."""


@dataclass(frozen=True)
class OptimizerChoice:
    """A name of torch's, or of a class anywhere; `muon+adamw` are two, with rules."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name.lower() == MUON_ADAMW and self.options:
            raise ConfigError(
                f"--options {self.options} belong to one class, and {MUON_ADAMW} are two: give one, or none"
            )

    def resolve(self, model: ModelShape) -> Any:
        """What `plan` takes."""
        return _muon_adamw_rules(model) if self.name.lower() == MUON_ADAMW else resolve_optimizer_class(self.name)


@dataclass(frozen=True)
class PlanRequest:
    """All that `plan` is asked for, but the optimizer and the precision."""

    model: ModelShape
    ranks: Sequence[int]
    config: ZeroConfig
    memory: int | None
    activations: int
    network: Network
    shard_group_size: int | None = None

    def make_plan(self, optimizer: OptimizerChoice, precision: str | None, ranks: Sequence[int] | None = None) -> Plan:
        """`precision`: None leaves the model as it is."""
        model, config = self.model, self.config
        if precision is not None:
            dtype, masters = _parse_precision(precision)
            model, config = model.cast(dtype), replace(config, master_dtype=masters)
        asked: dict[str, Any] = {
            "ranks": ranks or self.ranks,
            "config": config,
            "memory": self.memory,
            "network": self.network,
            "shard_group_size": self.shard_group_size,
        }
        made = optimizer.resolve(model)
        try:
            return plan(model, made, activations=self.activations, **asked, **optimizer.options)
        except (ZeroError, TypeError):
            raise
        except Exception as error:  # of a class that anybody may have written
            raise ConfigError(
                f"{optimizer.name} cannot be stepped to see what it keeps: {type(error).__name__}: {error}"
            ) from error


def resolve_optimizer_class(name: str) -> Any:
    """`AdamW`, `package.module:Class` or `file.py:Class`."""
    found = import_object(name, "a class of optimizers") if ":" in name else getattr(torch.optim, name, None)
    if found is None:
        alike = [it for it in dir(torch.optim) if it.lower() == name.lower()]
        raise ConfigError(
            f"--optimizer {name!r} is no class of torch.optim, such as {(alike or ['AdamW'])[0]}. Expected one of "
            f"these, {MUON_ADAMW}, package.module:Class or file.py:Class"
        )
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        raise ConfigError(f"--optimizer {name!r} is {found!r}: expected a class of optimizers, such as AdamW")
    return found


def parse_options(text: str | None) -> dict[str, Any]:
    """Of `lr=1e-3,betas=(0.9,0.95)`. Values are literals: nothing is run."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("a value without a name")
        found = {str(it.arg): ast.literal_eval(it.value) for it in call.keywords if it.arg}
        if len(found) < len(call.keywords):
            raise ValueError("a name twice, or none")
        return found
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
    row = None if within is None else parse_bandwidth("--bandwidth-within", within)
    return Network(parse_bandwidth("--bandwidth", bandwidth), parse_seconds("--latency", latency), row)


def _parse_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    if name not in PRECISIONS:
        raise ConfigError(f"--precision {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _muon_adamw_rules(model: ModelShape) -> list[ParamRule]:
    """Words that are in no name are left out, since they would be warned of."""
    words = [
        word
        for word in _MUON_EXCLUDED_WORDS
        if any(not matrix_params((word,))(it.name, it.to_meta_param()) for it in _matrix_shapes(model))
    ]
    chosen = matrix_params(tuple(words))
    takes = [chosen(it.name, it.to_meta_param()) for it in model.params]
    rules = [ParamRule(chosen, torch.optim.Muon), ParamRule(remaining_params, torch.optim.AdamW)]
    return [rule for rule, taken in zip(rules, (any(takes), not all(takes)), strict=True) if taken]


def _matrix_shapes(model: ModelShape) -> list[Any]:
    return [it for it in model.params if len(it.shape) == 2]
