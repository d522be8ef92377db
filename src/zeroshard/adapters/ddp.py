"""Steps inside DDP's backward: gradient buckets come in through a communication hook, updated parameters go out.

DDP settles its buckets in the first backward passes, so those make no update. From then on a bucket is
updated by its owners when its gradients have arrived. All ranks treat buckets in the same order, one
after the other: collectives that were started in the order of arrival would not match.

A rank that ran out of inputs inside `Join` has no backward any more. DDP hands it buckets of zeros instead, which
the others fill, and it goes on updating what it owns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..comm.agreement import Proposal, Trouble, agreed, compare, raise_failure
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..labels import Label
from ..layout.layout import Layout
from ..layout.partition import AssignedOwners, Partitioner, deal
from ..layout.specs import read_specs
from ..runtime.inner import Factory, ParamGroup
from ..runtime.whole import WholeEngine
from ..units import Rank
from .engine_events import NO_BACKWARD, at_end_of_backward, running_backward
from .join import share_options

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
Grads = dict[torch.Tensor, torch.Tensor]


class Arrival(NamedTuple):
    """A bucket that was handed over, and the promise of its reduced gradients."""

    number: int
    last: bool
    params: list[torch.Tensor]
    future: torch.futures.Future[Any]

    def wait(self) -> Grads:
        """The reduced gradients."""
        result = self.future.wait()
        reduced = result if isinstance(result, torch.Tensor) else result[0]
        grads = split_bucket(reduced, self.params)
        return {param: grad.to(param.dtype) for param, grad in zip(self.params, grads, strict=True)}


class Plan(NamedTuple):
    """What is known once DDP's buckets are settled."""

    engine: WholeEngine
    places: dict[int, int]
    """Buckets of the layout, by DDP's number. DDP's buckets without any of our parameters are not among them."""
    late: bool
    """Which parameters have gradients is known only when DDP is done: in its buckets unused ones have zeros."""


class Overlap:
    """An optimizer that DDP drives: first it learns the buckets, then it steps with them.

    The optimizer owns it, and so `repartition`, a method of the optimizer, is referred to weakly.
    """

    def __init__(self, comm: Comm, repartition: Callable[[Partitioner], WholeEngine], groups: list[ParamGroup]) -> None:
        self._comm, self._repartition, self._groups = comm, WeakMethod(repartition), groups
        self._index = {id(param): i for i, param in enumerate(_params(groups))}
        self._trainable = [param.requires_grad for param in _params(groups)]
        self._ddp: ref[DistributedDataParallel] | None = None
        self.shard_buckets = False
        """A bucket may have several owners."""
        self._seen_passes, self._backward = 0, NO_BACKWARD
        self._buckets: list[list[int]] = []
        self._plan: Plan | None = None
        self._pass: _Pass | None = None
        self._deferred: list[Callable[[], None]] = []

    @property
    def settled(self) -> bool:
        return self._plan is not None

    @property
    def buckets(self) -> list[list[int]]:
        """DDP's buckets as indices of our parameters, once they are settled."""
        return self._buckets if self.settled else []

    def owner_in_turn(self, bucket: int) -> Rank:
        """The owner of a DDP bucket, unless its parameters are dealt out."""
        return Rank(bucket % self._comm.group.size)

    @property
    def warmup_passes(self) -> int:
        """Backward passes until DDP's buckets are settled."""
        ddp = None if self._ddp is None else self._ddp()
        return 3 if ddp is not None and ddp.static_graph else 2

    def attach(
        self, ddp: DistributedDataParallel, hook: CommHook, owner: object, *, shard_buckets: bool, eager: bool
    ) -> CommHook:
        """A communication hook for `ddp` that reduces by `hook`, then steps. It keeps `owner`, the optimizer, alive.

        `eager`: a bucket is updated when the next one is handed over, and not only after the last one.
        """
        ours = dist.get_process_group_ranks(self._comm.group.process_group)
        if dist.get_process_group_ranks(ddp.process_group) != ours:
            raise ConfigError(f"the optimizer is sharded over ranks {ours}, DDP has others: give both the same group")
        # Hazard: DDP's reducer, which is not Python's, holds the hook. A hook that holds DDP would never be freed.
        self._ddp = found = ref(ddp)
        self.shard_buckets = shard_buckets

        def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = hook(state, bucket)
            ddp = found()
            assert ddp is not None, "its hook is running"
            arrival = Arrival(bucket.index(), bucket.is_last(), bucket.parameters(), future)
            if self._plan is None:
                self._learn(ddp, arrival, shard_buckets, eager)
            else:
                self._step(ddp, self._plan, arrival, eager)
            return future

        vars(reduce_and_step)["optimizer"] = owner  # which a script need not keep, since the hook makes all steps
        return reduce_and_step

    def check_trainable(self) -> None:
        """DDP's buckets do not follow `requires_grad`, and so neither can we."""
        if [param.requires_grad for param in _params(self._groups)] != self._trainable:
            raise RuntimeError("requires_grad cannot be switched with overlap_with_ddp=True: DDP's buckets are fixed")

    def shadow_step(self) -> None:
        """For a rank that ran out of inputs, once DDP has done its part: what could not be done in the hook."""
        while self._deferred:
            self._deferred.pop(0)()

    def _learn(self, ddp: DistributedDataParallel, arrival: Arrival, shard_buckets: bool, eager: bool) -> None:
        backward = running_backward()
        # In the first pass of a static graph DDP numbers all buckets 0, and calls none the last.
        if arrival.number == 0 and (backward == NO_BACKWARD or backward != self._backward):
            self._backward = backward
            self._seen_passes += 1
            self._buckets.clear()
        self._buckets.append([self._index[id(p)] for p in arrival.params if id(p) in self._index])
        if arrival.last and self._seen_passes >= self.warmup_passes:
            trained = backward != NO_BACKWARD
            self._after(ddp, lambda: self._settle(ddp, shard_buckets, eager, trained))

    def _settle(self, ddp: DistributedDataParallel, shard_buckets: bool, eager: bool, trained: bool) -> None:
        """Deal out the buckets. Raises on all ranks alike."""
        late = bool(ddp.find_unused_parameters)
        if ddp.static_graph:
            used = self._comm.union(bytes(trained and param.grad is not None for param in _params(self._groups)))
            late |= any(trains and not flag for trains, flag in zip(self._trainable, used, strict=True))
        choices = f"shard_buckets={shard_buckets}, interleaved={eager}, late={late}"
        self._plan = agreed(
            self._comm,
            "settling on DDP's buckets",
            lambda: self._propose(choices, shard_buckets=shard_buckets, late=late),
        )

    def _propose(self, choices: str, *, shard_buckets: bool, late: bool) -> Proposal[Plan]:
        facts = [choices]
        facts += [f"parameters {members} are in DDP's bucket {i}" for i, members in enumerate(self._buckets)]
        bucket_of = {index: number for number, members in enumerate(self._buckets) for index in members}
        missing = [i for i, trains in enumerate(self._trainable) if trains and i not in bucket_of]
        if missing:
            raise ConfigError(f"parameters {missing[:8]} of the optimizer are not among those that DDP reduces")
        owners = self._dealt(bucket_of) if shard_buckets else self._in_turns(bucket_of)
        repartition = self._repartition()
        assert repartition is not None, "the hook keeps the optimizer alive"
        engine = repartition(AssignedOwners(owners, bucket_of))
        places = {bucket_of[index]: engine.layout.bucket_of(index) for index in bucket_of}
        return Proposal(Plan(engine, places, late), [*facts, f"layout {engine.layout.digest}"])

    def _in_turns(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        return {index: self.owner_in_turn(number) for index, number in bucket_of.items()}

    def _dealt(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        """Whole parameters, bucket after bucket, each to the rank with the least so far."""
        specs = read_specs(self._groups)
        members = [replace(specs[index], group=number) for index, number in bucket_of.items()]
        return deal(Layout.empty(self._comm.group.size), members)

    def _step(self, ddp: DistributedDataParallel, plan: Plan, arrival: Arrival, eager: bool) -> None:
        trained, uneven = running_backward() != NO_BACKWARD, ddp._join_config.enable
        if self._pass is None or arrival.number == 0:
            if uneven:
                share_options(self._comm, self._groups, current=trained)
            self._pass = _Pass(plan, self._groups, self._comm)
            self._pass.guard(self.check_trainable)
        running = self._pass
        running.waiting.append(arrival)
        if not plan.late and (arrival.last or eager):
            running.update_arrived(but=0 if arrival.last else 1)
        if arrival.last:
            self._pass = None
            late_end = partial(running.update_used, trained=trained, uneven=uneven)
            self._after(ddp, late_end if plan.late else running.finish)

    def _after(self, ddp: DistributedDataParallel, action: Callable[[], None]) -> None:
        """Run `action` when DDP is done with this pass, so that it may look at `param.grad`, and may raise."""
        if running_backward() != NO_BACKWARD:
            # DDP queues its own end behind this hook.
            at_end_of_backward(lambda: at_end_of_backward(action))
        elif ddp.find_unused_parameters:
            # DDP will reduce its map of used parameters behind this hook.
            self._deferred.append(action)
        else:
            action()


class _Pass:
    """One backward pass that updates. What fails is kept until its end: the other ranks wait for our buckets."""

    def __init__(self, plan: Plan, groups: list[ParamGroup], comm: Comm) -> None:
        self._engine, self._places = plan.engine, plan.places
        self._groups, self._comm = groups, comm
        self._mine = {id(param): index for index, param in plan.engine.owned(comm.group.rank).items()}
        self._updates = 0
        self._put_counters_back = plan.engine.inner.counters()
        self._failure: Exception | None = None
        self.waiting: list[Arrival] = []
        self.guard(plan.engine.store.refresh)

    def guard(self, action: Callable[[], object]) -> None:
        """Run `action` unless something failed already."""
        if self._failure is None:
            try:
                action()
            except Exception as error:
                self._failure = error

    def update_arrived(self, *, but: int) -> None:
        """Update all buckets that wait, but the newest few."""
        while len(self.waiting) > but:
            arrival = self.waiting.pop(0)
            with self._comm.clock.part(Label.WAIT_DDP, arrival.number):
                grads = arrival.wait()
            self._update(arrival.number, self._of_mine(grads))

    def update_used(self, *, trained: bool, uneven: bool) -> None:
        """Update all buckets with what DDP left in `param.grad`, and finish.

        `trained`: this rank had inputs. `uneven`: some rank may have had none, and so does not know what was used.
        """
        used = bytes(trained and param.grad is not None for param in self._engine.params)
        if uneven:
            used = self._comm.union(used)
        for arrival in self.waiting:
            grads = {p: p.grad for p in arrival.params if p.grad is not None} if trained else arrival.wait()
            mine = self._of_mine(grads)
            self._update(arrival.number, {p: grad for p, grad in mine.items() if used[self._mine[id(p)]]})
        self.finish()

    def finish(self) -> None:
        """Wait for all parameters; raise what failed, on all ranks."""
        if not self._updates:
            self.guard(lambda: self._engine.update(self._groups, {}))
        self._engine.sync.finish()
        self.guard(lambda: self._engine.inner.pull(self._groups))
        self._engine.steps += 1
        call = f"overlapped step {self._engine.steps}"
        trouble = Trouble.NONE if self._failure is None else Trouble.FAILED
        verdict = compare(self._comm, call, b"", trouble)
        self._comm.clock.turn()
        if verdict.trouble:
            raise_failure(self._comm, call, self._failure)

    def _of_mine(self, grads: Grads) -> Grads:
        return {param: grad for param, grad in grads.items() if id(param) in self._mine}

    def _update(self, number: int, mine: Grads) -> None:
        if mine:
            if self._updates:
                self._put_counters_back()  # all updates of a pass are one step
            self._updates += 1
            self.guard(lambda: self._engine.update(self._groups, mine))
        if number in self._places:
            self._engine.send_bucket(self._places[number])


def plain_class(optimizer_class: Factory, *, overlap: bool) -> Factory:
    """The class to build. torch's functional optimizers stand for their plain twins, and only under overlap."""
    if not getattr(optimizer_class, "__module__", "").startswith("torch.distributed.optim."):
        return optimizer_class
    from torch.distributed.optim.utils import functional_optim_map

    twins: dict[Factory, Factory] = {functional: plain for plain, functional in functional_optim_map.items()}
    if optimizer_class not in twins:
        return optimizer_class
    if not overlap:
        raise ConfigError(f"{optimizer_class} is for overlap_with_ddp=True; pass {twins[optimizer_class]}")
    return twins[optimizer_class]


def _params(groups: list[ParamGroup]) -> Iterator[torch.Tensor]:
    return (param for group in groups for param in group["params"])


def split_bucket(bucket: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in a bucket of DDP: views of it, each in the shape of its parameter, in the dtype of the bucket.

    Hazard: `GradBucket.gradients()` ignores the strides of parameters, and takes complex gradients for real ones.
    """
    if bucket.layout != torch.strided:  # DDP gives every sparse gradient a bucket of its own
        return [bucket]
    numbers = [2 if param.is_complex() and not bucket.is_complex() else 1 for param in params]
    parts = torch.split(bucket, [param.numel() * number for param, number in zip(params, numbers, strict=True)])
    return [_shape_like(part, param) for part, param in zip(parts, params, strict=True)]


def _shape_like(part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A stretch of DDP's bucket as a gradient. DDP keeps the strides of dense parameters; others are contiguous there.
    The bucket of complex parameters is real: real and imaginary parts take turns."""
    if param.is_complex() and not part.is_complex():
        pairs = part.view(-1, 2)
        if part.dtype == torch.bfloat16:  # torch has no complex dtype for it
            pairs = pairs.to(param.dtype.to_real())
        part = torch.view_as_complex(pairs)
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return part.view(param.shape)
    return part.as_strided(param.shape, param.stride(), part.storage_offset())
