"""Parameters of an optimizer by the names that they have in the model, as torch's helpers call them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..state.state_dict import drop_param_names, strip_wrapper_prefixes

_MAX_NAMES_SHOWN = 8


def fqn_by_param_id(model: torch.nn.Module) -> dict[int, str]:
    """The names of all parameters, by id."""
    wrapped = [f"{name}." if name else "" for name, part in model.named_modules() if _is_ddp(part)]
    return {id(param): _strip_wrappers(name, wrapped) for name, param in model.named_parameters()}


def resolve_param_names(optimizer: Optimizer, model: torch.nn.Module | None) -> list[str]:
    """A name for each parameter, group after group: the model's, else the optimizer's own, else its number."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    if model is None:
        return own if len(own) == len(params) else [str(number) for number in range(len(params))]
    known = fqn_by_param_id(model)
    strangers = [number for number, param in enumerate(params) if id(param) not in known]
    if strangers:
        raise CheckpointError(
            f"{len(strangers)} parameters of the optimizer are not the model's, the first is number {strangers[0]}: "
            "give save() and load() the model that the optimizer was made for"
        )
    return [known[id(param)] for param in params]


def key_by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A state dict with names in the place of running numbers."""
    plain = drop_param_names(dict(state_dict))["param_groups"]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in plain]
    state = {names[key] if isinstance(key, int) else key: value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def format_names(names: Sequence[str]) -> str:
    """Some of many names."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return f"{shown}, and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else shown


def raise_if_names_differ(message: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing or unexpected:
        raise CheckpointError(
            f"{message}. "
            + (f"Missing there: {format_names(missing)}. " if missing else "")
            + (f"Only there: {format_names(unexpected)}. " if unexpected else "")
            + "strict=False loads what both have."
        )


def _strip_wrappers(name: str, ddp_prefixes: Sequence[str]) -> str:
    for prefix in sorted(ddp_prefixes, key=len, reverse=True):
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return strip_wrapper_prefixes(name)


def _is_ddp(module: torch.nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)
