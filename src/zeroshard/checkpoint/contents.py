"""What a checkpoint holds, as the nested dict that `torch.distributed.checkpoint` saves.

model.<name>                   parameters and buffers
optim.state.<name>.<key>       state, in the shape of its parameter, whoever holds which part of it
optim.param_groups             options, with the names of parameters
scheduler                      packed: read back without running code
ranks.<rank>                   packed: what each rank has for itself, random states and `extra`
"""

import io
import random
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..state.codec import dumps, loads
from .metadata import torch_reason
from .names import key_by_name, resolve_param_names
from .optimizer_adapter import make_adapter
from .owned import collect_model_state

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
MODEL, OPTIM, SCHEDULER, RANKS = "model", "optim", "scheduler", "ranks"


def build_state_dict(
    rank: int, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any, extra: Any
) -> dict[str, Any]:
    """All of it, with the tensors themselves and not copies."""
    contents: dict[str, Any] = {RANKS: {str(rank): to_byte_tensor({"random": get_rng_states(), "extra": extra})}}
    if model is not None:
        contents[MODEL] = collect_model_state(rank, model, optimizer)
    if optimizer is not None:
        contents[OPTIM] = key_by_name(make_adapter(optimizer).local_state_dict(), resolve_param_names(optimizer, model))
    if scheduler is not None and rank == 0:
        contents[SCHEDULER] = to_byte_tensor(scheduler.state_dict())
    return {key: ensure_loadable(value, key) for key, value in contents.items()}


def ensure_loadable(value: Any, key_path: str) -> Any:
    """The value with numbers of numpy as plain ones. Raises if something in it could not be read back."""
    if isinstance(value, dict):
        return {key: ensure_loadable(it, f"{key_path}.{key}") for key, it in value.items()}
    if type(value) in (list, tuple):
        return type(value)(ensure_loadable(it, f"{key_path}.{number}") for number, it in enumerate(value))
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN_TYPES:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{key_path} is a {type(value).__qualname__}, which could not be read back: files are read without running "
            "code. Use numbers, strings, tensors and plain containers, or allow the type with "
            "torch.serialization.add_safe_globals."
        ) from error
    return value


def to_byte_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def from_byte_tensor(tensor: Any, key: str, directory: Path) -> Any:
    """What was packed, read from the entry `key`. Whatever bytes these are, no code is run."""
    try:
        return loads(tensor_to_bytes(tensor))
    except Exception as error:
        raise CheckpointError(f"'{key}' in {directory} cannot be read: {torch_reason(error)}") from error


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Without numpy, which torch can do without."""
    buffer = bytearray(tensor.numel())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return bytes(buffer)


def get_rng_states() -> dict[str, Any]:
    """Of this process. CUDA's are those of the present device, if it was used."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_rng_states(states: dict[str, Any]) -> None:
    """Raise if they could not be set."""
    torch.Generator().set_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
