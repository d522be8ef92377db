"""State of parameters that may be cut: in records on every rank, whole in torch's dict."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..layout.specs import ParamSpec
from ..units import Span
from .dcp import CutTensor, whole
from .trees import clone, copy_mutable, dense_memory, map_tensors
from .wrapped import elements_per, insides, is_wrapped, joined

MASTER = "master_weights"
"""The key of a parameter's more precise copy in its state."""


class StateRecord(NamedTuple):
    """A rank's state of a parameter, or of a span of its memory.

    `cut` are the keys whose values have an element for each of the span, `common` is what all pieces have in common of
    values that are made of several tensors.
    """

    param: int
    span: Span | None
    cut: tuple[str, ...]
    state: Any
    common: frozenset[str] = frozenset()

    def part(self, spec: ParamSpec, *, room: bool) -> dict[Any, Any]:
        """As `torch.distributed.checkpoint` saves it. `room`: in memory of its own, to be loaded into."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor) if room else tensor.detach()

        def cut(key: Any, value: Any) -> Any:
            if is_wrapped(value):
                return self._insides(value, spec, own)
            if self.span is not None and key in self.cut:
                return CutTensor(own(value), spec.shape, spec.stride, self.span.start)
            if isinstance(value, tuple):  # DCP takes it for one value
                return map_tensors(value, clone)
            # Several pieces may share it, a step count for example, and each may be loaded with another one.
            return map_tensors(copy_mutable(value), lambda it: it.clone() if self.span is not None else whole(own(it)))

        return {key: cut(key, value) for key, value in self.state.items()}

    def _insides(
        self, value: torch.Tensor, spec: ParamSpec, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The plain tensors that a value is made of, flat, so that the same is saved however it is cut."""
        found = {name: it.reshape(-1) for name, it in insides(value).items()}
        if self.span is None:
            return {name: whole(own(it)) for name, it in found.items()}
        start = self.span.start

        def cut(inside: torch.Tensor) -> CutTensor:
            per = elements_per(value.numel(), inside)
            return CutTensor(own(inside), (spec.numel // per,), (1,), start // per)

        return {name: own(it).clone() if name in self.common else cut(it) for name, it in found.items()}

    def portable(self) -> Any:
        """In plain containers, as it travels."""
        return (None if self.span is None else list(self.span), list(self.cut), list(self.common), self.state)


class Whole:
    """Puts records together, from whichever rank they come, into the state of whole parameters."""

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._specs = specs
        self._by_param: dict[int, Any] = {}
        self._common: dict[int, frozenset[str]] = {}
        self._cut: dict[int, frozenset[str]] = {}
        self._pieces: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        """Of values that are made of several tensors, in the order of ranks, and so of memory."""

    def add(self, records: dict[int, Any]) -> None:
        """A rank's portable records, by parameter."""
        for param, (span, cut, common, state) in records.items():
            self._common[param] = frozenset(common)
            if span is None:
                self._by_param[param] = state
            else:
                self._add_piece(self._specs[param], Span(*span), frozenset(cut), state)

    def state(self) -> dict[int, Any]:
        """By parameter. State has no gaps where the parameter has: torch's optimizers leave none either."""
        for (param, key), pieces in self._pieces.items():
            self._by_param[param][key] = joined(pieces, self._specs[param].shape, self._common[param])
        for param, cut in self._cut.items():
            if self._specs[param].extent > self._specs[param].numel:
                self._by_param[param].update({key: self._by_param[param][key].clone() for key in cut})
        return dict(sorted(self._by_param.items()))

    def _add_piece(self, spec: ParamSpec, span: Span, cut: frozenset[str], state: dict[str, Any]) -> None:
        whole = self._by_param.setdefault(spec.index, {})
        self._cut[spec.index] = cut & state.keys()
        for key, value in state.items():
            if key not in cut:
                whole.setdefault(key, value)
                continue
            if is_wrapped(value):
                whole.setdefault(key, None)
                self._pieces[spec.index, key].append(value)
                continue
            if key not in whole:
                whole[key] = value.new_zeros(spec.extent).as_strided(spec.shape, spec.stride)
            whole[key].as_strided((spec.extent,), (1,))[slice(*span)] = value


def shaped_keys(found: Iterable[tuple[ParamSpec, Any, Sequence[int]]]) -> frozenset[Any]:
    """Keys of state that has the shape of its parameter, as far as the shapes of such state tell.

    A parameter of one element says nothing: its step count has one element, too.
    """
    telling = [(key, tuple(shape) == spec.shape) for spec, key, shape in found if spec.numel > 1]
    return frozenset(key for key, same in telling if same) - frozenset(key for key, same in telling if not same)


def span_of(tensor: torch.Tensor, spec: ParamSpec, span: Span) -> torch.Tensor:
    """A span of the parameter's memory, of a tensor of its shape."""
    if not isinstance(tensor, CutTensor):
        return in_memory_order(tensor, spec)[slice(*span)]
    if tensor.steps != spec.stride or tensor.span != span:
        raise CheckpointError(
            f"the loaded state of {spec.label} has elements {tensor.start} to {tensor.span.stop} of its memory, but "
            f"this rank owns {span.start} to {span.stop}: it is a rank's part of another optimizer's state. Save and "
            "load it through torch.distributed.checkpoint, which divides it anew."
        )
    return tensor.local


def in_memory_order(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """A tensor of a parameter's shape as a flat one, in the order of the parameter's memory."""
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
        found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise CheckpointError(f"loaded state of {spec.label} has {found}, but the parameter has shape {spec.shape}")
    dense = _dense(tensor, spec)
    if dense.stride() == spec.stride and (memory := dense_memory(dense)) is not None:
        return memory
    flat = dense.new_zeros(spec.extent)
    flat.as_strided(spec.shape, spec.stride).copy_(dense)
    return flat


def _dense(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
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
