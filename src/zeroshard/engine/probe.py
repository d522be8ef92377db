"""May a parameter be cut, and where? Asked by stepping the optimizer on whole probes and on pieces of them."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..layout.grain import ShardGranularity
from ..layout.spec import read_param_attrs
from ..state.tensor_utils import concat_subclass_shards, inner_tensors, is_wrapper_subclass
from .._types import align_up
from .inner import OptimizerFactory, ParamGroup
from .probe_cache import memoize_probe
from .selftest import GRAD_SCALES, isolated_probe, make_probe_values, make_probe_with_attrs, probe_dtype, set_train_mode, step_once, with_visible_lr

_ODD_FACTOR = 15
"""Probes are multiples of it, too: blocks need not have a power of two of elements."""
_LARGE_PROBE_NUMEL = 160 * 768
_SPLIT_SIZES = [*[7] * 9, 12345, _LARGE_PROBE_NUMEL - 12345 - 63]
"""Pieces of the large probe: small ones, and two that meet within a row, at no multiple of anything."""
_CANDIDATE_ALIGNS = (64, 128, 256, 512, 1024, 2048, 4096)
_COARSEST_GRANULARITY = ShardGranularity(_CANDIDATE_ALIGNS[-1], _CANDIDATE_ALIGNS[-1])


class SplitRule(NamedTuple):
    """How parameters may be cut, so that pieces are updated as the whole would be."""

    granularity: ShardGranularity = ShardGranularity()
    shared_inner_names: frozenset[str] = frozenset()
    """Of state that is made of several tensors: those that are the same for all pieces."""


@memoize_probe(on_failure=None)
def probe_split_rule(factory: OptimizerFactory) -> SplitRule | None:
    """The finest way; None if parameters must stay whole."""
    with isolated_probe(factory), suppress(_NotSplittable):
        found = SplitRule()
        for group, like in _distinct_params(factory.groups):
            found = _find_finest(_SplitProbe(factory, group, like), found)
        return found
    return None


def _find_finest(probe: "_SplitProbe", current: SplitRule) -> SplitRule:
    """The finest grain that is not finer than `so_far`. Raises if there is none.

    A small probe comes first: some keep a matrix of as many rows as a parameter has elements once it is flat.
    """
    probe.require_split_in_half()
    if probe.can_split_anywhere():
        return current
    known = current.granularity
    if not known.is_elementwise and (common := probe.try_granularity(known)) is not None:
        return SplitRule(known, current.shared_inner_names | common)
    if probe.try_granularity(_COARSEST_GRANULARITY) is None:
        raise _NotSplittable
    aligns = (
        ShardGranularity(align, _COARSEST_GRANULARITY.min_numel) for align in _CANDIDATE_ALIGNS if align >= known.align
    )
    align = next(grain.align for grain in aligns if probe.try_granularity(grain) is not None)
    for grain in (
        ShardGranularity(align, least) for least in _CANDIDATE_ALIGNS if least >= max(align, known.min_numel)
    ):
        if (common := probe.try_granularity(grain)) is not None:
            return SplitRule(grain, current.shared_inner_names | common)
    raise _NotSplittable


class _NotSplittable(Exception):  # noqa: N818 (an answer)
    """A parameter that is cut is not updated as the whole would be."""


def _distinct_params(groups: Sequence[ParamGroup]) -> Iterable[tuple[ParamGroup, torch.Tensor]]:
    """A parameter of each number of dimensions, dtype, device and marks, in each kind of group: many differ in lr."""
    found: dict[str, tuple[ParamGroup, torch.Tensor]] = {}
    for group in groups:
        kind = repr({key: value for key, value in group.items() if key not in ("params", "param_names", "lr")})
        for param in group["params"]:
            found.setdefault(
                f"{kind} {param.dim()} {param.dtype} {param.device} {read_param_attrs(param)}", (group, param)
            )
    return found.values()


class _SplitResult(NamedTuple):
    values: list[torch.Tensor]
    states: list[dict[str, Any]]


class _SplitProbe:
    """One parameter of a group, whole and in flat pieces, large enough for what optimizers do to large ones only."""

    def __init__(self, factory: OptimizerFactory, group: ParamGroup, like: torch.Tensor) -> None:
        self._factory, self._group, self._like = factory, group, like

    def require_split_in_half(self) -> None:
        """Raise if a small one cannot be cut in two."""
        numel = 128 if self._like.dim() else 1
        if self._compare_split(self._make_shape(numel, 16), [numel // 2, numel - numel // 2]) is None:
            raise _NotSplittable

    def can_split_anywhere(self) -> bool:
        """Whether it may be cut anywhere. Its pieces may then also be joined with those of others."""
        if not self._like.dim():
            return True
        return self._compare_split(self._make_shape(_LARGE_PROBE_NUMEL, 768), _SPLIT_SIZES) == frozenset()

    def try_granularity(self, granularity: ShardGranularity) -> frozenset[str] | None:
        """The common insides if it may be cut so; None if not. The shortest pieces and longer ones are tried.

        To the bit: pieces are so long that no unit of the processor treats their last elements in a way of its own.
        """
        pieces = [
            granularity.min_shard_numel,
            granularity.min_shard_numel + granularity.align,
            granularity.min_shard_numel,
        ]
        blocks = (sum(pieces) + 2 * _COARSEST_GRANULARITY.min_numel) // granularity.align
        common: frozenset[str] = frozenset()
        for numel in (
            granularity.align * (blocks | 1),
            align_up(granularity.align * blocks, granularity.align * _ODD_FACTOR),
        ):
            found = self._compare_split(self._make_shape(numel, 16), [*pieces, numel - sum(pieces)], exact=True)
            if found is None:
                return None
            common |= found
        return common

    def _make_shape(self, numel: int, columns: int) -> tuple[int, ...]:
        dims = self._like.dim()
        return (numel // columns, columns, *[1] * (dims - 2)) if dims > 1 else (numel,) * dims

    def _compare_split(self, shape: tuple[int, ...], sizes: list[int], *, exact: bool = False) -> frozenset[str] | None:
        value = _make_sloped_values(shape, 0.1, 3.0, phase=1).to(self._like.device, probe_dtype(self._like.dtype))
        whole, cut = self._run_steps(value, [value]), self._run_steps(value, torch.split(value.view(-1), sizes))
        found, expected = torch.cat(cut.values), whole.values[0].view(-1)
        # Vector units may round the last elements of a run in another way than those in its midst.
        same = torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        return _find_shared_inner_names(whole, cut) if same else None

    def _run_steps(self, full: torch.Tensor, values: Sequence[torch.Tensor]) -> _SplitResult:
        probes = [make_probe_with_attrs(value.clone(), self._like) for value in values]
        options = {k: v for k, v in self._group.items() if k not in ("params", "param_names")}
        names = {"param_names": [str(i) for i in range(len(probes))]} if "param_names" in self._group else {}
        group = {**with_visible_lr(options), **names, "params": probes}
        recipe = replace(self._factory, groups=[group], defaults=with_visible_lr(self._factory.defaults))
        inner = set_train_mode(recipe.build(set(map(id, probes))))
        for step, scale in enumerate(GRAD_SCALES):
            slope = (2.0, 0.2) if step % 2 else (0.1, 1.5)
            gradient = scale * _make_sloped_values(full.shape, *slope, phase=step).to(full)
            parts = torch.split(gradient.view(-1), [probe.numel() for probe in probes])
            for probe, part in zip(probes, parts, strict=True):
                probe.grad = part.view(probe.shape).clone()
            step_once(inner)
        return _SplitResult(
            [probe.detach() for probe in probes], [dict(inner.optimizer.state[probe]) for probe in probes]
        )


def _find_shared_inner_names(full: _SplitResult, split: _SplitResult) -> frozenset[str] | None:
    """None unless all state has an element for each of the parameter's, or is the same for whole and pieces.

    Of state that is made of several tensors: those that all pieces have in common.
    """
    (of_whole,), common = full.states, set[str]()
    if any(list(state) != list(of_whole) for state in split.states):
        return None
    for key, value in of_whole.items():
        parts = [state[key] for state in split.states]
        is_cut = _has_shape_of(value, full.values[0]) and all(map(_has_shape_of, parts, split.values))
        if not is_cut and not all(_values_equal(part, value) for part in parts):
            return None
        if is_cut and any(map(is_wrapper_subclass, [value, *parts])):
            found = _find_shared_inner_of_value(value, parts)
            if found is None:
                return None
            common |= found
    return frozenset(common)


def _find_shared_inner_of_value(value: torch.Tensor, shards: list[torch.Tensor]) -> frozenset[str] | None:
    """None unless the whole is what is joined of the parts."""
    if any(type(part) is not type(value) for part in shards):
        return None
    common = frozenset(
        n for n, it in inner_tensors(value).items() if all(_values_equal(inner_tensors(part)[n], it) for part in shards)
    )
    again = inner_tensors(concat_subclass_shards(shards, value.shape, common))
    return common if all(_values_equal(again[name], it) for name, it in inner_tensors(value).items()) else None


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _values_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


def _make_sloped_values(shape: tuple[int, ...], start: float, stop: float, phase: int) -> torch.Tensor:
    """Values that are not of one size: a piece must not be like the whole. To be copied, and not to be changed."""
    return _make_flat_sloped_values(math.prod(shape), start, stop, phase).reshape(shape)


@lru_cache(maxsize=16)
def _make_flat_sloped_values(numel: int, start: float, stop: float, phase: int) -> torch.Tensor:
    """They are kept for all shapes of a size: to make them took half of what it takes to make an optimizer."""
    with torch.inference_mode(False):  # its tensors could not be used outside
        return make_probe_values((numel,), phase) * torch.linspace(
            start, stop, numel, dtype=torch.float32, device="cpu"
        )
