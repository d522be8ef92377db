"""May a parameter be cut, and where? Asked by stepping the optimizer on whole probes and on pieces of them."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..layout.grain import Grain
from ..layout.specs import marks_of
from ..state.wrapped import insides, is_wrapped, joined
from ..units import align_up
from .inner import ParamGroup, Recipe
from .probe_cache import memoize_probe
from .selftest import SCALES, lively, made_ready, marked, precise, quietly, step_once, wave

_ODD = 15
"""Probes are multiples of it, too: blocks need not have a power of two of elements."""
_WHOLE = 160 * 768
_CUTS = [*[7] * 9, 12345, _WHOLE - 12345 - 63]
"""Pieces of the large probe: small ones, and two that meet within a row, at no multiple of anything."""
_ALIGNS = (64, 128, 256, 512, 1024, 2048, 4096)
_COARSEST = Grain(_ALIGNS[-1], _ALIGNS[-1])


class Cutting(NamedTuple):
    """How parameters may be cut, so that pieces are updated as the whole would be."""

    grain: Grain = Grain()
    common: frozenset[str] = frozenset()
    """Of state that is made of several tensors: those that are the same for all pieces."""


@memoize_probe(on_failure=None)
def how_to_cut(recipe: Recipe) -> Cutting | None:
    """The finest way; None if parameters must stay whole."""
    with quietly(recipe), suppress(_NotSeparable):
        found = Cutting()
        for group, like in _different(recipe.groups):
            found = _finest(_CutTrial(recipe, group, like), found)
        return found
    return None


def _finest(trial: "_CutTrial", so_far: Cutting) -> Cutting:
    """The finest grain that is not finer than `so_far`. Raises if there is none.

    A small probe comes first: some keep a matrix of as many rows as a parameter has elements once it is flat.
    """
    trial.require_halves()
    if trial.anywhere():
        return so_far
    known = so_far.grain
    if not known.is_fine and (common := trial.at(known)) is not None:
        return Cutting(known, so_far.common | common)
    if trial.at(_COARSEST) is None:
        raise _NotSeparable
    aligns = (Grain(align, _COARSEST.least) for align in _ALIGNS if align >= known.align)
    align = next(grain.align for grain in aligns if trial.at(grain) is not None)
    for grain in (Grain(align, least) for least in _ALIGNS if least >= max(align, known.least)):
        if (common := trial.at(grain)) is not None:
            return Cutting(grain, so_far.common | common)
    raise _NotSeparable


class _NotSeparable(Exception):  # noqa: N818 (an answer)
    """A parameter that is cut is not updated as the whole would be."""


def _different(groups: Sequence[ParamGroup]) -> Iterable[tuple[ParamGroup, torch.Tensor]]:
    """A parameter of each number of dimensions, dtype, device and marks, in each kind of group: many differ in lr."""
    found: dict[str, tuple[ParamGroup, torch.Tensor]] = {}
    for group in groups:
        kind = repr({key: value for key, value in group.items() if key not in ("params", "param_names", "lr")})
        for param in group["params"]:
            found.setdefault(f"{kind} {param.dim()} {param.dtype} {param.device} {marks_of(param)}", (group, param))
    return found.values()


class _Outcome(NamedTuple):
    values: list[torch.Tensor]
    states: list[dict[str, Any]]


class _CutTrial:
    """One parameter of a group, whole and in flat pieces, large enough for what optimizers do to large ones only."""

    def __init__(self, recipe: Recipe, group: ParamGroup, like: torch.Tensor) -> None:
        self._recipe, self._group, self._like = recipe, group, like

    def require_halves(self) -> None:
        """Raise if a small one cannot be cut in two."""
        numel = 128 if self._like.dim() else 1
        if self._try(self._shape(numel, 16), [numel // 2, numel - numel // 2]) is None:
            raise _NotSeparable

    def anywhere(self) -> bool:
        """Whether it may be cut anywhere. Its pieces may then also be joined with those of others."""
        if not self._like.dim():
            return True
        return self._try(self._shape(_WHOLE, 768), _CUTS) == frozenset()

    def at(self, grain: Grain) -> frozenset[str] | None:
        """The common insides if it may be cut so; None if not. The shortest pieces and longer ones are tried.

        To the bit: pieces are so long that no unit of the processor treats their last elements in a way of its own.
        """
        pieces = [grain.shortest, grain.shortest + grain.align, grain.shortest]
        blocks = (sum(pieces) + 2 * _COARSEST.least) // grain.align
        common: frozenset[str] = frozenset()
        for numel in (grain.align * (blocks | 1), align_up(grain.align * blocks, grain.align * _ODD)):
            found = self._try(self._shape(numel, 16), [*pieces, numel - sum(pieces)], exactly=True)
            if found is None:
                return None
            common |= found
        return common

    def _shape(self, numel: int, columns: int) -> tuple[int, ...]:
        dims = self._like.dim()
        return (numel // columns, columns, *[1] * (dims - 2)) if dims > 1 else (numel,) * dims

    def _try(self, shape: tuple[int, ...], sizes: list[int], *, exactly: bool = False) -> frozenset[str] | None:
        value = _slope(shape, 0.1, 3.0, phase=1).to(self._like.device, precise(self._like.dtype))
        whole, cut = self._run(value, [value]), self._run(value, torch.split(value.view(-1), sizes))
        found, expected = torch.cat(cut.values), whole.values[0].view(-1)
        # Vector units may round the last elements of a run in another way than those in its midst.
        same = torch.equal(found, expected) if exactly else torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        return _common(whole, cut) if same else None

    def _run(self, whole: torch.Tensor, values: Sequence[torch.Tensor]) -> _Outcome:
        probes = [marked(value.clone(), self._like) for value in values]
        options = {k: v for k, v in self._group.items() if k not in ("params", "param_names")}
        names = {"param_names": [str(i) for i in range(len(probes))]} if "param_names" in self._group else {}
        group = {**lively(options), **names, "params": probes}
        recipe = replace(self._recipe, groups=[group], defaults=lively(self._recipe.defaults))
        inner = made_ready(recipe.build(set(map(id, probes))))
        for step, scale in enumerate(SCALES):
            slope = (2.0, 0.2) if step % 2 else (0.1, 1.5)
            gradient = scale * _slope(whole.shape, *slope, phase=step).to(whole)
            parts = torch.split(gradient.view(-1), [probe.numel() for probe in probes])
            for probe, part in zip(probes, parts, strict=True):
                probe.grad = part.view(probe.shape).clone()
            step_once(inner)
        return _Outcome([probe.detach() for probe in probes], [dict(inner.optimizer.state[probe]) for probe in probes])


def _common(whole: _Outcome, cut: _Outcome) -> frozenset[str] | None:
    """None unless all state has an element for each of the parameter's, or is the same for whole and pieces.

    Of state that is made of several tensors: those that all pieces have in common.
    """
    (of_whole,), common = whole.states, set[str]()
    if any(list(state) != list(of_whole) for state in cut.states):
        return None
    for key, value in of_whole.items():
        parts = [state[key] for state in cut.states]
        is_cut = _has_shape(value, whole.values[0]) and all(map(_has_shape, parts, cut.values))
        if not is_cut and not all(_equal(part, value) for part in parts):
            return None
        if is_cut and any(map(is_wrapped, [value, *parts])):
            found = _common_insides(value, parts)
            if found is None:
                return None
            common |= found
    return frozenset(common)


def _common_insides(value: torch.Tensor, parts: list[torch.Tensor]) -> frozenset[str] | None:
    """None unless the whole is what is joined of the parts."""
    if any(type(part) is not type(value) for part in parts):
        return None
    common = frozenset(n for n, it in insides(value).items() if all(_equal(insides(part)[n], it) for part in parts))
    again = insides(joined(parts, value.shape, common))
    return common if all(_equal(again[name], it) for name, it in insides(value).items()) else None


def _has_shape(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


def _slope(shape: tuple[int, ...], start: float, stop: float, phase: int) -> torch.Tensor:
    """Values that are not of one size: a piece must not be like the whole. To be copied, and not to be changed."""
    return _flat_slope(math.prod(shape), start, stop, phase).reshape(shape)


@lru_cache(maxsize=16)
def _flat_slope(numel: int, start: float, stop: float, phase: int) -> torch.Tensor:
    """They are kept for all shapes of a size: to make them took half of what it takes to make an optimizer."""
    with torch.inference_mode(False):  # its tensors could not be used outside
        return wave((numel,), phase) * torch.linspace(start, stop, numel, dtype=torch.float32, device="cpu")
