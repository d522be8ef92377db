"""Optimizer state in torch's own format: `{"state": {id: ...}, "param_groups": [...]}`."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .._logging import warn_at_caller
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
"""Keys of a parameter's state that has the parameter's shape."""


def pack_param_groups(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """The groups with running numbers in the place of parameters, as `Optimizer.state_dict` writes them."""
    written, start = [], 0
    for group in groups:
        packed = {key: snapshot_to_host(value) for key, value in group.items() if key != "params"}
        packed["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        written.append(packed)
    return written


def drop_param_names(state_dict: StateDict) -> StateDict:
    """Without the names of parameters in the groups."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


@dataclass(frozen=True)
class SavedState:
    """A foreign dict, checked against this optimizer's parameters."""

    groups: list[dict[str, Any]]
    by_param: dict[int, Any]
    """State by this optimizer's parameter index. The caller's objects: to be copied before use."""
    shared_state: dict[Hashable, Any]
    """State that belongs to no parameter."""
    extra: StateDict
    """What the dict has beside the state and the groups."""
    param_names: list[str] | None
    """What this optimizer calls its parameters, whatever the dict calls them."""
    is_sharded: bool = False
    """It has this rank's part only, and other ranks have other parts."""

    def select_groups(self, group_ids: Sequence[int], specs: Sequence[ParamSpec]) -> "SavedState":
        """What it has of the groups with these numbers, in this order."""
        if len(group_ids) == len(self.groups):
            return self
        chosen = {index: state for index, state in self.by_param.items() if specs[index].group in group_ids}
        return replace(self, groups=[self.groups[number] for number in group_ids], by_param=chosen)

    def has_state(self, index: int) -> bool:
        """Whether there is state of a parameter. In a rank's part an empty dict says that there is none."""
        state = self.by_param.get(index)
        return index in self.by_param and not (self.is_sharded and isinstance(state, Mapping) and not state)

    @property
    def tensor_containers(self) -> list[Any]:
        """All that may have tensors in it."""
        return [self.groups, list(self.by_param.values()), list(self.shared_state.values()), self.extra]

    def must_match(self, *, is_sharded: bool) -> list[str]:
        """What must be equal on all ranks that load it: all of it, or of a rank's part the groups."""
        lines = describe_groups(self.groups, "the loaded dict's group")
        if is_sharded:
            return lines
        for index, state in sorted(self.by_param.items()):
            lines.append(f"state of parameter {index} in the loaded dict: {_describe_state(state)}")
        return lines


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """What goes wrong with a dict that has something else where a value should be is said of the dict."""
    try:
        yield
    except (ZeroError, torch.OutOfMemoryError):
        raise
    except RecursionError as error:
        raise CheckpointError("the loaded state dict is nested too deeply, or has itself in it") from error
    except (AttributeError, LookupError, AssertionError, RuntimeError) as error:
        raise CheckpointError(f"the loaded state dict cannot be used: {type(error).__name__}: {error}") from error


def parse_state_dict(
    state_dict: Any, specs: Sequence[ParamSpec], num_groups: int, param_shaped_keys: ParamShapedKeysFn
) -> SavedState:
    """Check `saved` and match its entries with `specs`, by name where both have names, else by position."""
    groups = _validate_groups(state_dict)
    _check_group_sizes(groups, specs, num_groups)
    ids = [key for group in groups for key in group["params"]]
    if len(set(ids)) != len(ids):
        raise CheckpointError("the loaded state dict lists a parameter twice in its param_groups")
    places = _match_params(groups, ids, specs)
    by_param = {places[key]: state for key, state in state_dict["state"].items() if key in places}
    # A number that no group lists would be taken for one of this rank's own numbers.
    others = {
        key: state for key, state in state_dict["state"].items() if key not in places and not isinstance(key, int)
    }
    for index, state in by_param.items():
        _check_state_shapes(specs[index], state, param_shaped_keys(index))
    names = [spec.name for spec in specs if spec.name is not None]
    extra = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    plain, is_part = unwrap_full_shards(by_param), _is_sharded_state(by_param)
    return SavedState([dict(group) for group in groups], plain, others, extra, names or None, is_part)


def _is_sharded_state(by_param: Mapping[int, Any]) -> bool:
    """A rank that owns nothing has an empty dict for each parameter."""
    cut: list[bool] = []
    map_tensors(dict(by_param), lambda tensor: cut.append(isinstance(tensor, ShardTensor)))
    return any(cut) or all(isinstance(state, Mapping) and not state for state in by_param.values())


def extract_local_state_dict(saved: SavedState, owned_params: Sequence[Sequence[int]]) -> StateDict:
    """The part of one rank, numbered from 0: `owned` lists the parameter indices of each of its groups."""
    state: dict[Hashable, Any] = dict(saved.shared_state)
    groups, number = [], 0
    for group, indices in zip(saved.groups, owned_params, strict=True):
        state |= {number + i: saved.by_param[index] for i, index in enumerate(indices) if saved.has_state(index)}
        own: dict[str, Any] = {"params": list(range(number, number + len(indices)))}
        if saved.param_names is not None:
            own["param_names"] = [saved.param_names[index] for index in indices]
        options = {key: value for key, value in group.items() if key != "param_names" or key in own}
        groups.append(options | own)
        number += len(indices)
    return {**saved.extra, "state": state, "param_groups": groups}


def describe_groups(groups: Sequence[ParamGroup], prefix: str = "group", *, first: int = 0) -> list[str]:
    """A line for each option of each group. They are numbered from `first` on."""
    return [
        f"{prefix} {number} has {key}={describe_value(value)}"
        for number, group in enumerate(groups, first)
        for key, value in sorted(_group_options(group).items())
    ]


def describe_options(group: ParamGroup) -> str:
    """Hyper-parameters in one line that is equal on ranks with equal values."""
    return ", ".join(f"{key}={describe_value(value)}" for key, value in sorted(_group_options(group).items()))


def _group_options(group: ParamGroup) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def describe_value(value: Any) -> str:
    """Equal for equal values, on all ranks."""
    if isinstance(value, torch.Tensor):
        inside = value.tolist() if value.numel() <= 16 else f"shape {tuple(value.shape)}"
        return f"tensor({inside}, {value.dtype})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(describe_value, value))})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{describe_value(key)}: {describe_value(item)}" for key, item in value.items())
        return f"{type(value).__name__}({items})"
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's floats are equal to plain ones
    if isinstance(value, (int, complex, str, bytes, type(None), torch.dtype)):
        return repr(value)
    return type(value).__qualname__  # a repr may hold an address, which differs from rank to rank


def _describe_state(state: Any) -> str:
    return describe_value(map_tensors(state, lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}"))


def _validate_groups(state_dict: Any) -> Sequence[ParamGroup]:
    """The groups of what must look like a state dict."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    listed = isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if groups is None or not listed or not isinstance(state_dict.get("state"), Mapping):
        raise CheckpointError(
            "not an optimizer state dict: it needs 'state', a dict, and 'param_groups', a list of dicts with 'params'"
        )
    for number, group in enumerate(groups):
        _check_group(number, group)
    return list(groups)


def _check_group(index: int, group: ParamGroup) -> None:
    where = f"group {index} of the loaded state dict"
    for key in group:
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has a {type(key).__name__} among the names of its options")
    params, names = group["params"], group.get("param_names")
    if not isinstance(params, (list, tuple)) or not all(map(_is_param_id, params)):
        raise CheckpointError(f"{where} has 'params' that are no list of numbers or names")
    if not isinstance(names, (list, tuple, type(None))):
        raise CheckpointError(f"{where} has 'param_names' that are no list, but a {type(names).__name__}")


def _is_param_id(value: Any) -> bool:
    """Whether state can be found by it: not by a tensor, nor by what differs from itself."""
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
    mine = {_strip_all_prefixes(spec.name): spec.index for spec in specs if spec.name is not None}
    if names is None or len(mine) != len(specs):
        return by_position
    if set(names) != set(mine):
        warn_at_caller("the parameter names in the loaded state dict differ from the optimizer's: matching by position")
        return by_position
    places = dict(zip(ids, (mine[name] for name in names), strict=True))
    moved = [key for key in ids if specs[places[key]].group != specs[by_position[key]].group]
    if moved:
        raise CheckpointError(f"{specs[places[moved[0]]].label} is in another group in the loaded state dict")
    return places


def _saved_param_names(groups: Sequence[ParamGroup]) -> list[str] | None:
    """The names of the saved parameters: given as such, or used as ids."""
    names: list[str] = []
    for group in groups:
        given = group.get("param_names") or group["params"]
        if len(given) != len(group["params"]) or not all(isinstance(name, str) for name in given):
            return None
        names.extend(map(_strip_all_prefixes, given))
    return names


def strip_wrapper_prefixes(name: str) -> str:
    """A parameter's name without what torch.compile and wrappers of modules put into it."""
    for wrapping in _WRAPPER_PREFIXES:
        name = name.replace(wrapping, "")
    return name


def _strip_all_prefixes(name: str) -> str:
    """Without what DDP puts in front, too."""
    return strip_wrapper_prefixes(name).removeprefix("module.")


def _check_state_shapes(spec: ParamSpec, state: Any, param_shaped_keys: frozenset[str]) -> None:
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else spec.shape
        if key in param_shaped_keys and shape != spec.shape:
            raise CheckpointError(
                f"the loaded state '{key}' of {spec.label} has shape {shape}, but the parameter has {spec.shape}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# State of parameters that may be cut: in records on every rank, whole in torch's dict.


MASTER_KEY = "master_weights"
"""The key of a parameter's more precise copy in its state."""


class StateShard(NamedTuple):
    """A rank's state of a parameter, or of a span of its memory.

    `cut` are the keys whose values have an element for each of the span, `common` is what all pieces have in common of
    values that are made of several tensors.
    """

    param: int
    span: Span | None
    sharded_keys: tuple[str, ...]
    state: Any
    shared_inner_names: frozenset[str] = frozenset()

    def to_dcp(self, spec: ParamSpec, *, as_load_target: bool) -> dict[Any, Any]:
        """As `torch.distributed.checkpoint` saves it. `room`: in memory of its own, to be loaded into."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor) if as_load_target else tensor.detach()

        def convert_value(key: Any, value: Any) -> Any:
            if is_wrapper_subclass(value):
                return self._inner_to_dcp(value, spec, convert)
            if self.span is not None and key in self.sharded_keys:
                return ShardTensor(convert(value), spec.shape, spec.stride, self.span.start)
            if isinstance(value, tuple):  # DCP takes it for one value
                return map_tensors(value, clone_tensor)
            # Several pieces may share it, a step count for example, and each may be loaded with another one.
            return map_tensors(
                deepcopy_except_tensors(value),
                lambda it: it.clone() if self.span is not None else make_full_shard(convert(it)),
            )

        return {key: convert_value(key, value) for key, value in self.state.items()}

    def _inner_to_dcp(
        self, value: torch.Tensor, spec: ParamSpec, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The plain tensors that a value is made of, flat, so that the same is saved however it is cut."""
        found = {name: it.reshape(-1) for name, it in inner_tensors(value).items()}
        if self.span is None:
            return {name: make_full_shard(convert(it)) for name, it in found.items()}
        start = self.span.start

        def make_inner_shard(inner: torch.Tensor) -> ShardTensor:
            per = elements_per_inner(value.numel(), inner)
            return ShardTensor(convert(inner), (spec.numel // per,), (1,), start // per)

        return {
            name: convert(it).clone() if name in self.shared_inner_names else make_inner_shard(it)
            for name, it in found.items()
        }

    def to_portable(self) -> Any:
        """In plain containers, as it travels."""
        return (
            None if self.span is None else list(self.span),
            list(self.sharded_keys),
            list(self.shared_inner_names),
            self.state,
        )


class StateAssembler:
    """Puts records together, from whichever rank they come, into the state of whole parameters."""

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._specs = specs
        self._by_param: dict[int, Any] = {}
        self._shared_inner_names: dict[int, frozenset[str]] = {}
        self._sharded_keys: dict[int, frozenset[str]] = {}
        self._subclass_shards: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        """Of values that are made of several tensors, in the order of ranks, and so of memory."""

    def add(self, portable_shards: dict[int, Any]) -> None:
        """A rank's portable records, by parameter."""
        for param, (span, cut, common, state) in portable_shards.items():
            self._shared_inner_names[param] = frozenset(common)
            if span is None:
                self._by_param[param] = state
            else:
                self._add_shard(self._specs[param], Span(*span), frozenset(cut), state)

    def assemble(self) -> dict[int, Any]:
        """By parameter. State has no gaps where the parameter has: torch's optimizers leave none either."""
        for (param, key), pieces in self._subclass_shards.items():
            self._by_param[param][key] = concat_subclass_shards(
                pieces, self._specs[param].shape, self._shared_inner_names[param]
            )
        for param, cut in self._sharded_keys.items():
            if self._specs[param].storage_numel > self._specs[param].numel:
                self._by_param[param].update({key: self._by_param[param][key].clone() for key in cut})
        return dict(sorted(self._by_param.items()))

    def _add_shard(self, spec: ParamSpec, span: Span, sharded_keys: frozenset[str], state: dict[str, Any]) -> None:
        whole = self._by_param.setdefault(spec.index, {})
        self._sharded_keys[spec.index] = sharded_keys & state.keys()
        for key, value in state.items():
            if key not in sharded_keys:
                whole.setdefault(key, value)
                continue
            if is_wrapper_subclass(value):
                whole.setdefault(key, None)
                self._subclass_shards[spec.index, key].append(value)
                continue
            if key not in whole:
                whole[key] = value.new_zeros(spec.storage_numel).as_strided(spec.shape, spec.stride)
            whole[key].as_strided((spec.storage_numel,), (1,))[slice(*span)] = value


def infer_param_shaped_keys(shapes: Iterable[tuple[ParamSpec, Any, Sequence[int]]]) -> frozenset[Any]:
    """Keys of state that has the shape of its parameter, as far as the shapes of such state tell.

    A parameter of one element says nothing: its step count has one element, too.
    """
    telling = [(key, tuple(shape) == spec.shape) for spec, key, shape in shapes if spec.numel > 1]
    return frozenset(key for key, same in telling if same) - frozenset(key for key, same in telling if not same)


def slice_span(tensor: torch.Tensor, spec: ParamSpec, span: Span) -> torch.Tensor:
    """A span of the parameter's memory, of a tensor of its shape."""
    if not isinstance(tensor, ShardTensor):
        return flatten_in_memory_order(tensor, spec)[slice(*span)]
    if tensor.full_stride != spec.stride or tensor.span != span:
        raise CheckpointError(
            f"the loaded state of {spec.label} has elements {tensor.start} to {tensor.span.stop} of its memory, but "
            f"this rank owns {span.start} to {span.stop}: it is a rank's part of another optimizer's state. Save and "
            "load it through torch.distributed.checkpoint, which divides it anew."
        )
    return tensor.local


def flatten_in_memory_order(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """A tensor of a parameter's shape as a flat one, in the order of the parameter's memory."""
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
        found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise CheckpointError(f"loaded state of {spec.label} has {found}, but the parameter has shape {spec.shape}")
    dense = _to_dense(tensor, spec)
    if dense.stride() == spec.stride and (memory := dense_flat_view(dense)) is not None:
        return memory
    flat = dense.new_zeros(spec.storage_numel)
    flat.as_strided(spec.shape, spec.stride).copy_(dense)
    return flat


def _to_dense(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout != torch.sparse_coo:
        raise CheckpointError(f"loaded state of {spec.label} has the layout {tensor.layout}: make it dense")
    # Hazard: torch.load does not look at indices, and what they point to is written.
    indices, values = tensor._indices(), tensor._values()
    try:
        return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).to_dense()
    except RuntimeError as error:
        raise CheckpointError(f"loaded state of {spec.label} is no sparse tensor: {error}") from error
