"""Parameters of an optimizer by the names that they have in the model, as torch's helpers call them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..state.compat import nameless, unwrapped

_MOST_NAMES = 8


def names_in(model: torch.nn.Module) -> dict[int, str]:
    """The names of all parameters, by id."""
    wrapped = [f"{name}." if name else "" for name, part in model.named_modules() if _is_ddp(part)]
    return {id(param): _bare(name, wrapped) for name, param in model.named_parameters()}


def names_of(optimizer: Optimizer, model: torch.nn.Module | None) -> list[str]:
    """A name for each parameter, group after group: the model's, else the optimizer's own, else its number."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    if model is None:
        return own if len(own) == len(params) else [str(number) for number in range(len(params))]
    known = names_in(model)
    strangers = [number for number, param in enumerate(params) if id(param) not in known]
    if strangers:
        raise CheckpointError(
            f"{len(strangers)} parameters of the optimizer are not the model's, the first is number {strangers[0]}: "
            "give save() and load() the model that the optimizer was made for"
        )
    return [known[id(param)] for param in params]


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A state dict with names in the place of running numbers."""
    plain = nameless(dict(saved))["param_groups"]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in plain]
    state = {names[key] if isinstance(key, int) else key: value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def listed(names: Sequence[str]) -> str:
    """Some of many names."""
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown}, and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def refuse_other_names(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing or unexpected:
        raise CheckpointError(
            f"{what}. "
            + (f"Missing there: {listed(missing)}. " if missing else "")
            + (f"Only there: {listed(unexpected)}. " if unexpected else "")
            + "strict=False loads what both have."
        )


def _bare(name: str, wrapped: Sequence[str]) -> str:
    for prefix in sorted(wrapped, key=len, reverse=True):
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return unwrapped(name)


def _is_ddp(part: torch.nn.Module) -> bool:
    return isinstance(part, DistributedDataParallel)
