"""Checkpoints to convert: directories of `torch.distributed.checkpoint`, and files of `torch.save`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.metadata import CheckpointMetadata, Entry
from ..checkpoint.contents import MODEL, OPTIM, RANKS, SCHEDULER, to_byte_tensor
from ..checkpoint.load import find_checkpoint
from ..checkpoint.directory import Manifest, manifest_fields, read_manifest
from ..checkpoint.progress import Progress
from ..checkpoint.reader import read_values
from ..checkpoint.saved_optimizer import PARAM_GROUPS, STATE, SavedOptimizer, param_group_entries, set_nested
from ..checkpoint.showing import safe_repr
from ..errors import CheckpointError, ZeroError
from ..state.state_dict import describe_options
from .contents import MANIFEST_KEY, CheckpointContents, Leaf, ModelWeights, flatten_leaves, is_serialized
from .stored import InMemoryTensor, make_checkpoint_tensor, wrap_tensor

_OPTIMIZER_KEYS = (OPTIM, "optimizer")


def open_checkpoint(path: Path, progress: Progress) -> CheckpointContents:
    """Of a directory with check sums all files are read once, so that no damage goes on to other formats unseen."""
    with wrap_errors_for(path):
        return _open_torch_file(path) if path.is_file() else _open_dcp_directory(find_checkpoint(path), progress)


def select_weights(path: Path, contents: CheckpointContents) -> ModelWeights:
    """What `model.load_state_dict` takes. Raises if there is none of it."""
    weights = ModelWeights({place: leaf for place, leaf in contents.under(MODEL).items() if place})
    if not weights.leaves:
        found = sorted({str(place[0]) for place in contents.leaves} | ({OPTIM} if contents.param_groups else set()))
        raise CheckpointError(
            f"{path} has no weights: they are expected under '{MODEL}', where checkpoint.save(model=...) puts them, "
            f"and there are {safe_repr(found)}"
        )
    return weights


@contextmanager
def wrap_errors_for(path: Path, *, is_reading: bool = True) -> Iterator[None]:
    """Whatever values are where others should be, it is said of the file. What a disk does to another is not."""
    try:
        yield
    except ZeroError:
        raise
    except OSError as error:
        if not is_reading:
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} is not in a form that is known: {type(error).__name__}: {error}") from error


# ---- directories


def _open_dcp_directory(directory: Path, progress: Progress) -> CheckpointContents:
    archive, manifest = open_metadata(directory), read_manifest(directory)
    if manifest is not None:
        manifest.verify_checksums(directory, slice(None), progress)
    contents = CheckpointContents(manifest=manifest_fields(manifest))
    small = [entry for entry in archive.entries if entry.tensor is None or is_serialized(entry.path)]
    values = _read_entries(archive, small)
    for entry in archive.entries:
        if entry.path[0] == MODEL and len(entry.path) > 1:
            contents.leaves[MODEL, ".".join(map(str, entry.path[1:]))] = _make_leaf(archive, entry, values)
        elif not _is_optimizer_entry(entry):
            contents.leaves[entry.path] = _make_leaf(archive, entry, values)
    if any(map(_is_optimizer_entry, archive.entries)):
        _add_saved_optimizer(archive, contents, values)
    return contents


def _add_saved_optimizer(metadata: CheckpointMetadata, contents: CheckpointContents, values: Mapping[str, Any]) -> None:
    small = {entry.key: entry.allocate() for entry in param_group_entries(metadata)}
    saved = SavedOptimizer(metadata, read_values(metadata, small))
    contents.param_groups = _read_param_groups(metadata, saved)
    for name, state in saved.state.items():
        for keys, entry in state:
            path = (OPTIM, STATE, name, *keys)
            contents.leaves[path] = _make_leaf(metadata, entry, values)


def open_metadata(directory: Path) -> CheckpointMetadata:
    """A complete one, with entries in the order in which they were given to be saved."""
    archive = CheckpointMetadata(directory)
    archive.check_files()
    places = {key: number for number, key in enumerate(archive.dcp_metadata.planner_data or ())}
    archive.entries.sort(key=lambda entry: places.get(entry.key, len(places)))
    return archive


def _is_optimizer_entry(entry: Entry) -> bool:
    """Torch has two ways to write state and groups, one with names that have dots."""
    return len(entry.path) > 1 and entry.path[0] == OPTIM and str(entry.path[1]).split(".")[0] in (STATE, PARAM_GROUPS)


def _read_entries(metadata: CheckpointMetadata, entries: Iterable[Entry]) -> dict[str, Any]:
    return read_values(metadata, {entry.key: entry.allocate() for entry in entries})


def _make_leaf(metadata: CheckpointMetadata, entry: Entry, values: Mapping[str, Any]) -> Leaf:
    if entry.tensor is None:
        return values[entry.key]
    return (
        wrap_tensor(values[entry.key])
        if entry.key in values
        else make_checkpoint_tensor(metadata, entry.key, entry.tensor)
    )


def _read_param_groups(metadata: CheckpointMetadata, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """As they were listed; in torch's flat form there is no list, and those with equal options make a group."""
    listed = metadata.under(OPTIM, PARAM_GROUPS)
    if listed:
        values, by_number = _read_entries(metadata, listed), defaultdict[int, dict[str, Any]](dict)
        for entry in listed:
            set_nested(by_number[int(entry.path[2])], entry.path[3:], values[entry.key])
        return [by_number[number] for number in sorted(by_number)]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in saved.options.items():
        groups.setdefault(describe_options(options), {**options, "params": []})["params"].append(name)
    return list(groups.values())


# ---- files


def _open_torch_file(file: Path) -> CheckpointContents:
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file}: safetensors are written, but not read. Convert what it was made of.")
    saved = _torch_load(file)
    if not isinstance(saved, dict) or not saved.keys() & {MODEL, *_OPTIMIZER_KEYS}:
        raise CheckpointError(f"{file} has neither a '{MODEL}' nor an '{OPTIM}': expected a dict with both")
    _check_names(file, saved)
    _check_names(file, saved.get(MODEL) or {})
    contents = CheckpointContents(manifest=_parse_manifest(saved.get(MANIFEST_KEY) or {}))
    for name, value in (saved.get(MODEL) or {}).items():
        contents.leaves[MODEL, name] = wrap_tensor(value) if isinstance(value, torch.Tensor) else value
    for key in _OPTIMIZER_KEYS:
        if isinstance(saved.get(key), dict) and {STATE, PARAM_GROUPS} <= saved[key].keys():
            _add_optimizer(file, contents, saved[key])
    for key, value in saved.items():
        if key not in (MODEL, MANIFEST_KEY, *_OPTIMIZER_KEYS):
            contents.leaves.update(_serialize_leaves(key, value))
    return contents


def _parse_manifest(values: dict[str, Any]) -> dict[str, Any]:
    """Raises if it is none."""
    if not values:
        return {}
    return manifest_fields(
        Manifest(int(values["step"]), int(values["world_size"]), {}, float(values["time"]), str(values["torch"]))
    )


def _check_names(file: Path, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"{file} has {safe_repr(name)} where a name is expected")


def _torch_load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file} cannot be read as a file of torch.save: {reason}") from error


def _add_optimizer(file: Path, contents: CheckpointContents, saved: Mapping[str, Any]) -> None:
    _check_names(file, saved)
    names = _param_names(file, contents, saved)
    contents.param_groups = [
        {
            **{key: it for key, it in group.items() if key != "param_names"},
            "params": [names[it] for it in group["params"]],
        }
        for group in saved[PARAM_GROUPS]
    ]
    for number, state in saved[STATE].items():
        contents.leaves.update(flatten_leaves((OPTIM, STATE, names.get(number, str(number))), state))
    for key, value in saved.items():
        if key not in (STATE, PARAM_GROUPS):
            contents.leaves.update(flatten_leaves((OPTIM, key), value))


def _param_names(file: Path, contents: CheckpointContents, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Of the parameters, by what the dict calls them: the groups' own, else the model's in its order."""
    numbers = [number for group in saved[PARAM_GROUPS] for number in group["params"]]
    own = [name for group in saved[PARAM_GROUPS] for name in group.get("param_names") or ()]
    if len(own) == len(numbers):
        _check_names(file, own)
        return dict(zip(numbers, own, strict=True))
    model = {name: leaf for (name,), leaf in contents.under(MODEL).items() if isinstance(leaf, InMemoryTensor)}
    if not model or not all(isinstance(number, int) for number in numbers):
        return {number: str(number) for number in numbers}
    guess = dict(zip(numbers, model, strict=False))
    fits = all(_state_shapes_match(model[name], saved[STATE].get(number, {})) for number, name in guess.items())
    if len(saved[PARAM_GROUPS]) > 1 or len(model) != len(numbers) or not fits:
        raise CheckpointError(
            f"{file} does not say which parameters the optimizer's state belongs to, and they are not the model's in "
            "its order. Save it again with an optimizer that was made of model.named_parameters()."
        )
    return guess


def _state_shapes_match(param: InMemoryTensor, state: Mapping[str, Any]) -> bool:
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    return all(tuple(value.shape) == param.shape for value in tensors)


def _serialize_leaves(key: str, value: Any) -> dict[Any, Leaf]:
    """What a checkpoint has in bytes is that again."""
    if key == SCHEDULER and not isinstance(value, torch.Tensor):
        return {(SCHEDULER,): wrap_tensor(to_byte_tensor(value))}
    if key == RANKS and isinstance(value, dict):
        return {
            (RANKS, str(rank)): wrap_tensor(it if isinstance(it, torch.Tensor) else to_byte_tensor(it))
            for rank, it in value.items()
        }
    return dict(flatten_leaves((key,), value))
