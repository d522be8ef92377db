"""Nested values as a flat dict of text: with all bits of tensors, or with digests of them; and the comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
CHECKPOINTS = FOLDER / "checkpoints"


def runs_file(world_size: int) -> Path:
    return FOLDER / f"runs-{world_size}.json"


def checkpoint_file(name: str, ending: str) -> Path:
    return CHECKPOINTS / f"{name.replace(' ', '-')}.{ending}"


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, contents: Any) -> None:
    file.write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def flatten(value: Any, path: str) -> dict[str, Any]:
    """Nested containers as one dict. Its keys tell dicts, lists and tuples apart."""
    if isinstance(value, dict) and value:
        parts = {f"{path}.{key if isinstance(key, str) else repr(key)}": it for key, it in value.items()}
    elif type(value) in (list, tuple) and value:
        left, right = "[]" if isinstance(value, list) else "()"
        parts = {f"{path}{left}{number}{right}": it for number, it in enumerate(value)}
    elif isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        parts = {f"{path}.{name}": getattr(value, name) for name in value.__tensor_flatten__()[0]}
    else:
        return {path: value}
    return {key: it for place, part in parts.items() for key, it in flatten(part, place).items()}


def write_out(value: Any) -> str:
    """All bits of a tensor and how it lies in memory, or a plain value."""
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f"/{list(value.stride())}".replace(" ", "")
    return f"{_describe(value)}{strides} {_bytes(value).hex()}"


def digest(value: Any) -> str:
    """Equal if and only if all bits are. State that was loaded may lie in memory in another way."""
    return f"{_describe(value)} {sha256(_bytes(value)).hexdigest()[:16]}" if isinstance(value, Tensor) else repr(value)


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}".replace(", ", ",")


def _bytes(value: Tensor) -> bytes:
    return bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist())


def _read_out(text: str) -> tuple[str, Tensor]:
    kind, shape, data = text.rsplit(" ", 2)
    values = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8).view(getattr(torch, kind))
    return f"{kind} {shape}", values


def _is_tensor(text: str) -> bool:
    return hasattr(torch, text.partition(" ")[0]) and text.count(" ") == 2


def list_differences(found: Mapping[str, str], expected: Mapping[str, str], tolerance: float = 0.0) -> list[str]:
    """In words. `tolerance`: relative to the largest value of a tensor."""
    texts = [f"{name} is missing" for name in expected.keys() - found.keys()]
    texts += [f"{name} is new" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        mine, recorded = found[name], expected[name]
        if mine != recorded and not (tolerance and _are_close(mine, recorded, tolerance)):
            texts.append(f"{name} is {mine}, expected {recorded}")
    return sorted(texts)


def _are_close(found: str, expected: str, tolerance: float) -> bool:
    if not (_is_tensor(found) and _is_tensor(expected)):
        return False
    (kind, mine), (recorded_kind, recorded) = _read_out(found), _read_out(expected)
    if kind != recorded_kind or not recorded.is_floating_point():
        return False
    mine, recorded = mine.double(), recorded.double()
    return bool((mine - recorded).abs().max() <= tolerance * recorded.abs().max())
