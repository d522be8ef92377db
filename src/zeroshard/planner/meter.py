"""Measure the state and the temporary memory of any optimizer class.

`StateMeter` steps the optimizer on meta tensors of the real shapes and counts bytes. An optimizer that does not run on
the meta device is stepped on two small CPU tensors instead, and the result is extrapolated linearly.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import finalize

import torch

from .._torch_compat import ITEM_OP, TorchDispatchMode, tree_leaves
from ..engine.inner import LocalOptimizer, OptimizerFactory
from ..engine.probe import build_for_probes, isolated_probe, step_once
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, map_tensors

TensorMeta = tuple[tuple[int, ...], torch.dtype]

_SMALL_PROBE_ROWS, _LARGE_PROBE_ROWS = 64, 256
"""Rows of the CPU probes. With 1,024 columns, blocks of quantized state fit into them."""


class StepMemory(NamedTuple):
    """Bytes of one optimizer on some tensors."""

    state_bytes: int
    temporary_bytes: int
    """Peak during a step, beyond the state."""


class StateMeter:
    """Measures one optimizer class, and caches the results."""

    def __init__(self, factory: OptimizerFactory) -> None:
        """Measure the optimizers of `factory`, with the options of its first group."""
        self._factory = factory
        self._state_cache: dict[TensorMeta, int] = {}
        self._temporary_cache: dict[tuple[TensorMeta, ...], int] = {}
        self._multi_tensor: bool | None = None
        self._linear_fits: tuple[_LinearFit, _LinearFit] | None = None

    def state_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the state bytes of one tensor."""
        if (shape, dtype) not in self._state_cache:
            self._state_cache[shape, dtype] = self._measure_state_bytes(shape, dtype)
        return self._state_cache[shape, dtype]

    def temporary_bytes(self, shapes: Sequence[TensorMeta]) -> int:
        """Return the peak of temporary memory in a step on all these tensors. Equal shapes are measured once.

        A class updates tensors one by one, and temporaries of one may still be alive at the next, or all at once.
        """
        counts = Counter(shapes)
        if not self._is_multi_tensor(shapes[0]):
            return max(map(self._peak_temporary_bytes, {*pairwise(shapes)}), default=0) or self._peak_temporary_bytes(
                (shapes[0],)
            )
        together, alone = (
            self._peak_temporary_bytes(tuple(counts)),
            {shape: self._peak_temporary_bytes((shape,)) for shape in counts},
        )
        if together == sum(alone.values()):
            return sum(alone[shape] * count for shape, count in counts.items())
        return self._peak_temporary_bytes(tuple(shapes))

    def _is_multi_tensor(self, shape: TensorMeta) -> bool:
        if self._multi_tensor is None:
            self._multi_tensor = self._peak_temporary_bytes((shape,) * 3) > self._peak_temporary_bytes((shape,) * 2)
        return self._multi_tensor

    def _peak_temporary_bytes(self, shapes: tuple[TensorMeta, ...]) -> int:
        if shapes not in self._temporary_cache:
            measured = _measure_on_meta(self._factory, shapes)
            elements = max(math.prod(shape) for shape, _ in shapes)
            self._temporary_cache[shapes] = (
                measured.temporary_bytes if measured else self._linear_fits_for(shapes[0][1])[1].predict(elements)
            )
        return self._temporary_cache[shapes]

    def _measure_state_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        measured = _measure_on_meta(self._factory, [(shape, dtype)])
        if measured is not None:
            return measured.state_bytes
        return self._linear_fits_for(dtype)[0].predict(math.prod(shape))

    def _linear_fits_for(self, dtype: torch.dtype) -> "tuple[_LinearFit, _LinearFit]":
        self._linear_fits = self._linear_fits or _fit_on_cpu(self._factory, dtype)
        return self._linear_fits


class _LinearFit(NamedTuple):
    """Bytes as a linear function of the number of elements."""

    fixed: float
    per_element: float

    def predict(self, numel: int) -> int:
        return round(self.fixed + self.per_element * numel)


def _measure_on_meta(factory: OptimizerFactory, shapes: Sequence[TensorMeta]) -> StepMemory | None:
    """Step on meta tensors. Return None if the optimizer does not support them."""
    with isolated_probe(factory), suppress(Exception):
        return _measure_two_steps(factory, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    return None


def _fit_on_cpu(factory: OptimizerFactory, dtype: torch.dtype) -> tuple[_LinearFit, _LinearFit]:
    """Fit the bytes of state and of temporaries on two CPU tensors. Raises what the optimizer raises."""
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
    state_bytes = sum(map(_total_nbytes, inner.optimizer.state.values()))
    return StepMemory(
        state_bytes, _measure_step_peak(inner, params)
    )  # the second step: the first one also creates state


def _measure_step_peak(inner: LocalOptimizer, params: Sequence[torch.nn.Parameter]) -> int:
    """Return the peak of memory that one step allocates."""
    for param in params:
        param.grad = torch.ones_like(param)
    tracker = _MemoryTracker()
    with tracker:
        step_once(inner)
    return tracker.peak_bytes


def _total_nbytes(value: Any) -> int:
    """Return the bytes of all tensors in nested values."""
    sizes: list[int] = []
    map_tensors(value, lambda tensor: sizes.append(_tensor_nbytes(tensor)))
    return sum(sizes)


def _tensor_nbytes(tensor: torch.Tensor) -> int:
    return sum(map(_tensor_nbytes, inner_tensors(tensor).values())) if is_wrapper_subclass(tensor) else tensor.nbytes


class _MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages that are allocated while the mode is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_storages: set[int] = set()
        self._current_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ITEM_OP and args[0].is_meta:
            return 1.0  # lets an optimizer that calls `.item()` continue; its state has the same size
        input_storages = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and id(tensor.untyped_storage()) not in input_storages | self._live_storages
            ):
                self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        self._live_storages.add(id(storage))
        self._current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)
        finalize(storage, self._release, id(storage), storage.nbytes())

    def _release(self, storage_id: int, nbytes: int) -> None:
        self._live_storages.discard(storage_id)
        self._current_bytes -= nbytes
