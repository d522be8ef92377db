"""Measure the state and the temporary memory of any optimizer class, without a formula for any of them.

`OptimizerMeter` steps the optimizer on meta tensors and counts the bytes that it allocates. An optimizer that does not
run on the meta device is stepped on two small CPU tensors instead, and the bytes are extrapolated linearly.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import finalize

import torch

from .._torch_compat import ITEM_OP, TorchDispatchMode, tree_leaves
from ..engine.inner import OptimizerFactory
from ..engine.probe import build_for_probes, isolated_probe, step_once
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, map_tensors

TensorMeta = tuple[tuple[int, ...], torch.dtype]

_PROBE_ROWS = (64, 256)
"""Rows of the CPU probes. With 1,024 columns, blocks of quantized state fit into them."""


class StepMemory(NamedTuple):
    """Bytes of one optimizer on some tensors."""

    state: float
    temporary: float
    """Peak during a step, beyond the state."""


class OptimizerMeter:
    """Measures the optimizers of `factory`, with the options of its first group, and caches the results."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self._measured: dict[tuple[TensorMeta, int], StepMemory] = {}
        self._cpu_probes: list[StepMemory] = []

    def state_bytes(self, tensor: TensorMeta) -> int:
        """Return the state bytes of one tensor."""
        return round(self._measure(tensor).state)

    def temporary_bytes(self, tensors: Sequence[TensorMeta]) -> int:
        """Return the peak of temporary memory in a step on all these tensors.

        The step is measured on one, two and three copies of the largest tensor. What the second and the third one add
        is scaled to the second largest tensor and to the others: nothing for classes that update tensor by tensor and
        free everything in between, all of it for `foreach` implementations.
        """
        largest, *others = sorted(tensors, key=lambda tensor: math.prod(tensor[0]), reverse=True)
        one, two, three = (self._measure(largest, copies).temporary for copies in (1, 2, 3))
        second, *rest = [math.prod(shape) / max(1, math.prod(largest[0])) for shape, _ in others] or [0.0]
        return round(one + (two - one) * second + (three - two) * sum(rest))

    def _measure(self, tensor: TensorMeta, copies: int = 1) -> StepMemory:
        if (tensor, copies) not in self._measured:
            self._measured[tensor, copies] = self._measure_on_meta(tensor, copies) or self._extrapolate(tensor)
        return self._measured[tensor, copies]

    def _measure_on_meta(self, tensor: TensorMeta, copies: int) -> StepMemory | None:
        """Step on meta tensors. Return None if the optimizer does not support them."""
        with isolated_probe(self._factory), suppress(Exception):
            return measure_step(self._factory, [tensor] * copies, "meta")
        return None

    def _extrapolate(self, tensor: TensorMeta) -> StepMemory:
        """Extrapolate from one small and one larger CPU tensor. Raises what the optimizer raises."""
        (shape, dtype), columns = tensor, 1024
        if not self._cpu_probes:
            with isolated_probe(self._factory):
                probes = (measure_step(self._factory, [((rows, columns), dtype)], "cpu") for rows in _PROBE_ROWS)
                self._cpu_probes = list(probes)
        position = (math.prod(shape) / columns - _PROBE_ROWS[0]) / (_PROBE_ROWS[1] - _PROBE_ROWS[0])
        small, large = self._cpu_probes
        return StepMemory(*(low + position * (high - low) for low, high in zip(small, large, strict=True)))


def measure_step(factory: OptimizerFactory, tensors: Sequence[TensorMeta], device: str) -> StepMemory:
    """Measure the second step on these tensors: the first one also creates state."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape, dtype in tensors]
    inner = build_for_probes(factory, factory.groups[0], params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with MemoryTracker() as tracker:
            step_once(inner)
    sizes: list[int] = []
    for state in inner.optimizer.state.values():
        map_tensors(state, lambda tensor: sizes.append(_nbytes(tensor)))
    return StepMemory(sum(sizes), tracker.peak_bytes)


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(map(_nbytes, inner_tensors(tensor).values())) if is_wrapper_subclass(tensor) else tensor.nbytes


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in inputs | self._live_storages:
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
