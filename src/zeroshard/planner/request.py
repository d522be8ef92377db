"""Parse the arguments of `zeroshard plan` into a `PlanRequest` and an `OptimizerChoice`."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch

from .._formatting import format_error
from ..config import CPUOffload, PeerCheckpoint, ZeroConfig
from ..errors import ConfigError, ZeroError
from ..layout.partition import FlatShards
from ..rules import ParamRule, matrix_params, remaining_params
from .estimate import Network
from .plan import Plan, plan
from .shapes import ModelShape, import_object

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_Units = dict[str, Decimal]
_BYTE_UNITS: _Units = dict.fromkeys(("", "b"), Decimal(1))
_BYTE_UNITS |= {f"{letter}b": Decimal(1000**power) for letter, power in _POWERS.items()}
_BYTE_UNITS |= {f"{letter}ib": Decimal(1024**power) for letter, power in _POWERS.items()}
_BIT_UNITS: _Units = {f"{letter}{bit}": Decimal(1000**n) / 8 for letter, n in _POWERS.items() for bit in ("bit", "bps")}
_TIME_UNITS: _Units = {unit: Decimal(f"1e{n}") for unit, n in {"s": 0, "ms": -3, "us": -6, "µs": -6, "ns": -9}.items()}
_QUANTITY_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([a-zµ]*)\s*", re.IGNORECASE)
_SHORT_BITS_PATTERN = re.compile(r"(?<=\d)(\s*[KkMmGgTt])b(?=\s*(/s)?\s*$)")
"""In 400Gb/s, the lower-case b means bits."""
_MAX_RANKS = 65_536


def parse_bytes(option: str, text: str) -> int:
    """Parse a size such as 80GB, 80GiB or 512MB."""
    return round(_parse_quantity(option, text, _BYTE_UNITS, "80GB or 80GiB"))


def parse_bandwidth(option: str, text: str) -> float:
    """Parse a bandwidth such as 50GB/s, 400Gbit/s or 400Gb/s into bytes per second."""
    text = _SHORT_BITS_PATTERN.sub(r"\1bit", text).removesuffix("/s")
    bandwidth = _parse_quantity(option, text, {**_BYTE_UNITS, **_BIT_UNITS}, "50GB/s or 400Gbit/s")
    if not bandwidth:
        raise ConfigError(f"{option} must be above 0, such as 50GB/s, got {text}")
    return bandwidth


def parse_seconds(option: str, text: str) -> float:
    """Parse a duration such as 10us or 1ms."""
    return _parse_quantity(option, text, _TIME_UNITS, "10us or 1ms")


def _parse_quantity(option: str, text: str, units: _Units, example: str) -> float:
    match = _QUANTITY_PATTERN.fullmatch(text)
    has_unit = match is not None and match[2].lower() in units and (match[2] or not float(match[1]))
    if match is None or not has_unit:
        raise ConfigError(f"{option}: expected a number and a unit, such as {example}, got {text!r}")
    return float(Decimal(match[1]) * units[match[2].lower()])


def parse_ranks(text: str) -> list[int]:
    """Parse numbers of ranks such as 8,64,512. A range such as 1-4096 stands for the powers of two in it."""
    counts: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ConfigError(f"--ranks: expected numbers such as 8,64,512, or a range such as 1-4096, got {part!r}")
        powers = {2**power for power in range(40) if dash and int(first) <= 2**power <= int(last)}
        counts |= powers if dash else {int(first)}
    if not counts or min(counts) < 1 or max(counts) > _MAX_RANKS:
        raise ConfigError(
            f"--ranks: expected numbers from 1 to {_MAX_RANKS:,}, or a range that contains a power of two, got {text!r}"
        )
    return sorted(counts)


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
        raise ConfigError(f"--options: expected name=value,..., such as lr=1e-3,nesterov=True, got {text!r}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Requests.


PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype | None]] = {
    "fp32": (torch.float32, None, None),
    "bf16": (torch.bfloat16, None, None),
    "fp16": (torch.float16, None, None),
    "bf16+fp32": (torch.bfloat16, torch.float32, None),
    "fp16+fp32": (torch.float16, torch.float32, None),
    "bf16-autocast": (torch.float32, None, torch.bfloat16),
    "fp16-autocast": (torch.float32, None, torch.float16),
}
"""Dtype of parameters, of master weights and of autocast, if there are any."""
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MUON_ADAMW = "muon+adamw"
_MUON_EXCLUDED_WORDS = ("embed", "head", "wte", "wpe")
"""Words in the names of matrices that Muon should not update: embeddings and heads."""


def make_config(*, peer_checkpoint: bool, offload: bool, bucket: str | None, reduce: str | None) -> ZeroConfig:
    return ZeroConfig(
        partition=None if bucket is None else FlatShards(bucket_bytes=parse_bytes("--bucket", bucket)),
        reduce_dtype=None if reduce is None else _choose("--reduce", reduce, REDUCE_DTYPES),
        offload=CPUOffload() if offload else None,
        peer_checkpoint=PeerCheckpoint() if peer_checkpoint else None,
    )


def make_network(bandwidth: str, latency: str, within: str | None) -> Network:
    within_bandwidth = None if within is None else parse_bandwidth("--bandwidth-within", within)
    return Network(parse_bandwidth("--bandwidth", bandwidth), parse_seconds("--latency", latency), within_bandwidth)


def _choose(option: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise ConfigError(f"{option}: expected one of {', '.join(choices)}, got {name!r}")
    return choices[name]


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer by name: of torch.optim, an importable class, or `muon+adamw`, which stands for two with rules."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name.lower() == MUON_ADAMW and self.options:
            raise ConfigError(f"--options apply to one class, but {MUON_ADAMW} stands for two: omit {self.options}")

    @property
    def label(self) -> str:
        if self.name.lower() == MUON_ADAMW:
            return "Muon + AdamW"
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name

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

    def make_plan(self, optimizer: OptimizerChoice, precision: str | None) -> Plan:
        """Make the plan. `precision=None` keeps the dtypes of the model."""
        arguments: dict[str, Any] = dict(vars(self))
        if precision is not None:
            dtype, master_dtype, arguments["autocast"] = _choose("--precision", precision, PRECISIONS)
            arguments["model"] = self.model.cast(dtype)
            arguments["config"] = replace(self.config, master_dtype=master_dtype)
        try:
            return plan(optimizer_class=optimizer.resolve(arguments["model"]), **arguments, **optimizer.options)
        except (ZeroError, TypeError):
            raise
        except Exception as error:  # user-defined optimizers may raise anything
            raise ConfigError(f"{optimizer.name} failed in a trial step: {format_error(error)}") from error


def resolve_optimizer_class(name: str) -> Any:
    """Return the class of a name such as `AdamW`, `package.module:Class` or `file.py:Class`."""
    found = import_object(name, "an optimizer class") if ":" in name else getattr(torch.optim, name, None)
    if found is None:
        similar = [candidate for candidate in dir(torch.optim) if candidate.lower() == name.lower()]
        raise ConfigError(
            f"--optimizer: expected a class of torch.optim such as {(similar or ['AdamW'])[0]}, {MUON_ADAMW}, "
            f"package.module:Class or file.py:Class, got {name!r}"
        )
    base = torch.optim.Optimizer
    if not isinstance(found, type) or not issubclass(found, base) or found is base:
        raise ConfigError(f"--optimizer {name}: expected an optimizer class such as AdamW, got {found!r}")
    return found


def _muon_adamw_rules(model: ModelShape) -> list[ParamRule]:
    """Return rules for Muon and AdamW, without one that would select nothing."""
    select = matrix_params(_MUON_EXCLUDED_WORDS)
    names = {param.name for param in model.params if select(param.name, param.to_meta_param())}
    # By name: the selector itself would warn about words that occur in no name.
    muon = [ParamRule(lambda name, _: name in names, torch.optim.Muon)] if names else []
    has_others = len(names) < len(model.params)
    return [*muon, *([ParamRule(remaining_params, torch.optim.AdamW)] if has_others else [])]
