"""What a user wants to have planned, from the words of the command line."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import ZeroConfig
from ..errors import ConfigError, ZeroError
from ..layout.partition import FlatShards
from ..planning.code import named
from ..planning.plan import Plan, plan
from ..planning.shapes import ModelShape
from ..planning.usage import Network
from ..policies import Offload, SecondCopy
from ..rules import Rule, everything_else, matrices
from .plan_quantities import bandwidth_in, bytes_in, seconds_in

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp16+fp32": (torch.float16, torch.float32),
}
"""Dtypes of parameters, and of more precise copies of them."""
REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAIR = "muon+adamw"
_NO_MATRICES = ("embed", "head", "wte", "wpe")
"""Words in names of matrices that are not Muon's: embeddings and heads."""


@dataclass(frozen=True)
class Optimizer:
    """A name of torch's, or of a class anywhere; `muon+adamw` are two, with rules."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name.lower() == PAIR and self.options:
            raise ConfigError(f"--options {self.options} belong to one class, and {PAIR} are two: give one, or none")

    def made_for(self, model: ModelShape) -> Any:
        """What `plan` takes."""
        return _muon_and_adamw(model) if self.name.lower() == PAIR else optimizer_class(self.name)


@dataclass(frozen=True)
class Wish:
    """All that `plan` is asked for, but the optimizer and the precision."""

    model: ModelShape
    ranks: Sequence[int]
    config: ZeroConfig
    memory: int | None
    activations: int
    network: Network
    shard_within: int | None = None

    def planned(self, optimizer: Optimizer, precision: str | None, ranks: Sequence[int] | None = None) -> Plan:
        """`precision`: None leaves the model as it is."""
        model, config = self.model, self.config
        if precision is not None:
            dtype, masters = _precision(precision)
            model, config = model.cast(dtype), replace(config, master_dtype=masters)
        asked: dict[str, Any] = {
            "ranks": ranks or self.ranks,
            "config": config,
            "memory": self.memory,
            "network": self.network,
            "shard_within": self.shard_within,
        }
        made = optimizer.made_for(model)
        try:
            return plan(model, made, activations=self.activations, **asked, **optimizer.options)
        except (ZeroError, TypeError):
            raise
        except Exception as error:  # of a class that anybody may have written
            raise ConfigError(
                f"{optimizer.name} cannot be stepped to see what it keeps: {type(error).__name__}: {error}"
            ) from error


def optimizer_class(name: str) -> Any:
    """`AdamW`, `package.module:Class` or `file.py:Class`."""
    found = named(name, "a class of optimizers") if ":" in name else getattr(torch.optim, name, None)
    if found is None:
        alike = [it for it in dir(torch.optim) if it.lower() == name.lower()]
        raise ConfigError(
            f"--optimizer {name!r} is no class of torch.optim, such as {(alike or ['AdamW'])[0]}. Expected one of "
            f"these, {PAIR}, package.module:Class or file.py:Class"
        )
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        raise ConfigError(f"--optimizer {name!r} is {found!r}: expected a class of optimizers, such as AdamW")
    return found


def options_in(text: str | None) -> dict[str, Any]:
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


def config_of(*, second_copy: bool, offload: bool, bucket: str | None, reduce: str | None) -> ZeroConfig:
    if reduce is not None and reduce not in REDUCED:
        raise ConfigError(f"--reduce {reduce!r}: expected one of {', '.join(REDUCED)}")
    return ZeroConfig(
        partition=None if bucket is None else FlatShards(bucket_bytes=bytes_in("--bucket", bucket)),
        reduce_dtype=REDUCED[reduce] if reduce else None,
        offload=Offload() if offload else None,
        second_copy=SecondCopy() if second_copy else None,
    )


def network_of(bandwidth: str, latency: str, within: str | None) -> Network:
    row = None if within is None else bandwidth_in("--bandwidth-within", within)
    return Network(bandwidth_in("--bandwidth", bandwidth), seconds_in("--latency", latency), row)


def _precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    if name not in PRECISIONS:
        raise ConfigError(f"--precision {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _muon_and_adamw(model: ModelShape) -> list[Rule]:
    """Words that are in no name are left out, since they would be warned of."""
    words = [word for word in _NO_MATRICES if any(not matrices((word,))(it.name, it.stand_in()) for it in _flat(model))]
    chosen = matrices(tuple(words))
    takes = [chosen(it.name, it.stand_in()) for it in model.params]
    rules = [Rule(chosen, torch.optim.Muon), Rule(everything_else, torch.optim.AdamW)]
    return [rule for rule, taken in zip(rules, (any(takes), not all(takes)), strict=True) if taken]


def _flat(model: ModelShape) -> list[Any]:
    return [it for it in model.params if len(it.shape) == 2]
