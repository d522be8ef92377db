"""Parse and validate the parameters that a user passes to an optimizer."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise, starmap
from operator import add, le
from typing import Any, NamedTuple

import torch

from ._formatting import format_count
from ._torch_compat import is_traceable_wrapper_subclass
from .errors import ConfigError
from .layout.chunks import has_internal_overlap
from .layout.spec import ParamSpec


class ParsedParams(NamedTuple):
    groups: list[dict[str, Any]]
    is_bare_sequence: bool
    """The user passed a sequence of parameters, not group dicts."""


def parse_params(params: Any) -> ParsedParams:
    """Normalize parameters, named parameters or groups of either to a list of new group dicts."""
    entries = _as_list(params, "params")
    if not entries:
        raise ValueError("the optimizer got an empty parameter list")
    if all(isinstance(entry, Mapping) for entry in entries):
        return ParsedParams([parse_group(entry) for entry in entries], is_bare_sequence=False)
    _check_entries(entries)
    return ParsedParams([{"params": entries}], is_bare_sequence=True)


def parse_groups(groups: Any) -> list[dict[str, Any]]:
    """Normalize several groups to new dicts."""
    if isinstance(groups, (str, Mapping, torch.Tensor)) or not isinstance(groups, Iterable):
        raise TypeError(
            f"expected a list of parameter groups, got {type(groups).__name__}. Put a single group into a list."
        )
    return [parse_group(group) for group in groups]


def parse_group(group: Any) -> dict[str, Any]:
    """Normalize one group to a new dict with its parameters in a list."""
    if not isinstance(group, Mapping):
        raise TypeError(f"expected a parameter group to be a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"a parameter group has no key 'params', only {sorted(map(str, group))}")
    params = group["params"]
    entries = [params] if isinstance(params, torch.Tensor) else _as_list(params, "the 'params' of a group")
    _check_entries(entries)
    names = group.get("param_names")
    if names is not None and (not isinstance(names, (list, tuple)) or len(names) != len(entries)):
        raise TypeError(
            f"expected 'param_names' of a group to be a list of {format_count(len(entries), 'name')}, got "
            f"{names!r:.200}. Pass named parameters instead: model.named_parameters()."
        )
    return {**group, "params": entries}


def check_specs(
    specs: Sequence[ParamSpec], params: Sequence[torch.Tensor], *, allow_mixed_dtypes: bool, num_checked: int = 0
) -> None:
    """Raise `ConfigError` for parameters that cannot be sharded. The first `num_checked` were checked before."""
    for spec, param in zip(specs[num_checked:], params[num_checked:], strict=True):
        if param.layout != torch.strided:
            raise ConfigError(f"{spec.label} has layout {param.layout}, but only dense parameters can be sharded")
        reject_dtensor(spec.label, param)
        if is_traceable_wrapper_subclass(param):
            raise ConfigError(f"{spec.label} is a {type(param.data).__name__}, which cannot be sharded")
        if not param.is_contiguous() and has_internal_overlap(spec.shape, spec.stride):
            raise ConfigError(
                f"{spec.label} has elements that share memory (strides {spec.stride}), as after expand(). Clone it."
            )
    check_no_aliasing(specs, params)
    others = [spec for spec in specs[num_checked:] if spec.dtype != specs[0].dtype]
    if others and not allow_mixed_dtypes:
        raise ConfigError(
            f"parameters have several dtypes: {specs[0].label} is {specs[0].dtype}, {others[0].label} is "
            f"{others[0].dtype}. Pass config=ZeroConfig(allow_mixed_dtypes=True) to allow that."
        )


def reject_dtensor(label: str, param: torch.Tensor) -> None:
    """Raise for a DTensor: its local shape differs from its global shape, and its gradients are DTensors, too."""
    placements, mesh = getattr(param, "placements", None), getattr(param, "device_mesh", None)
    if placements is None or mesh is None:
        return
    shown = ", ".join(map(str, placements))
    raise ConfigError(
        f"{label} is a DTensor, placed as ({shown}) on a mesh of {tuple(mesh.shape)} ranks: tensor parallelism or "
        "FSDP2 has already sharded it. Under FSDP2, use a plain optimizer, whose state is sharded with the "
        "parameters. With tensor parallelism, combine it with FSDP2."
    )


def check_no_aliasing(specs: Sequence[ParamSpec], params: Sequence[torch.Tensor]) -> None:
    """Raise if two parameters share memory: two owners would update it."""
    if _are_disjoint(specs, params):
        return
    ranges: dict[torch.device, list[tuple[int, int, int]]] = defaultdict(list)
    for spec, param in zip(specs, params, strict=True):
        if spec.numel and (start := param.data_ptr()):
            ranges[param.device].append((start, start + spec.storage_numel * param.element_size(), spec.index))
    neighbours = chain.from_iterable(pairwise(sorted(device_ranges)) for device_ranges in ranges.values())
    for (start, stop, index), (next_start, _, next_index) in neighbours:
        # The next parameter may start in a gap of this one: columns of one matrix interleave without sharing memory.
        has_gaps = specs[index].storage_numel > specs[index].numel
        if next_start < stop and (next_start == start or not has_gaps):
            raise ConfigError(
                f"{specs[index].label} and {specs[next_index].label} share memory. To tie them, use one parameter in "
                "both places."
            )


def _are_disjoint(specs: Sequence[ParamSpec], params: Sequence[torch.Tensor]) -> bool:
    """Whether no two address ranges overlap, ignoring devices: a fast path that almost always succeeds."""
    starts = map(torch.Tensor.data_ptr, params)
    ranges = sorted(zip(starts, (spec.storage_bytes for spec in specs), strict=True))
    stops = starmap(add, ranges)
    return all(map(le, stops, (start for start, _ in islice(ranges, 1, None))))


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"expected {name} to be an iterable of tensors or dicts, got a tensor. Put it into a list.")
    if isinstance(value, torch.nn.Module):
        raise TypeError(
            f"expected {name} to be an iterable of tensors or dicts, got the module {type(value).__name__}. Pass its "
            "parameters()."
        )
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"expected {name} to be an iterable of tensors or dicts, got {type(value).__name__}")
    if isinstance(value, (set, frozenset)):
        raise TypeError(
            f"expected {name} to be ordered, got a {type(value).__name__}, whose order differs between ranks. Pass a "
            "list."
        )
    return list(value)


def _check_entries(entries: Iterable[Any]) -> None:
    for entry in entries:
        tensor = entry[1] if _is_named_param(entry) else entry
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected params to be all tensors or all dicts, got {type(entry).__name__} among them")


def _is_named_param(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
