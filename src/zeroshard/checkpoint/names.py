"""Names of an optimizer's parameters: fully qualified names in the model, as DCP's helpers use them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._formatting import format_count, format_names
from ..errors import CheckpointError
from ..state.state_dict import drop_param_names, strip_wrapper_prefixes


def fqn_by_param_id(model: torch.nn.Module) -> dict[int, str]:
    """Return the fully qualified name of each parameter, without wrappers, by the parameter's id."""
    ddp_prefixes = _ddp_prefixes(model)
    return {id(param): _strip_wrappers(name, ddp_prefixes) for name, param in model.named_parameters()}


def tied_param_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each shared parameter, by its other names."""
    first_names = fqn_by_param_id(model)
    ddp_prefixes = _ddp_prefixes(model)
    names = (
        (_strip_wrappers(name, ddp_prefixes), first_names[id(param)])
        for name, param in model.named_parameters(remove_duplicate=False)
    )
    return {name: first for name, first in names if name != first}


def resolve_param_names(optimizer: Optimizer, model: torch.nn.Module | None) -> list[str]:
    """Return a name for each parameter, in the order of groups.

    Names come from the model; without a model from the optimizer's `param_names`, else they are running numbers.

    Raises:
        CheckpointError: A parameter of the optimizer is not in the model.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    if model is None:
        return own if len(own) == len(params) else [str(index) for index in range(len(params))]
    fqns = fqn_by_param_id(model)
    unknown = [index for index, param in enumerate(params) if id(param) not in fqns]
    if unknown:
        raise CheckpointError(
            f"expected an optimizer over the model's parameters, got {format_count(len(unknown), 'parameter')} not in "
            f"the model, the first at index {unknown[0]}. Pass save() and load() the model that the optimizer updates."
        )
    return [fqns[id(param)] for param in params]


def key_by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict keyed by parameter names instead of indices."""
    saved_groups = drop_param_names(dict(state_dict))["param_groups"]
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in saved_groups]
    state = {names[key] if isinstance(key, int) else key: value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def raise_if_names_differ(message: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing or unexpected:
        raise CheckpointError(
            f"{message}. "
            + (f"Missing from the checkpoint: {format_names(missing)}. " if missing else "")
            + (f"Only in the checkpoint: {format_names(unexpected)}. " if unexpected else "")
            + "Load into the saved model, or pass strict=False to load the names that both have."
        )


def _ddp_prefixes(model: torch.nn.Module) -> list[str]:
    return [
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]


def _strip_wrappers(name: str, ddp_prefixes: Sequence[str]) -> str:
    for prefix in sorted(ddp_prefixes, key=len, reverse=True):
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return strip_wrapper_prefixes(name)
