"""What an optimizer keeps of a tensor, and takes for moments while it steps. Asked by stepping it on tensors without
memory; one that cannot be stepped so is stepped on small ones that have some."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..runtime.beginnings import built_for
from ..runtime.inner import Recipe, ShardOptimizer
from ..runtime.selftest import quietly, step_once
from ..state.trees import map_tensors
from ..state.wrapped import insides, is_wrapped

Shape = tuple[tuple[int, ...], torch.dtype]

_SMALL, _LARGE = 64, 256
"""Rows of probes that have memory, with 1,024 columns: blocks of quantized state fit into them."""


class Taken(NamedTuple):
    """Bytes."""

    state: int
    temporaries: int
    """At most, during a step, beyond what stays."""


class Meter:
    """For one kind of optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        """`recipe`: its first group has the options that count."""
        self._recipe = recipe
        self._known: dict[Shape, int] = {}
        self._moments: dict[tuple[Shape, ...], int] = {}
        self._at_once: bool | None = None
        self._rates: tuple[_Rate, _Rate] | None = None

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of one tensor."""
        if (shape, dtype) not in self._known:
            self._known[shape, dtype] = self._state(shape, dtype)
        return self._known[shape, dtype]

    def temporaries(self, shapes: Sequence[Shape]) -> int:
        """Of a step on all of these, of which equal ones need not all be stepped.

        A class updates its tensors one after the other, where what is left of one meets the next, or all at once.
        """
        counts = Counter(shapes)
        if not self._is_at_once(shapes[0]):
            return max(map(self._most, {*pairwise(shapes)}), default=0) or self._most((shapes[0],))
        once, each = self._most(tuple(counts)), {shape: self._most((shape,)) for shape in counts}
        if once == sum(each.values()):
            return sum(each[shape] * count for shape, count in counts.items())
        return self._most(tuple(shapes))

    def _is_at_once(self, shape: Shape) -> bool:
        if self._at_once is None:
            self._at_once = self._most((shape,) * 3) > self._most((shape,) * 2)
        return self._at_once

    def _most(self, shapes: tuple[Shape, ...]) -> int:
        if shapes not in self._moments:
            taken = _without_memory(self._recipe, shapes)
            elements = max(math.prod(shape) for shape, _ in shapes)
            self._moments[shapes] = taken.temporaries if taken else self._rates_of(shapes[0][1])[1].of(elements)
        return self._moments[shapes]

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        taken = _without_memory(self._recipe, [(shape, dtype)])
        if taken is not None:
            return taken.state
        return self._rates_of(dtype)[0].of(math.prod(shape))

    def _rates_of(self, dtype: torch.dtype) -> "tuple[_Rate, _Rate]":
        self._rates = self._rates or _rates(self._recipe, dtype)
        return self._rates


class _Rate(NamedTuple):
    """Bytes for any tensor, and for each of its elements."""

    fixed: float
    per_element: float

    def of(self, elements: int) -> int:
        return round(self.fixed + self.per_element * elements)


def _without_memory(recipe: Recipe, shapes: Sequence[Shape]) -> Taken | None:
    """None if the optimizer cannot be stepped so."""
    with quietly(recipe), suppress(Exception):
        return _stepped(recipe, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    return None


def _rates(recipe: Recipe, dtype: torch.dtype) -> tuple[_Rate, _Rate]:
    """Of state and of temporaries, from steps on two tensors. Raises what the optimizer raises."""
    with quietly(recipe):
        small, large = (
            _stepped(recipe, [torch.ones(rows, 1024, dtype=dtype, device="cpu")]) for rows in (_SMALL, _LARGE)
        )
    return _between(small.state, large.state), _between(small.temporaries, large.temporaries)


def _between(small: int, large: int) -> _Rate:
    per_element = (large - small) / (1024 * (_LARGE - _SMALL))
    return _Rate(small - per_element * 1024 * _SMALL, per_element)


def _stepped(recipe: Recipe, values: Sequence[torch.Tensor]) -> Taken:
    params = [torch.nn.Parameter(value) for value in values]
    inner = built_for(recipe, recipe.groups[0], params)
    _step(inner, params)
    kept = sum(map(_bytes_of, inner.optimizer.state.values()))
    return Taken(kept, _step(inner, params))  # what the first step makes stays


def _step(inner: ShardOptimizer, params: Sequence[torch.nn.Parameter]) -> int:
    """The most memory that it takes on the way."""
    for param in params:
        param.grad = torch.ones_like(param)
    watch = _Watch()
    with watch:
        step_once(inner)
    return watch.most


def _bytes_of(value: Any) -> int:
    """Of all tensors in it."""
    found: list[int] = []
    map_tensors(value, lambda it: found.append(_nbytes(it)))
    return sum(found)


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(map(_nbytes, insides(tensor).values())) if is_wrapped(tensor) else tensor.nbytes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that is made while it is on, until it is let go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: set[int] = set()
        self._now = 0
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0  # an optimizer that looks at a number goes on; what it keeps has the same size
        known = {id(it.untyped_storage()) for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in known | self._seen:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(id(storage))
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        finalize(storage, self._let_go, id(storage), storage.nbytes())

    def _let_go(self, number: int, nbytes: int) -> None:
        self._seen.discard(number)
        self._now -= nbytes
