"""State in host memory: it comes to the device bucket by bucket, is updated there, and goes back.

While one bucket is updated, the state of the next is on its way in, and that of the last on its way out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch

from ..profiling import Phase, StepProfiler
from .flat_params import FlatParam, OffloadedMasterStorage, ShardStorage, State
from .host_buffers import HostTransfer, HostTransfers, is_offloadable
from .inner import LocalOptimizer
from .optimizer_shard import OptimizerShard


def is_offload_device(device: torch.device) -> bool:
    """Whether the host can spare memory there."""
    return device.type == "cuda"


class OffloadPipeline:
    """Steps inner optimizers whose state rests in host memory."""

    def __init__(self, host_transfers: HostTransfers, storage: ShardStorage, profiler: StepProfiler) -> None:
        self._host_transfers, self._storage, self._profiler = host_transfers, storage, profiler

    def step(self, optimizer_shard: OptimizerShard, kwargs: dict[str, Any]) -> Any:
        """State of what has no gradient stays where it is, unless the optimizer moves that, too."""
        step, everything = _SplitStep(optimizer_shard.inner, kwargs), optimizer_shard.traits.updates_without_grads
        chosen = [segment for segment in optimizer_shard if everything or segment.param.grad is not None]

        def update(flat_params: Sequence[FlatParam]) -> None:
            with (
                ExitStack() as after,
                self._profiler.phase(Phase.INNER_STEP, optimizer_shard.name),
            ):  # also where it fails
                after.callback(self._storage.write_params, flat_params)
                after.callback(optimizer_shard.flat_params.rebind, flat_params)
                step.step_params(flat_params)

        self._run_batches(optimizer_shard.inner, chosen, update)
        if not chosen:
            step.step_params([])  # it may count its steps
        return step.result

    def for_each_bucket(self, optimizer_shard: OptimizerShard, action: Callable[[], object]) -> None:
        """Do something to all parameters of the inner optimizer and their state, on the device, some at a time."""

        def run_action(flat_params: Sequence[FlatParam]) -> None:
            with optimizer_shard.inner.restrict_to({id(segment.param) for segment in flat_params}):
                action()

        self._run_batches(optimizer_shard.inner, list(optimizer_shard), run_action)

    def _run_batches(
        self,
        local_optimizer: LocalOptimizer,
        flat_params: Sequence[FlatParam],
        action: Callable[[Sequence[FlatParam]], None],
    ) -> None:
        runs = [list(run) for _, run in groupby(sorted(flat_params, key=_bucket_of), key=_bucket_of)]
        hosts = [self._host_transfers.for_device(run[0].param.device) for run in runs]
        batches = [
            _OffloadedBucket(*it, local_optimizer, self._storage, self._profiler)
            for it in zip(runs, hosts, strict=True)
        ]
        try:
            for number, batch in enumerate(batches):
                for ahead in batches[number : number + 2]:
                    ahead.prefetch()
                batch.wait_for_prefetch()
                action(batch.flat_params)
                batch.write_back()
        finally:
            self._write_back_all(batches)

    def _write_back_all(self, batches: Sequence["_OffloadedBucket"]) -> None:
        """All that can be. What fails is raised at the end."""
        failure: Exception | None = None
        for batch in batches:
            try:
                batch.write_back()
            except Exception as error:
                failure = failure or error
        with self._profiler.phase(Phase.OFFLOAD_STATE):
            self._host_transfers.synchronize()
        if failure is not None:
            raise failure


class _OffloadedBucket:
    """Segments of a bucket, with their state and master weights."""

    def __init__(
        self,
        flat_params: Sequence[FlatParam],
        host_transfer: HostTransfer,
        local_optimizer: LocalOptimizer,
        storage: ShardStorage,
        profiler: StepProfiler,
    ) -> None:
        self.flat_params, self._host_transfer, self._local_optimizer, self._profiler = (
            flat_params,
            host_transfer,
            local_optimizer,
            profiler,
        )
        self._bucket_index = _bucket_of(flat_params[0])
        self._master_storage = storage if isinstance(storage, OffloadedMasterStorage) else None
        self._host_tensors: dict[tuple[int, Any], torch.Tensor] = {}
        self._is_on_device = False
        self._prefetch_event: Any = None

    def prefetch(self) -> None:
        """Start bringing everything to the device."""
        if self._is_on_device or not is_offload_device(self.flat_params[0].param.device):
            return
        self._is_on_device = True
        with self._profiler.phase(Phase.PREFETCH_STATE, self._bucket_index), self._host_transfer.use_h2d_stream():
            if self._master_storage is not None:
                self._master_storage.prefetch(self._bucket_index, self._host_transfer)
            for place, state, key, value in self._offloadable_state():
                if value.device.type == "cpu":
                    self._host_tensors[place, key] = value
                    state[key] = self._host_transfer.prefetch(value)
        self._prefetch_event = self._host_transfer.record_prefetch()

    def wait_for_prefetch(self) -> None:
        self._host_transfer.wait_event(self._prefetch_event)

    def write_back(self) -> None:
        """Start bringing it back; what is there for the first time gets a home. State for which there is no memory
        stays on the device, and is used there."""
        if not self._is_on_device:
            return
        self._is_on_device = False
        with self._profiler.phase(Phase.OFFLOAD_STATE, self._bucket_index):
            if self._master_storage is not None:
                self._master_storage.write_back(self._bucket_index, self._host_transfer)
            for place, state, key, value in self._offloadable_state():
                home = self._host_transfer.allocate(value, self._host_tensors.get((place, key)))
                self._host_transfer.write_back(value, home)
                state[key] = home

    def _offloadable_state(self) -> Iterator[tuple[int, State, Any, torch.Tensor]]:
        for place, segment in enumerate(self.flat_params):
            state = self._local_optimizer.optimizer.state.get(segment.param, {})
            for key, value in list(state.items()):
                if is_offloadable(value):
                    yield place, state, key, value


class _SplitStep:
    """Many calls of `step`, each on some parameters, that count as one."""

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
        with self._local_optimizer.restrict_to({id(segment.param) for segment in flat_params}):
            self.result = self._local_optimizer.step(**self._kwargs)


def _bucket_of(flat_param: FlatParam) -> int:
    return flat_param.bucket
