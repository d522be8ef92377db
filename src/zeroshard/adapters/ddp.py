"""Steps inside DDP's backward: gradient buckets come in through a communication hook, updated parameters go out.

DDP settles its buckets in the first backward passes, so those make no update. From then on a bucket is
updated by its owners when its gradients have arrived. All ranks treat buckets in the same order, one
after the other: collectives that were started in the order of arrival would not match.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..comm.agreement import Trouble, agree, compare, raise_failure
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..layout.layout import Layout
from ..layout.partition import AssignedOwners, Partitioner, deal
from ..layout.specs import read_specs
from ..runtime.inner import Factory, ParamGroup
from ..runtime.step import Engine
from ..units import Rank

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Arrival(NamedTuple):
    """A bucket that was handed over, and the promise of its reduced gradients."""

    number: int
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[Any]

    def wait(self) -> list[torch.Tensor]:
        """The reduced gradients, as views shaped like the parameters."""
        result = self.future.wait()
        reduced = result if isinstance(result, torch.Tensor) else result[0]
        if reduced.data_ptr() == self.buffer.data_ptr():
            return self.grads
        start = self.buffer.storage_offset()
        return [reduced.as_strided(g.shape, g.stride(), g.storage_offset() - start) for g in self.grads]


class Overlap:
    """An optimizer that DDP drives: first it learns the buckets, then it steps with them."""

    def __init__(self, comm: Comm, repartition: Callable[[Partitioner], Engine], groups: list[ParamGroup]) -> None:
        self._comm, self._repartition, self._groups = comm, repartition, groups
        self._index = {id(param): i for i, param in enumerate(_params(groups))}
        self._trainable = [param.requires_grad for param in _params(groups)]
        self._seen_passes = 0
        self._buckets: list[list[int]] = []
        self._pass: _Pass | None = None
        self.engine: Engine | None = None
        self.warmup_passes = 2

    @property
    def settled(self) -> bool:
        return self.engine is not None

    def attach(self, ddp: DistributedDataParallel, hook: CommHook, *, shard_buckets: bool, eager: bool) -> CommHook:
        """A communication hook for `ddp` that reduces by `hook`, then steps.

        `eager`: a bucket is updated when the next one is handed over, and not only after the last one.
        """
        ours = dist.get_process_group_ranks(self._comm.group.process_group)
        if dist.get_process_group_ranks(ddp.process_group) != ours:
            raise ConfigError(f"the optimizer is sharded over ranks {ours}, DDP has others: give both the same group")
        self.warmup_passes = 3 if ddp.static_graph else 2
        # Which parameters went unused is known only when DDP is done: in the buckets they have zeros.
        late = bool(ddp.find_unused_parameters)

        def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = hook(state, bucket)
            arrival = Arrival(bucket.index(), bucket.parameters(), bucket.gradients(), bucket.buffer(), future)
            if self.engine is None:
                self._learn(arrival, bucket.is_last(), shard_buckets)
            else:
                self._step(self.engine, arrival, bucket.is_last(), late=late, eager=eager)
            return future

        return reduce_and_step

    def check_trainable(self) -> None:
        """DDP's buckets do not follow `requires_grad`, and so neither can we."""
        if [param.requires_grad for param in _params(self._groups)] != self._trainable:
            raise RuntimeError("requires_grad cannot be switched with overlap_with_ddp=True: DDP's buckets are fixed")

    def _learn(self, arrival: Arrival, last: bool, shard_buckets: bool) -> None:
        if arrival.number == 0:
            self._buckets.clear()
        self._buckets.append([self._index[id(p)] for p in arrival.params if id(p) in self._index])
        self._seen_passes += last
        if last and self._seen_passes == self.warmup_passes:
            _at_end_of_backward(lambda: self._settle(shard_buckets))

    def _settle(self, shard_buckets: bool) -> None:
        """Deal out the buckets. Raises on all ranks alike."""
        agree(self._comm, "settling on DDP's buckets", [f"bucket {i}: {b}" for i, b in enumerate(self._buckets)])
        bucket_of = {index: number for number, members in enumerate(self._buckets) for index in members}
        missing = [i for i, trains in enumerate(self._trainable) if trains and i not in bucket_of]
        if missing:
            raise ConfigError(f"parameters {missing[:8]} of the optimizer are not among those that DDP reduces")
        owners = self._dealt(bucket_of) if shard_buckets else self._in_turns(bucket_of)
        self.engine = self._repartition(AssignedOwners(owners, bucket_of))

    def _in_turns(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        return {index: Rank(number % self._comm.group.size) for index, number in bucket_of.items()}

    def _dealt(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        """Whole parameters, bucket after bucket, each to the rank with the least so far."""
        specs = read_specs(self._groups)
        members = [replace(specs[index], group=number) for index, number in bucket_of.items()]
        return deal(Layout.empty(self._comm.group.size), members)

    def _step(self, engine: Engine, arrival: Arrival, last: bool, *, late: bool, eager: bool) -> None:
        if self._pass is None:
            self._pass = _Pass(engine, self._groups, self._comm)
            self._pass.guard(self.check_trainable)
        running = self._pass
        running.waiting.append(arrival)
        if not late and (last or eager):
            running.update_arrived(but=0 if last else 1)
        if last:
            self._pass = None
            # DDP puts its results into `param.grad` in a callback that is queued after this hook.
            _at_end_of_backward((lambda: _at_end_of_backward(running.update_used)) if late else running.finish)


class _Pass:
    """One backward pass that updates. What fails is kept until its end: the other ranks wait for our buckets."""

    def __init__(self, engine: Engine, groups: list[ParamGroup], comm: Comm) -> None:
        self._engine, self._groups, self._comm = engine, groups, comm
        self._mine = {id(param) for param in engine.owned(comm.group.rank).values()}
        self._updates = 0
        self._failure: Exception | None = None
        self.waiting: list[Arrival] = []
        self.guard(engine.store.refresh)

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
            self._update(arrival.number, dict(zip(arrival.params, arrival.wait(), strict=True)))

    def update_used(self) -> None:
        """Update all buckets with what DDP left in `param.grad`, and finish."""
        for arrival in self.waiting:
            self._update(arrival.number, {p: p.grad for p in arrival.params if p.grad is not None})
        self.finish()

    def finish(self) -> None:
        """Wait for all parameters; raise what failed, on all ranks."""
        if not self._updates:
            self.guard(lambda: self._engine.update(self._groups, {}))
        self._engine.sync.finish()
        self._engine.inner.pull(self._groups)
        self._engine.steps += 1
        call = f"overlapped step {self._engine.steps}"
        trouble = Trouble.NONE if self._failure is None else Trouble.FAILED
        if compare(self._comm, call, b"", trouble).trouble:
            raise_failure(self._comm, call, self._failure)

    def _update(self, bucket: int, grads: dict[torch.Tensor, torch.Tensor]) -> None:
        mine = {param: grad for param, grad in grads.items() if id(param) in self._mine}
        if mine:
            self._updates += 1
            self.guard(lambda: self._engine.update(self._groups, mine))
        self._engine.send_bucket(bucket)


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


def _at_end_of_backward(action: Callable[[], None]) -> None:
    """Queue `action` behind all that is queued for the end of the running backward; it may raise there."""
    torch.autograd.Variable._execution_engine.queue_callback(action)
