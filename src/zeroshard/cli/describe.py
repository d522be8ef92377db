"""What is in a checkpoint, told from its metadata and the sizes of its files alone."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.archive import Entry
from ..checkpoint.contents import MODEL, OPTIM
from ..checkpoint.loading import find
from ..checkpoint.manifest import read_manifest, said_by
from ..checkpoint.saved_optimizer import GROUPS, STATE, SavedOptimizer, groups_in
from .sources import open_archive

_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Value:
    """A tensor, or something else, of which neither shape nor dtype is known."""

    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int


@dataclass(frozen=True)
class Share:
    """What one rank has written."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Totals:
    elements: int
    """Of the model."""
    model_bytes: int
    state_bytes: int
    other_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Description:
    path: str
    step: int | None
    """None if the checkpoint does not say, as those that are not of `zeroshard.checkpoint.save`."""
    world_size: int
    """How many ranks have saved it."""
    torch: str | None
    model: dict[str, Value]
    state: dict[str, dict[str, Value]]
    """By names of parameters and keys."""
    state_keys: list[str]
    other: dict[str, Value]
    ranks: dict[int, Share]
    totals: Totals

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: Path) -> Description:
    """Of a directory with a checkpoint, or the latest one in a folder."""
    directory = find(path)
    archive, manifest, ranks = open_archive(directory), said_by(read_manifest(directory)), _ranks(directory)
    model = {".".join(map(str, entry.path[1:])): _value(entry) for entry in archive.below(MODEL)}
    state: dict[str, dict[str, Value]] = {}
    if archive.below(OPTIM):
        # Nothing is read: that there are options is enough to find out names.
        saved = SavedOptimizer(archive, {entry.key: () for entry in groups_in(archive)})
        for name, items in saved.state.items():
            state[name] = {".".join(map(str, keys)): _value(entry) for keys, entry in items}
    other = {entry.key: _value(entry) for entry in sorted(archive.entries, key=lambda it: it.key) if _is_other(entry)}
    values = [value for items in state.values() for value in items.values()]
    return Description(
        path=str(directory),
        step=manifest.get("step"),
        world_size=manifest.get("world_size") or max(ranks, default=0) + 1,
        torch=manifest.get("torch"),
        model=model,
        state=state,
        state_keys=sorted({key for items in state.values() for key in items}),
        other=other,
        ranks=ranks,
        totals=Totals(
            elements=sum(prod(it.shape) for it in model.values() if it.shape is not None),
            model_bytes=_sum(model.values()),
            state_bytes=_sum(values),
            other_bytes=_sum(other.values()),
            file_bytes=sum(share.bytes for share in ranks.values()),
        ),
    )


def _value(entry: Entry) -> Value:
    if entry.tensor is None:
        return Value(None, None, 0)
    dtype = str(entry.tensor.properties.dtype).removeprefix("torch.")
    return Value(tuple(entry.tensor.size), dtype, entry.nbytes)


def _is_other(entry: Entry) -> bool:
    if entry.path[0] == OPTIM and len(entry.path) > 1:
        return str(entry.path[1]).partition(".")[0] not in (STATE, GROUPS)
    return bool(entry.path[0] != MODEL)


def _ranks(directory: Path) -> dict[int, Share]:
    sizes: dict[int, list[int]] = defaultdict(list)
    for file in directory.iterdir():
        if match := _FILE.fullmatch(file.name):
            sizes[int(match[1])].append(file.stat().st_size)
    return {rank: Share(len(files), sum(files)) for rank, files in sorted(sizes.items())}


def _sum(values: Iterable[Value]) -> int:
    return sum(value.bytes for value in values)
