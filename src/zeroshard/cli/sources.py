"""Checkpoints to convert: directories of `torch.distributed.checkpoint`, and files of `torch.save`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.archive import Archive, Entry
from ..checkpoint.contents import MODEL, OPTIM, RANKS, SCHEDULER, packed
from ..checkpoint.loading import find
from ..checkpoint.manifest import Manifest, read_manifest, said_by
from ..checkpoint.progress import Progress
from ..checkpoint.reading import read
from ..checkpoint.saved_optimizer import GROUPS, STATE, SavedOptimizer, groups_in, put
from ..checkpoint.showing import shown
from ..errors import CheckpointError, ZeroError
from ..state.compat import describe_options
from .contents import MANIFEST, Contents, Leaf, Weights, flattened, is_packed
from .stored import Held, held, in_archive

_OPTIMIZERS = (OPTIM, "optimizer")


def open_source(path: Path, progress: Progress) -> Contents:
    """Of a directory with check sums all files are read once, so that no damage goes on to other formats unseen."""
    with told_of(path):
        return _from_file(path) if path.is_file() else _from_directory(find(path), progress)


def weights_of(path: Path, contents: Contents) -> Weights:
    """What `model.load_state_dict` takes. Raises if there is none of it."""
    weights = Weights({place: leaf for place, leaf in contents.below(MODEL).items() if place})
    if not weights.leaves:
        found = sorted({str(place[0]) for place in contents.leaves} | ({OPTIM} if contents.groups else set()))
        raise CheckpointError(
            f"{path} has no weights: they are expected under '{MODEL}', where checkpoint.save(model=...) puts them, "
            f"and there are {shown(found)}"
        )
    return weights


@contextmanager
def told_of(path: Path, *, reading: bool = True) -> Iterator[None]:
    """Whatever values are where others should be, it is said of the file. What a disk does to another is not."""
    try:
        yield
    except ZeroError:
        raise
    except OSError as error:
        if not reading:
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} is not in a form that is known: {type(error).__name__}: {error}") from error


# ---- directories


def _from_directory(directory: Path, progress: Progress) -> Contents:
    archive, manifest = open_archive(directory), read_manifest(directory)
    if manifest is not None:
        manifest.check_sums(directory, slice(None), progress)
    contents = Contents(manifest=said_by(manifest))
    small = [entry for entry in archive.entries if entry.tensor is None or is_packed(entry.path)]
    values = _read(archive, small)
    for entry in archive.entries:
        if entry.path[0] == MODEL and len(entry.path) > 1:
            contents.leaves[MODEL, ".".join(map(str, entry.path[1:]))] = _leaf(archive, entry, values)
        elif not _is_optimizers(entry):
            contents.leaves[entry.path] = _leaf(archive, entry, values)
    if any(map(_is_optimizers, archive.entries)):
        _take_saved_optimizer(archive, contents, values)
    return contents


def _take_saved_optimizer(archive: Archive, contents: Contents, values: Mapping[str, Any]) -> None:
    small = {entry.key: entry.room() for entry in groups_in(archive)}
    saved = SavedOptimizer(archive, read(archive, small))
    contents.groups = _groups(archive, saved)
    for name, state in saved.state.items():
        for keys, entry in state:
            path = (OPTIM, STATE, name, *keys)
            contents.leaves[path] = _leaf(archive, entry, values)


def open_archive(directory: Path) -> Archive:
    """A complete one, with entries in the order in which they were given to be saved."""
    archive = Archive(directory)
    archive.check_files()
    places = {key: number for number, key in enumerate(archive.metadata.planner_data or ())}
    archive.entries.sort(key=lambda entry: places.get(entry.key, len(places)))
    return archive


def _is_optimizers(entry: Entry) -> bool:
    """Torch has two ways to write state and groups, one with names that have dots."""
    return len(entry.path) > 1 and entry.path[0] == OPTIM and str(entry.path[1]).split(".")[0] in (STATE, GROUPS)


def _read(archive: Archive, entries: Iterable[Entry]) -> dict[str, Any]:
    return read(archive, {entry.key: entry.room() for entry in entries})


def _leaf(archive: Archive, entry: Entry, values: Mapping[str, Any]) -> Leaf:
    if entry.tensor is None:
        return values[entry.key]
    return held(values[entry.key]) if entry.key in values else in_archive(archive, entry.key, entry.tensor)


def _groups(archive: Archive, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """As they were listed; in torch's flat form there is no list, and those with equal options make a group."""
    listed = archive.below(OPTIM, GROUPS)
    if listed:
        values, by_number = _read(archive, listed), defaultdict[int, dict[str, Any]](dict)
        for entry in listed:
            put(by_number[int(entry.path[2])], entry.path[3:], values[entry.key])
        return [by_number[number] for number in sorted(by_number)]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in saved.options.items():
        groups.setdefault(describe_options(options), {**options, "params": []})["params"].append(name)
    return list(groups.values())


# ---- files


def _from_file(file: Path) -> Contents:
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file}: safetensors are written, but not read. Convert what it was made of.")
    saved = _load(file)
    if not isinstance(saved, dict) or not saved.keys() & {MODEL, *_OPTIMIZERS}:
        raise CheckpointError(f"{file} has neither a '{MODEL}' nor an '{OPTIM}': expected a dict with both")
    _require_names(file, saved)
    _require_names(file, saved.get(MODEL) or {})
    contents = Contents(manifest=_manifest(saved.get(MANIFEST) or {}))
    for name, value in (saved.get(MODEL) or {}).items():
        contents.leaves[MODEL, name] = held(value) if isinstance(value, torch.Tensor) else value
    for key in _OPTIMIZERS:
        if isinstance(saved.get(key), dict) and {STATE, GROUPS} <= saved[key].keys():
            _take_optimizer(file, contents, saved[key])
    for key, value in saved.items():
        if key not in (MODEL, MANIFEST, *_OPTIMIZERS):
            contents.leaves.update(_repacked(key, value))
    return contents


def _manifest(said: dict[str, Any]) -> dict[str, Any]:
    """Raises if it is none."""
    if not said:
        return {}
    return said_by(Manifest(int(said["step"]), int(said["world_size"]), {}, float(said["time"]), str(said["torch"])))


def _require_names(file: Path, values: Iterable[Any]) -> None:
    for name in values:
        if not isinstance(name, str):
            raise CheckpointError(f"{file} has {shown(name)} where a name is expected")


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file} cannot be read as a file of torch.save: {reason}") from error


def _take_optimizer(file: Path, contents: Contents, saved: Mapping[str, Any]) -> None:
    _require_names(file, saved)
    names = _names(file, contents, saved)
    contents.groups = [
        {
            **{key: it for key, it in group.items() if key != "param_names"},
            "params": [names[it] for it in group["params"]],
        }
        for group in saved[GROUPS]
    ]
    for number, state in saved[STATE].items():
        contents.leaves.update(flattened((OPTIM, STATE, names.get(number, str(number))), state))
    for key, value in saved.items():
        if key not in (STATE, GROUPS):
            contents.leaves.update(flattened((OPTIM, key), value))


def _names(file: Path, contents: Contents, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Of the parameters, by what the dict calls them: the groups' own, else the model's in its order."""
    numbers = [number for group in saved[GROUPS] for number in group["params"]]
    own = [name for group in saved[GROUPS] for name in group.get("param_names") or ()]
    if len(own) == len(numbers):
        _require_names(file, own)
        return dict(zip(numbers, own, strict=True))
    model = {name: leaf for (name,), leaf in contents.below(MODEL).items() if isinstance(leaf, Held)}
    if not model or not all(isinstance(number, int) for number in numbers):
        return {number: str(number) for number in numbers}
    guess = dict(zip(numbers, model, strict=False))
    fits = all(_fits(model[name], saved[STATE].get(number, {})) for number, name in guess.items())
    if len(saved[GROUPS]) > 1 or len(model) != len(numbers) or not fits:
        raise CheckpointError(
            f"{file} does not say which parameters the optimizer's state belongs to, and they are not the model's in "
            "its order. Save it again with an optimizer that was made of model.named_parameters()."
        )
    return guess


def _fits(param: Held, state: Mapping[str, Any]) -> bool:
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    return all(tuple(value.shape) == param.shape for value in tensors)


def _repacked(key: str, value: Any) -> dict[Any, Leaf]:
    """What a checkpoint has in bytes is that again."""
    if key == SCHEDULER and not isinstance(value, torch.Tensor):
        return {(SCHEDULER,): held(packed(value))}
    if key == RANKS and isinstance(value, dict):
        return {
            (RANKS, str(rank)): held(it if isinstance(it, torch.Tensor) else packed(it)) for rank, it in value.items()
        }
    return dict(flattened((key,), value))
