"""Estimate the memory and communication of a training step with `zeroshard.shard`.

The estimate uses the layout that `shard` would make and counts bytes on the rank with the most. Optimizer state is
measured on meta tensors (`OptimizerMeter`); the buffers of backward follow a formula (`_buffers_in_backward`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from .._types import Rank
from ..build import Partitioning
from ..config import ZeroConfig, reject_config_options, sum_dtype
from ..engine.inner import OptimizerConstructor, OptimizerFactory, can_choose_impl
from ..engine.optimizer_shard import OptimizerSpec
from ..errors import ConfigError
from ..layout.layout import Bucket, Layout
from ..layout.spec import ParamSpec, make_param_specs
from ..peer_checkpoint.placement import max_shards_per_rank
from ..rules import ParamRule, assign_params_to_rules, make_class_names
from .meter import OptimizerMeter
from .shapes import ModelShape, ParamShape

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
    """Peak of temporary memory during backward, on top of the above. Activations are not included."""
    step_overhead: int = 0
    """Peak of temporary memory during the step, on top of the above."""
    construction_peak: int = 0
    """Peak of all memory while the optimizer is constructed."""
    host: int = 0
    """Bytes in host memory. Offloaded state and masters count here, not above."""
    activations: int = 0
    """Activations during backward: those given by the user, and casts of parameters under autocast."""

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
            "construction": self.construction_peak,
            "backward": self.total + self.backward_overhead + self.activations,
            "step": self.total + self.step_overhead,
        }

    @property
    def peak(self) -> int:
        return max(self.phase_peaks.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phase_peaks, key=lambda phase: self.phase_peaks[phase])

    @property
    def breakdown(self) -> dict[str, int]:
        """Categories that add up to the peak."""
        parts = {name: getattr(self, name) for name in ("parameters", "gradients", "state", "masters")}
        parts["activations"] = self.activations if self.peak_phase == "backward" else 0
        return {**parts, "temporary": self.peak - sum(parts.values())}


class Traffic(NamedTuple):
    """Communication of one step."""

    sent: int = 0
    """Bytes that a rank sends, on average."""
    messages: int = 0
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
                f"expected Network(...) with bandwidths above 0 and a latency of 0 or more, in bytes per second and "
                f"seconds, got {bandwidths} and {self.latency!r}"
            )

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
    """State bytes of the rank with the most, divided by the mean."""
    peer_checkpoint_bytes: int = 0
    """Bytes that a rank sends for one peer checkpoint."""


# ---------------------------------------------------------------------------------------------------------------------
# Training setup: what the estimates of all methods share.


UpdatedTensor = tuple[ParamSpec, tuple[int, ...]]
"""A tensor that an optimizer updates: the parameter that it is, or is a part of, and its own shape."""


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its optimizers, and where it is trained. Construction raises what `shard` would raise."""

    model: ModelShape
    optimizer_class: OptimizerConstructor | Sequence[ParamRule]
    options: dict[str, Any]
    config: ZeroConfig
    device: torch.device
    network: Network
    activations: int = 0
    shard_group_size: int | None = None

    def __post_init__(self) -> None:
        size = self.shard_group_size
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"expected shard_group_size to be a positive number of ranks, got {size!r}")
        if size is None and self.network.within is not None:
            raise ConfigError("a bandwidth inside shard groups needs shard groups: set shard_group_size")
        for spec in self.optimizer_specs:
            reject_config_options(spec.factory.optimizer_class, spec.factory.defaults)
            spec.check_constructible()
        self.partitioning.validate_optimizer_specs()

    @cached_property
    def _param_groups(self) -> list[list[ParamShape]]:
        """The parameters of each optimizer."""
        if not self._rules:
            return [list(self.model.params)]
        by_name = {param.name: param for param in self.model.params}
        groups = assign_params_to_rules([(name, param.to_meta_param()) for name, param in by_name.items()], self._rules)
        return [[by_name[name] for name, _ in group] for group in groups]

    @cached_property
    def optimizer_specs(self) -> list[OptimizerSpec]:
        if not self._rules:
            factory = _make_factory(self.optimizer_class, self._param_groups[0], self.options)
            return [OptimizerSpec(factory.name, factory)]
        rules = zip(make_class_names(self._rules), self._rules, self._param_groups, strict=True)
        return [
            OptimizerSpec(name, _make_factory(rule.optimizer_class, group, rule.options), rule.partition)
            for name, rule, group in rules
        ]

    @property
    def _rules(self) -> list[ParamRule]:
        """The parameter rules; empty if one class updates all parameters."""
        return list(self.optimizer_class) if isinstance(self.optimizer_class, (list, tuple)) else []

    @cached_property
    def partitioning(self) -> Partitioning:
        return Partitioning(self.config, self.optimizer_specs, reduces_grads=True, is_offloaded=self.is_offloaded)

    @cached_property
    def param_specs(self) -> list[ParamSpec]:
        groups = [
            {"params": [param.to_meta_param() for param in group], "param_names": [param.name for param in group]}
            for group in self._param_groups
        ]
        return [replace(spec, device=self.device) for spec in make_param_specs(groups)]

    @property
    def is_offloaded(self) -> bool:
        return self.config.offload is not None and self.device.type != "cpu"

    @property
    def grad_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(param.nbytes for param in self.model.trainable_params)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of a dtype are updated."""
        masters = self.config._master_policy
        return masters.dtype if masters is not None and masters.covers(dtype) else dtype

    def state_bytes(self, spec: ParamSpec, shape: tuple[int, ...]) -> int:
        """Return the state bytes of a tensor of this shape that is, or is a part of, a parameter."""
        return self._meters[spec.group].state_bytes((shape, self.update_dtype(spec.dtype))) if spec.trainable else 0

    def temporary_bytes(self, tensors: Sequence[UpdatedTensor], *, use_fused: bool) -> int:
        """Return the peak of temporaries in a step on these tensors. `use_fused`: use fused kernels if supported."""
        peak = 0
        for group, (optimizer, meter) in enumerate(zip(self.optimizer_specs, self._meters, strict=True)):
            own = [(spec, shape) for spec, shape in tensors if spec.trainable and spec.group == group]
            updated = [(shape, self.update_dtype(spec.dtype)) for spec, shape in own]
            fused = use_fused and self.device.type != "cpu" and can_choose_impl(optimizer.factory, "fused")
            if updated and not fused and not optimizer.factory.defaults.get("fused"):
                peak = max(peak, meter.temporary_bytes(updated))
        return peak

    @cached_property
    def _meters(self) -> list[OptimizerMeter]:
        return [OptimizerMeter(_without_fused_kernels(self.device, spec.factory)) for spec in self.optimizer_specs]

    def collective_traffic(self, nbytes: int, messages: int, ranks: int) -> Traffic:
        """Return the traffic of reduce-scattering or all-gathering `nbytes` among these ranks."""
        if ranks == 1:
            return Traffic()
        sent, network = nbytes * (ranks - 1) // ranks, self.network
        if ranks == self.shard_group_size and network.within:
            network = Network(network.within, network.latency)
        return Traffic(sent, messages, network.estimate_seconds(sent, messages, ranks))


def _make_factory(optimizer_class: Any, params: Sequence[ParamShape], options: dict[str, Any]) -> OptimizerFactory:
    """Return a factory with stand-in CPU parameters for the probes, each expanded from a single element."""
    stand_ins = [torch.empty((), dtype=param.dtype).expand(param.shape) for param in params]
    for stand_in, param in zip(stand_ins, params, strict=True):
        stand_in.requires_grad_(param.trainable)
    return OptimizerFactory(optimizer_class, [{"params": stand_ins}], True, options)


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


_NUM_BUFFERS = 3
"""Buckets in memory at the peak of backward: one is filled while two are in flight."""


def estimate_zeroshard(training: TrainingSetup, ranks: int) -> list[Estimate]:
    """Estimate ZeRO-1 and ZeRO-2. With shard groups, all replicas are the same."""
    group_size = training.shard_group_size or ranks
    if ranks % group_size:
        raise ConfigError(f"shard_group_size={group_size} does not divide {ranks} ranks: plan for multiples of it")
    estimator = _ShardEstimator(training, group_size, ranks // group_size)
    return [estimator.estimate(stage) for stage in (1, 2)]


class _ShardEstimator:
    """Estimates the rank with the highest memory use in a shard group."""

    def __init__(self, training: TrainingSetup, group_size: int, num_replicas: int) -> None:
        self._training, self._num_replicas = training, num_replicas
        order = {param.name: index for index, param in enumerate(training.model.params)}
        specs = sorted(training.param_specs, key=lambda spec: order[spec.name or ""])
        groups = list(range(len(training.optimizer_specs)))
        self._layout = training.partitioning.extend_layout(Layout.empty(group_size), specs, groups)
        self._buckets = self._layout.buckets
        self._trainable = [bucket for bucket in self._buckets if self._layout.has_trainable_params(bucket.index)]
        states = self._layout.sum_per_rank(self._estimate_state_bytes)
        others = self._layout.sum_per_rank(self._estimate_grad_and_master_bytes)
        self._rank = Rank(max(range(group_size), key=lambda rank: states[rank] + others[rank]))
        self._imbalance = max(states) * group_size / sum(states) if any(states) else 1.0

    def _estimate_state_bytes(self, spec: ParamSpec, numel: int) -> float:
        return self._training.state_bytes(spec, spec.shape) * numel / max(1, spec.storage_numel)

    def _estimate_grad_and_master_bytes(self, spec: ParamSpec, numel: int) -> float:
        updated = self._training.update_dtype(spec.dtype)
        return numel * updated.itemsize * (spec.trainable + (updated != spec.dtype))

    def estimate(self, stage: int) -> Estimate:
        training, buckets, ranks = self._training, self._buckets, self._layout.world_size * self._num_replicas
        updated = [list(self._updated_tensors(bucket)) for bucket in buckets]
        states = [sum(training.state_bytes(*tensor) for tensor in tensors) for tensors in updated]
        masters = [self._master_bytes(bucket) for bucket in buckets]
        grad_shards = sum(self._numel(b) * training.update_dtype(b.dtype).itemsize for b in self._trainable)
        gradients = training.grad_bytes if stage == 1 else sum(map(self._own_nbytes, self._trainable))
        kept = grad_shards if stage == 1 else grad_shards - gradients
        idle, in_backward = self._buffers_in_backward(stage)
        temporary = training.temporary_bytes([tensor for tensors in updated for tensor in tensors], use_fused=True)
        parameters = sum(map(_nbytes, buckets)) + training.model.buffer_bytes
        host, allocated = 0, sum(masters)
        if training.is_offloaded:  # while one bucket is updated, the next one is prefetched
            offloaded = [*map(sum, zip(states, masters, strict=True)), 0]
            temporary += max(map(sum, pairwise(offloaded)), default=0)
            host, allocated = sum(offloaded), max(masters, default=0)
        policy = training.config.peer_checkpoint
        snapshot = sum(states) + (sum(masters) or sum(map(self._own_nbytes, buckets))) if policy else 0
        if policy:  # the current snapshot, and the next one in flight
            host += 2 * max_shards_per_rank(ranks, policy.failure_domain_size) * snapshot
        memory = MemoryEstimate(
            parameters=parameters,
            gradients=gradients,
            state=0 if training.is_offloaded else sum(states),
            masters=0 if training.is_offloaded else sum(masters),
            backward_overhead=kept + in_backward,
            step_overhead=kept + idle + temporary,
            # Parameters move into buckets one by one; then masters are allocated.
            construction_peak=parameters + max(allocated, max(map(_nbytes, buckets), default=0)),
            host=host,
            activations=training.activations,
        )
        sent = snapshot if ranks > 1 else 0
        return Estimate(f"zeroshard {stage}", ranks, memory, self._estimate_traffic(), self._imbalance, sent)

    def _numel(self, bucket: Bucket) -> int:
        """Return the elements of the rank's shard of a bucket."""
        return bucket.shards[self._rank].length

    def _own_nbytes(self, bucket: Bucket) -> int:
        return self._numel(bucket) * bucket.dtype.itemsize

    def _master_bytes(self, bucket: Bucket) -> int:
        updated = self._training.update_dtype(bucket.dtype)
        return self._numel(bucket) * updated.itemsize if updated != bucket.dtype else 0

    def _updated_tensors(self, bucket: Bucket) -> Iterator[UpdatedTensor]:
        """Yield the tensors that this rank's optimizers update: flat params if elementwise, else single shards."""
        params, training = self._layout.params, self._training
        owned = bucket.param_shards_of_rank(self._rank)
        for group, shards in groupby(owned, key=lambda shard: params[shard.param].group):
            rule, run = training.optimizer_specs[group].split_rule, list(shards)
            is_flat = training.partitioning.is_split(group) and rule is not None and rule.granularity.is_elementwise
            for first, last in [(run[0], run[-1])] if is_flat else zip(run, run, strict=True):
                spec = params[first.param]
                is_whole = not is_flat and first.in_param.length == spec.storage_numel
                yield spec, spec.shape if is_whole else (last.in_bucket.stop - first.in_bucket.start,)

    # Backward: gradients that are being reduced.

    def _buffers_in_backward(self, stage: int) -> tuple[int, int]:
        """Return the bytes of pooled buffers, which stay allocated, and the peak of all buffers in backward.

        The formula assumes that every bucket in turn is filled while the two before it are in flight. Buckets of
        several parameters use pooled buffers of one size, into which gradients are copied one by one. A single gradient
        is sent in place or from a copy. docs/planner.md states the error.
        """
        pooled = [self._wire_nbytes(bucket) for bucket in self._trainable if len(bucket.slots) > 1]
        pool = 0 if self._is_single_rank else min(_NUM_BUFFERS, len(pooled)) * max(pooled, default=0)
        in_flight = [0 if self._is_single_rank else self._in_flight_bytes(bucket) for bucket in self._trainable]
        peaks = (
            self._filling_bytes(bucket, stage, in_flight[i]) + sum(in_flight[max(0, i + 1 - _NUM_BUFFERS) : i])
            for i, bucket in enumerate(self._trainable)
        )
        return pool, pool + max(peaks, default=0)

    def _filling_bytes(self, bucket: Bucket, stage: int, in_flight: int) -> int:
        """Return the peak on top of pooled buffers from the first gradient of a bucket until its reduce has started."""
        sizes = [0 if stage == 1 else self._layout.params[index].storage_bytes for index in bucket.params]
        if self._is_single_rank:
            return sum(sizes)  # copied all at once
        if len(sizes) > 1:
            return max(*sizes, in_flight)
        is_sent_uncopied = sizes[0] == _nbytes(bucket) == self._wire_nbytes(bucket)
        return in_flight + (0 if is_sent_uncopied else sizes[0])

    def _in_flight_bytes(self, bucket: Bucket) -> int:
        """Return what a reduce needs on top of pooled buffers: its message, and sums in float32 or in rank order."""
        wire, fixed_order = self._wire_dtype(bucket), self._training.config.deterministic_reduce
        total = sum_dtype(wire)
        nbytes = 0 if len(bucket.slots) > 1 else self._wire_nbytes(bucket)
        if bucket.has_equal_shards and (total != wire or fixed_order):
            nbytes += self._wire_nbytes(bucket)
        elif total != wire:
            nbytes += bucket.numel * total.itemsize
        if self._num_replicas > 1:  # the sum of this shard group, and with a fixed order those of all groups
            has_sum = not bucket.has_equal_shards or self._training.update_dtype(bucket.dtype) == total
            nbytes += ((not has_sum) + self._num_replicas * fixed_order) * self._numel(bucket) * total.itemsize
        return nbytes

    @property
    def _is_single_rank(self) -> bool:
        return self._layout.world_size * self._num_replicas == 1

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._training.config._reduce_policy.wire_dtype(bucket.dtype)

    def _wire_nbytes(self, bucket: Bucket) -> int:
        return bucket.numel * self._wire_dtype(bucket).itemsize

    # Traffic.

    def _estimate_traffic(self) -> Traffic:
        """Return the traffic of reduce-scattering all gradients and all-gathering all parameters."""
        nbytes = sum(map(_nbytes, self._trainable)) + sum(
            # NCCL reduces uneven shards in flight, in a higher precision.
            self._wire_nbytes(b) if b.has_equal_shards or self._is_on_cpu else b.numel * self._sum_itemsize(b)
            for b in self._trainable
        )
        ranks, replicas = self._layout.world_size, self._num_replicas
        inside = self._training.collective_traffic(nbytes, 2 * len(self._trainable), ranks)
        if replicas == 1:
            return inside
        # A fixed summation order on NCCL needs an all-gather; gloo always sums in replica order.
        gathers = self._training.config.deterministic_reduce and not self._is_on_cpu
        sent = sum(self._cross_replica_bytes(bucket, gathers) for bucket in self._trainable) * (replicas - 1) // ranks
        messages = (1 if gathers else 2) * len(self._trainable)
        seconds = self._training.network.estimate_seconds(sent, messages, replicas)
        return Traffic(inside.sent + sent, inside.messages + messages, inside.seconds + seconds)

    def _cross_replica_bytes(self, bucket: Bucket, gathers: bool) -> int:
        """Return the bytes to each other replica: of an all-gather, or of a reduce-scatter and an all-gather."""
        itemsize = self._sum_itemsize(bucket)
        if gathers:
            return bucket.numel * itemsize
        result_itemsize = self._training.update_dtype(bucket.dtype).itemsize if self._is_on_cpu else itemsize
        return bucket.numel * (itemsize + result_itemsize) // self._num_replicas

    def _sum_itemsize(self, bucket: Bucket) -> int:
        return sum_dtype(self._wire_dtype(bucket)).itemsize

    @property
    def _is_on_cpu(self) -> bool:
        return self._training.device.type == "cpu"


def _nbytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
