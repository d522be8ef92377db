"""What a user wants to have planned, from the words of the command line."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import ZeroConfig
from ..errors import ConfigError, ZeroError
from ..layout.partition import FlatShards
from .code import import_object
from .plan import Plan, plan
from .shapes import ModelShape
from .usage import Network
from ..policies import CPUOffload, PeerCheckpoint
from ..rules import ParamRule, matrix_params, remaining_params
from .plan_quantities import parse_bandwidth, parse_bytes, parse_seconds

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
