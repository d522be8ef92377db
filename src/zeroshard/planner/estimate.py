"""Estimate the memory and communication of a training step with `zeroshard.shard`.

The estimate uses the real layout: it partitions the model as `shard` would and counts bytes on the rank with the most.
Optimizer state is measured on meta tensors (`StateMeter`), and `BackwardSimulation` replays a backward pass bucket by
bucket to find the peak of gradient memory. Nothing is allocated.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from .._types import Rank
from ..build import Partitioning
from ..config import Reduce, ZeroConfig, ZeroStage, ZeroStage1, ZeroStage2, reject_config_options, sum_dtype
from ..engine.grad_reducer import EAGER_COPY_MIN_BYTES, MAX_IN_FLIGHT
from ..engine.inner import OptimizerConstructor, OptimizerFactory, can_choose_impl
from ..engine.optimizer_shard import OptimizerSpec
from ..errors import ConfigError
from ..layout.layout import Bucket, Layout, ParamShard
from ..layout.spec import ParamSpec
from ..peer_checkpoint.placement import max_shards_per_rank
from ..rules import ParamRule, assign_params_to_rules, make_class_names
from .meter import StateMeter, TensorMeta
from .shapes import ModelShape, ParamShape, make_param_specs

# ---------------------------------------------------------------------------------------------------------------------
# Results: bytes on one rank, and traffic of a step.


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank with the highest memory use."""

    parameters: int
    """Parameters and buffers of the model."""
    gradients: int
    """Gradients that are kept until the step, in the dtype of the parameters, as the ZeRO paper counts."""
    state: int
    masters: int = 0
    """Master weights."""
    backward_overhead: int = 0
    """Peak of temporary memory during backward, on top of the above."""
    step_overhead: int = 0
    """Peak of temporary memory during the step, on top of the above."""
    construction_peak: int = 0
    """Peak of all memory while the optimizer is constructed."""
    host: int = 0
    """Bytes in host memory. Offloaded state and masters count here, not above."""
    activations: int = 0
    """Activations during backward, as given by the user."""

    @property
    def total(self) -> int:
        """Parameters, gradients, state and masters, as the ZeRO paper counts."""
        return self.parameters + self.gradients + self.state + self.masters

    @property
    def buffers(self) -> int:
        """The larger of both overheads."""
        return max(self.backward_overhead, self.step_overhead)

    @property
    def phase_peaks(self) -> dict[str, int]:
        return {
            "making the optimizer": self.construction_peak,
            "backward": self.total + self.backward_overhead + self.activations,
            "step": self.total + self.step_overhead,
        }

    @property
    def peak(self) -> int:
        return max(self.phase_peaks.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phase_peaks, key=lambda phase: self.phase_peaks[phase])


class Traffic(NamedTuple):
    """Communication of one step."""

    sent: int
    """Bytes that a rank sends, on average."""
    messages: int
    """Number of collectives, one after the other."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Network:
    """The network between any two ranks.

    bandwidth: bytes per second that a rank sends.
    latency: seconds of an empty message.
    within: bandwidth inside a shard group, if it differs.
    """

    bandwidth: float = 50e9
    latency: float = 10e-6
    within: float | None = None

    def __post_init__(self) -> None:
        bandwidths = (self.bandwidth, self.bandwidth if self.within is None else self.within)
        if not all(0 < bandwidth < math.inf for bandwidth in bandwidths) or not 0 <= self.latency < math.inf:
            raise ConfigError(
                f"Network(...) takes bandwidths above 0 and a latency of 0 or more, not {bandwidths} and "
                f"{self.latency!r}: bytes a second, and seconds"
            )

    @property
    def shard_group_network(self) -> "Network":
        """The network among the ranks of one shard group."""
        return Network(self.within or self.bandwidth, self.latency)

    def estimate_seconds(self, sent: float, messages: int, ranks: int) -> float:
        """Return the time of optimal collectives: log2 N sequential messages each, at full bandwidth.

        Ring algorithms take N - 1 messages, so this is a lower bound for many ranks and small buckets.
        """
        return messages * self.latency * (ranks - 1).bit_length() + sent / self.bandwidth


@dataclass(frozen=True)
class Estimate:
    """The estimate of one training method on a number of ranks."""

    method: str
    ranks: int
    memory: MemoryEstimate
    traffic: Traffic
    state_imbalance: float = 1.0
    """State bytes of the fullest rank, divided by the mean."""
    peer_checkpoint_bytes: int = 0
    """Bytes that a rank sends for one peer checkpoint."""


# ---------------------------------------------------------------------------------------------------------------------
# Backward simulation: the memory of gradients that are being reduced.
#
# It follows engine/grad_reducer.py as it runs with NCCL: large gradients are copied into a bucket buffer when they are
# ready and freed, small ones wait until their bucket is full, and at most MAX_IN_FLIGHT (2) buckets are in flight.


class BackwardSimulation:
    """Simulates the memory of gradient reduction during a backward pass.

    `peak_bytes` is the most memory in use at one time; `persistent_bytes` are the bucket buffers that stay allocated
    for the next pass.
    """

    def __init__(
        self,
        layout: Layout,
        stage: ZeroStage,
        reduce: Reduce,
        update_dtype: Callable[[torch.dtype], torch.dtype],
        *,
        rank: Rank,
        num_replicas: int,
    ) -> None:
        """Run the simulation.

        Args:
            layout: layout of the shard group.
            stage: whether gradients are freed after they are reduced.
            reduce: dtype and order of the reduction.
            update_dtype: maps the dtype of parameters to the dtype of their update.
            rank: rank in the shard group whose memory is simulated.
            num_replicas: number of shard groups.
        """
        self._layout, self._frees_grads, self._reduce = layout, stage.frees, reduce
        self._update_dtype, self._rank, self._num_replicas = update_dtype, rank, num_replicas
        self._is_single_rank = layout.world_size * num_replicas == 1
        self._buffer_bytes = max(
            (self._wire_bytes(bucket) for bucket in self._trainable_buckets if len(bucket.slots) > 1), default=0
        )
        """Bytes of one pooled buffer, which fits any bucket of several parameters."""
        self._memory = _PeakCounter()
        self._buffer_memory = _PeakCounter()
        self._simulate()

    @property
    def peak_bytes(self) -> int:
        return self._memory.peak

    @property
    def persistent_bytes(self) -> int:
        return self._buffer_memory.peak

    @property
    def _trainable_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self._layout.buckets if self._layout.has_trainable_params(bucket.index)]

    def _wire_bytes(self, bucket: Bucket) -> int:
        return bucket.numel * self._wire_dtype(bucket).itemsize

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._reduce.wire_dtype(bucket.dtype)

    def _simulate(self) -> None:
        in_flight: deque[int] = deque()
        for bucket in self._trainable_buckets:
            waiting = self._fill_bucket(bucket)
            if self._is_single_rank:
                self._memory.free(waiting)
                continue
            held = self._start_reduce(bucket, waiting)
            in_flight.append(held)
            while len(in_flight) > MAX_IN_FLIGHT:
                self._memory.free(in_flight.popleft())

    def _fill_bucket(self, bucket: Bucket) -> int:
        """Produce the gradients of a bucket one by one; return the bytes of those that wait for the reduction."""
        is_packed, waiting = len(bucket.slots) > 1, 0
        if is_packed and not self._is_single_rank:
            self._acquire_buffer()
        for index in bucket.params:
            spec = self._layout.params[index]
            nbytes = spec.storage_numel * spec.dtype.itemsize
            self._memory.allocate(nbytes if self._frees_grads else 0)
            if is_packed and nbytes >= EAGER_COPY_MIN_BYTES and not self._is_single_rank and self._frees_grads:
                self._memory.free(nbytes)
            else:
                waiting += nbytes if self._frees_grads else 0
        return waiting

    def _acquire_buffer(self) -> None:
        """Take a buffer from the pool, which grows to one buffer being filled plus those in flight."""
        if self._buffer_memory.current < (MAX_IN_FLIGHT + 1) * self._buffer_bytes:
            self._buffer_memory.allocate(self._buffer_bytes)
            self._memory.allocate(self._buffer_bytes)

    def _start_reduce(self, bucket: Bucket, pending_bytes: int) -> int:
        """Start the reduction of a bucket; return the bytes that are freed when it is complete."""
        copied = self._accumulation_bytes(bucket) + self._cross_replica_bytes(bucket)
        if len(bucket.slots) > 1:
            self._memory.free(pending_bytes)
            self._memory.allocate(copied)
            return copied
        if self._is_zero_copy(bucket):
            self._memory.allocate(copied)
            return copied + pending_bytes
        copied += self._wire_bytes(bucket)
        self._memory.allocate(copied)
        self._memory.free(pending_bytes)
        return copied

    def _is_zero_copy(self, bucket: Bucket) -> bool:
        """Return whether the single gradient of a bucket is sent as it is, without a copy."""
        (slot,) = bucket.slots
        return self._frees_grads and slot.span.length == bucket.numel and self._wire_dtype(bucket) == bucket.dtype

    def _accumulation_bytes(self, bucket: Bucket) -> int:
        """Return the bytes needed to sum shards in a higher precision than they are sent in."""
        wire = self._wire_dtype(bucket)
        if bucket.has_equal_shards:
            is_exact = sum_dtype(wire) == wire and not self._reduce.fixed_order
            return 0 if is_exact else self._wire_bytes(bucket)
        return 0 if sum_dtype(wire) == wire else bucket.numel * sum_dtype(wire).itemsize

    def _cross_replica_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of this shard group's sum and, with a fixed order, of the sums of all replicas."""
        if self._num_replicas == 1:
            return 0
        accumulation_dtype = sum_dtype(self._wire_dtype(bucket))
        # Already counted if it is part of `_accumulation_bytes`, or if it is the reduced gradient itself.
        is_counted = not bucket.has_equal_shards or self._update_dtype(bucket.dtype) == accumulation_dtype
        num_shards = (not is_counted) + self._num_replicas * self._reduce.fixed_order
        return num_shards * bucket.shards[self._rank].length * accumulation_dtype.itemsize


@dataclass
class _PeakCounter:
    """Current and highest memory use, in bytes."""

    current: int = 0
    peak: int = 0

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes


# ---------------------------------------------------------------------------------------------------------------------
# Training setup: what the estimates of all methods share.


UpdatedTensor = tuple[ParamSpec, tuple[int, ...]]
"""A tensor that an optimizer updates: the parameter that it is, or is a part of, and its own shape."""


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its optimizers, and where it is trained: what the estimates of all methods share."""

    model: ModelShape
    optimizer_class: OptimizerConstructor | Sequence[ParamRule]
    options: dict[str, Any]
    config: ZeroConfig
    device: torch.device
    network: Network
    activations: int = 0
    shard_group_size: int | None = None

    def validate(self) -> None:
        """Raise the errors that constructing the optimizer would raise."""
        if self.shard_group_size is not None and (type(self.shard_group_size) is not int or self.shard_group_size < 1):
            raise ConfigError(
                f"plan(shard_group_size=...) takes a number of ranks from 1 on, not {self.shard_group_size!r}"
            )
        if self.shard_group_size is None and self.network.within is not None:
            raise ConfigError("a bandwidth inside shard groups was given without shard groups: set shard_group_size")
        for spec in self.optimizer_specs:
            reject_config_options(spec.factory.optimizer_class, spec.factory.defaults)
            spec.check_constructible()
        self.partitioning.validate_optimizer_specs()

    @cached_property
    def params_by_optimizer(self) -> list[list[ParamShape]]:
        """Parameters of each optimizer class."""
        if not self._rules:
            return [list(self.model.params)]
        by_name = {param.name: param for param in self.model.params}
        chosen = assign_params_to_rules(
            [(param.name, param.to_meta_param()) for param in self.model.params], self._rules
        )
        return [[by_name[name] for name, _ in group] for group in chosen]

    @cached_property
    def optimizer_specs(self) -> list[OptimizerSpec]:
        if not self._rules:
            factory = _make_factory(self.optimizer_class, self.params_by_optimizer[0], self.options)
            return [OptimizerSpec(factory.name, factory)]
        return [
            OptimizerSpec(name, _make_factory(rule.optimizer_class, group, rule.options), rule.partition)
            for name, rule, group in zip(
                make_class_names(self._rules), self._rules, self.params_by_optimizer, strict=True
            )
        ]

    @property
    def _rules(self) -> list[ParamRule]:
        """The parameter rules; empty if one class updates all parameters."""
        return list(self.optimizer_class) if isinstance(self.optimizer_class, (list, tuple)) else []

    @cached_property
    def optimizer_name(self) -> str:
        return " + ".join(spec.name for spec in self.optimizer_specs)

    @cached_property
    def partitioning(self) -> Partitioning:
        return Partitioning(self.config, self.optimizer_specs, reduces_grads=True, is_offloaded=self.is_offloaded)

    @cached_property
    def param_specs(self) -> list[ParamSpec]:
        return make_param_specs(self.params_by_optimizer, self.device)

    def shard_group_size_for(self, ranks: int) -> int:
        """Return the size of a shard group on this number of ranks."""
        size = self.shard_group_size or ranks
        if ranks % size:
            raise ConfigError(f"shard_group_size={size} does not divide {ranks} ranks: plan for multiples of {size}")
        return size

    def network_for(self, ranks: int) -> Network:
        """Return the network among this number of ranks, which may form one shard group."""
        return self.network.shard_group_network if ranks == self.shard_group_size else self.network

    @property
    def is_offloaded(self) -> bool:
        return self.config.offload is not None and self.device.type != "cpu"

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of a dtype are updated."""
        masters = self.config._master_policy
        return masters.dtype if masters is not None and masters.covers(dtype) else dtype

    def state_bytes(self, spec: ParamSpec, shape: tuple[int, ...]) -> int:
        """Return the state bytes of a tensor of this shape that is, or is a part of, a parameter."""
        return self._meters[spec.group].state_bytes(shape, self.update_dtype(spec.dtype)) if spec.trainable else 0

    def temporary_bytes(self, tensors: Sequence[UpdatedTensor], *, use_fused: bool) -> int:
        """Return the peak of temporaries in a step on these tensors. `use_fused`: use fused kernels if supported."""
        peak = 0
        for group_id, (optimizer, meter) in enumerate(zip(self.optimizer_specs, self._meters, strict=True)):
            shapes: list[TensorMeta] = [
                (shape, self.update_dtype(spec.dtype))
                for spec, shape in tensors
                if spec.group == group_id and spec.trainable
            ]
            fused = use_fused and self.device.type != "cpu" and can_choose_impl(optimizer.factory, "fused")
            if shapes and not fused and not optimizer.factory.defaults.get("fused"):
                peak = max(peak, meter.temporary_bytes(shapes))
        return peak

    @cached_property
    def _meters(self) -> list[StateMeter]:
        return [StateMeter(_without_fused_kernels(self.device, spec.factory)) for spec in self.optimizer_specs]


def _make_factory(
    optimizer_class: Any, param_shapes: Sequence[ParamShape], options: dict[str, Any]
) -> OptimizerFactory:
    """Return a factory with stand-in CPU parameters for the probes, each expanded from a single element."""
    params = [
        torch.empty((), dtype=shape.dtype).expand(shape.shape).requires_grad_(shape.trainable) for shape in param_shapes
    ]
    return OptimizerFactory(optimizer_class, [{"params": params}], True, options)


def _without_fused_kernels(device: torch.device, factory: OptimizerFactory) -> OptimizerFactory:
    """Return a factory with torch's default implementation on that device: foreach where the class supports it.

    Fused kernels do not run on meta tensors; the state is the same without them.
    """
    defaults = {key: value for key, value in factory.defaults.items() if key != "fused"}
    if device.type != "cpu" and can_choose_impl(factory, "foreach"):
        defaults["foreach"] = True
    return replace(factory, defaults=defaults)


# ---------------------------------------------------------------------------------------------------------------------
# Estimate of `zeroshard.shard`, from the layout that it would make.


@dataclass(frozen=True)
class ZeroShardMethod:
    """`zeroshard.shard` with ZeRO-1 or ZeRO-2."""

    stage: ZeroStage

    @property
    def name(self) -> str:
        return f"zeroshard {2 if self.stage.frees else 1}"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        shard_group_size = training.shard_group_size_for(ranks)
        return _ShardEstimator(training, self.stage, shard_group_size, ranks // shard_group_size).estimate(self.name)


ZERO1, ZERO2 = ZeroShardMethod(ZeroStage1()), ZeroShardMethod(ZeroStage2())


class _ShardEstimator:
    """Estimates the rank with the highest memory use in a shard group. All replicas are the same."""

    def __init__(self, training: TrainingSetup, stage: ZeroStage, shard_group_size: int, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._training, self._stage, self._frees_grads = training, stage, stage.frees
        order = {param.name: index for index, param in enumerate(training.model.params)}
        specs = sorted(training.param_specs, key=lambda spec: order[spec.name or ""])
        groups = list(range(len(training.optimizer_specs)))
        self._layout = training.partitioning.extend_layout(Layout.empty(shard_group_size), specs, groups)
        states = self._layout.sum_per_rank(self._spec_state_bytes)
        others = self._layout.sum_per_rank(self._spec_grad_and_master_bytes)
        self._peak_rank = Rank(max(range(shard_group_size), key=lambda rank: states[rank] + others[rank]))
        self._state_imbalance = max(states) * shard_group_size / sum(states) if any(states) else 1.0

    def estimate(self, name: str) -> Estimate:
        policy, ranks = self._training.config.peer_checkpoint, self._layout.world_size * self._num_replicas
        snapshot_bytes = self._peer_checkpoint_bytes() if policy else 0
        num_shards = max_shards_per_rank(ranks, policy.failure_domain_size) if policy else 0
        memory = self._estimate_memory()
        memory = replace(
            memory, host=memory.host + 2 * num_shards * snapshot_bytes
        )  # the current snapshot and the next one in flight
        return Estimate(
            name, ranks, memory, self._estimate_traffic(), self._state_imbalance, snapshot_bytes if ranks > 1 else 0
        )

    def _peer_checkpoint_bytes(self) -> int:
        """Return the bytes of this rank's peer snapshot: state, and parameters in the dtype of their update."""
        masters = sum(map(self._master_bytes, self._layout.buckets))
        return self._state_bytes() + (masters or self._owned_param_bytes())

    def _estimate_memory(self) -> MemoryEstimate:
        training, backward = self._training, self._simulate_backward()
        parameters = sum(map(_bucket_nbytes, self._layout.buckets))
        gradients, reduced = self._grad_bytes(), sum(map(self._reduced_grad_bytes, self._layout.buckets))
        masters = sum(map(self._master_bytes, self._layout.buckets))
        # The reduced gradients beyond what counts as gradients: a wider dtype, or all of them with ZeRO-1.
        extra = reduced - (gradients if self._frees_grads else 0)
        memory = MemoryEstimate(
            parameters=parameters + training.model.buffer_bytes,
            gradients=gradients,
            state=self._state_bytes(),
            masters=masters,
            backward_overhead=extra + backward.peak_bytes,
            step_overhead=extra
            + backward.persistent_bytes
            + training.temporary_bytes(list(self._updated_tensors()), use_fused=True),
            construction_peak=parameters + max(self._largest_bucket_bytes(), masters) + training.model.buffer_bytes,
            activations=training.activations,
        )
        return self._apply_offload(memory) if training.is_offloaded else memory

    def _simulate_backward(self) -> BackwardSimulation:
        reduce, update_dtype = self._training.config._reduce_policy, self._training.update_dtype
        return BackwardSimulation(
            self._layout, self._stage, reduce, update_dtype, rank=self._peak_rank, num_replicas=self._num_replicas
        )

    def _largest_bucket_bytes(self) -> int:
        """Return the largest bucket. Parameters move into buckets one by one; then masters are allocated."""
        return max(map(_bucket_nbytes, self._layout.buckets), default=0)

    def _apply_offload(self, memory: MemoryEstimate) -> MemoryEstimate:
        """Move state and masters to the host. The device holds those of one bucket while the next one is prefetched."""
        bucket_bytes = list(map(self._offloaded_bytes, self._layout.buckets))
        on_device = max(map(sum, zip(bucket_bytes, [*bucket_bytes[1:], 0], strict=True)), default=0)
        construction_peak = memory.parameters + max(
            self._largest_bucket_bytes(), max(map(self._master_bytes, self._layout.buckets), default=0)
        )
        return replace(
            memory,
            state=0,
            masters=0,
            step_overhead=memory.step_overhead + on_device,
            construction_peak=construction_peak,
            host=sum(bucket_bytes),
        )

    def _offloaded_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of a bucket that are offloaded to host memory."""
        return self._master_bytes(bucket) + sum(
            self._training.state_bytes(*tensor) for tensor in self._updated_tensors_in(bucket)
        )

    def _spec_state_bytes(self, spec: ParamSpec, numel: int) -> float:
        return self._training.state_bytes(spec, spec.shape) * numel / spec.storage_numel if spec.storage_numel else 0.0

    def _spec_grad_and_master_bytes(self, spec: ParamSpec, numel: int) -> float:
        updated = self._training.update_dtype(spec.dtype)
        return numel * updated.itemsize * (spec.trainable + (updated != spec.dtype))

    def _grad_bytes(self) -> int:
        """Return the bytes of kept gradients in the dtype of the parameters: all of them, or this rank's shards."""
        if not self._frees_grads:
            return sum(param.nbytes for param in self._training.model.trainable_params)
        return sum(bucket.shards[self._peak_rank].length * bucket.dtype.itemsize for bucket in self._trainable_buckets)

    def _reduced_grad_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of this rank's reduced gradients, in the dtype of the update."""
        itemsize = self._training.update_dtype(bucket.dtype).itemsize
        return (
            bucket.shards[self._peak_rank].length * itemsize if self._layout.has_trainable_params(bucket.index) else 0
        )

    def _master_bytes(self, bucket: Bucket) -> int:
        updated = self._training.update_dtype(bucket.dtype)
        return bucket.shards[self._peak_rank].length * updated.itemsize if updated != bucket.dtype else 0

    def _owned_param_bytes(self) -> int:
        return sum(bucket.shards[self._peak_rank].length * bucket.dtype.itemsize for bucket in self._layout.buckets)

    def _state_bytes(self) -> int:
        return sum(self._training.state_bytes(*tensor) for tensor in self._updated_tensors())

    def _updated_tensors(self) -> Iterator[UpdatedTensor]:
        """Return the tensors that this rank's optimizer updates: flat params if elementwise, else single shards."""
        return chain.from_iterable(map(self._updated_tensors_in, self._layout.buckets))

    def _updated_tensors_in(self, bucket: Bucket) -> Iterator[UpdatedTensor]:
        for group, shards in groupby(
            bucket.param_shards_of_rank(self._peak_rank), key=lambda shard: self._layout.params[shard.param].group
        ):
            param_shards = list(shards)
            runs = [param_shards] if self._is_flattened(group) else [[shard] for shard in param_shards]
            yield from map(self._make_updated_tensor, runs)

    def _is_flattened(self, group: int) -> bool:
        split_rule = self._training.optimizer_specs[group].split_rule
        return (
            self._training.partitioning.is_split(group)
            and split_rule is not None
            and split_rule.granularity.is_elementwise
        )

    def _make_updated_tensor(self, param_shards: list[ParamShard]) -> UpdatedTensor:
        first, last = param_shards[0], param_shards[-1]
        spec = self._layout.params[first.param]
        is_whole_param = (
            len(param_shards) == 1
            and first.in_param.length == spec.storage_numel
            and not self._is_flattened(spec.group)
        )
        return spec, spec.shape if is_whole_param else (last.in_bucket.stop - first.in_bucket.start,)

    def _estimate_traffic(self) -> Traffic:
        """Return the traffic of reduce-scattering all gradients and all-gathering all parameters."""
        inside, across = self._shard_group_traffic(), self._cross_replica_traffic()
        sent, messages = inside.sent + across.sent, inside.messages + across.messages
        return Traffic(sent, messages, inside.seconds + across.seconds)

    def _shard_group_traffic(self) -> Traffic:
        ranks = self._layout.world_size
        if ranks == 1:
            return Traffic(0, 0)
        reduced = sum(bucket.numel * self._wire_dtype(bucket).itemsize for bucket in self._trainable_buckets)
        sent = (reduced + sum(map(_bucket_nbytes, self._trainable_buckets))) * (ranks - 1) // ranks
        messages = 2 * len(self._trainable_buckets)
        return Traffic(sent, messages, self._training.network_for(ranks).estimate_seconds(sent, messages, ranks))

    def _cross_replica_traffic(self) -> Traffic:
        """Return the traffic of reducing gradient shards across replicas."""
        if self._num_replicas == 1:
            return Traffic(0, 0)
        sent = (
            sum(map(self._cross_replica_bytes, self._trainable_buckets))
            * (self._num_replicas - 1)
            // self._layout.world_size
        )
        messages = (1 if self._uses_all_gather_across_replicas else 2) * len(self._trainable_buckets)
        return Traffic(sent, messages, self._training.network.estimate_seconds(sent, messages, self._num_replicas))

    def _cross_replica_bytes(self, bucket: Bucket) -> int:
        """Return the bytes to each other replica: of an all-gather, or of a reduce-scatter and an all-gather."""
        sum_itemsize = sum_dtype(self._training.config._reduce_policy.wire_dtype(bucket.dtype)).itemsize
        if self._uses_all_gather_across_replicas:
            return bucket.numel * sum_itemsize
        result_itemsize = self._training.update_dtype(bucket.dtype).itemsize if self._is_on_cpu else sum_itemsize
        return bucket.numel * (sum_itemsize + result_itemsize) // self._num_replicas

    @property
    def _uses_all_gather_across_replicas(self) -> bool:
        """A fixed summation order on NCCL needs an all-gather; gloo always sums in replica order."""
        return self._training.config.deterministic_reduce and not self._is_on_cpu

    @property
    def _is_on_cpu(self) -> bool:
        return self._training.device.type == "cpu"

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which gradients are sent. NCCL reduces uneven shards in flight, in a higher precision."""
        wire = self._training.config._reduce_policy.wire_dtype(bucket.dtype)
        return wire if bucket.has_equal_shards or self._is_on_cpu else sum_dtype(wire)

    @property
    def _trainable_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self._layout.buckets if self._layout.has_trainable_params(bucket.index)]


def _bucket_nbytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
