"""What a checkpoint holds, wherever it is stored, under the names that `zeroshard.checkpoint` gives it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint.contents import MODEL, OPTIM, RANKS, SCHEDULER, tensor_to_bytes
from ..checkpoint.saved_optimizer import PARAM_GROUPS, STATE
from ..state.codec import loads
from .stored import InMemoryTensor, StoredTensor, wrap_tensor

MANIFEST_KEY = "zeroshard"
"""In files that have everything in one dict: what the manifest of a checkpoint says."""

LeafPath = tuple[Any, ...]
Leaf = Any
"""A `Stored` tensor, or a value that is small."""


@dataclass
class CheckpointContents:
    """Tensors stay where they are stored until they are asked for."""

    leaves: dict[LeafPath, Leaf] = field(default_factory=dict)
    """By path: (model, name), (optim, state, name, key), and what else there is. Without the groups."""
    param_groups: list[dict[str, Any]] | None = None
    """Of the optimizer, with names of parameters."""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values() if isinstance(leaf, StoredTensor))

    def under(self, *path: Any) -> dict[LeafPath, Leaf]:
        """What is there, by the rest of its path."""
        return {it[len(path) :]: leaf for it, leaf in self.leaves.items() if it[: len(path)] == path}

    def param_group_leaves(self) -> dict[LeafPath, Leaf]:
        """The groups as leaves too."""
        groups = enumerate(self.param_groups or ())
        return dict(leaf for number, group in groups for leaf in flatten_leaves((OPTIM, PARAM_GROUPS, number), group))

    def other_leaves(self) -> dict[LeafPath, Leaf]:
        """What belongs neither to the model nor to the optimizer's state."""
        return {it: leaf for it, leaf in self.leaves.items() if it[0] != MODEL and it[:2] != (OPTIM, STATE)}


class ModelWeights(CheckpointContents):
    """Parameters and buffers alone, by the names that the model has for them."""


def flatten_leaves(path: LeafPath, value: Any) -> Iterator[tuple[LeafPath, Leaf]]:
    """Tensors and other values in nested dicts."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten_leaves((*path, str(key)), item)
    else:
        yield path, wrap_tensor(value) if isinstance(value, torch.Tensor) else value


def is_serialized(path: LeafPath) -> bool:
    """Whether `zeroshard.checkpoint.save` packs what is there into bytes."""
    return path == (SCHEDULER,) or (path[0] == RANKS and len(path) == 2)


def deserialize_leaf(leaf: Leaf) -> Leaf:
    """What was packed; else the leaf itself."""
    if not isinstance(leaf, InMemoryTensor) or leaf.dtype != torch.uint8:
        return leaf
    try:
        return loads(tensor_to_bytes(leaf.tensor))
    except Exception:  # bytes of somebody else
        return leaf
