"""DDP communication hooks: step inside DDP's backward pass, or reduce gradients to their owners.

`DDPOverlap` observes DDP's buckets during the warmup passes, which do not update anything. Then the owners of a bucket
update its parameters as soon as its gradients are reduced, and broadcast them. All ranks process buckets in the same
order: collectives started in order of arrival would not match across ranks.

A rank that is out of inputs inside `Join` runs no backward pass. DDP passes it buckets of zeros instead, to which the
other ranks add their gradients, and it keeps updating the parameters it owns.

`make_comm_hook` passes the gradients in DDP's buckets to a `GradReducer`; `step()` is called as usual.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from .._torch_compat import is_in_join
from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Prepared, exchange_status, prepare_all, raise_failure
from ..errors import ConfigError
from ..layout.layout import Layout
from ..layout.partition import AssignedOwners, Partitioner, assign_owners
from ..layout.spec import make_param_specs
from ..profiling import Phase, StepProfiler
from .autograd_hooks import NO_BACKWARD, current_backward_id, queue_after_backward
from .base import Engine
from .grad_reducer import GradReducer
from .inner import OptimizerConstructor, ParamGroup
from .join import broadcast_options
from .param_sync import ParamBroadcast
from .whole_params import WholeParamStore

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
GradsByParam = dict[torch.Tensor, torch.Tensor]


class DDPBucket(NamedTuple):
    """A DDP bucket whose reduction was started, and the future of its reduced gradients."""

    bucket_index: int
    is_last: bool
    params: list[torch.Tensor]
    future: torch.futures.Future[Any]

    def wait(self) -> GradsByParam:
        """Wait for the reduction and return the gradients in the dtypes of their parameters."""
        result = self.future.wait()
        reduced = result if isinstance(result, torch.Tensor) else result[0]
        grads = split_bucket(reduced, self.params)
        return {param: grad.to(param.dtype) for param, grad in zip(self.params, grads, strict=True)}


class OverlapPlan(NamedTuple):
    """How to step once DDP's buckets are final."""

    engine: Engine
    store: WholeParamStore
    param_sync: ParamBroadcast
    layout_bucket_of: dict[int, int]
    """Index in the layout of each DDP bucket, without the buckets that contain none of the optimizer's parameters."""
    should_defer_updates: bool
    """Update only when DDP is done: its buckets contain zeros for unused parameters, so only `param.grad` tells which
    parameters have gradients."""


class DDPOverlap:
    """Drives an optimizer from a DDP communication hook: observes DDP's buckets first, then steps with them.

    The optimizer owns this object, so `set_engine`, a method of the optimizer, is referenced weakly.
    """

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        groups: list[ParamGroup],
        *,
        build_engine: Callable[[Partitioner], Engine],
        set_engine: Callable[[Engine], None],
    ) -> None:
        """Prepare to observe DDP's buckets.

        Args:
            comm: Collectives of the optimizer.
            profiler: Times waits for DDP.
            groups: The user's groups.
            build_engine: Builds an engine whose owners a partitioner decides. It may raise on one rank only.
            set_engine: Replaces the optimizer's engine. Called on all ranks, once DDP's buckets are final.
        """
        self._comm, self._profiler, self._groups = comm, profiler, groups
        self._build_engine, self._set_engine = build_engine, WeakMethod(set_engine)
        self._index_of_param = {id(param): i for i, param in enumerate(_iter_params(groups))}
        self._trainable_mask = [param.requires_grad for param in _iter_params(groups)]
        self._ddp_ref: ref[DistributedDataParallel] | None = None
        self.shard_buckets = False
        """Whether a bucket may have several owners."""
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
        """DDP's buckets as indices of the optimizer's parameters; empty until they are final."""
        return self._buckets if self.is_initialized else []

    def round_robin_owner(self, bucket_index: int) -> Rank:
        """Return the owner of a DDP bucket, if `shard_buckets` is not set."""
        return Rank(bucket_index % self._comm.group.size)

    @property
    def warmup_passes(self) -> int:
        """Number of backward passes until DDP's buckets are final."""
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
        """Return a communication hook for `ddp` that reduces a bucket with `hook`, then steps.

        Args:
            ddp: The module on which the hook will be registered.
            hook: Reduces a bucket.
            optimizer: The owner of this object. The hook keeps it alive.
            shard_buckets: Distribute the parameters of each bucket over all ranks.
            is_interleaved: Update a bucket when the next one is sent, not only after the last one.

        Raises:
            ConfigError: If `ddp` and the optimizer have different ranks.
        """
        ranks = dist.get_process_group_ranks(self._comm.group.process_group)
        if dist.get_process_group_ranks(ddp.process_group) != ranks:
            raise ConfigError(
                f"the optimizer is sharded over ranks {ranks}, but DDP uses other ranks. Pass the same process_group "
                "to both."
            )
        # Hazard: DDP's C++ reducer holds the hook, and the garbage collector cannot see that. A strong reference from
        # the hook to DDP would form a cycle that is never freed.
        self._ddp_ref = ddp_ref = ref(ddp)
        self.shard_buckets = shard_buckets

        def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = hook(state, bucket)
            ddp = ddp_ref()
            assert ddp is not None, "its hook is running"
            reduced = DDPBucket(bucket.index(), bucket.is_last(), bucket.parameters(), future)
            if self._plan is None:
                self._observe_bucket(ddp, reduced, shard_buckets, is_interleaved)
            else:
                self._step(ddp, self._plan, reduced, is_interleaved)
            return future

        # A script need not keep the optimizer, since the hook drives all steps.
        vars(reduce_and_step)["optimizer"] = optimizer
        return reduce_and_step

    def check_trainable_unchanged(self) -> None:
        """Raise if `requires_grad` of a parameter changed: DDP's buckets are fixed."""
        if [param.requires_grad for param in _iter_params(self._groups)] != self._trainable_mask:
            raise RuntimeError(
                "requires_grad cannot be changed with overlap_with_ddp=True, because DDP's buckets are fixed. Restore "
                "it, or make a new DDP module and optimizer."
            )

    def run_deferred(self) -> None:
        """Run the actions that a joined rank could not run inside the hook. Called when DDP is done."""
        while self._deferred_actions:
            self._deferred_actions.pop(0)()

    def _observe_bucket(
        self, ddp: DistributedDataParallel, bucket: DDPBucket, shard_buckets: bool, is_interleaved: bool
    ) -> None:
        backward_id = current_backward_id()
        # In the first pass of a static graph, DDP gives all buckets the index 0 and marks none as the last.
        if bucket.bucket_index == 0 and (backward_id == NO_BACKWARD or backward_id != self._backward_id):
            self._backward_id = backward_id
            self._num_warmup_passes += 1
            self._buckets.clear()
        self._buckets.append([self._index_of_param[id(p)] for p in bucket.params if id(p) in self._index_of_param])
        if bucket.is_last and self._num_warmup_passes >= self.warmup_passes:
            has_inputs = backward_id != NO_BACKWARD
            self._run_after_ddp(ddp, lambda: self._finalize_buckets(ddp, shard_buckets, is_interleaved, has_inputs))

    def _finalize_buckets(
        self, ddp: DistributedDataParallel, shard_buckets: bool, is_interleaved: bool, has_inputs: bool
    ) -> None:
        """Assign the buckets to ranks and create the plan. An error on one rank is raised on all ranks."""
        should_defer = bool(ddp.find_unused_parameters)
        if ddp.static_graph:
            used = self._comm.all_reduce_any(
                bytes(has_inputs and param.grad is not None for param in _iter_params(self._groups))
            )
            should_defer |= any(
                is_trainable and not is_used for is_trainable, is_used in zip(self._trainable_mask, used, strict=True)
            )
        settings = f"shard_buckets={shard_buckets}, interleaved={is_interleaved}, late={should_defer}"
        self._plan = prepare_all(
            self._comm,
            "assigning DDP's buckets to ranks",
            lambda: self._prepare_plan(settings, shard_buckets=shard_buckets, should_defer_updates=should_defer),
        )
        set_engine = self._set_engine()
        assert set_engine is not None, "the hook keeps the optimizer alive"
        set_engine(self._plan.engine)

    def _prepare_plan(self, settings: str, *, shard_buckets: bool, should_defer_updates: bool) -> Prepared[OverlapPlan]:
        must_match = [settings]
        must_match += [f"parameters {members} are in DDP's bucket {i}" for i, members in enumerate(self._buckets)]
        bucket_of = {index: bucket for bucket, members in enumerate(self._buckets) for index in members}
        missing = [i for i, is_trainable in enumerate(self._trainable_mask) if is_trainable and i not in bucket_of]
        if missing:
            raise ConfigError(
                f"parameters {missing[:8]} of the optimizer are not reduced by DDP. Pass the optimizer only parameters "
                "of the DDP module."
            )
        owners = self._assign_balanced(bucket_of) if shard_buckets else self._assign_round_robin(bucket_of)
        engine = self._build_engine(AssignedOwners(owners, bucket_of))
        layout_bucket_of = {bucket_of[index]: engine.layout.bucket_of(index) for index in bucket_of}
        # overlap_with_ddp is rejected for any other store.
        store, param_sync = cast(WholeParamStore, engine.params), cast(ParamBroadcast, engine.param_sync)
        plan = OverlapPlan(engine, store, param_sync, layout_bucket_of, should_defer_updates)
        return Prepared(plan, [*must_match, f"layout {engine.layout.digest}"])

    def _assign_round_robin(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        return {index: self.round_robin_owner(bucket) for index, bucket in bucket_of.items()}

    def _assign_balanced(self, bucket_of: dict[int, int]) -> dict[int, Rank]:
        """Assign whole parameters, bucket by bucket, each to the rank with the smallest load so far."""
        specs = make_param_specs(self._groups)
        specs_by_bucket = [replace(specs[index], group=bucket) for index, bucket in bucket_of.items()]
        return assign_owners(Layout.empty(self._comm.group.size), specs_by_bucket)

    def _step(self, ddp: DistributedDataParallel, plan: OverlapPlan, bucket: DDPBucket, is_interleaved: bool) -> None:
        has_inputs, in_join = current_backward_id() != NO_BACKWARD, is_in_join(ddp)
        if self._backward_pass is None or bucket.bucket_index == 0:
            if in_join:
                broadcast_options(self._comm, self._groups, is_current=has_inputs)
            self._backward_pass = _BackwardPass(plan, self._groups, self._comm, self._profiler)
            self._backward_pass.run_unless_failed(self.check_trainable_unchanged)
        backward_pass = self._backward_pass
        backward_pass.pending_buckets.append(bucket)
        if not plan.should_defer_updates and (bucket.is_last or is_interleaved):
            backward_pass.update_pending(keep_newest=0 if bucket.is_last else 1)
        if bucket.is_last:
            self._backward_pass = None
            deferred = partial(backward_pass.update_from_param_grads, has_inputs=has_inputs, is_join_enabled=in_join)
            self._run_after_ddp(ddp, deferred if plan.should_defer_updates else backward_pass.finish)

    def _run_after_ddp(self, ddp: DistributedDataParallel, action: Callable[[], None]) -> None:
        """Run `action` when DDP is done with this pass: then it may read `param.grad`, and may raise."""
        if current_backward_id() != NO_BACKWARD:
            # DDP queues its own callback after this hook, so queue the action from a callback.
            queue_after_backward(lambda: queue_after_backward(action))
        elif ddp.find_unused_parameters:
            # DDP all-reduces its map of used parameters after this hook; `run_deferred` follows that.
            self._deferred_actions.append(action)
        else:
            action()


class _BackwardPass:
    """A backward pass that updates parameters.

    An error is kept until the end of the pass, since the other ranks wait for this rank's broadcasts.
    """

    def __init__(self, plan: OverlapPlan, groups: list[ParamGroup], comm: Comm, profiler: StepProfiler) -> None:
        self._engine, self._store, self._param_sync = plan.engine, plan.store, plan.param_sync
        self._layout_bucket_of = plan.layout_bucket_of
        self._groups, self._comm, self._profiler = groups, comm, profiler
        self._owned_index_of = {id(param): index for index, param in plan.store.owned_by(comm.group.rank).items()}
        self._num_updates = 0
        self._restore_counters = plan.store.member.inner.snapshot_counters()
        self._error: Exception | None = None
        self.pending_buckets: list[DDPBucket] = []
        self.run_unless_failed(plan.store.memory.rebind_if_moved)

    def run_unless_failed(self, action: Callable[[], object]) -> None:
        """Run `action` unless an earlier one failed; record its exception."""
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def update_pending(self, *, keep_newest: int) -> None:
        """Update all pending buckets except the `keep_newest` newest ones."""
        while len(self.pending_buckets) > keep_newest:
            bucket = self.pending_buckets.pop(0)
            with self._profiler.phase(Phase.WAIT_DDP, bucket.bucket_index):
                grads = self._wait_for_bucket(bucket)
            self._update(bucket.bucket_index, self._select_owned(grads))

    def update_from_param_grads(self, *, has_inputs: bool, is_join_enabled: bool) -> None:
        """Update all buckets with the gradients that DDP left in `param.grad`, and finish.

        Args:
            has_inputs: This rank had inputs. Otherwise it takes gradients from DDP's buckets.
            is_join_enabled: Some rank may have had no inputs and does not know which parameters were used.
        """
        used = bytes(has_inputs and param.grad is not None for param in self._store.tensors)
        if is_join_enabled:
            used = self._comm.all_reduce_any(used)
        for bucket in self.pending_buckets:
            grads = (
                {p: p.grad for p in bucket.params if p.grad is not None}
                if has_inputs
                else self._wait_for_bucket(bucket)
            )
            owned = self._select_owned(grads)
            self._update(
                bucket.bucket_index, {p: grad for p, grad in owned.items() if used[self._owned_index_of[id(p)]]}
            )
        self.finish()

    def finish(self) -> None:
        """Wait for all parameters. An error on one rank is raised on all ranks."""
        if not self._num_updates:
            self.run_unless_failed(lambda: self._store.update_params(self._groups, {}))
        self._param_sync.finish()
        self.run_unless_failed(lambda: self._store.inner.pull_options(self._groups))
        self._engine.count_step()
        call = f"overlapped step {self._engine.steps}"
        failure = Failure.NONE if self._error is None else Failure.FAILED
        status = exchange_status(self._comm, call, b"", failure)
        self._profiler.end_step()
        if status.failure_level:
            raise_failure(self._comm, call, self._error)

    def _wait_for_bucket(self, bucket: DDPBucket) -> GradsByParam:
        """Return the reduced gradients of a bucket; none after an error, which is kept."""
        grads: GradsByParam = {}
        self.run_unless_failed(lambda: grads.update(bucket.wait()))
        return grads

    def _select_owned(self, grads: GradsByParam) -> GradsByParam:
        return {param: grad for param, grad in grads.items() if id(param) in self._owned_index_of}

    def _update(self, bucket_index: int, owned_grads: GradsByParam) -> None:
        if owned_grads:
            if self._num_updates:
                self._restore_counters()  # all updates of a pass count as one step
            self._num_updates += 1
            self.run_unless_failed(lambda: self._store.update_params(self._groups, owned_grads))
        if bucket_index in self._layout_bucket_of:
            self._param_sync.start_bucket(self._layout_bucket_of[bucket_index])


def resolve_optimizer_class(optimizer_class: OptimizerConstructor, *, overlap: bool) -> OptimizerConstructor:
    """Return the class to construct: for a functional optimizer of torch its plain class. These need `overlap`."""
    if not getattr(optimizer_class, "__module__", "").startswith("torch.distributed.optim."):
        return optimizer_class
    from torch.distributed.optim.utils import functional_optim_map

    plain_classes: dict[OptimizerConstructor, OptimizerConstructor] = {
        functional: plain for plain, functional in functional_optim_map.items()
    }
    if optimizer_class not in plain_classes:
        return optimizer_class
    if not overlap:
        raise ConfigError(
            f"{optimizer_class} needs overlap_with_ddp=True. Pass {plain_classes[optimizer_class]} instead."
        )
    return plain_classes[optimizer_class]


def _iter_params(groups: list[ParamGroup]) -> Iterator[torch.Tensor]:
    return (param for group in groups for param in group["params"])


def split_bucket(bucket: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a DDP bucket, one per gradient, with the shape of the parameter and the dtype of the bucket.

    Hazard: `GradBucket.gradients()` ignores the strides of parameters, and treats complex gradients as real.
    """
    if bucket.layout != torch.strided:  # DDP gives every sparse gradient a bucket of its own
        return [bucket]
    numels = [param.numel() * (2 if param.is_complex() and not bucket.is_complex() else 1) for param in params]
    flat_grads = torch.split(bucket, numels)
    return [_view_as_param(flat_grad, param) for flat_grad, param in zip(flat_grads, params, strict=True)]


def _view_as_param(flat_grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a span of DDP's bucket as a view with the shape of `param`.

    DDP keeps the strides of non-overlapping and dense parameters; all others are contiguous in the bucket. The bucket
    of complex parameters is real, with real and imaginary parts interleaved.
    """
    if param.is_complex() and not flat_grad.is_complex():
        pairs = flat_grad.view(-1, 2)
        if flat_grad.dtype == torch.bfloat16:  # torch has no complex dtype of bfloat16
            pairs = pairs.to(param.dtype.to_real())
        flat_grad = torch.view_as_complex(pairs)
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat_grad.view(param.shape)
    return flat_grad.as_strided(param.shape, param.stride(), flat_grad.storage_offset())


# ---------------------------------------------------------------------------------------------------------------------
# From DDP's buckets to a `GradReducer`.


def make_comm_hook(reducer: GradReducer, params: Sequence[torch.Tensor]) -> CommHook:
    """Return a DDP communication hook that marks gradients ready in `reducer` and returns DDP its bucket unreduced.

    Parameters that are appended to `params` later are handled, too.
    """
    index_of: dict[int, int] = {}
    ready: list[int] = []

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket_params = bucket.parameters()
        for new_index in range(len(index_of), len(params)):
            index_of[id(params[new_index])] = new_index
        for param, grad in zip(bucket_params, split_bucket(bucket.buffer(), bucket_params), strict=True):
            if id(param) not in index_of:
                raise ConfigError(
                    f"DDP reduces a parameter of shape {tuple(param.shape)} that the optimizer does not have. Pass "
                    "it all parameters that DDP reduces, or freeze the others before DDP wraps the model."
                )
            # Hazard: inside Join a rank without inputs receives zeros here, while `param.grad` has old gradients.
            reducer.mark_ready(index_of[id(param)], grad)
            ready.append(index_of[id(param)])
        if bucket.is_last():
            reducer.finish_backward()
            _queue_after_ddp_backward(partial(reducer.record_param_grads, tuple(ready)))
            ready.clear()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


def _queue_after_ddp_backward(action: Callable[[], None]) -> None:
    """Run `action` after DDP wrote `param.grad`. Do nothing on a joined rank, which has no backward pass."""
    if current_backward_id() != NO_BACKWARD:
        # Hazard: DDP writes `param.grad` at the end of backward, which it queues after the last bucket's hook.
        queue_after_backward(lambda: queue_after_backward(action))
