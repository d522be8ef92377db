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

from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Prepared, exchange_status, prepare_all, raise_failure
from ..errors import ConfigError
from ..layout.layout import Layout
from ..layout.partition import AssignedOwners, Partitioner, assign_owners
from ..layout.spec import make_param_specs
from ..profiling import Phase
from .autograd_hooks import NO_BACKWARD, current_backward_id, queue_after_backward
from .grad_reducer import GradReducer
from .inner import OptimizerConstructor, ParamGroup
from .join import broadcast_options
from .whole_engine import WholeParamEngine

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
GradsByParam = dict[torch.Tensor, torch.Tensor]


class ReducedBucket(NamedTuple):
    """A bucket that was handed over, and the promise of its reduced gradients."""

    bucket_index: int
    is_last: bool
    params: list[torch.Tensor]
    future: torch.futures.Future[Any]

    def wait(self) -> GradsByParam:
        """The reduced gradients."""
        result = self.future.wait()
        reduced = result if isinstance(result, torch.Tensor) else result[0]
        grads = split_bucket(reduced, self.params)
        return {param: grad.to(param.dtype) for param, grad in zip(self.params, grads, strict=True)}


class OverlapPlan(NamedTuple):
    """What is known once DDP's buckets are settled."""

    engine: WholeParamEngine
    layout_bucket_of: dict[int, int]
    """Buckets of the layout, by DDP's number. DDP's buckets without any of our parameters are not among them."""
    should_defer_updates: bool
    """Which parameters have gradients is known only when DDP is done: in its buckets unused ones have zeros."""


class DDPOverlap:
    """An optimizer that DDP drives: first it learns the buckets, then it steps with them.

    The optimizer owns it, and so `repartition`, a method of the optimizer, is referred to weakly.
    """

    def __init__(
        self, comm: Comm, repartition: Callable[[Partitioner], WholeParamEngine], groups: list[ParamGroup]
    ) -> None:
        self._comm, self._repartition, self._groups = comm, WeakMethod(repartition), groups
        self._index_of_param = {id(param): i for i, param in enumerate(_iter_params(groups))}
        self._trainable_mask = [param.requires_grad for param in _iter_params(groups)]
        self._ddp_ref: ref[DistributedDataParallel] | None = None
        self.shard_buckets = False
        """A bucket may have several owners."""
        self._num_warmup_passes, self._backward_id = 0, NO_BACKWARD
        self._buckets: list[list[int]] = []
        self._plan: OverlapPlan | None = None
        self._backward_pass: _BackwardPass | None = None
        self._deferred_actions: list[Callable[[], None]] = []

    @property
    def is_initialized(self) -> bool:
        return self._plan is not None

    @property
    def buckets(self) -> list[list[int]]:
        """DDP's buckets as indices of our parameters, once they are settled."""
        return self._buckets if self.is_initialized else []

    def round_robin_owner(self, bucket_index: int) -> Rank:
        """The owner of a DDP bucket, unless its parameters are dealt out."""
        return Rank(bucket_index % self._comm.group.size)

    @property
    def warmup_passes(self) -> int:
        """Backward passes until DDP's buckets are settled."""
        ddp = None if self._ddp_ref is None else self._ddp_ref()
        return 3 if ddp is not None and ddp.static_graph else 2

    def wrap_comm_hook(
        self,
        ddp: DistributedDataParallel,
        hook: CommHook,
        optimizer: object,
        *,
        shard_buckets: bool,
        is_interleaved: bool,
    ) -> CommHook:
        """A communication hook for `ddp` that reduces by `hook`, then steps. It keeps `owner`, the optimizer, alive.

        `eager`: a bucket is updated when the next one is handed over, and not only after the last one.
        """
        ours = dist.get_process_group_ranks(self._comm.group.process_group)
        if dist.get_process_group_ranks(ddp.process_group) != ours:
            raise ConfigError(f"the optimizer is sharded over ranks {ours}, DDP has others: give both the same group")
        # Hazard: DDP's reducer, which is not Python's, holds the hook. A hook that holds DDP would never be freed.
        self._ddp_ref = found = ref(ddp)
        self.shard_buckets = shard_buckets

        def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = hook(state, bucket)
            ddp = found()
            assert ddp is not None, "its hook is running"
            arrival = ReducedBucket(bucket.index(), bucket.is_last(), bucket.parameters(), future)
            if self._plan is None:
                self._observe_bucket(ddp, arrival, shard_buckets, is_interleaved)
            else:
                self._step(ddp, self._plan, arrival, is_interleaved)
            return future

        vars(reduce_and_step)["optimizer"] = optimizer  # which a script need not keep, since the hook makes all steps
        return reduce_and_step

    def check_trainable_unchanged(self) -> None:
        """DDP's buckets do not follow `requires_grad`, and so neither can we."""
        if [param.requires_grad for param in _iter_params(self._groups)] != self._trainable_mask:
            raise RuntimeError("requires_grad cannot be switched with overlap_with_ddp=True: DDP's buckets are fixed")

    def run_deferred(self) -> None:
        """For a rank that ran out of inputs, once DDP has done its part: what could not be done in the hook."""
        while self._deferred_actions:
            self._deferred_actions.pop(0)()

    def _observe_bucket(
        self, ddp: DistributedDataParallel, bucket: ReducedBucket, shard_buckets: bool, is_interleaved: bool
    ) -> None:
        backward = current_backward_id()
        # In the first pass of a static graph DDP numbers all buckets 0, and calls none the last.
        if bucket.bucket_index == 0 and (backward == NO_BACKWARD or backward != self._backward_id):
            self._backward_id = backward
            self._num_warmup_passes += 1
            self._buckets.clear()
        self._buckets.append([self._index_of_param[id(p)] for p in bucket.params if id(p) in self._index_of_param])
        if bucket.is_last and self._num_warmup_passes >= self.warmup_passes:
            trained = backward != NO_BACKWARD
            self._run_after_ddp(ddp, lambda: self._finalize_buckets(ddp, shard_buckets, is_interleaved, trained))

    def _finalize_buckets(
        self, ddp: DistributedDataParallel, shard_buckets: bool, is_interleaved: bool, has_inputs: bool
    ) -> None:
        """Deal out the buckets. Raises on all ranks alike."""
        late = bool(ddp.find_unused_parameters)
        if ddp.static_graph:
            used = self._comm.all_reduce_any(
                bytes(has_inputs and param.grad is not None for param in _iter_params(self._groups))
            )
            late |= any(trains and not flag for trains, flag in zip(self._trainable_mask, used, strict=True))
        choices = f"shard_buckets={shard_buckets}, interleaved={is_interleaved}, late={late}"
        self._plan = prepare_all(
            self._comm,
            "settling on DDP's buckets",
            lambda: self._prepare_plan(choices, shard_buckets=shard_buckets, should_defer_updates=late),
        )

    def _prepare_plan(self, settings: str, *, shard_buckets: bool, should_defer_updates: bool) -> Prepared[OverlapPlan]:
        facts = [settings]
        facts += [f"parameters {members} are in DDP's bucket {i}" for i, members in enumerate(self._buckets)]
        bucket_of = {index: number for number, members in enumerate(self._buckets) for index in members}
        missing = [i for i, trains in enumerate(self._trainable_mask) if trains and i not in bucket_of]
        if missing:
            raise ConfigError(f"parameters {missing[:8]} of the optimizer are not among those that DDP reduces")
        owners = self._assign_balanced(bucket_of) if shard_buckets else self._assign_round_robin(bucket_of)
        repartition = self._repartition()
        assert repartition is not None, "the hook keeps the optimizer alive"
        engine = repartition(AssignedOwners(owners, bucket_of))
        places = {bucket_of[index]: engine.layout.bucket_of(index) for index in bucket_of}
        return Prepared(OverlapPlan(engine, places, should_defer_updates), [*facts, f"layout {engine.layout.digest}"])

    def _assign_round_robin(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        return {index: self.round_robin_owner(number) for index, number in bucket_of.items()}

    def _assign_balanced(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        """Whole parameters, bucket after bucket, each to the rank with the least so far."""
        specs = make_param_specs(self._groups)
        members = [replace(specs[index], group=number) for index, number in bucket_of.items()]
        return assign_owners(Layout.empty(self._comm.group.size), members)

    def _step(
        self, ddp: DistributedDataParallel, plan: OverlapPlan, bucket: ReducedBucket, is_interleaved: bool
    ) -> None:
        trained, uneven = current_backward_id() != NO_BACKWARD, ddp._join_config.enable
        if self._backward_pass is None or bucket.bucket_index == 0:
            if uneven:
                broadcast_options(self._comm, self._groups, is_current=trained)
            self._backward_pass = _BackwardPass(plan, self._groups, self._comm)
            self._backward_pass.run_unless_failed(self.check_trainable_unchanged)
        running = self._backward_pass
        running.pending_buckets.append(bucket)
        if not plan.should_defer_updates and (bucket.is_last or is_interleaved):
            running.update_pending(keep_newest=0 if bucket.is_last else 1)
        if bucket.is_last:
            self._backward_pass = None
            late_end = partial(running.update_from_param_grads, has_inputs=trained, is_join_enabled=uneven)
            self._run_after_ddp(ddp, late_end if plan.should_defer_updates else running.finish)

    def _run_after_ddp(self, ddp: DistributedDataParallel, action: Callable[[], None]) -> None:
        """Run `action` when DDP is done with this pass, so that it may look at `param.grad`, and may raise."""
        if current_backward_id() != NO_BACKWARD:
            # DDP queues its own end behind this hook.
            queue_after_backward(lambda: queue_after_backward(action))
        elif ddp.find_unused_parameters:
            # DDP will reduce its map of used parameters behind this hook.
            self._deferred_actions.append(action)
        else:
            action()


class _BackwardPass:
    """One backward pass that updates. What fails is kept until its end: the other ranks wait for our buckets."""

    def __init__(self, plan: OverlapPlan, groups: list[ParamGroup], comm: Comm) -> None:
        self._engine, self._layout_bucket_of = plan.engine, plan.layout_bucket_of
        self._groups, self._comm = groups, comm
        self._owned_index_of = {id(param): index for index, param in plan.engine.owned_params(comm.group.rank).items()}
        self._num_updates = 0
        self._restore_counters = plan.engine.inner.snapshot_counters()
        self._error: Exception | None = None
        self.pending_buckets: list[ReducedBucket] = []
        self.run_unless_failed(plan.engine.param_store.rebind_if_moved)

    def run_unless_failed(self, action: Callable[[], object]) -> None:
        """Run `action` unless something failed already."""
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def update_pending(self, *, keep_newest: int) -> None:
        """Update all buckets that wait, but the newest few."""
        while len(self.pending_buckets) > keep_newest:
            arrival = self.pending_buckets.pop(0)
            with self._comm.profiler.phase(Phase.WAIT_DDP, arrival.bucket_index):
                grads = arrival.wait()
            self._update(arrival.bucket_index, self._select_owned(grads))

    def update_from_param_grads(self, *, has_inputs: bool, is_join_enabled: bool) -> None:
        """Update all buckets with what DDP left in `param.grad`, and finish.

        `trained`: this rank had inputs. `uneven`: some rank may have had none, and so does not know what was used.
        """
        used = bytes(has_inputs and param.grad is not None for param in self._engine.params)
        if is_join_enabled:
            used = self._comm.all_reduce_any(used)
        for arrival in self.pending_buckets:
            grads = {p: p.grad for p in arrival.params if p.grad is not None} if has_inputs else arrival.wait()
            mine = self._select_owned(grads)
            self._update(
                arrival.bucket_index, {p: grad for p, grad in mine.items() if used[self._owned_index_of[id(p)]]}
            )
        self.finish()

    def finish(self) -> None:
        """Wait for all parameters; raise what failed, on all ranks."""
        if not self._num_updates:
            self.run_unless_failed(lambda: self._engine.update_params(self._groups, {}))
        self._engine.param_sync.finish()
        self.run_unless_failed(lambda: self._engine.inner.pull_options(self._groups))
        self._engine.steps += 1
        call = f"overlapped step {self._engine.steps}"
        trouble = Failure.NONE if self._error is None else Failure.FAILED
        verdict = exchange_status(self._comm, call, b"", trouble)
        self._comm.profiler.end_step()
        if verdict.failure_level:
            raise_failure(self._comm, call, self._error)

    def _select_owned(self, grads: GradsByParam) -> GradsByParam:
        return {param: grad for param, grad in grads.items() if id(param) in self._owned_index_of}

    def _update(self, bucket_index: int, owned_grads: GradsByParam) -> None:
        if owned_grads:
            if self._num_updates:
                self._restore_counters()  # all updates of a pass are one step
            self._num_updates += 1
            self.run_unless_failed(lambda: self._engine.update_params(self._groups, owned_grads))
        if bucket_index in self._layout_bucket_of:
            self._engine.broadcast_bucket(self._layout_bucket_of[bucket_index])


def resolve_optimizer_class(optimizer_class: OptimizerConstructor, *, overlap: bool) -> OptimizerConstructor:
    """The class to build. torch's functional optimizers stand for their plain twins, and only under overlap."""
    if not getattr(optimizer_class, "__module__", "").startswith("torch.distributed.optim."):
        return optimizer_class
    from torch.distributed.optim.utils import functional_optim_map

    twins: dict[OptimizerConstructor, OptimizerConstructor] = {
        functional: plain for plain, functional in functional_optim_map.items()
    }
    if optimizer_class not in twins:
        return optimizer_class
    if not overlap:
        raise ConfigError(f"{optimizer_class} is for overlap_with_ddp=True; pass {twins[optimizer_class]}")
    return twins[optimizer_class]


def _iter_params(groups: list[ParamGroup]) -> Iterator[torch.Tensor]:
    return (param for group in groups for param in group["params"])


def split_bucket(bucket: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in a bucket of DDP: views of it, each in the shape of its parameter, in the dtype of the bucket.

    Hazard: `GradBucket.gradients()` ignores the strides of parameters, and takes complex gradients for real ones.
    """
    if bucket.layout != torch.strided:  # DDP gives every sparse gradient a bucket of its own
        return [bucket]
    numbers = [2 if param.is_complex() and not bucket.is_complex() else 1 for param in params]
    parts = torch.split(bucket, [param.numel() * number for param, number in zip(params, numbers, strict=True)])
    return [_view_as_param(part, param) for part, param in zip(parts, params, strict=True)]


def _view_as_param(flat_grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A stretch of DDP's bucket as a gradient. DDP keeps the strides of dense parameters; others are contiguous there.
    The bucket of complex parameters is real: real and imaginary parts take turns."""
    if param.is_complex() and not flat_grad.is_complex():
        pairs = flat_grad.view(-1, 2)
        if flat_grad.dtype == torch.bfloat16:  # torch has no complex dtype for it
            pairs = pairs.to(param.dtype.to_real())
        flat_grad = torch.view_as_complex(pairs)
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat_grad.view(param.shape)
    return flat_grad.as_strided(param.shape, param.stride(), flat_grad.storage_offset())


# ---------------------------------------------------------------------------------------------------------------------
# Gradients from DDP's buckets, whatever those are, to their owners.


def make_comm_hook(reducer: GradReducer, params: Sequence[torch.Tensor]) -> CommHook:
    """A communication hook that hands gradients to `sync`, and to DDP what it gave. More `params` may be added."""
    index: dict[int, int] = {}
    handed: list[int] = []

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        members = bucket.parameters()
        for added in range(len(index), len(params)):
            index[id(params[added])] = added
        for param, grad in zip(members, split_bucket(bucket.buffer(), members), strict=True):
            if id(param) not in index:
                raise ConfigError(
                    f"DDP reduces a parameter of shape {tuple(param.shape)} that the optimizer does not have. Give it "
                    "all parameters that DDP reduces, or freeze the others before DDP wraps the model."
                )
            # Hazard: inside Join a rank without inputs is given zeros here, while old gradients are in `param.grad`.
            reducer.mark_ready(index[id(param)], grad)
            handed.append(index[id(param)])
        if bucket.is_last():
            reducer.finish_backward()
            _queue_after_ddp_backward(partial(reducer.record_param_grads, tuple(handed)))
            handed.clear()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


def _queue_after_ddp_backward(action: Callable[[], None]) -> None:
    """Inside Join, on a rank without inputs, there is no backward pass, and `param.grad` is none of what was given."""
    if current_backward_id() != NO_BACKWARD:
        # Hazard: DDP writes `param.grad` at the end of backward, which it queues after the last bucket's hook.
        queue_after_backward(lambda: queue_after_backward(action))
