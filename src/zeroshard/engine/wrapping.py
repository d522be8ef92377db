"""State that files have in plain tensors, put together as the optimizer would have made it.

Files need not say which class that is, and no code comes from them: the running optimizer shows what it keeps.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from ..state.state_dict import StateDict
from ..state.shard_tensor import ShardTensor
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, rebuild_subclass
from .beginnings import probe_initial_state
from .inner import OptimizerFactory
from .selftest import isolated_probe


def rebuild_subclass_state(
    state_dict: StateDict, factory: OptimizerFactory, optimizer: torch.optim.Optimizer
) -> StateDict:
    """The dict with values of the optimizer's own classes, where it has what is inside them."""
    places = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    state = dict(state_dict["state"])
    for number, found in state.items():
        if isinstance(number, int) and isinstance(found, dict) and any(isinstance(it, dict) for it in found.values()):
            param, options = places[number]
            with isolated_probe(factory):
                # Of a parameter whose values may be elsewhere only the kind is known here, and that is enough.
                (expected,) = probe_initial_state(factory, options, [torch.zeros_like(param)])
            state[number] = {key: _rebuild_like(expected.get(key), value, key) for key, value in found.items()}
    return {**state_dict, "state": state}


def _rebuild_like(like: Any, value: Any, key: Any) -> Any:
    if not is_wrapper_subclass(like) or not isinstance(value, Mapping):
        return value
    wanted = inner_tensors(like)
    found = {name: it.local if isinstance(it, ShardTensor) else it for name, it in value.items()}
    if {name: it.numel() for name, it in found.items()} != {name: it.numel() for name, it in wanted.items()}:
        raise CheckpointError(
            f"the loaded state '{key}' is made of {_format_sizes(found)}, but {type(like).__name__} has "
            f"{_format_sizes(wanted)}: it was saved by an optimizer of another class, or with other options"
        )
    return rebuild_subclass(
        like, {name: it.to(wanted[name].device).view(wanted[name].shape) for name, it in found.items()}
    )


def _format_sizes(inner: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} of {it.numel()} elements" for name, it in inner.items())
