"""What is in a checkpoint, told from its metadata and the sizes of its files alone."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.metadata import Entry
from ..checkpoint.contents import MODEL, OPTIM
from ..checkpoint.load import find_checkpoint
from ..checkpoint.directory import manifest_fields, read_manifest
from ..checkpoint.saved_optimizer import PARAM_GROUPS, STATE, SavedOptimizer, param_group_entries
from .checkpoint import open_metadata

_DISTCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class EntrySummary:
    """A tensor, or something else, of which neither shape nor dtype is known."""

    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int


@dataclass(frozen=True)
class RankFiles:
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
class CheckpointDescription:
    path: str
    step: int | None
    """None if the checkpoint does not say, as those that are not of `zeroshard.checkpoint.save`."""
    world_size: int
    """How many ranks have saved it."""
    torch: str | None
    model: dict[str, EntrySummary]
    state: dict[str, dict[str, EntrySummary]]
    """By names of parameters and keys."""
    state_keys: list[str]
    other: dict[str, EntrySummary]
    ranks: dict[int, RankFiles]
    totals: Totals

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Of a directory with a checkpoint, or the latest one in a folder."""
    directory = find_checkpoint(path)
    archive, manifest, ranks = (
        open_metadata(directory),
        manifest_fields(read_manifest(directory)),
        _files_per_rank(directory),
    )
    model = {".".join(map(str, entry.path[1:])): _summarize_entry(entry) for entry in archive.under(MODEL)}
    state: dict[str, dict[str, EntrySummary]] = {}
    if archive.under(OPTIM):
        # Nothing is read: that there are options is enough to find out names.
        saved = SavedOptimizer(archive, {entry.key: () for entry in param_group_entries(archive)})
        for name, items in saved.state.items():
            state[name] = {".".join(map(str, keys)): _summarize_entry(entry) for keys, entry in items}
    other = {
        entry.key: _summarize_entry(entry)
        for entry in sorted(archive.entries, key=lambda it: it.key)
        if _is_other_entry(entry)
    }
    values = [value for items in state.values() for value in items.values()]
    return CheckpointDescription(
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
            model_bytes=_sum_bytes(model.values()),
            state_bytes=_sum_bytes(values),
            other_bytes=_sum_bytes(other.values()),
            file_bytes=sum(share.bytes for share in ranks.values()),
        ),
    )


def _summarize_entry(entry: Entry) -> EntrySummary:
    if entry.tensor is None:
        return EntrySummary(None, None, 0)
    dtype = str(entry.tensor.properties.dtype).removeprefix("torch.")
    return EntrySummary(tuple(entry.tensor.size), dtype, entry.nbytes)


def _is_other_entry(entry: Entry) -> bool:
    if entry.path[0] == OPTIM and len(entry.path) > 1:
        return str(entry.path[1]).partition(".")[0] not in (STATE, PARAM_GROUPS)
    return bool(entry.path[0] != MODEL)


def _files_per_rank(directory: Path) -> dict[int, RankFiles]:
    sizes: dict[int, list[int]] = defaultdict(list)
    for file in directory.iterdir():
        if match := _DISTCP_FILE.fullmatch(file.name):
            sizes[int(match[1])].append(file.stat().st_size)
    return {rank: RankFiles(len(files), sum(files)) for rank, files in sorted(sizes.items())}


def _sum_bytes(entries: Iterable[EntrySummary]) -> int:
    return sum(value.bytes for value in entries)
