"""Write nested values as a flat dict of text, with all bits of tensors or with digests, and compare such dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIRECTORY = Path(__file__).parent
CHECKPOINTS = DIRECTORY / "checkpoints"


def runs_file(world_size: int) -> Path:
    return DIRECTORY / f"runs-{world_size}.json"


def checkpoint_file(name: str, suffix: str) -> Path:
    return CHECKPOINTS / f"{name.replace(' ', '-')}.{suffix}"


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, contents: Any) -> None:
    file.write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def flatten(value: Any, path: str) -> dict[str, Any]:
    """Return nested containers as one dict. Its keys tell dicts, lists and tuples apart."""
    if isinstance(value, dict) and value:
        items = {f"{path}.{key if isinstance(key, str) else repr(key)}": item for key, item in value.items()}
    elif type(value) in (list, tuple) and value:
        left, right = "[]" if isinstance(value, list) else "()"
        items = {f"{path}{left}{index}{right}": item for index, item in enumerate(value)}
    elif isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        items = {f"{path}.{name}": getattr(value, name) for name in value.__tensor_flatten__()[0]}
    else:
        return {path: value}
    return {key: leaf for item_path, item in items.items() for key, leaf in flatten(item, item_path).items()}


def write_out(value: Any) -> str:
    """Return all bits of a tensor with its dtype, shape and strides, or the repr of another value."""
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f"/{list(value.stride())}".replace(" ", "")
    return f"{_describe(value)}{strides} {_bytes(value).hex()}"


def digest(value: Any) -> str:
    """Return a text that is equal if and only if all bits are. Strides are ignored: loading may change them."""
    return f"{_describe(value)} {sha256(_bytes(value)).hexdigest()[:16]}" if isinstance(value, Tensor) else repr(value)


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}".replace(", ", ",")


def _bytes(value: Tensor) -> bytes:
    return bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist())


def _parse_tensor(text: str) -> tuple[str, Tensor]:
    dtype, shape, data = text.rsplit(" ", 2)
    values = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8).view(getattr(torch, dtype))
    return f"{dtype} {shape}", values


def _is_tensor(text: str) -> bool:
    return hasattr(torch, text.partition(" ")[0]) and text.count(" ") == 2


def list_differences(found: Mapping[str, str], expected: Mapping[str, str], tolerance: float = 0.0) -> list[str]:
    """Describe the differences. `tolerance`: relative to the largest value of a tensor."""
    texts = [f"{name} is missing" for name in expected.keys() - found.keys()]
    texts += [f"{name} is new" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        value, recorded = found[name], expected[name]
        if value != recorded and not (tolerance and _are_close(value, recorded, tolerance)):
            texts.append(f"{name} is {value}, expected {recorded}")
    return sorted(texts)


def _are_close(found: str, expected: str, tolerance: float) -> bool:
    if not (_is_tensor(found) and _is_tensor(expected)):
        return False
    (kind, value), (recorded_kind, recorded) = _parse_tensor(found), _parse_tensor(expected)
    if kind != recorded_kind or not recorded.is_floating_point():
        return False
    value, recorded = value.double(), recorded.double()
    return bool((value - recorded).abs().max() <= tolerance * recorded.abs().max())
