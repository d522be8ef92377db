"""What `zeroshard.shard` takes, read off the layout that it would make."""

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
# Answers of a planner: bytes on one rank, and what travels.


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that has most."""

    parameters: int
    """With the buffers of the model."""
    gradients: int
    """What stays of them until the step, as theory counts: in the dtype of the parameters."""
    state: int
    masters: int = 0
    """More precise copies of parameters."""
    backward_overhead: int = 0
    """At most beside all that, while gradients are made and sent."""
    step_overhead: int = 0
    """At most beside all that, while parameters are updated."""
    construction_peak: int = 0
    """At most while the optimizer is made: all that there is then."""
    host: int = 0
    """In host memory. State and masters that rest there are not among those above."""
    activations: int = 0
    """As the user says. They are there in backward."""

    @property
    def total(self) -> int:
        """What theory counts: parameters, gradients, state and masters."""
        return self.parameters + self.gradients + self.state + self.masters

    @property
    def buffers(self) -> int:
        """The most that comes on top."""
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
    """Of one step."""

    sent: int
    """Bytes, by each rank on the average."""
    messages: int
    """Collectives, one after the other."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Network:
    """Between any two ranks.

    bandwidth: bytes that a rank sends in a second.
    latency: seconds until a message of no length has arrived.
    within: the bandwidth inside a row of ranks that share the state, if it is another.
    """

    bandwidth: float = 50e9
    latency: float = 10e-6
    within: float | None = None

    def __post_init__(self) -> None:
        bandwidths = (self.bandwidth, self.bandwidth if self.within is None else self.within)
        if not all(0 < it < math.inf for it in bandwidths) or not 0 <= self.latency < math.inf:
            raise ConfigError(
                f"Network(...) takes bandwidths above 0 and a latency of 0 or more, not {bandwidths} and "
                f"{self.latency!r}: bytes a second, and seconds"
            )

    @property
    def shard_group_network(self) -> "Network":
        """That among the ranks of one row."""
        return Network(self.within or self.bandwidth, self.latency)

    def estimate_seconds(self, sent: float, messages: int, ranks: int) -> float:
        """Collectives of the best kind: each takes log2 N messages one after the other, and all links are busy.

        Rings take N - 1 of them: with many ranks and small buckets the truth lies above.
        """
        return messages * self.latency * (ranks - 1).bit_length() + sent / self.bandwidth


@dataclass(frozen=True)
class Estimate:
    """One way of training on so many ranks."""

    method: str
    ranks: int
    memory: MemoryEstimate
    traffic: Traffic
    state_imbalance: float = 1.0
    """State of the rank that has most, over the mean."""
    peer_checkpoint_bytes: int = 0
    """Bytes that a rank sends for a second copy."""


# ---------------------------------------------------------------------------------------------------------------------
# How much memory gradients take on their way to their owners: a backward pass, played through bucket by bucket.
#
# It follows runtime/grad_sync.py, as it is with NCCL: large gradients are copied into a buffer as they come and freed,
# small ones wait for their bucket to be full, and no more than two buckets are under way.


class BackwardSimulation:
    """What `in_backward` takes at most, and what `stays` for the next pass."""

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
        """`updated_in`: what parameters of a dtype are updated in. `rows` of ranks hold the same."""
        self._layout, self._frees_grads, self._reduce = layout, stage.frees, reduce
        self._update_dtype, self._rank, self._num_replicas = update_dtype, rank, num_replicas
        self._is_single_rank = layout.world_size * num_replicas == 1
        self._buffer_bytes = max(
            (self._wire_bytes(it) for it in self._trainable_buckets if len(it.slots) > 1), default=0
        )
        """Bytes of a buffer that all buckets of several parameters take turns in."""
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
        return [it for it in self._layout.buckets if self._layout.has_trainable_params(it.index)]

    def _wire_bytes(self, bucket: Bucket) -> int:
        return bucket.numel * self._wire_dtype(bucket).itemsize

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._reduce.wire_dtype(bucket.dtype)

    def _simulate(self) -> None:
        under_way: deque[int] = deque()
        for bucket in self._trainable_buckets:
            waiting = self._fill_bucket(bucket)
            if self._is_single_rank:
                self._memory.free(waiting)
                continue
            kept = self._start_reduce(bucket, waiting)
            under_way.append(kept)
            while len(under_way) > MAX_IN_FLIGHT:
                self._memory.free(under_way.popleft())

    def _fill_bucket(self, bucket: Bucket) -> int:
        """Gradients come, one after the other; bytes of those that wait."""
        packs, waiting = len(bucket.slots) > 1, 0
        if packs and not self._is_single_rank:
            self._acquire_buffer()
        for param in bucket.params:
            spec = self._layout.params[param]
            nbytes = spec.storage_numel * spec.dtype.itemsize
            self._memory.allocate(nbytes if self._frees_grads else 0)
            if packs and nbytes >= EAGER_COPY_MIN_BYTES and not self._is_single_rank and self._frees_grads:
                self._memory.free(nbytes)
            else:
                waiting += nbytes if self._frees_grads else 0
        return waiting

    def _acquire_buffer(self) -> None:
        """There is one to fill beside those that are under way, and they stay."""
        if self._buffer_memory.current < (MAX_IN_FLIGHT + 1) * self._buffer_bytes:
            self._buffer_memory.allocate(self._buffer_bytes)
            self._memory.allocate(self._buffer_bytes)

    def _start_reduce(self, bucket: Bucket, pending_bytes: int) -> int:
        """Bytes that are let go when it has arrived."""
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
        """Whether the only gradient of a bucket is what is sent; else it is copied for that."""
        (room,) = bucket.slots
        return self._frees_grads and room.span.length == bucket.numel and self._wire_dtype(bucket) == bucket.dtype

    def _accumulation_bytes(self, bucket: Bucket) -> int:
        """What it takes to add up slices in more precision than they travel in."""
        wire = self._wire_dtype(bucket)
        if bucket.has_equal_shards:
            exact = sum_dtype(wire) == wire and not self._reduce.fixed_order
            return 0 if exact else self._wire_bytes(bucket)
        return 0 if sum_dtype(wire) == wire else bucket.numel * sum_dtype(wire).itemsize

    def _cross_replica_bytes(self, bucket: Bucket) -> int:
        """A sum of this row, and in a fixed order those of all rows."""
        if self._num_replicas == 1:
            return 0
        exact = sum_dtype(self._wire_dtype(bucket))
        counted = (
            not bucket.has_equal_shards or self._update_dtype(bucket.dtype) == exact
        )  # it is among `_copied`, or stays
        apart = (not counted) + self._num_replicas * self._reduce.fixed_order
        return apart * bucket.shards[self._rank].length * exact.itemsize


@dataclass
class _PeakCounter:
    """Of water, in bytes."""

    current: int = 0
    peak: int = 0

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes


# ---------------------------------------------------------------------------------------------------------------------
# What is to be trained, how: all that estimates of every way of training have in common.


UpdatedTensor = tuple[ParamSpec, tuple[int, ...]]
"""One that an optimizer updates: a parameter that it is, or is a part of, and its shape."""


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its optimizers, and where it is trained."""

    model: ModelShape
    optimizer_class: OptimizerConstructor | Sequence[ParamRule]
    options: dict[str, Any]
    config: ZeroConfig
    device: torch.device
    network: Network
    activations: int = 0
    shard_group_size: int | None = None

    def validate(self) -> None:
        """Raise what making the optimizer would raise."""
        if self.shard_group_size is not None and (type(self.shard_group_size) is not int or self.shard_group_size < 1):
            raise ConfigError(
                f"plan(shard_group_size=...) takes a number of ranks from 1 on, not {self.shard_group_size!r}"
            )
        if self.shard_group_size is None and self.network.within is not None:
            raise ConfigError(
                "a bandwidth inside of rows was given, and no rows: say with shard_group_size how long they are"
            )
        for kind in self.optimizer_specs:
            reject_config_options(kind.factory.optimizer_class, kind.factory.defaults)
            kind.check_constructible()
        self.partitioning.validate_optimizer_specs()

    @cached_property
    def params_by_optimizer(self) -> list[list[ParamShape]]:
        """Parameters by the class that updates them."""
        if not self._rules:
            return [list(self.model.params)]
        by_name = {it.name: it for it in self.model.params}
        chosen = assign_params_to_rules([(it.name, it.to_meta_param()) for it in self.model.params], self._rules)
        return [[by_name[name] for name, _ in group] for group in chosen]

    @cached_property
    def optimizer_specs(self) -> list[OptimizerSpec]:
        if not self._rules:
            recipe = _make_factory(self.optimizer_class, self.params_by_optimizer[0], self.options)
            return [OptimizerSpec(recipe.name, recipe)]
        return [
            OptimizerSpec(name, _make_factory(rule.optimizer_class, group, rule.options), rule.partition)
            for name, rule, group in zip(
                make_class_names(self._rules), self._rules, self.params_by_optimizer, strict=True
            )
        ]

    @property
    def _rules(self) -> list[ParamRule]:
        """Empty if there is one class for all."""
        return list(self.optimizer_class) if isinstance(self.optimizer_class, (list, tuple)) else []

    @cached_property
    def optimizer_name(self) -> str:
        return " + ".join(kind.name for kind in self.optimizer_specs)

    @cached_property
    def partitioning(self) -> Partitioning:
        return Partitioning(self.config, self.optimizer_specs, reduces_grads=True, is_offloaded=self.is_offloaded)

    @cached_property
    def param_specs(self) -> list[ParamSpec]:
        return make_param_specs(self.params_by_optimizer, self.device)

    def shard_group_size_for(self, ranks: int) -> int:
        """How many of so many ranks share the state."""
        row = self.shard_group_size or ranks
        if ranks % row:
            raise ConfigError(f"shard_group_size={row} does not divide {ranks} ranks: plan for multiples of {row}")
        return row

    def network_for(self, ranks: int) -> Network:
        """That among so many ranks, which may be those of one row."""
        return self.network.shard_group_network if ranks == self.shard_group_size else self.network

    @property
    def is_offloaded(self) -> bool:
        return self.config.offload is not None and self.device.type != "cpu"

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What parameters of a dtype are updated in."""
        masters = self.config._master_policy
        return masters.dtype if masters is not None and masters.covers(dtype) else dtype

    def state_bytes(self, spec: ParamSpec, shape: tuple[int, ...]) -> int:
        """Of a tensor of that shape that is, or is a part of, a parameter."""
        return self._meters[spec.group].state_bytes(shape, self.update_dtype(spec.dtype)) if spec.trainable else 0

    def temporary_bytes(self, tensors: Sequence[UpdatedTensor], *, use_fused: bool) -> int:
        """Of a step on these. `fuses`: the fused implementation is taken where there is one."""
        found = 0
        for number, (kind, meter) in enumerate(zip(self.optimizer_specs, self._meters, strict=True)):
            shapes: list[TensorMeta] = [
                (shape, self.update_dtype(spec.dtype))
                for spec, shape in tensors
                if spec.group == number and spec.trainable
            ]
            fused = use_fused and self.device.type != "cpu" and can_choose_impl(kind.factory, "fused")
            if shapes and not fused and not kind.factory.defaults.get("fused"):
                found = max(found, meter.temporary_bytes(shapes))
        return found

    @cached_property
    def _meters(self) -> list[StateMeter]:
        return [StateMeter(_without_fused_kernels(self.device, kind.factory)) for kind in self.optimizer_specs]


def _make_factory(
    optimizer_class: Any, param_shapes: Sequence[ParamShape], options: dict[str, Any]
) -> OptimizerFactory:
    """One whose parameters the self-test can ask for dimensions and dtypes, on the CPU, and that take no memory."""
    params = [torch.empty((), dtype=it.dtype).expand(it.shape).requires_grad_(it.trainable) for it in param_shapes]
    return OptimizerFactory(optimizer_class, [{"params": params}], True, options)


def _without_fused_kernels(device: torch.device, factory: OptimizerFactory) -> OptimizerFactory:
    """What torch takes on that device by default: all tensors at once, where its class knows how to.

    Fused kernels are for tensors with memory; what is kept is the same.
    """
    defaults = {key: value for key, value in factory.defaults.items() if key != "fused"}
    if device.type != "cpu" and can_choose_impl(factory, "foreach"):
        defaults["foreach"] = True
    return replace(factory, defaults=defaults)


# ---------------------------------------------------------------------------------------------------------------------
# What `zeroshard.shard` takes, read off the layout that it would make.


@dataclass(frozen=True)
class ZeroShardMethod:
    """ZeRO-1 or ZeRO-2, by what is kept of gradients."""

    stage: ZeroStage

    @property
    def name(self) -> str:
        return f"zeroshard {2 if self.stage.frees else 1}"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        row = training.shard_group_size_for(ranks)
        return _ShardEstimator(training, self.stage, row, ranks // row).estimate(self.name)


ZERO1, ZERO2 = ZeroShardMethod(ZeroStage1()), ZeroShardMethod(ZeroStage2())


class _ShardEstimator:
    """That of the rank with most, in one of several rows of ranks that hold the same."""

    def __init__(self, training: TrainingSetup, stage: ZeroStage, shard_group_size: int, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._training, self._stage, self._frees_grads = training, stage, stage.frees
        order = {it.name: place for place, it in enumerate(training.model.params)}
        specs = sorted(training.param_specs, key=lambda spec: order[spec.name or ""])
        kinds = list(range(len(training.optimizer_specs)))
        self._layout = training.partitioning.extend_layout(Layout.empty(shard_group_size), specs, kinds)
        states, others = (
            self._layout.sum_per_rank(self._spec_state_bytes),
            self._layout.sum_per_rank(self._spec_grad_and_master_bytes),
        )
        self._peak_rank = Rank(max(range(shard_group_size), key=lambda rank: states[rank] + others[rank]))
        self._state_imbalance = max(states) * shard_group_size / sum(states) if any(states) else 1.0

    def estimate(self, name: str) -> Estimate:
        policy, ranks = self._training.config.peer_checkpoint, self._layout.world_size * self._num_replicas
        share = self._peer_checkpoint_bytes() if policy else 0
        held = max_shards_per_rank(ranks, policy.failure_domain_size) if policy else 0
        usage = self._estimate_memory()
        usage = replace(usage, host=usage.host + 2 * held * share)  # of this copy and of the next, which is under way
        return Estimate(name, ranks, usage, self._estimate_traffic(), self._state_imbalance, share if ranks > 1 else 0)

    def _peer_checkpoint_bytes(self) -> int:
        """What a second copy has of this rank: state, and parameters in the precision of their update."""
        masters = sum(map(self._master_bytes, self._layout.buckets))
        return self._state_bytes() + (masters or self._owned_param_bytes())

    def _estimate_memory(self) -> MemoryEstimate:
        training, transit = self._training, self._simulate_backward()
        parameters = sum(map(_bucket_nbytes, self._layout.buckets))
        gradients, slices = self._grad_bytes(), sum(map(self._reduced_grad_bytes, self._layout.buckets))
        masters, more = (
            sum(map(self._master_bytes, self._layout.buckets)),
            slices - (gradients if self._frees_grads else 0),
        )
        taken = MemoryEstimate(
            parameters=parameters + training.model.buffer_bytes,
            gradients=gradients,
            state=self._state_bytes(),
            masters=masters,
            backward_overhead=more + transit.peak_bytes,
            step_overhead=more
            + transit.persistent_bytes
            + training.temporary_bytes(list(self._updated_tensors()), use_fused=True),
            construction_peak=parameters + max(self._largest_bucket_bytes(), masters) + training.model.buffer_bytes,
            activations=training.activations,
        )
        return self._apply_offload(taken) if training.is_offloaded else taken

    def _simulate_backward(self) -> BackwardSimulation:
        reduce, updated_in = self._training.config._reduce_policy, self._training.update_dtype
        return BackwardSimulation(
            self._layout, self._stage, reduce, updated_in, rank=self._peak_rank, num_replicas=self._num_replicas
        )

    def _largest_bucket_bytes(self) -> int:
        """Parameters move into buckets one after the other; then masters are made."""
        return max(map(_bucket_nbytes, self._layout.buckets), default=0)

    def _apply_offload(self, memory: MemoryEstimate) -> MemoryEstimate:
        """State and masters of a bucket are on the device, and those of the next one on their way there."""
        buckets = list(map(self._offloaded_bytes, self._layout.buckets))
        here = max(map(sum, zip(buckets, [*buckets[1:], 0], strict=True)), default=0)
        made = memory.parameters + max(
            self._largest_bucket_bytes(), max(map(self._master_bytes, self._layout.buckets), default=0)
        )
        return replace(
            memory,
            state=0,
            masters=0,
            step_overhead=memory.step_overhead + here,
            construction_peak=made,
            host=sum(buckets),
        )

    def _offloaded_bytes(self, bucket: Bucket) -> int:
        """What of a bucket rests in host memory."""
        return self._master_bytes(bucket) + sum(
            self._training.state_bytes(*tensor) for tensor in self._updated_tensors_in(bucket)
        )

    def _spec_state_bytes(self, spec: ParamSpec, numel: int) -> float:
        return self._training.state_bytes(spec, spec.shape) * numel / spec.storage_numel if spec.storage_numel else 0.0

    def _spec_grad_and_master_bytes(self, spec: ParamSpec, numel: int) -> float:
        """Of gradients and masters."""
        updated = self._training.update_dtype(spec.dtype)
        return numel * updated.itemsize * (spec.trainable + (updated != spec.dtype))

    def _grad_bytes(self) -> int:
        """In the dtype of the parameters: all of them, or this rank's slices."""
        if not self._frees_grads:
            return sum(it.nbytes for it in self._training.model.trainable_params)
        return sum(it.shards[self._peak_rank].length * it.dtype.itemsize for it in self._trainable_buckets)

    def _reduced_grad_bytes(self, bucket: Bucket) -> int:
        """Of averaged gradients, in the dtype of the update."""
        itemsize = self._training.update_dtype(bucket.dtype).itemsize
        return (
            bucket.shards[self._peak_rank].length * itemsize if self._layout.has_trainable_params(bucket.index) else 0
        )

    def _master_bytes(self, bucket: Bucket) -> int:
        updated = self._training.update_dtype(bucket.dtype)
        return bucket.shards[self._peak_rank].length * updated.itemsize if updated != bucket.dtype else 0

    def _owned_param_bytes(self) -> int:
        return sum(it.shards[self._peak_rank].length * it.dtype.itemsize for it in self._layout.buckets)

    def _state_bytes(self) -> int:
        return sum(self._training.state_bytes(*tensor) for tensor in self._updated_tensors())

    def _updated_tensors(self) -> Iterator[UpdatedTensor]:
        """That this rank's optimizer updates: runs of pieces where it may join them, else one by one."""
        return chain.from_iterable(map(self._updated_tensors_in, self._layout.buckets))

    def _updated_tensors_in(self, bucket: Bucket) -> Iterator[UpdatedTensor]:
        for group, run in groupby(
            bucket.param_shards_of_rank(self._peak_rank), key=lambda it: self._layout.params[it.param].group
        ):
            pieces = list(run)
            runs = [pieces] if self._is_flattened(group) else [[piece] for piece in pieces]
            yield from map(self._make_updated_tensor, runs)

    def _is_flattened(self, group: int) -> bool:
        cutting = self._training.optimizer_specs[group].split_rule
        return (
            self._training.partitioning.is_split(group) and cutting is not None and cutting.granularity.is_elementwise
        )

    def _make_updated_tensor(self, param_shards: list[ParamShard]) -> UpdatedTensor:
        first, last = param_shards[0], param_shards[-1]
        spec = self._layout.params[first.param]
        whole = (
            len(param_shards) == 1
            and first.in_param.length == spec.storage_numel
            and not self._is_flattened(spec.group)
        )
        return spec, spec.shape if whole else (last.in_bucket.stop - first.in_bucket.start,)

    def _estimate_traffic(self) -> Traffic:
        """Each bucket of gradients to its owners, each of parameters back."""
        inside, across = self._shard_group_traffic(), self._cross_replica_traffic()
        sent, messages = inside.sent + across.sent, inside.messages + across.messages
        return Traffic(sent, messages, inside.seconds + across.seconds)

    def _shard_group_traffic(self) -> Traffic:
        ranks = self._layout.world_size
        if ranks == 1:
            return Traffic(0, 0)
        away = sum(it.numel * self._wire_dtype(it).itemsize for it in self._trainable_buckets)
        sent = (away + sum(map(_bucket_nbytes, self._trainable_buckets))) * (ranks - 1) // ranks
        messages = 2 * len(self._trainable_buckets)
        return Traffic(sent, messages, self._training.network_for(ranks).estimate_seconds(sent, messages, ranks))

    def _cross_replica_traffic(self) -> Traffic:
        """Sums of a row's slices meet those of the other rows."""
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
        """To each other row, of all slices of this one: all of them, or a part to be added up and the sums back."""
        exact = sum_dtype(self._training.config._reduce_policy.wire_dtype(bucket.dtype)).itemsize
        if self._uses_all_gather_across_replicas:
            return bucket.numel * exact
        back = self._training.update_dtype(bucket.dtype).itemsize if self._is_on_cpu else exact
        return bucket.numel * (exact + back) // self._num_replicas

    @property
    def _uses_all_gather_across_replicas(self) -> bool:
        """NCCL adds them up in an order of its own, unless everybody gets all of them; gloo in that of rows."""
        return self._training.config.deterministic_reduce and not self._is_on_cpu

    @property
    def _is_on_cpu(self) -> bool:
        return self._training.device.type == "cpu"

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """What gradients travel as: NCCL adds slices that differ in length up on the way, in more precision."""
        wire = self._training.config._reduce_policy.wire_dtype(bucket.dtype)
        return wire if bucket.has_equal_shards or self._is_on_cpu else sum_dtype(wire)

    @property
    def _trainable_buckets(self) -> list[Bucket]:
        return [it for it in self._layout.buckets if self._layout.has_trainable_params(it.index)]


def _bucket_nbytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
