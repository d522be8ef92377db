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

from ..engine.inner import LocalOptimizer, OptimizerFactory
from ..engine.probe import build_for_probes, isolated_probe, step_once
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, map_tensors

TensorMeta = tuple[tuple[int, ...], torch.dtype]

_SMALL_PROBE_ROWS, _LARGE_PROBE_ROWS = 64, 256
"""Rows of probes that have memory, with 1,024 columns: blocks of quantized state fit into them."""


class StepMemory(NamedTuple):
    """Bytes."""

    state_bytes: int
    temporary_bytes: int
    """At most, during a step, beyond what stays."""


class StateMeter:
    """For one kind of optimizer."""

    def __init__(self, factory: OptimizerFactory) -> None:
        """`recipe`: its first group has the options that count."""
        self._factory = factory
        self._state_cache: dict[TensorMeta, int] = {}
        self._temporary_cache: dict[tuple[TensorMeta, ...], int] = {}
        self._multi_tensor: bool | None = None
        self._linear_fits: tuple[_LinearFit, _LinearFit] | None = None

    def state_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of one tensor."""
        if (shape, dtype) not in self._state_cache:
            self._state_cache[shape, dtype] = self._measure_state_bytes(shape, dtype)
        return self._state_cache[shape, dtype]

    def temporary_bytes(self, shapes: Sequence[TensorMeta]) -> int:
        """Of a step on all of these, of which equal ones need not all be stepped.

        A class updates its tensors one after the other, where what is left of one meets the next, or all at once.
        """
        counts = Counter(shapes)
        if not self._is_multi_tensor(shapes[0]):
            return max(map(self._peak_temporary_bytes, {*pairwise(shapes)}), default=0) or self._peak_temporary_bytes(
                (shapes[0],)
            )
        once, each = (
            self._peak_temporary_bytes(tuple(counts)),
            {shape: self._peak_temporary_bytes((shape,)) for shape in counts},
        )
        if once == sum(each.values()):
            return sum(each[shape] * count for shape, count in counts.items())
        return self._peak_temporary_bytes(tuple(shapes))

    def _is_multi_tensor(self, shape: TensorMeta) -> bool:
        if self._multi_tensor is None:
            self._multi_tensor = self._peak_temporary_bytes((shape,) * 3) > self._peak_temporary_bytes((shape,) * 2)
        return self._multi_tensor

    def _peak_temporary_bytes(self, shapes: tuple[TensorMeta, ...]) -> int:
        if shapes not in self._temporary_cache:
            taken = _measure_on_meta(self._factory, shapes)
            elements = max(math.prod(shape) for shape, _ in shapes)
            self._temporary_cache[shapes] = (
                taken.temporary_bytes if taken else self._linear_fits_for(shapes[0][1])[1].predict(elements)
            )
        return self._temporary_cache[shapes]

    def _measure_state_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        taken = _measure_on_meta(self._factory, [(shape, dtype)])
        if taken is not None:
            return taken.state_bytes
        return self._linear_fits_for(dtype)[0].predict(math.prod(shape))

    def _linear_fits_for(self, dtype: torch.dtype) -> "tuple[_LinearFit, _LinearFit]":
        self._linear_fits = self._linear_fits or _fit_on_cpu(self._factory, dtype)
        return self._linear_fits


class _LinearFit(NamedTuple):
    """Bytes for any tensor, and for each of its elements."""

    fixed: float
    per_element: float

    def predict(self, numel: int) -> int:
        return round(self.fixed + self.per_element * numel)


def _measure_on_meta(factory: OptimizerFactory, shapes: Sequence[TensorMeta]) -> StepMemory | None:
    """None if the optimizer cannot be stepped so."""
    with isolated_probe(factory), suppress(Exception):
        return _measure_two_steps(factory, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    return None


def _fit_on_cpu(factory: OptimizerFactory, dtype: torch.dtype) -> tuple[_LinearFit, _LinearFit]:
    """Of state and of temporaries, from steps on two tensors. Raises what the optimizer raises."""
    with isolated_probe(factory):
        small, large = (
            _measure_two_steps(factory, [torch.ones(rows, 1024, dtype=dtype, device="cpu")])
            for rows in (_SMALL_PROBE_ROWS, _LARGE_PROBE_ROWS)
        )
    return _fit_line(small.state_bytes, large.state_bytes), _fit_line(small.temporary_bytes, large.temporary_bytes)


def _fit_line(small: int, large: int) -> _LinearFit:
    per_element = (large - small) / (1024 * (_LARGE_PROBE_ROWS - _SMALL_PROBE_ROWS))
    return _LinearFit(small - per_element * 1024 * _SMALL_PROBE_ROWS, per_element)


def _measure_two_steps(factory: OptimizerFactory, values: Sequence[torch.Tensor]) -> StepMemory:
    params = [torch.nn.Parameter(value) for value in values]
    inner = build_for_probes(factory, factory.groups[0], params)
    _measure_step_peak(inner, params)
    kept = sum(map(_total_nbytes, inner.optimizer.state.values()))
    return StepMemory(kept, _measure_step_peak(inner, params))  # what the first step makes stays


def _measure_step_peak(inner: LocalOptimizer, params: Sequence[torch.nn.Parameter]) -> int:
    """The most memory that it takes on the way."""
    for param in params:
        param.grad = torch.ones_like(param)
    watch = _MemoryTracker()
    with watch:
        step_once(inner)
    return watch.peak_bytes


def _total_nbytes(value: Any) -> int:
    """Of all tensors in it."""
    found: list[int] = []
    map_tensors(value, lambda it: found.append(_tensor_nbytes(it)))
    return sum(found)


def _tensor_nbytes(tensor: torch.Tensor) -> int:
    return sum(map(_tensor_nbytes, inner_tensors(tensor).values())) if is_wrapper_subclass(tensor) else tensor.nbytes


class _MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that is made while it is on, until it is let go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_storages: set[int] = set()
        self._current_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0  # an optimizer that looks at a number goes on; what it keeps has the same size
        known = {id(it.untyped_storage()) for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in known | self._live_storages:
                self._track(tensor.untyped_storage())
        return made

    def _track(self, storage: torch.UntypedStorage) -> None:
        self._live_storages.add(id(storage))
        self._current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)
        finalize(storage, self._release, id(storage), storage.nbytes())

    def _release(self, storage_id: int, nbytes: int) -> None:
        self._live_storages.discard(storage_id)
        self._current_bytes -= nbytes
