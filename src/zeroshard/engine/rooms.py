"""Memory for state that is about to be loaded: the present state's own wherever it will do, else new."""

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from typing import Any

import torch

from ..layout.layout import Layout, ParamShard
from ..layout.spec import ParamSpec
from ..state.shard_tensor import ShardTensor, make_full_shard
from ..state.records import MASTER_KEY
from ..state.trees import dense_flat_view
from .masters import ShardStorage
from .flat_params import FlatParams, State

CPU = torch.device("cpu")
StateKeys = Set[tuple[int, Any]]
"""State to be loaded: parameters and keys."""


def allocate_full(current: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a value of which a rank has all."""
    if _is_reusable(current, shape, dtype) and dense_flat_view(current) is not None:
        return make_full_shard(current)
    return make_full_shard(torch.empty(shape, dtype=dtype, device=device if shape else "cpu"))


class ShardStateAllocator:
    """For the pieces of a rank. Neighbouring pieces share new memory, so that segments need not be put together."""

    def __init__(
        self,
        layout: Layout,
        flat_params: FlatParams,
        storage: ShardStorage,
        current_state: Mapping[int, State],
        state_keys: StateKeys,
        *,
        shared_inner_names: frozenset[str],
    ) -> None:
        """`present`: the state of each parameter that may be overwritten; `wanted`: all that memory will be asked for;
        `common`: see `StateRecord`."""
        self._layout, self._flat_params, self._storage, self._current_state = (
            layout,
            flat_params,
            storage,
            current_state,
        )
        self._shared_inner_names, self._state_keys = shared_inner_names, state_keys
        self._allocated: dict[tuple[int, Any, torch.dtype], dict[int, torch.Tensor]] = {}

    def __call__(self, param_shard: ParamShard, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spec = self._layout.params[param_shard.param]
        present: Any = self._current_state.get(param_shard.param, {}).get(key)
        if self._flat_params.is_full_param(param_shard):
            return allocate_full(present, shape, dtype, spec.device if self._storage.host_transfers is None else CPU)
        if isinstance(key, tuple) and self._shared_inner_names.isdisjoint(key) and len(shape) == 1 and shape[0] > 1:
            return _allocate_inner(param_shard, spec, shape[0], dtype)
        if key != MASTER_KEY and not self._flat_params.has_param_shape(key, shape, spec.shape):
            # Several pieces may share the present value, a step count for example.
            return torch.empty(shape, dtype=dtype, device=spec.device if shape else "cpu")
        memory = (
            present.detach()
            if self._can_reuse(param_shard, key, dtype)
            else self._get_or_allocate(param_shard, key, dtype)
        )
        return ShardTensor(memory, spec.shape, spec.stride, param_shard.in_param.start)

    def _can_reuse(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> bool:
        return _is_reusable(
            self._current_state.get(param_shard.param, {}).get(key), (param_shard.in_param.length,), dtype
        )

    def _get_or_allocate(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> torch.Tensor:
        mark = (param_shard.bucket, key, dtype)
        if mark not in self._allocated:
            self._allocated[mark] = self._allocate_bucket(*mark)
        return self._allocated[mark][param_shard.param]

    def _allocate_bucket(self, bucket: int, key: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """For all pieces of a bucket whose state of that key needs new memory, by parameter."""

        def needs_allocation(param_shard: ParamShard) -> bool:
            is_wanted = (param_shard.param, key) in self._state_keys and not self._flat_params.is_full_param(
                param_shard
            )
            return is_wanted and not self._can_reuse(param_shard, key, dtype)

        new: dict[int, torch.Tensor] = {}
        for needed, run in groupby(
            self._layout.buckets[bucket].param_shards_of_rank(self._storage.rank), key=needs_allocation
        ):
            places = [(piece.param, self._storage.slice_in_shard(piece)) for piece in run if needed]
            if places:
                start, stop = places[0][1].start, places[-1][1].stop
                memory = self._storage.allocate_state(bucket, slice(start, stop), dtype)
                new |= {param: memory[span.start - start : span.stop - start] for param, span in places}
        return new


def _allocate_inner(param_shard: ParamShard, spec: ParamSpec, numel: int, dtype: torch.dtype) -> ShardTensor:
    """For what one of the tensors that make up a value has of a piece."""
    per = spec.numel // numel
    start, stop = (place // per for place in param_shard.in_param)
    return ShardTensor(torch.empty(stop - start, dtype=dtype, device=spec.device), (numel,), (1,), start)


def join_views(views: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor | None:
    """The flat tensor that has `parts` from those places on, if that is how they lie in memory."""
    first, last = views[0], views[-1]
    for part, start in zip(views, starts, strict=True):
        if part.dtype != first.dtype or _storage_ptr(part) != _storage_ptr(first):
            return None
        if part.storage_offset() != first.storage_offset() + start - starts[0]:
            return None
    return first.as_strided((starts[-1] - starts[0] + last.numel(),), (1,))


def _storage_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_reusable(current: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return type(current) is torch.Tensor and tuple(current.shape) == shape and current.dtype == dtype
