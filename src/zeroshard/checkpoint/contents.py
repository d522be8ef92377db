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
from ..state.codec import pack, unpack
from .archive import why
from .naming import by_name, names_of
from .optimizers import running
from .owned import written

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
MODEL, OPTIM, SCHEDULER, RANKS = "model", "optim", "scheduler", "ranks"


def collect(
    rank: int, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any, extra: Any
) -> dict[str, Any]:
    """All of it, with the tensors themselves and not copies."""
    contents: dict[str, Any] = {RANKS: {str(rank): packed({"random": random_states(), "extra": extra})}}
    if model is not None:
        contents[MODEL] = written(rank, model, optimizer)
    if optimizer is not None:
        contents[OPTIM] = by_name(running(optimizer).part(), names_of(optimizer, model))
    if scheduler is not None and rank == 0:
        contents[SCHEDULER] = packed(scheduler.state_dict())
    return {key: readable(value, key) for key, value in contents.items()}


def readable(value: Any, where: str) -> Any:
    """The value with numbers of numpy as plain ones. Raises if something in it could not be read back."""
    if isinstance(value, dict):
        return {key: readable(it, f"{where}.{key}") for key, it in value.items()}
    if type(value) in (list, tuple):
        return type(value)(readable(it, f"{where}.{number}") for number, it in enumerate(value))
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
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
            f"{where} is a {type(value).__qualname__}, which could not be read back: files are read without running "
            "code. Use numbers, strings, tensors and plain containers, or allow the type with "
            "torch.serialization.add_safe_globals."
        ) from error
    return value


def packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)


def unpacked(value: Any, key: str, directory: Path) -> Any:
    """What was packed, read from the entry `key`. Whatever bytes these are, no code is run."""
    try:
        return unpack(bytes_of(value))
    except Exception as error:
        raise CheckpointError(f"'{key}' in {directory} cannot be read: {why(error)}") from error


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Without numpy, which torch can do without."""
    buffer = bytearray(tensor.numel())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return bytes(buffer)


def random_states() -> dict[str, Any]:
    """Of this process. CUDA's are those of the present device, if it was used."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Raise if they could not be set."""
    torch.Generator().set_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
