"""CPU offload: optimizer state is kept in host memory and is updated on the device, bucket by bucket.

While one bucket is updated, the state of the next bucket is prefetched and that of the previous one is written back::

    prefetch    | bucket 0 | bucket 1 | bucket 2 |          |
    step        |          | bucket 0 | bucket 1 | bucket 2 |
    write back  |          |          | bucket 0 | bucket 1 | bucket 2 |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch

from ..profiling import Phase, StepProfiler
from .flat_params import FlatParam, ShardStorage, State
from .host_buffers import HostTransfer, HostTransfers, is_offloadable
from .inner import InnerOptimizer, LocalOptimizer, ParamGroup
from .optimizer_shard import OptimizerShard


def is_offload_device(device: torch.device) -> bool:
    """Return whether offloading saves memory on this device."""
    return device.type == "cuda"


class OffloadPipeline:
    """Steps inner optimizers whose state is kept in host memory."""

    def __init__(self, host_transfers: HostTransfers, storage: ShardStorage, profiler: StepProfiler) -> None:
        self._host_transfers, self._storage, self._profiler = host_transfers, storage, profiler

    def step(self, optimizer_shard: OptimizerShard, kwargs: dict[str, Any]) -> Any:
        """Step an inner optimizer bucket by bucket and return the result of its `step`.

        State of flat params without a gradient stays in host memory, unless the optimizer updates those too.
        """
        split_step, update_all = _SplitStep(optimizer_shard.inner, kwargs), optimizer_shard.traits.updates_without_grads
        to_update = [flat_param for flat_param in optimizer_shard if update_all or flat_param.param.grad is not None]

        def update(flat_params: Sequence[FlatParam]) -> None:
            # The callbacks run in reverse order, also when the inner step fails.
            with ExitStack() as callbacks, self._profiler.phase(Phase.INNER_STEP, optimizer_shard.name):
                callbacks.callback(self._storage.write_params, flat_params)
                callbacks.callback(optimizer_shard.flat_params.rebind, flat_params)
                split_step.step_params(flat_params)

        self._run_batches(optimizer_shard.inner, to_update, update)
        if not to_update:
            split_step.step_params([])  # the optimizer may count its steps
        return split_step.result

    def for_each_bucket(self, optimizer_shard: OptimizerShard, action: Callable[[], object]) -> None:
        """Call `action` once per bucket, with the inner optimizer restricted to it and its state on the device."""

        def run_action(flat_params: Sequence[FlatParam]) -> None:
            with optimizer_shard.inner.restrict_to({id(flat_param.param) for flat_param in flat_params}):
                action()

        self._run_batches(optimizer_shard.inner, list(optimizer_shard), run_action)

    def _run_batches(
        self,
        local_optimizer: LocalOptimizer,
        flat_params: Sequence[FlatParam],
        action: Callable[[Sequence[FlatParam]], None],
    ) -> None:
        by_bucket = [list(run) for _, run in groupby(sorted(flat_params, key=_bucket_of), key=_bucket_of)]
        host_transfers = [self._host_transfers.for_device(run[0].param.device) for run in by_bucket]
        buckets = [
            _OffloadedBucket(bucket_params, host_transfer, local_optimizer, self._storage, self._profiler)
            for bucket_params, host_transfer in zip(by_bucket, host_transfers, strict=True)
        ]
        try:
            for position, bucket in enumerate(buckets):
                for upcoming in buckets[position : position + 2]:
                    upcoming.prefetch()
                bucket.wait_for_prefetch()
                action(bucket.flat_params)
                bucket.write_back()
        finally:
            self._write_back_all(buckets)

    def _write_back_all(self, buckets: Sequence["_OffloadedBucket"]) -> None:
        """Write back every bucket that is still on the device and wait. Raises the first error at the end."""
        first_error: Exception | None = None
        for bucket in buckets:
            try:
                bucket.write_back()
            except Exception as error:
                first_error = first_error or error
        with self._profiler.phase(Phase.OFFLOAD_STATE):
            self._host_transfers.synchronize()
        if first_error is not None:
            raise first_error


class _OffloadedBucket:
    """The flat params of one bucket, with their state and master weights."""

    def __init__(
        self,
        flat_params: Sequence[FlatParam],
        host_transfer: HostTransfer,
        local_optimizer: LocalOptimizer,
        storage: ShardStorage,
        profiler: StepProfiler,
    ) -> None:
        self.flat_params, self._host_transfer = flat_params, host_transfer
        self._local_optimizer, self._profiler = local_optimizer, profiler
        self._bucket_index = _bucket_of(flat_params[0])
        self._storage = storage
        self._host_tensors: dict[tuple[int, Any], torch.Tensor] = {}
        self._is_on_device = False
        self._prefetch_event: Any = None

    def prefetch(self) -> None:
        """Start copying state and master weights to the device, unless they are there."""
        if self._is_on_device or not is_offload_device(self.flat_params[0].param.device):
            return
        self._is_on_device = True
        with self._profiler.phase(Phase.PREFETCH_STATE, self._bucket_index), self._host_transfer.use_h2d_stream():
            self._storage.prefetch_masters(self._bucket_index, self._host_transfer)
            for position, state, key, value in self._offloadable_state():
                if value.device.type == "cpu":
                    self._host_tensors[position, key] = value
                    state[key] = self._host_transfer.prefetch(value)
        self._prefetch_event = self._host_transfer.record_prefetch()

    def wait_for_prefetch(self) -> None:
        """Make the current stream wait for the prefetch."""
        self._host_transfer.wait_event(self._prefetch_event)

    def write_back(self) -> None:
        """Start copying state and master weights back to the host, unless they are there.

        State created by this step gets new host memory. If that allocation fails, the state stays on the device, and
        later steps use it there.
        """
        if not self._is_on_device:
            return
        self._is_on_device = False
        with self._profiler.phase(Phase.OFFLOAD_STATE, self._bucket_index):
            self._storage.write_back_masters(self._bucket_index, self._host_transfer)
            for position, state, key, value in self._offloadable_state():
                host_tensor = self._host_transfer.allocate(value, self._host_tensors.get((position, key)))
                self._host_transfer.write_back(value, host_tensor)
                state[key] = host_tensor

    def _offloadable_state(self) -> Iterator[tuple[int, State, Any, torch.Tensor]]:
        """Yield the position of the flat param, its state, and a key and value of it that can be offloaded."""
        for position, flat_param in enumerate(self.flat_params):
            state = self._local_optimizer.optimizer.state.get(flat_param.param, {})
            for key, value in list(state.items()):
                if is_offloadable(value):
                    yield position, state, key, value


class _SplitStep:
    """Several calls of `step`, each for a subset of the parameters, that count as one step.

    Every call starts from the options and step counters as they were before the step; the last call advances them.
    """

    def __init__(self, local_optimizer: LocalOptimizer, kwargs: dict[str, Any]) -> None:
        self._local_optimizer, self._kwargs = local_optimizer, kwargs
        self._options = [dict(group) for group in local_optimizer.optimizer.param_groups]
        self._restore_counters = local_optimizer.snapshot_counters()
        self._has_started = False
        self.result: Any = None

    def step_params(self, flat_params: Sequence[FlatParam]) -> None:
        if self._has_started:
            self._restore_counters()
            self._local_optimizer.push_options(self._options)
        self._has_started = True
        with self._local_optimizer.restrict_to({id(flat_param.param) for flat_param in flat_params}):
            self.result = self._local_optimizer.step(**self._kwargs)


def _bucket_of(flat_param: FlatParam) -> int:
    return flat_param.bucket


class OffloadedOptimizer(InnerOptimizer):
    """Inner optimizers whose state is kept in host memory."""

    def __init__(self, members: Sequence[OptimizerShard], profiler: StepProfiler, pipeline: OffloadPipeline) -> None:
        super().__init__(members, profiler)
        self._optimizer_shards, self._pipeline = members, pipeline

    def run(self, outer_groups: Sequence[ParamGroup], closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.push_options(outer_groups)
        results = [self._pipeline.step(shard, kwargs) for shard in self._optimizer_shards]
        self.pull_options(outer_groups)
        return results[0] if closure is None else loss
