"""Optimizer state dicts in torch's format, `{"state": {id: ...}, "param_groups": [...]}`, and shards of state.

`parse_state_dict` validates a dict and matches it with this optimizer's parameters. `StateShard` is one rank's state of
a parameter or of a span of it; `StateAssembler` joins the shards of all ranks to the state of full parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .._formatting import format_error
from .._logging import warn_at_caller
from .._torch_compat import sparse_indices, sparse_values
from .._types import Span
from ..errors import CheckpointError, ZeroError
from ..layout.spec import ParamSpec
from .shard_tensor import ShardTensor, make_full_shard, unwrap_full_shards
from .tensor_utils import (
    clone_tensor,
    concat_subclass_shards,
    deepcopy_except_tensors,
    dense_flat_view,
    elements_per_inner,
    inner_tensors,
    is_wrapper_subclass,
    map_tensors,
    snapshot_to_host,
)

StateDict = dict[str, Any]
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
ParamGroup = Mapping[str, Any]
ParamShapedKeysFn = Callable[[int], frozenset[str]]
"""Maps a parameter index to the keys of state that has the shape of the parameter."""


def pack_param_groups(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Replace the parameters of groups by consecutive ids, as `Optimizer.state_dict` does."""
    packed_groups, start = [], 0
    for group in groups:
        packed = {key: snapshot_to_host(value) for key, value in group.items() if key != "params"}
        packed["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        packed_groups.append(packed)
    return packed_groups


def drop_param_names(state_dict: StateDict) -> StateDict:
    """Return a copy without `param_names` in the groups."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


@dataclass(frozen=True)
class SavedState:
    """A loaded state dict, validated and matched with this optimizer's parameters."""

    groups: list[dict[str, Any]]
    by_param: dict[int, Any]
    """State by this optimizer's parameter index. The caller owns these objects: copy them before use."""
    shared_state: dict[Hashable, Any]
    """State that belongs to no parameter."""
    extra: StateDict
    """All other entries of the dict."""
    param_names: list[str] | None
    """This optimizer's names of its parameters, regardless of the names in the dict."""
    is_sharded: bool = False
    """Whether it holds only this rank's shards."""

    def select_groups(self, group_ids: Sequence[int], specs: Sequence[ParamSpec]) -> "SavedState":
        """Return only the groups with these indices, in this order, and their state."""
        if len(group_ids) == len(self.groups):
            return self
        selected = {index: state for index, state in self.by_param.items() if specs[index].group in group_ids}
        return replace(self, groups=[self.groups[group_id] for group_id in group_ids], by_param=selected)

    def has_state(self, index: int) -> bool:
        """Return whether a parameter has state. In a sharded dict, an empty dict stands for no state."""
        state = self.by_param.get(index)
        return index in self.by_param and not (self.is_sharded and isinstance(state, Mapping) and not state)

    @property
    def tensor_containers(self) -> list[Any]:
        """Everything that may contain tensors."""
        return [self.groups, list(self.by_param.values()), list(self.shared_state.values()), self.extra]

    def must_match(self, *, is_sharded: bool) -> list[str]:
        """Return descriptions that must be equal on all ranks: of groups and, unless sharded, of the state."""
        lines = describe_groups(self.groups, "the loaded dict's group")
        if is_sharded:
            return lines
        for index, state in sorted(self.by_param.items()):
            lines.append(f"state of parameter {index} in the loaded dict: {_describe_state(state)}")
        return lines


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Re-raise errors caused by unexpected values in a loaded dict as `CheckpointError`."""
    try:
        yield
    except (ZeroError, torch.OutOfMemoryError):
        raise
    except RecursionError as error:
        raise CheckpointError(
            "the loaded state dict is nested too deeply or contains itself. Pass a dict that an optimizer returned."
        ) from error
    except (AttributeError, LookupError, AssertionError, RuntimeError) as error:
        raise CheckpointError(
            f"the loaded state dict is malformed: {format_error(error)}. Pass a dict that an optimizer returned."
        ) from error


def parse_state_dict(
    state_dict: Any, specs: Sequence[ParamSpec], num_groups: int, param_shaped_keys: ParamShapedKeysFn
) -> SavedState:
    """Validate `state_dict` and match its entries with `specs`: by name if both have names, otherwise by position.

    Raises `CheckpointError` if it does not fit.
    """
    groups = _validate_groups(state_dict)
    _check_group_sizes(groups, specs, num_groups)
    ids = [key for group in groups for key in group["params"]]
    if len(set(ids)) != len(ids):
        raise CheckpointError(
            "the loaded state dict lists a parameter twice. Remove the duplicate from its param_groups."
        )
    indices = _match_params(groups, ids, specs)
    by_param = {indices[key]: state for key, state in state_dict["state"].items() if key in indices}
    # Drop integer ids that no group lists: they would be mistaken for ids of this rank's parameters.
    shared_state = {
        key: state for key, state in state_dict["state"].items() if key not in indices and not isinstance(key, int)
    }
    for index, state in by_param.items():
        _check_state_shapes(specs[index], state, param_shaped_keys(index))
    names = [spec.name for spec in specs if spec.name is not None]
    extra = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    is_sharded = _is_sharded_state(by_param)
    by_param = unwrap_full_shards(by_param)
    return SavedState([dict(group) for group in groups], by_param, shared_state, extra, names or None, is_sharded)


def _is_sharded_state(by_param: Mapping[int, Any]) -> bool:
    """Return whether state has shards. A rank that owns nothing has an empty dict for each parameter."""
    is_shard: list[bool] = []
    map_tensors(dict(by_param), lambda tensor: is_shard.append(isinstance(tensor, ShardTensor)))
    return any(is_shard) or all(isinstance(state, Mapping) and not state for state in by_param.values())


def extract_local_state_dict(saved: SavedState, owned_params: Sequence[Sequence[int]]) -> StateDict:
    """Return one rank's state dict, with ids from 0. `owned_params` are the parameter indices of each of its groups."""
    state: dict[Hashable, Any] = dict(saved.shared_state)
    groups, next_id = [], 0
    for group, indices in zip(saved.groups, owned_params, strict=True):
        state |= {next_id + i: saved.by_param[index] for i, index in enumerate(indices) if saved.has_state(index)}
        own: dict[str, Any] = {"params": list(range(next_id, next_id + len(indices)))}
        if saved.param_names is not None:
            own["param_names"] = [saved.param_names[index] for index in indices]
        options = {key: value for key, value in group.items() if key != "param_names" or key in own}
        groups.append(options | own)
        next_id += len(indices)
    return {**saved.extra, "state": state, "param_groups": groups}


def describe_groups(groups: Sequence[ParamGroup], prefix: str = "group", *, first: int = 0) -> list[str]:
    """Return one line per option of each group. Groups are numbered from `first`."""
    return [
        f"{prefix} {index} has {key}={describe_value(value)}"
        for index, group in enumerate(groups, first)
        for key, value in sorted(_group_options(group).items())
    ]


def describe_options(group: ParamGroup) -> str:
    """Return a group's options in one line, which is equal on ranks with equal values."""
    return ", ".join(f"{key}={describe_value(value)}" for key, value in sorted(_group_options(group).items()))


def _group_options(group: ParamGroup) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def describe_value(value: Any) -> str:
    """Return a text that is equal on all ranks for equal values."""
    if isinstance(value, torch.Tensor):
        is_readable = value.layout == torch.strided and not value.is_meta and value.numel() <= 16
        contents = value.tolist() if is_readable else f"shape {tuple(value.shape)}"
        return f"tensor({contents}, {value.dtype})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(describe_value, value))})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{describe_value(key)}: {describe_value(item)}" for key, item in value.items())
        return f"{type(value).__name__}({items})"
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's floats compare equal to plain ones
    if isinstance(value, (int, complex, str, bytes, type(None), torch.dtype)):
        return repr(value)
    return type(value).__qualname__  # a repr may contain an address, which differs between ranks


def _describe_state(state: Any) -> str:
    return describe_value(map_tensors(state, lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}"))


def _validate_groups(state_dict: Any) -> Sequence[ParamGroup]:
    """Return the groups of a state dict. Raises `CheckpointError` if it is not one."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    is_list = isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if state_dict is None:
        raise CheckpointError(
            "expected an optimizer state dict, got None: full_state_dict(to=0) returns the state on rank 0, and None "
            "on all other ranks. Broadcast it, or save it on rank 0 and load it on all ranks."
        )
    if groups is None or not is_list or not isinstance(state_dict.get("state"), Mapping):
        raise CheckpointError(
            "expected an optimizer state dict with 'state', a dict, and 'param_groups', a list of dicts with 'params', "
            f"got {_describe_dict(state_dict)}. Pass the result of state_dict() or full_state_dict()."
        )
    for index, group in enumerate(groups):
        _check_group(index, group)
    return list(groups)


def _describe_dict(value: Any) -> str:
    return f"a dict with {[*map(str, value)][:8]}" if isinstance(value, Mapping) else type(value).__name__


def _check_group(index: int, group: ParamGroup) -> None:
    where = f"group {index} of the loaded state dict"
    for key in group:
        if not isinstance(key, str):
            raise CheckpointError(f"{where}: expected option names to be str, got {type(key).__name__}")
    params, names = group["params"], group.get("param_names")
    if not isinstance(params, (list, tuple)) or not all(map(_is_param_id, params)):
        raise CheckpointError(f"{where}: expected 'params' to be a list of numbers or names")
    if not isinstance(names, (list, tuple, type(None))):
        raise CheckpointError(f"{where}: expected 'param_names' to be a list, got {type(names).__name__}")


def _is_param_id(value: Any) -> bool:
    """Return whether a value can be a key of state: hashable, not a tensor, and equal to itself (unlike NaN)."""
    return isinstance(value, Hashable) and not isinstance(value, torch.Tensor) and bool(value == value)  # noqa: PLR0124


def _check_group_sizes(groups: Sequence[ParamGroup], specs: Sequence[ParamSpec], num_groups: int) -> None:
    sizes = [0] * num_groups
    for spec in specs:
        sizes[spec.group] += 1
    if len(groups) != len(sizes):
        raise CheckpointError(
            f"loaded state dict has a different number of parameter groups: it has {len(groups)}, "
            f"this optimizer has {len(sizes)}"
        )
    for i, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        if len(group["params"]) != size:
            raise CheckpointError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {i} has {len(group['params'])} parameters there and {size} here"
            )


def _match_params(groups: Sequence[ParamGroup], ids: list[Hashable], specs: Sequence[ParamSpec]) -> dict[Hashable, int]:
    by_position = dict(zip(ids, (spec.index for spec in specs), strict=True))
    names = _saved_param_names(groups)
    index_by_name = {_strip_all_prefixes(spec.name): spec.index for spec in specs if spec.name is not None}
    if names is None or len(index_by_name) != len(specs):
        return by_position
    if set(names) != set(index_by_name):
        warn_at_caller(
            "parameter names in the loaded state dict differ from the optimizer's: matching parameters by position"
        )
        return by_position
    by_name = dict(zip(ids, (index_by_name[name] for name in names), strict=True))
    moved = [key for key in ids if specs[by_name[key]].group != specs[by_position[key]].group]
    if moved:
        raise CheckpointError(
            f"{specs[by_name[moved[0]]].label} is in another parameter group in the loaded state dict. Create the "
            "optimizer with the saved groups."
        )
    return by_name


def _saved_param_names(groups: Sequence[ParamGroup]) -> list[str] | None:
    """Return the names of the saved parameters, from `param_names` or from ids that are names; None if incomplete."""
    names: list[str] = []
    for group in groups:
        group_names = group.get("param_names") or group["params"]
        if len(group_names) != len(group["params"]) or not all(isinstance(name, str) for name in group_names):
            return None
        names.extend(map(_strip_all_prefixes, group_names))
    return names


def strip_wrapper_prefixes(name: str) -> str:
    """Remove the prefixes that torch.compile, activation checkpointing and FSDP insert into parameter names."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _strip_all_prefixes(name: str) -> str:
    """Also remove DDP's `module.`."""
    return strip_wrapper_prefixes(name).removeprefix("module.")


def _check_state_shapes(spec: ParamSpec, state: Any, param_shaped_keys: frozenset[str]) -> None:
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else spec.shape
        if key in param_shaped_keys and shape != spec.shape:
            raise CheckpointError(
                f"the loaded state '{key}' of {spec.label} does not match: expected shape {spec.shape}, got {shape}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Sharded state.


MASTER_KEY = "master_weights"
"""The key of a parameter's master weights in its state."""


class StateShard(NamedTuple):
    """One rank's state of a parameter, or of a span of its memory (None: all of it).

    Values under `sharded_keys` have one element per element of the span. `shared_inner_names` are the inner tensors of
    wrapper subclasses that all shards have in common.
    """

    param: int
    span: Span | None
    sharded_keys: tuple[str, ...]
    state: Any
    shared_inner_names: frozenset[str] = frozenset()

    def to_dcp(self, spec: ParamSpec, *, as_load_target: bool) -> dict[Any, Any]:
        """Return the state as DCP saves it. With `as_load_target`, in new memory for DCP to load into."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor) if as_load_target else tensor.detach()

        def convert_value(key: Any, value: Any) -> Any:
            if is_wrapper_subclass(value):
                return self._inner_to_dcp(value, spec, convert)
            if self.span is not None and key in self.sharded_keys:
                return ShardTensor(convert(value), spec.shape, spec.stride, self.span.start)
            if isinstance(value, tuple):  # DCP treats a tuple as one opaque value
                return map_tensors(value, clone_tensor)
            # Several shards may share a value, a step count for example, and each may be loaded with a different one.
            return map_tensors(
                deepcopy_except_tensors(value),
                lambda tensor: tensor.clone() if self.span is not None else make_full_shard(convert(tensor)),
            )

        return {key: convert_value(key, value) for key, value in self.state.items()}

    def _inner_to_dcp(
        self, value: torch.Tensor, spec: ParamSpec, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the inner tensors, flat: the saved format must not depend on how the value is sharded."""
        flat_inner = {name: inner.reshape(-1) for name, inner in inner_tensors(value).items()}
        if self.span is None:
            return {name: make_full_shard(convert(inner)) for name, inner in flat_inner.items()}
        start = self.span.start

        def make_inner_shard(inner: torch.Tensor) -> ShardTensor:
            block = elements_per_inner(value.numel(), inner)
            return ShardTensor(convert(inner), (spec.numel // block,), (1,), start // block)

        return {
            name: convert(inner).clone() if name in self.shared_inner_names else make_inner_shard(inner)
            for name, inner in flat_inner.items()
        }

    def to_portable(self) -> Any:
        """Return the shard in plain containers, to be sent."""
        return (
            None if self.span is None else list(self.span),
            list(self.sharded_keys),
            list(self.shared_inner_names),
            self.state,
        )


class StateAssembler:
    """Joins the state shards of all ranks to the state of full parameters."""

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._specs = specs
        self._by_param: dict[int, Any] = {}
        self._shared_inner_names: dict[int, frozenset[str]] = {}
        self._sharded_keys: dict[int, frozenset[str]] = {}
        self._subclass_shards: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        """Shards of wrapper subclasses, in rank order, which is memory order."""

    def add(self, portable_shards: dict[int, Any]) -> None:
        """Add the portable shards of one rank, by parameter. Call in rank order."""
        for param, (span, sharded_keys, shared_inner_names, state) in portable_shards.items():
            self._shared_inner_names[param] = frozenset(shared_inner_names)
            if span is None:
                self._by_param[param] = state
            else:
                self._add_shard(self._specs[param], Span(*span), frozenset(sharded_keys), state)

    def assemble(self) -> dict[int, Any]:
        """Return the state by parameter. Like torch's optimizers, state has no gaps where the parameter has some."""
        for (param, key), shards in self._subclass_shards.items():
            self._by_param[param][key] = concat_subclass_shards(
                shards, self._specs[param].shape, self._shared_inner_names[param]
            )
        for param, sharded_keys in self._sharded_keys.items():
            if self._specs[param].storage_numel > self._specs[param].numel:
                self._by_param[param].update({key: self._by_param[param][key].clone() for key in sharded_keys})
        return dict(sorted(self._by_param.items()))

    def _add_shard(self, spec: ParamSpec, span: Span, sharded_keys: frozenset[str], state: dict[str, Any]) -> None:
        full_state = self._by_param.setdefault(spec.index, {})
        self._sharded_keys[spec.index] = sharded_keys & state.keys()
        for key, value in state.items():
            if key not in sharded_keys:
                full_state.setdefault(key, value)
                continue
            if is_wrapper_subclass(value):
                full_state.setdefault(key, None)
                self._subclass_shards[spec.index, key].append(value)
                continue
            if key not in full_state:
                full_state[key] = value.new_zeros(spec.storage_numel).as_strided(spec.shape, spec.stride)
            full_state[key].as_strided((spec.storage_numel,), (1,))[slice(*span)] = value


def infer_param_shaped_keys(shapes: Iterable[tuple[ParamSpec, Any, Sequence[int]]]) -> frozenset[Any]:
    """Return the keys whose state has the shape of its parameter, in all of `shapes`.

    Parameters of one element are ignored: their step counts have one element, too.
    """
    matches = [(key, tuple(shape) == spec.shape) for spec, key, shape in shapes if spec.numel > 1]
    return frozenset(key for key, same in matches if same) - frozenset(key for key, same in matches if not same)


def slice_span(tensor: torch.Tensor, spec: ParamSpec, span: Span) -> torch.Tensor:
    """Return a span, in the parameter's memory order, of a tensor that has the parameter's shape."""
    if not isinstance(tensor, ShardTensor):
        return flatten_in_memory_order(tensor, spec)[slice(*span)]
    if tensor.full_stride != spec.stride or tensor.span != span:
        raise CheckpointError(
            f"the loaded state of {spec.label} is sharded differently: expected elements {span.start} to {span.stop}, "
            f"got {tensor.start} to {tensor.span.stop}. Save and load it with torch.distributed.checkpoint, which "
            "reshards it."
        )
    return tensor.local


def flatten_in_memory_order(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Flatten a tensor that has the parameter's shape, in the parameter's memory order."""
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
        actual = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise CheckpointError(f"loaded state of {spec.label} does not match: expected shape {spec.shape}, got {actual}")
    dense = _to_dense(tensor, spec)
    if dense.stride() == spec.stride and (view := dense_flat_view(dense)) is not None:
        return view
    flat = dense.new_zeros(spec.storage_numel)
    flat.as_strided(spec.shape, spec.stride).copy_(dense)
    return flat


def _to_dense(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout != torch.sparse_coo:
        raise CheckpointError(
            f"loaded state of {spec.label}: expected a dense tensor, got {tensor.layout}. Call to_dense() on it."
        )
    # Hazard: torch.load does not validate sparse indices, and to_dense() writes to memory wherever they point.
    indices, values = sparse_indices(tensor), sparse_values(tensor)
    try:
        return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).to_dense()
    except RuntimeError as error:
        raise CheckpointError(f"loaded state of {spec.label} is not a valid sparse tensor: {error}") from error
