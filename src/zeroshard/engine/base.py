"""The engine interface, and what all engines share: group checks, collective closures and step outcomes.

An engine updates the parameters that this rank owns, agrees with the other ranks that the update succeeded, and sends
the updated parameters to all ranks. A rank that fails keeps its error until all ranks know of it, so that all ranks
raise and none waits for a message that is never sent.
"""

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from .._logging import log_rank
from .._types import Rank
from ..comm.collectives import Comm, encode_text
from ..comm.consensus import (
    EncodedOptions,
    Failure,
    Prepared,
    Status,
    exchange_status,
    prepare_all,
    raise_failure,
    raise_first_mismatch,
)
from ..errors import BindingError
from ..layout.layout import Layout
from ..profiling import Phase
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import MASTER_KEY, SavedState, StateShard, describe_groups
from .checks import GradConsistencyCheck, GradSample, StepChecks
from .grad_bucket import local_grad
from .inner import InnerOptimizer, LocalOptimizer, ParamGroup
from .param_gather import ParamAllGather, ParamBroadcast
from .param_store import FlatParamBuffers, ParamStore
from .probe import init_state, is_init_neutral
from .state import StateKeys

PARTIAL_UPDATE = "What other ranks own has been updated: for numbers as if nothing had failed, load a checkpoint."
"""Appended to the error of a step that failed on some rank."""
Closure = Callable[[], Any]
StateAllocator = Callable[[int, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns memory for this rank's part of a state tensor: (param index, key, shape, dtype)."""


class Engine(ABC):
    """This rank's part of the optimizer: inner optimizers, layout, parameter memory, and the step.

    Param groups are added in two phases. `prepare` and `move_params` allocate everything and can be undone with
    `rollback`; once they have succeeded on all ranks, `extend` commits.
    """

    inner: InnerOptimizer
    param_sync: ParamBroadcast | ParamAllGather
    reduces_grads = False
    """Whether this engine averages gradients over ranks. Otherwise the user, or DDP, has done so before the step."""

    def __init__(self, comm: Comm, param_store: ParamStore) -> None:
        self.comm, self.param_store = comm, param_store
        self.checks = StepChecks(comm)
        self.grad_check = GradConsistencyCheck(comm)
        self._init_neutral_cache: dict[int, bool] = {}
        self.layout = Layout.empty(comm.group.size)
        self.params: list[torch.Tensor] = []
        self.steps = 0
        self._owned_indices: tuple[int, ...] = ()
        self._group_params: list[list[torch.Tensor]] = []
        self._scalar_params: list[tuple[int, int, torch.Tensor]] = []
        """Parameters with fewer than two elements, with their group and position."""
        self._option_encoders: list[GroupOptionsEncoder] = []
        """One per group."""

    @abstractmethod
    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Build the inner optimizers, or add new groups to them. `groups` are all groups."""

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:  # noqa: B027 (optional)
        """Move new parameters into their buffers: the last step before all ranks agree to `extend`."""

    @abstractmethod
    def rollback(self, first_group: int) -> None:
        """Undo `prepare` and `move_params` for groups from `first_group` on, even if one failed halfway."""

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Commit the new groups and buckets of `layout`. `groups` are all groups."""
        params = [param for group in groups for param in group["params"]][len(self.params) :]
        first_new = len(self._group_params)
        new_groups = groups[first_new:]
        self._owned_indices += layout.params_owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        self.layout = layout
        self.params.extend(params)
        self._option_encoders.extend(map(GroupOptionsEncoder, new_groups))
        self._group_params.extend(list(group["params"]) for group in new_groups)
        for group_id, group_params in enumerate(self._group_params[first_new:], first_new):
            self._scalar_params.extend(
                (group_id, position, param) for position, param in enumerate(group_params) if param.numel() < 2
            )
        self.param_store.extend(layout, params)

    def owned_params(self, rank: Rank) -> dict[int, torch.Tensor]:
        """Return the parameters that a rank owns, entirely or in part, by index."""
        return {index: self.params[index] for index in self.layout.params_owned_by(rank)}

    def step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Make one step. Call on all ranks.

        If it fails on one rank, it raises on all ranks, after the updates of the others have arrived.
        """
        options_before = [dict(group) for group in groups]
        try:
            return self._step(groups, closure, kwargs)
        except BaseException:
            # Otherwise step counts in the groups would differ between ranks that succeeded and ranks that failed.
            for group, options in zip(groups, options_before, strict=True):
                group.clear()
                group.update(options)
            raise
        finally:
            self.comm.group.failure_detector.set_activity("between steps", self.steps)

    @abstractmethod
    def _step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def state(self) -> dict[Any, Any]:
        """Return this rank's optimizer state by parameter. Changing it changes the inner optimizers' state."""

    @abstractmethod
    def replace_state(self, state: Any) -> None:
        """Replace all optimizer state (`optimizer.state = state`)."""

    @contextmanager
    def temporary_initial_state(self) -> Iterator[None]:
        """Give trainable parameters without state their initial state inside the block, and remove it afterwards.

        The initial state is the one that the first step would start with. Optimizers whose state cannot be initialized
        without side effects are left out.
        """
        with ExitStack() as undo:
            self._init_missing_state(undo)
            yield

    def materialize_initial_state(self) -> None:
        """Like `temporary_initial_state`, but keep the state."""
        with ExitStack() as undo:
            self._init_missing_state(undo)
            undo.pop_all()

    def _init_missing_state(self, undo: ExitStack) -> None:
        trainable = self._find_trainable()
        for local_optimizer in self.inner.local_optimizers:
            if self._is_init_neutral(local_optimizer):
                init_state(local_optimizer, trainable, undo)

    def _find_trainable(self) -> Set[int]:
        """Return the ids of the inner optimizers' tensors that can get gradients now."""
        return {id(param) for param in self.params if param.requires_grad}

    def _is_init_neutral(self, local_optimizer: LocalOptimizer) -> bool:
        if id(local_optimizer) not in self._init_neutral_cache:
            self._init_neutral_cache[id(local_optimizer)] = is_init_neutral(local_optimizer.factory)
        return self._init_neutral_cache[id(local_optimizer)]

    @abstractmethod
    def local_optimizer_of(self, index: int) -> LocalOptimizer:
        """Return the inner optimizer that has a parameter, or would have it if this rank owned it."""

    @abstractmethod
    def param_shaped_keys(self, index: int) -> frozenset[str]:
        """Return the state keys for which the probe saw tensors of the parameter's shape."""

    @abstractmethod
    def state_shards(self) -> list[StateShard]:
        """Return the state of all parameters, or shards of them, that this rank owns."""

    def owns_state(self, index: int, key: Any) -> bool:
        """Return whether this rank has state of a parameter under this key, entirely or in part."""
        return key != MASTER_KEY and self.layout.param_shard(index, self.comm.group.rank) is not None

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:  # noqa: B027 (optional)
        """Declare that state under these keys has the shape of its parameter."""

    @abstractmethod
    def state_allocator(
        self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]
    ) -> StateAllocator:
        """Return an allocator for state that is being loaded.

        Args:
            state_keys: All state that the allocator will be called for.
            in_place: Reuse the memory of the present state wherever it fits; otherwise always allocate.
            param_shaped_keys: Keys of state that has the shape of its parameter.
        """

    @abstractmethod
    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        """Load this rank's part of saved state; returns a function that undoes it. `assign`: may keep its tensors."""

    def snapshot_replica_status(self) -> Callable[[], None]:
        """Return a function that restores which replicas are known to have diverged.

        A load marks replicas as equal, even one that only restores what was there before.
        """
        return lambda: None

    @abstractmethod
    def shard_tensor(self, index: int) -> ShardTensor:
        """Return this rank's shard of a parameter, in place and perhaps empty. Call after `wait_until_idle`."""

    def master_shard_tensor(self, index: int) -> ShardTensor | None:  # noqa: ARG002
        """Return the master weights of this rank's shard of a parameter, or None if it has none."""
        return None

    @abstractmethod
    def wait_until_idle(self) -> None:
        """Wait for parameters in flight, and rebind parameters that the user has moved."""

    @abstractmethod
    def broadcast_params(self) -> Callable[[], None]:
        """Start sending all parameters from their owners to all ranks; returns a wait function. Call on all ranks."""

    def sync_params(self, call: str, groups: Sequence[ParamGroup]) -> None:
        """Send all parameters from their owners to all ranks and wait. Call on all ranks."""

        def prepare() -> Prepared[None]:
            self.check_groups(groups)
            self.wait_until_idle()
            return Prepared(None)

        prepare_all(self.comm, call, prepare)
        with self.comm.group.failure_detector.abort_on_error():
            self.broadcast_params()()

    def check_consistency(self, call: str, step: int | None = None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if their parameters differ. Call on all ranks."""
        self.param_sync.finish()
        self.checks.check_consistency(self.layout, self.params, call, step)

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank keeps in memory, by purpose, without optimizer state."""
        grads = [grad for grad in map(local_grad, self.params) if grad is not None]
        params = self.param_store.buffers() if isinstance(self.param_store, FlatParamBuffers) else self.params
        return {"parameters": params, "gradients": grads, "staging": self.param_store.staging_buffers()}

    @abstractmethod
    def bytes_to_send(self) -> tuple[int | None, int]:
        """Return the bytes of gradients (None if others reduce them) and parameters that this rank sends per step."""

    @property
    def is_reducing(self) -> bool:
        """Whether gradients have been sent for the next step."""
        return False

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing by default)
        """Remove placeholders for sharded gradients from `param.grad`, which `zero_grad` would otherwise use."""

    def clear_grads(self, *, set_to_none: bool) -> None:  # noqa: B027 (nothing by default)
        """Clear gradients outside `param.grad`, as a part of `zero_grad`."""

    def check_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Raise `BindingError` if the parameters of the groups are no longer those of the layout."""
        if not self._has_same_params([group["params"] for group in groups]):
            raise BindingError(
                "the parameters in param_groups were changed by hand; add some with add_param_group(), "
                "or make a new optimizer"
            )

    def _has_same_params(self, group_params: list[list[torch.Tensor]]) -> bool:
        try:
            # List comparison checks identity first, many times faster than a loop. Hazard: for other objects it then
            # calls `Tensor.__eq__`, whose result has no truth value for several elements and raises RuntimeError.
            is_equal = group_params == self._group_params
        except RuntimeError:
            return False
        # A tensor with one element can be equal to another one without being the same.
        return is_equal and all(
            group_params[group_id][position] is param for group_id, position, param in self._scalar_params
        )

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        self.inner.push_options(groups)
        result = self.inner.step(*([] if closure is None else [closure]), **kwargs)
        self.inner.pull_options(groups)
        return result

    def _precompute_closure(self, closure: Closure | None) -> Closure | None:
        """Call the closure before the optimizer does, if gradients are checked before the step."""
        return PrecomputedClosure(closure) if self.checks.should_check_grads and closure is not None else closure

    def should_skip(self, get_samples: Callable[[], Iterable[GradSample]], error: Exception | None = None) -> bool:
        """Return whether to skip the step because gradients are not finite. Call on all ranks; raises on all ranks."""
        return self.checks.should_skip_step(self.layout, get_samples, error)

    def snapshot(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        """Copy owned parameters and group options; returns a function that restores them.

        Optimizer state is not copied: train and eval mode swap parameters with values in the state and leave the state
        itself as it is.
        """
        counter_resets = [local_optimizer.snapshot_counters() for local_optimizer in self.inner.local_optimizers]
        owned = [
            param
            for local_optimizer in self.inner.local_optimizers
            for group in local_optimizer.optimizer.param_groups
            for param in group["params"]
        ]
        values, options_before = [param.detach().clone() for param in owned], [dict(group) for group in groups]

        @torch.no_grad()
        def restore() -> None:
            for param, value in zip(owned, values, strict=True):
                param.copy_(value)
            for group, options in zip(groups, options_before, strict=True):
                group.clear()
                group.update(options)
            for reset in counter_resets:
                reset()
            self.inner.push_options(groups)

        return restore

    def set_mode(self, groups: Sequence[ParamGroup], mode: str) -> None:
        """Switch owned parameters to "train" or "eval" mode of an optimizer that has modes. Does not communicate."""
        self.inner.push_options(groups)
        for local_optimizer in self.inner.local_optimizers:
            local_optimizer.set_mode(mode)
        self.inner.pull_options(groups)

    def consensus_options(self, groups: Sequence[ParamGroup]) -> EncodedOptions:
        """Return the options of all groups, for comparison between ranks."""
        return EncodedOptions(
            self._encode_options(groups), lambda: describe_groups(groups[: len(self._option_encoders)])
        )

    def _encode_options(self, groups: Sequence[ParamGroup]) -> bytes:
        """Encode numbers and strings in the options, cheap enough to compare in every step.

        Options that an optimizer adds during its step are left out: one without parameters on this rank may not add
        them.
        """
        return b"".join([encoder.encode(group) for encoder, group in zip(self._option_encoders, groups, strict=False)])

    def _require_same_options(
        self, call: str, status: Status, groups: Sequence[ParamGroup], arguments: Sequence[str] = ()
    ) -> None:
        """Raise on all ranks if the last status exchange found different options."""
        if not status.has_same_options and not status.failure_level:
            raise_first_mismatch(self.comm, call, [*arguments, *describe_groups(groups)])


class GroupOptionsEncoder:
    """Encodes numbers and strings in a group's original options as bytes, to compare between ranks."""

    def __init__(self, group: ParamGroup) -> None:
        keys = sorted(set(group) - {"params", "param_names"})
        self._keys = keys
        self._get_values: Callable[[ParamGroup], Any] = itemgetter(*keys) if len(keys) > 1 else self._lookup
        self._cached_values: Any = None
        self._cached_bytes = b""

    def encode(self, group: ParamGroup) -> bytes:
        """Return the encoded options; cached while they are immutable and unchanged."""
        try:
            if self._get_values(group) == self._cached_values:
                return self._cached_bytes
        except (KeyError, RuntimeError):  # an option was removed, or is now a tensor with several elements
            pass
        values = self._lookup(group)
        self._cached_bytes = _encode_values(values)
        self._cached_values = values if all(map(_is_immutable, values)) else None
        return self._cached_bytes

    def _lookup(self, group: ParamGroup) -> tuple[Any, ...]:
        return tuple(map(group.get, self._keys))


def _is_immutable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return value is None or isinstance(value, (int, float, str))


def _encode_values(values: Iterable[Any]) -> bytes:
    numbers: list[float] = []
    strings: list[str] = []
    for value in values:
        if isinstance(value, (int, float)):
            numbers.append(value)
        elif isinstance(value, str):
            strings.append(value)
        elif value is not None:
            numbers.extend(_extract_numbers(value))
    return array("d", numbers).tobytes() + encode_text("\n".join(strings))


def _extract_numbers(value: Any) -> Iterable[float]:
    """Return the numbers in an option. GPU tensors are left out: reading them would synchronize with the device."""
    if isinstance(value, (int, float)):
        return (value,)
    if isinstance(value, (tuple, list)):
        return chain.from_iterable(map(_extract_numbers, value))
    is_cpu_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return (value.item(),) if is_cpu_tensor and value.numel() == 1 and not value.is_complex() else ()


class StepOutcome:
    """The result or the error of this rank's part of a step."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.failure = Failure.NONE

    def run(self, action: Callable[[], Any]) -> None:
        """Run a part of the step. If it fails, this rank can still take part in the collectives that follow."""
        try:
            self.result = action()
        except Exception as error:
            self.error, self.failure = error, Failure.FAILED

    def raise_if_closure_failed(self, closure: "CollectiveClosure | None") -> None:
        """Raise on all ranks if the closure failed: all ranks know of it, and none has updated anything."""
        if closure is not None and closure.has_failed and self.error is not None:
            raise self.error

    def check(self, action: Callable[[], object]) -> None:
        """Run a check. If it fails, this rank cannot take part in the collectives that follow."""
        try:
            action()
        except Exception as error:
            self.error, self.failure = self.error or error, Failure.CANNOT_CONTINUE


class CollectiveClosure:
    """Calls the user's closure, and tells all ranks if it failed on any, before any of them updates parameters."""

    def __init__(
        self,
        comm: Comm,
        call: str,
        closure: Closure,
        on_success: Callable[[], object],
        on_failure: Callable[[], object] = lambda: None,
        *,
        before_retry: Callable[[], object] = lambda: None,
    ) -> None:
        """Wrap a closure.

        Args:
            comm: Collectives of the optimizer.
            call: Name of the step in error messages.
            closure: The user's closure.
            on_success: Called on all ranks after the closure has succeeded on all of them.
            on_failure: Called on all ranks after the closure has failed on some rank.
            before_retry: Called on all ranks before every call but the first. Errors must be raised on all ranks.
        """
        self._comm, self._call, self._closure, self._on_success = comm, call, closure, on_success
        self._on_failure, self._before_retry = on_failure, before_retry
        self._call_count = 0
        self.has_failed = False

    def __call__(self) -> Any:
        self._call_count += 1
        self.has_failed = True
        if self._call_count > 1:
            self._before_retry()
        caught: Exception | None = None
        loss = None
        try:
            with self._comm.profiler.phase(Phase.CLOSURE):
                loss = self._closure()
        except Exception as error:
            # Hazard: other ranks may be inside a collective of their closure, where our status exchange never reaches
            # them. Log now.
            log_rank(logging.ERROR, self._comm.data_parallel.group.rank, "the closure failed: %r", error)
            caught = error
        self._exchange_failure(f"closure {self._call_count} of {self._call}", caught)
        self.has_failed = False
        self._on_success()
        return loss

    def _exchange_failure(self, call: str, error: Exception | None) -> None:
        failure = Failure.NONE if error is None else Failure.FAILED
        if exchange_status(self._comm, call, b"", failure).failure_level:
            self._on_failure()
            raise_failure(self._comm, call, error)


class PrecomputedClosure:
    """Calls a closure at construction. The first call returns that loss, later calls call the closure again."""

    def __init__(self, closure: Closure) -> None:
        self._closure, self._has_unused_loss = closure, True
        with torch.enable_grad():
            self._loss = closure()

    def __call__(self) -> Any:
        if not self._has_unused_loss:
            return self._closure()
        self._has_unused_loss = False
        return self._loss
