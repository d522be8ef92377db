"""What `zeroshard.shard` takes, read off the layout that it would make."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby

import torch

from ..layout.layout import Bucket, Layout, Piece
from ..layout.partners import most_shares
from ..layout.specs import ParamSpec
from ..policies import ZeroStage, ZeroStage1, ZeroStage2, sum_dtype
from ..units import Rank
from .training import Tensor, Training
from .transit import Transit
from .usage import Estimate, Traffic, Usage


@dataclass(frozen=True)
class Sharded:
    """ZeRO-1 or ZeRO-2, by what is kept of gradients."""

    stage: ZeroStage

    @property
    def name(self) -> str:
        return f"zeroshard {2 if self.stage.frees else 1}"

    def estimate(self, training: Training, ranks: int) -> Estimate:
        row = training.row_of(ranks)
        return _Share(training, self.stage, row, ranks // row).estimate(self.name)


ZERO1, ZERO2 = Sharded(ZeroStage1()), Sharded(ZeroStage2())


class _Share:
    """That of the rank with most, in one of several rows of ranks that hold the same."""

    def __init__(self, training: Training, stage: ZeroStage, ranks: int, rows: int) -> None:
        self._rows = rows
        self._training, self._stage, self._frees = training, stage, stage.frees
        order = {it.name: place for place, it in enumerate(training.model.params)}
        specs = sorted(training.specs, key=lambda spec: order[spec.name or ""])
        kinds = list(range(len(training.kinds)))
        self._layout = training.division.divide(Layout.empty(ranks), specs, kinds)
        states, others = self._layout.tally(self._state_of), self._layout.tally(self._beside_state)
        self._rank = Rank(max(range(ranks), key=lambda rank: states[rank] + others[rank]))
        self._balance = max(states) * ranks / sum(states) if any(states) else 1.0

    def estimate(self, name: str) -> Estimate:
        policy, ranks = self._training.config.second_copy, self._layout.world_size * self._rows
        share = self._copied_share() if policy else 0
        held = most_shares(ranks, policy.apart) if policy else 0
        usage = self._usage()
        usage = replace(usage, host=usage.host + 2 * held * share)  # of this copy and of the next, which is under way
        return Estimate(name, ranks, usage, self._traffic(), self._balance, share if ranks > 1 else 0)

    def _copied_share(self) -> int:
        """What a second copy has of this rank: state, and parameters in the precision of their update."""
        masters = sum(map(self._masters, self._layout.buckets))
        return self._state() + (masters or self._owned_bytes())

    def _usage(self) -> Usage:
        training, transit = self._training, self._transit()
        parameters = sum(map(_nbytes, self._layout.buckets))
        gradients, slices = self._gradients(), sum(map(self._slice, self._layout.buckets))
        masters, more = sum(map(self._masters, self._layout.buckets)), slices - (gradients if self._frees else 0)
        taken = Usage(
            parameters=parameters + training.model.buffers,
            gradients=gradients,
            state=self._state(),
            masters=masters,
            in_backward=more + transit.in_backward,
            in_step=more + transit.stays + training.temporaries(list(self._tensors()), fuses=True),
            while_made=parameters + max(self._largest_bucket(), masters) + training.model.buffers,
            activations=training.activations,
        )
        return self._offloaded(taken) if training.offloads else taken

    def _transit(self) -> Transit:
        reduce, updated_in = self._training.config._reduce_policy, self._training.dtype_of_update
        return Transit(self._layout, self._stage, reduce, updated_in, rank=self._rank, rows=self._rows)

    def _largest_bucket(self) -> int:
        """Parameters move into buckets one after the other; then masters are made."""
        return max(map(_nbytes, self._layout.buckets), default=0)

    def _offloaded(self, it: Usage) -> Usage:
        """State and masters of a bucket are on the device, and those of the next one on their way there."""
        buckets = list(map(self._resting, self._layout.buckets))
        here = max(map(sum, zip(buckets, [*buckets[1:], 0], strict=True)), default=0)
        made = it.parameters + max(self._largest_bucket(), max(map(self._masters, self._layout.buckets), default=0))
        return replace(it, state=0, masters=0, in_step=it.in_step + here, while_made=made, host=sum(buckets))

    def _resting(self, bucket: Bucket) -> int:
        """What of a bucket rests in host memory."""
        return self._masters(bucket) + sum(self._training.state(*tensor) for tensor in self._tensors_in(bucket))

    def _state_of(self, spec: ParamSpec, elements: int) -> float:
        return self._training.state(spec, spec.shape) * elements / spec.extent if spec.extent else 0.0

    def _beside_state(self, spec: ParamSpec, elements: int) -> float:
        """Of gradients and masters."""
        updated = self._training.dtype_of_update(spec.dtype)
        return elements * updated.itemsize * (spec.trainable + (updated != spec.dtype))

    def _gradients(self) -> int:
        """In the dtype of the parameters: all of them, or this rank's slices."""
        if not self._frees:
            return sum(it.nbytes for it in self._training.model.trained)
        return sum(it.shards[self._rank].length * it.dtype.itemsize for it in self._trained)

    def _slice(self, bucket: Bucket) -> int:
        """Of averaged gradients, in the dtype of the update."""
        itemsize = self._training.dtype_of_update(bucket.dtype).itemsize
        return bucket.shards[self._rank].length * itemsize if self._layout.trains(bucket.index) else 0

    def _masters(self, bucket: Bucket) -> int:
        updated = self._training.dtype_of_update(bucket.dtype)
        return bucket.shards[self._rank].length * updated.itemsize if updated != bucket.dtype else 0

    def _owned_bytes(self) -> int:
        return sum(it.shards[self._rank].length * it.dtype.itemsize for it in self._layout.buckets)

    def _state(self) -> int:
        return sum(self._training.state(*tensor) for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        """That this rank's optimizer updates: runs of pieces where it may join them, else one by one."""
        return chain.from_iterable(map(self._tensors_in, self._layout.buckets))

    def _tensors_in(self, bucket: Bucket) -> Iterator[Tensor]:
        for group, run in groupby(bucket.pieces_of(self._rank), key=lambda it: self._layout.params[it.param].group):
            pieces = list(run)
            runs = [pieces] if self._joins(group) else [[piece] for piece in pieces]
            yield from map(self._tensor, runs)

    def _joins(self, group: int) -> bool:
        cutting = self._training.kinds[group].cutting
        return self._training.division.is_cut(group) and cutting is not None and cutting.grain.is_fine

    def _tensor(self, run: list[Piece]) -> Tensor:
        first, last = run[0], run[-1]
        spec = self._layout.params[first.param]
        whole = len(run) == 1 and first.in_param.length == spec.extent and not self._joins(spec.group)
        return spec, spec.shape if whole else (last.in_bucket.stop - first.in_bucket.start,)

    def _traffic(self) -> Traffic:
        """Each bucket of gradients to its owners, each of parameters back."""
        inside, across = self._inside_a_row(), self._across_rows()
        sent, messages = inside.sent + across.sent, inside.messages + across.messages
        return Traffic(sent, messages, inside.seconds + across.seconds)

    def _inside_a_row(self) -> Traffic:
        ranks = self._layout.world_size
        if ranks == 1:
            return Traffic(0, 0)
        away = sum(it.numel * self._wire_dtype(it).itemsize for it in self._trained)
        sent = (away + sum(map(_nbytes, self._trained))) * (ranks - 1) // ranks
        messages = 2 * len(self._trained)
        return Traffic(sent, messages, self._training.network_of(ranks).seconds(sent, messages, ranks))

    def _across_rows(self) -> Traffic:
        """Sums of a row's slices meet those of the other rows."""
        if self._rows == 1:
            return Traffic(0, 0)
        sent = sum(map(self._sent_across, self._trained)) * (self._rows - 1) // self._layout.world_size
        messages = (1 if self._gathers_sums else 2) * len(self._trained)
        return Traffic(sent, messages, self._training.network.seconds(sent, messages, self._rows))

    def _sent_across(self, bucket: Bucket) -> int:
        """To each other row, of all slices of this one: all of them, or a part to be added up and the sums back."""
        exact = sum_dtype(self._training.config._reduce_policy.wire_dtype(bucket.dtype)).itemsize
        if self._gathers_sums:
            return bucket.numel * exact
        back = self._training.dtype_of_update(bucket.dtype).itemsize if self._on_cpu else exact
        return bucket.numel * (exact + back) // self._rows

    @property
    def _gathers_sums(self) -> bool:
        """NCCL adds them up in an order of its own, unless everybody gets all of them; gloo in that of rows."""
        return self._training.config.deterministic_reduce and not self._on_cpu

    @property
    def _on_cpu(self) -> bool:
        return self._training.device.type == "cpu"

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """What gradients travel as: NCCL adds slices that differ in length up on the way, in more precision."""
        wire = self._training.config._reduce_policy.wire_dtype(bucket.dtype)
        return wire if bucket.has_equal_shards or self._on_cpu else sum_dtype(wire)

    @property
    def _trained(self) -> list[Bucket]:
        return [it for it in self._layout.buckets if self._layout.trains(it.index)]


def _nbytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
