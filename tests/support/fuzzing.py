"""Random damage to state dicts, arguments and files. A seed decides what happens, so every example can be repeated."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

ROUNDS = float(os.environ.get("ZEROSHARD_FUZZ", "1"))
"""Factor for the number of examples."""


def rounds(count: int) -> int:
    return max(1, int(count * ROUNDS))


def time_limit(seconds: float) -> float:
    """Return the time limit of a test: it grows with the number of examples, on a busy machine too."""
    return seconds * max(1.0, ROUNDS)


class TensorSubclass(torch.Tensor):
    """A user-defined tensor subclass."""


ODD_VALUES: list[Any] = [None, True, 0, -1, 10**30, 3.5, float("nan"), "x", "../x", "\ud800", "\x1b[2J", b"x", ()]
ODD_VALUES += [[], {}, [1], {"a": 1}, [[[[[]]]]], {"state": {}}, {1: {2: 3}}]
ODD: list[Callable[[], Any]] = [
    *(partial(copy.deepcopy, value) for value in ODD_VALUES),
    lambda: torch.ones(3),
    lambda: torch.ones(()),
    lambda: torch.full((2, 2), float("nan")),
    lambda: torch.empty(2, 3, device="meta"),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.ones(2, dtype=torch.complex64).conj(),
    lambda: torch.ones(1).expand(1 << 40),
    lambda: torch.ones(2).as_subclass(TensorSubclass),
    lambda: torch.zeros(0),
]
# Examples are drawn from the sorted names: keep their order.
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "sparse, out of range": lambda tensor: torch.sparse_coo_tensor(
        torch.full((tensor.dim(), 2), 1 << 40), torch.ones(2), tensor.shape, check_invariants=False
    ),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "whole numbers": lambda tensor: tensor.to(torch.int64),
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "eight bits": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "flags": lambda tensor: tensor.bool(),
    "not finite": lambda tensor: tensor * float("nan"),
    "expanded": lambda tensor: torch.ones(()).expand(tensor.shape),
    "transposed": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor,
    "with gaps": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "of a subclass": lambda tensor: tensor.as_subclass(TensorSubclass),
    "parameter": torch.nn.Parameter,
    "flat": lambda tensor: tensor.reshape(-1),
    "longer": lambda tensor: torch.cat([tensor.reshape(-1), tensor.reshape(-1)]),
    "one element": lambda tensor: tensor.reshape(-1)[:1],
    "empty": lambda tensor: tensor.reshape(-1)[:0],
    "more dimensions": lambda tensor: tensor[None],
    "huge": lambda tensor: torch.ones(()).expand(*tensor.shape, 1 << 40),
}
KEYS: list[Any] = [
    "x",
    "step",
    "exp_avg",
    "params",
    "lr",
    "param_names",
    "master_weights",
    "a.b",
    "../x",
    "\ud800",
    5,
    -1,
]
KEYS += [None, 1.0, True, 10**30, (1, 2), ""]


def iter_paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in nested containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*prefix, key)
        yield from iter_paths(child, (*prefix, key))


def mutate(value: Any, draw: Random) -> Any:
    """Return a copy with entries dropped, duplicated, renamed, swapped, nested or replaced. Tensors are shared."""
    result = _copy_containers(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        paths = list(iter_paths(result))
        if not paths:
            break
        depth = draw.choice((1, 2, 3, 9))
        _change_entry(result, draw.choice([path for path in paths if len(path) <= depth]), draw)
    return result


def _copy_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(child) for key, child in value.items()}
    return [_copy_containers(child) for child in value] if isinstance(value, list) else value


def _change_entry(tree: Any, path: Sequence[Any], draw: Random) -> None:
    for key in path[:-1]:
        tree = tree[key]
    key, change = (
        path[-1],
        draw.choice(("drop", "replace", "replace", "tensor", "tensor", "rename", "double", "swap", "nest")),
    )
    value = tree[key]
    if change == "drop":
        del tree[key]
    elif change == "tensor" and isinstance(value, torch.Tensor):
        tree[key] = TENSORS[draw.choice(sorted(TENSORS))](value)
    elif change == "swap":
        other = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        tree[key], tree[other] = tree[other], tree[key]
    elif change == "nest":
        tree[key] = draw.choice(([value], {"x": value}, {0: value}, (value, value)))
    elif change in ("rename", "double") and isinstance(tree, dict):
        tree[draw.choice(KEYS)] = tree.pop(key) if change == "rename" else value
    else:
        tree[key] = draw.choice(ODD)()


def corrupt_bytes(content: bytes, draw: Random) -> bytes:
    """Return a copy with bytes flipped, removed, inserted, moved, zeroed or set to 255."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((1, 1, 4, 8, 100)))
        change = draw.choice(("flip", "cut", "truncate", "insert", "move", "zero", "fill with ones"))
        if change == "flip" and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif change == "cut":
            del data[start:stop]
        elif change == "truncate":
            del data[max(start, 1) :]
        elif change == "insert":
            data[start:start] = draw.randbytes(draw.choice((1, 4, 100)))
        elif change == "move":
            to = draw.randrange(len(data) + 1)
            data[to : to + stop - start] = data[start:stop]
        elif change == "zero":
            data[start:stop] = bytes(stop - start)
        elif change == "fill with ones":
            data[start:stop] = b"\xff" * (stop - start)
    return bytes(data)


NAMES = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a\0b",
    "x" * 300,
    "\ud800",
    "a/b",
    "latest",
    ".metadata",
    "step-000000001",
]


def corrupt_directory(directory: Path, draw: Random) -> str:
    """Corrupt a checkpoint on disk. Return a description."""
    files = sorted(entry for entry in directory.iterdir() if entry.is_file())
    file = draw.choice(files)
    change = draw.choice(("bytes", "bytes", "bytes", "swap", "drop", "link", "folder", "empty"))
    if change == "bytes":
        file.write_bytes(corrupt_bytes(file.read_bytes(), draw))
    elif change == "swap":
        other = draw.choice(files)
        content, other_content = file.read_bytes(), other.read_bytes()
        file.write_bytes(other_content)
        other.write_bytes(content)
    elif change == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if change == "link":
            file.symlink_to(draw.choice(("/dev/zero", "/nowhere", ".", "/etc/passwd", file.name)))
        elif change == "folder":
            file.mkdir()
    return f"{change} {file.name}"
