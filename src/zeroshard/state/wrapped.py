"""Tensors that are made of others: quantized state, for example, of codes and scales.

Their classes need not know how to be cloned, cut or joined. They say what is inside them (`__tensor_flatten__`, as
torch wants it of classes that are compiled), and that are plain tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CheckpointError

Insides = dict[str, torch.Tensor]


def is_wrapped(value: Any) -> TypeGuard[torch.Tensor]:
    """Not what is a part of a tensor: a DTensor, or a rank's piece, which know how to be copied and saved."""
    is_part = hasattr(value, "to_local") or hasattr(value, "is_whole")
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and not is_part


def insides(value: Any) -> Insides:
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def rewrapped(like: Any, inside: Mapping[str, torch.Tensor], shape: Sequence[int] | None = None) -> torch.Tensor:
    """One of the class of `like`, of other tensors; of another shape, if that is given."""
    _, context = like.__tensor_flatten__()
    size, before = torch.Size(like.shape if shape is None else shape), tuple(like.shape)
    if isinstance(context, (list, tuple)):
        context = [size if isinstance(it, tuple) and tuple(it) == before else it for it in context]
    contiguous = torch.empty(size, device="meta").stride()
    made: torch.Tensor = type(like).__tensor_unflatten__(dict(inside), context, size, contiguous)
    return made


def on_plain(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A plain tensor changed; one that is made of others, made of them changed.

    Hazard: a `change` that called itself would be a cycle, and keep what it refers to alive.
    """
    if not is_wrapped(value):
        return change(value)
    return rewrapped(value, {name: on_plain(it, change) for name, it in insides(value).items()})


def apart(state: Any) -> Any:
    """The state of a parameter with the insides of its values in their place, flat, as files have them."""
    if not isinstance(state, dict):
        return state
    return {key: _flat_insides(value) if is_wrapped(value) else value for key, value in state.items()}


def _flat_insides(value: torch.Tensor) -> Insides:
    return {name: it.reshape(-1) for name, it in insides(value).items()}


def piece_of(value: torch.Tensor, start: int, stop: int, common: frozenset[str]) -> torch.Tensor:
    """Elements `start` to `stop` of it, flat. `common`: what of its insides all pieces have in common."""
    found = insides(value)
    for name in found.keys() - common:
        per = elements_per(value.numel(), found[name])
        if start % per or stop % per:
            raise CheckpointError(
                f"elements {start} to {stop} of a {type(value).__name__} cannot be taken out of it: its {name} is of "
                f"blocks of {per}. Use WholeParams() to load it."
            )
        found[name] = found[name].reshape(-1)[start // per : stop // per]
    return rewrapped(value, found, (stop - start,))


def joined(pieces: Sequence[torch.Tensor], shape: Sequence[int], common: frozenset[str]) -> torch.Tensor:
    """One of that shape, of flat pieces in order."""
    first, parts = pieces[0], [insides(piece) for piece in pieces]
    found = {name: it if name in common else torch.cat([part[name] for part in parts]) for name, it in parts[0].items()}
    for name, it in parts[0].items():
        if name not in common and it.shape == first.shape:
            found[name] = found[name].view(torch.Size(shape))
    return rewrapped(first, found, shape)


def elements_per(numel: int, inside: torch.Tensor) -> int:
    """How many elements of a tensor one of an inner tensor stands for."""
    per = numel // max(1, inside.numel())
    if per * inside.numel() != numel:
        raise CheckpointError(f"an inner tensor of {inside.numel()} elements cannot be divided as one of {numel} is")
    return per
