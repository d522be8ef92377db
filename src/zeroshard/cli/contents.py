"""What a checkpoint holds, wherever it is stored, under the names that `zeroshard.checkpoint` gives it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint.contents import MODEL, OPTIM, RANKS, SCHEDULER, bytes_of
from ..checkpoint.saved_optimizer import GROUPS, STATE
from ..state.codec import unpack
from .stored import Held, Stored, held

MANIFEST = "zeroshard"
"""In files that have everything in one dict: what the manifest of a checkpoint says."""

Place = tuple[Any, ...]
Leaf = Any
"""A `Stored` tensor, or a value that is small."""


@dataclass
class Contents:
    """Tensors stay where they are stored until they are asked for."""

    leaves: dict[Place, Leaf] = field(default_factory=dict)
    """By path: (model, name), (optim, state, name, key), and what else there is. Without the groups."""
    groups: list[dict[str, Any]] | None = None
    """Of the optimizer, with names of parameters."""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values() if isinstance(leaf, Stored))

    def below(self, *path: Any) -> dict[Place, Leaf]:
        """What is there, by the rest of its path."""
        return {it[len(path) :]: leaf for it, leaf in self.leaves.items() if it[: len(path)] == path}

    def of_groups(self) -> dict[Place, Leaf]:
        """The groups as leaves too."""
        groups = enumerate(self.groups or ())
        return dict(leaf for number, group in groups for leaf in flattened((OPTIM, GROUPS, number), group))

    def rest(self) -> dict[Place, Leaf]:
        """What belongs neither to the model nor to the optimizer's state."""
        return {it: leaf for it, leaf in self.leaves.items() if it[0] != MODEL and it[:2] != (OPTIM, STATE)}


class Weights(Contents):
    """Parameters and buffers alone, by the names that the model has for them."""


def flattened(path: Place, value: Any) -> Iterator[tuple[Place, Leaf]]:
    """Tensors and other values in nested dicts."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flattened((*path, str(key)), item)
    else:
        yield path, held(value) if isinstance(value, torch.Tensor) else value


def is_packed(path: Place) -> bool:
    """Whether `zeroshard.checkpoint.save` packs what is there into bytes."""
    return path == (SCHEDULER,) or (path[0] == RANKS and len(path) == 2)


def opened(leaf: Leaf) -> Leaf:
    """What was packed; else the leaf itself."""
    if not isinstance(leaf, Held) or leaf.dtype != torch.uint8:
        return leaf
    try:
        return unpack(bytes_of(leaf.tensor))
    except Exception:  # bytes of somebody else
        return leaf
