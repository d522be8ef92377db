"""What `zeroshard.shard` takes, read off the layout that it would make."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby

import torch

from ..layout.layout import Bucket, Layout, ParamShard
from ..peer_checkpoint.placement import max_shards_per_rank
from ..layout.spec import ParamSpec
from ..policies import ZeroStage, ZeroStage1, ZeroStage2, sum_dtype
from .._types import Rank
from .training import TrainingSetup, UpdatedTensor
from .transit import BackwardSimulation
from .usage import Estimate, MemoryEstimate, Traffic


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
