"""State of parameters that may be cut: in records on every rank, whole in torch's dict."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..layout.spec import ParamSpec
from .._types import Span
from .shard_tensor import ShardTensor, make_full_shard
from .trees import clone_tensor, deepcopy_except_tensors, dense_flat_view, map_tensors
from .tensor_utils import concat_subclass_shards, elements_per_inner, inner_tensors, is_wrapper_subclass

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
