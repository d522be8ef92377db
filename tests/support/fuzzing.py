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
"""How many times as many examples are tried."""


def rounds(count: int) -> int:
    return max(1, int(count * ROUNDS))


class Stranger(torch.Tensor):
    """A class of somebody's own."""


PLAIN: list[Any] = [None, True, 0, -1, 10**30, 3.5, float("nan"), "x", "../x", "\ud800", "\x1b[2J", b"x", ()]
PLAIN += [[], {}, [1], {"a": 1}, [[[[[]]]]], {"state": {}}, {1: {2: 3}}]
ODD: list[Callable[[], Any]] = [
    *(partial(copy.deepcopy, it) for it in PLAIN),
    lambda: torch.ones(3),
    lambda: torch.ones(()),
    lambda: torch.full((2, 2), float("nan")),
    lambda: torch.empty(2, 3, device="meta"),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.ones(2, dtype=torch.complex64).conj(),
    lambda: torch.ones(1).expand(1 << 40),
    lambda: torch.ones(2).as_subclass(Stranger),
    lambda: torch.zeros(0),
]
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda it: it.to("meta"),
    "sparse": lambda it: it.to_sparse(),
    "sparse, pointing elsewhere": lambda it: torch.sparse_coo_tensor(
        torch.full((it.dim(), 2), 1 << 40), torch.ones(2), it.shape, check_invariants=False
    ),
    "complex": lambda it: it.to(torch.complex64),
    "whole numbers": lambda it: it.to(torch.int64),
    "half": lambda it: it.half(),
    "double": lambda it: it.double(),
    "eight bits": lambda it: it.to(torch.float8_e4m3fn),
    "flags": lambda it: it.bool(),
    "not finite": lambda it: it * float("nan"),
    "expanded": lambda it: torch.ones(()).expand(it.shape),
    "turned": lambda it: it.mT.contiguous().mT if it.dim() > 1 else it,
    "with gaps": lambda it: torch.stack([it, it], -1)[..., 0],
    "of a class": lambda it: it.as_subclass(Stranger),
    "parameter": torch.nn.Parameter,
    "flat": lambda it: it.reshape(-1),
    "longer": lambda it: torch.cat([it.reshape(-1), it.reshape(-1)]),
    "one": lambda it: it.reshape(-1)[:1],
    "empty": lambda it: it.reshape(-1)[:0],
    "more dimensions": lambda it: it[None],
    "huge": lambda it: torch.ones(()).expand(*it.shape, 1 << 40),
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


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that is in nested containers."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*at, key)
        yield from places(part, (*at, key))


def mutated(value: Any, draw: Random) -> Any:
    """A copy with something dropped, doubled, renamed, exchanged, nested or replaced. Tensors are shared."""
    result = _copied(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        found = list(places(result))
        if not found:
            break
        depth = draw.choice((1, 2, 3, 9))
        _change(result, draw.choice([path for path in found if len(path) <= depth]), draw)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _change(tree: Any, path: Sequence[Any], draw: Random) -> None:
    for key in path[:-1]:
        tree = tree[key]
    key, way = (
        path[-1],
        draw.choice(("drop", "replace", "replace", "tensor", "tensor", "rename", "double", "swap", "nest")),
    )
    value = tree[key]
    if way == "drop":
        del tree[key]
    elif way == "tensor" and isinstance(value, torch.Tensor):
        tree[key] = TENSORS[draw.choice(sorted(TENSORS))](value)
    elif way == "swap":
        other = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        tree[key], tree[other] = tree[other], tree[key]
    elif way == "nest":
        tree[key] = draw.choice(([value], {"x": value}, {0: value}, (value, value)))
    elif way in ("rename", "double") and isinstance(tree, dict):
        tree[draw.choice(KEYS)] = tree.pop(key) if way == "rename" else value
    else:
        tree[key] = draw.choice(ODD)()


def spoiled(content: bytes, draw: Random) -> bytes:
    """Some bytes flipped, cut, added, moved or zeroed."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((1, 1, 4, 8, 100)))
        way = draw.choice(("flip", "cut", "end", "insert", "move", "zero", "largest"))
        if way == "flip" and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif way == "cut":
            del data[start:stop]
        elif way == "end":
            del data[max(start, 1) :]
        elif way == "insert":
            data[start:start] = draw.randbytes(draw.choice((1, 4, 100)))
        elif way == "move":
            to = draw.randrange(len(data) + 1)
            data[to : to + stop - start] = data[start:stop]
        elif way == "zero":
            data[start:stop] = bytes(stop - start)
        elif way == "largest":
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


def spoil_directory(directory: Path, draw: Random) -> str:
    """Change a checkpoint on the disk; says how."""
    files = sorted(it for it in directory.iterdir() if it.is_file())
    file = draw.choice(files)
    way = draw.choice(("bytes", "bytes", "bytes", "swap", "drop", "link", "folder", "empty"))
    if way == "bytes":
        file.write_bytes(spoiled(file.read_bytes(), draw))
    elif way == "swap":
        other = draw.choice(files)
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
    elif way == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if way == "link":
            file.symlink_to(draw.choice(("/dev/zero", "/nowhere", ".", "/etc/passwd", file.name)))
        elif way == "folder":
            file.mkdir()
    return f"{way} {file.name}"
