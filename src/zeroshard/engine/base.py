"""What every step has: groups that are still those of the layout, a shared closure, failures kept until all know."""

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
"""After a step that failed on a rank."""
Closure = Callable[[], Any]
StateAllocator = Callable[[int, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory for what this rank holds of a state tensor: of a parameter, a key, a shape and a dtype."""


class Engine(ABC):
    """This rank's share of the work, and the order of it: update what it owns, agree that all is well, bring
    the updates to everyone.

    It grows in two steps: `prepare` makes what it takes, and can be taken back; `extend` starts to use it.
    """

    inner: InnerOptimizer
    param_sync: ParamBroadcast | ParamAllGather
    reduces_grads = False
    """Gradients are averaged over all ranks here, not before."""

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
        """Members of less than two elements, by group and place."""
        self._option_encoders: list[GroupOptionsEncoder] = []
        """Of each group, the options that it came with."""

    @abstractmethod
    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Have inner optimizers for all groups."""

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:  # noqa: B027 (most have, in `prepare`)
        """Move parameters to where they are to lie, as the last thing before all ranks agree."""

    @abstractmethod
    def rollback(self, first_group: int) -> None:
        """Undo `prepare` and `move_params`, also where one failed halfway."""

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take in the parameters that `layout` has beyond the present ones. `groups` are all groups."""
        params = [param for group in groups for param in group["params"]][len(self.params) :]
        known, new_groups = len(self._group_params), groups[len(self._group_params) :]
        self._owned_indices += layout.params_owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        self.layout = layout
        self.params.extend(params)
        self._option_encoders.extend(map(GroupOptionsEncoder, new_groups))
        self._group_params.extend(list(group["params"]) for group in new_groups)
        for number, members in enumerate(self._group_params[known:], known):
            self._scalar_params.extend(
                (number, place, param) for place, param in enumerate(members) if param.numel() < 2
            )
        self.param_store.extend(layout, params)

    def owned_params(self, rank: Rank) -> dict[int, torch.Tensor]:
        """The parameters of which a rank owns all or a piece, by index."""
        return {index: self.params[index] for index in self.layout.params_owned_by(rank)}

    def step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """One step on all ranks. What fails on one rank is raised on all, after the others' updates arrived."""
        before = [dict(group) for group in groups]
        try:
            return self._step(groups, closure, kwargs)
        except BaseException:
            # What a step counts in its groups would else differ between the ranks that made it and those that failed.
            for group, options in zip(groups, before, strict=True):
                group.clear()
                group.update(options)
            raise
        finally:
            self.comm.group.failure_detector.set_activity("between steps", self.steps)

    @abstractmethod
    def _step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def state(self) -> dict[Any, Any]:
        """This rank's optimizer state, by parameter: whoever changes it changes that of the inner optimizers."""

    @abstractmethod
    def replace_state(self, state: Any) -> None:
        """Have that state and no other."""

    @contextmanager
    def temporary_initial_state(self) -> Iterator[None]:
        """Inside, parameters that require gradients and have no state have the one that their first step would begin
        with, as far as the optimizer allows it. Afterwards they have none, as before."""
        with ExitStack() as undo:
            self._init_missing_state(undo)
            yield

    def materialize_initial_state(self) -> None:
        """The same, to stay."""
        with ExitStack() as undo:
            self._init_missing_state(undo)
            undo.pop_all()

    def _init_missing_state(self, undo: ExitStack) -> None:
        chosen = self._find_trainable()
        for member in self.inner.local_optimizers:
            if self._is_init_neutral(member):
                init_state(member, chosen, undo)

    def _find_trainable(self) -> Set[int]:
        """The ids of the inner optimizers' tensors that may get gradients now."""
        return {id(param) for param in self.params if param.requires_grad}

    def _is_init_neutral(self, local_optimizer: LocalOptimizer) -> bool:
        if id(local_optimizer) not in self._init_neutral_cache:
            self._init_neutral_cache[id(local_optimizer)] = is_init_neutral(local_optimizer.factory)
        return self._init_neutral_cache[id(local_optimizer)]

    @abstractmethod
    def local_optimizer_of(self, index: int) -> LocalOptimizer:
        """The inner optimizer that has a parameter, or would have it if this rank owned it."""

    @abstractmethod
    def param_shaped_keys(self, index: int) -> frozenset[str]:
        """Keys of a parameter's state that has the parameter's shape, as far as the self-test saw."""

    @abstractmethod
    def state_shards(self) -> list[StateShard]:
        """All state of parameters that this rank has."""

    def owns_state(self, index: int, key: Any) -> bool:
        """Whether this rank keeps state of that name of a parameter, all or a part of it."""
        return key != MASTER_KEY and self.layout.param_shard(index, self.comm.group.rank) is not None

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:  # noqa: B027 (of no use to whole parameters)
        """State under these keys has the shape of its parameter."""

    @abstractmethod
    def state_allocator(
        self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]
    ) -> StateAllocator:
        """Where to read state to: new memory, or `in_place` that of the present state wherever it will do.

        `wanted`: all that room will be asked for.
        """

    @abstractmethod
    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        """Take this rank's part of it; returns how to undo it. `adopt`: its tensors are given away."""

    def snapshot_replica_status(self) -> Callable[[], None]:
        """How to doubt again what is doubted now: a load ends that, also one that puts back what was there before."""
        return lambda: None

    @abstractmethod
    def shard_tensor(self, index: int) -> ShardTensor:
        """What this rank owns of a parameter, where it lies, with the parameters `at_rest`; perhaps nothing."""

    def master_shard_tensor(self, index: int) -> ShardTensor | None:  # noqa: ARG002
        """The more precise copy of it, if there is one."""
        return None

    @abstractmethod
    def wait_until_idle(self) -> None:
        """No parameter is still on its way, and all lie where this rank expects them."""

    @abstractmethod
    def broadcast_params(self) -> Callable[[], None]:
        """Start to bring what each rank owns of all parameters to everyone; returns how to wait. On all ranks."""

    def sync_params(self, call: str, groups: Sequence[ParamGroup]) -> None:
        """Bring what each rank owns of all parameters to everyone and wait for it. On all ranks."""

        def prepare() -> Prepared[None]:
            self.check_groups(groups)
            self.wait_until_idle()
            return Prepared(None)

        prepare_all(self.comm, call, prepare)
        with self.comm.group.failure_detector.abort_on_error():
            self.broadcast_params()()

    def check_consistency(self, call: str, step: int | None = None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if they have different parameters. On all ranks."""
        self.param_sync.finish()
        self.checks.check_consistency(self.layout, self.params, call, step)

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        """The memory that this rank keeps, by what it is for; state is not among it."""
        grads = [grad for grad in map(local_grad, self.params) if grad is not None]
        own = self.param_store.buffers() if isinstance(self.param_store, FlatParamBuffers) else self.params
        return {"parameters": own, "gradients": grads, "staging": self.param_store.staging_buffers()}

    @abstractmethod
    def bytes_to_send(self) -> tuple[int | None, int]:
        """What this rank sends of gradients and of parameters when all travel once; None if others send gradients."""

    @property
    def is_reducing(self) -> bool:
        """Gradients have been sent for the step that comes."""
        return False

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing, by default)
        """Remove what stands in `param.grad` for gradients that are elsewhere: `zero_grad` would use it."""

    def clear_grads(self, *, set_to_none: bool) -> None:  # noqa: B027 (nothing, by default)
        """What `zero_grad` does beyond `param.grad`."""

    def check_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse groups whose parameters are no longer those of the layout."""
        if not self._has_same_params([group["params"] for group in groups]):
            raise BindingError(
                "the parameters in param_groups were changed by hand; add some with add_param_group(), "
                "or make a new optimizer"
            )

    def _has_same_params(self, group_params: list[list[torch.Tensor]]) -> bool:
        try:
            # Lists ask for identity first, many times faster than a loop could. Hazard: only then do they ask tensors
            # whether they are equal, which those with several elements refuse to say.
            same = group_params == self._group_params
        except RuntimeError:
            return False
        return same and all(group_params[group][place] is param for group, place, param in self._scalar_params)

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        self.inner.push_options(groups)
        result = self.inner.step(*([] if closure is None else [closure]), **kwargs)
        self.inner.pull_options(groups)
        return result

    def _precompute_closure(self, closure: Closure | None) -> Closure | None:
        """A closure that has made its gradients before the optimizer's code runs, if they are looked at."""
        return PrecomputedClosure(closure) if self.checks.should_check_grads and closure is not None else closure

    def should_skip(self, get_samples: Callable[[], Iterable[GradSample]], error: Exception | None = None) -> bool:
        """Whether the step is not to be made, since gradients are not finite. On all ranks; raises there alike."""
        return self.checks.should_skip_step(self.layout, get_samples, error)

    def snapshot(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        """Keeps what this rank owns of parameters, and the options of groups; returns how to put that back. Not state:
        modes exchange parameters with it, and leave it as it is."""
        counters = [member.snapshot_counters() for member in self.inner.local_optimizers]
        owned = [
            param
            for it in self.inner.local_optimizers
            for group in it.optimizer.param_groups
            for param in group["params"]
        ]
        values, options = [param.detach().clone() for param in owned], [dict(group) for group in groups]

        @torch.no_grad()
        def restore() -> None:
            for param, value in zip(owned, values, strict=True):
                param.copy_(value)
            for group, before in zip(groups, options, strict=True):
                group.clear()
                group.update(before)
            for undo in counters:
                undo()
            self.inner.push_options(groups)

        return restore

    def set_mode(self, groups: Sequence[ParamGroup], mode: str) -> None:
        """What this rank owns goes into the mode `train` or `eval`, of an optimizer that has them; tells no one."""
        self.inner.push_options(groups)
        for member in self.inner.local_optimizers:
            member.set_mode(mode)
        self.inner.pull_options(groups)

    def consensus_options(self, groups: Sequence[ParamGroup]) -> EncodedOptions:
        """Those of all groups that it has."""
        return EncodedOptions(
            self._encode_options(groups), lambda: describe_groups(groups[: len(self._option_encoders)])
        )

    def _encode_options(self, groups: Sequence[ParamGroup]) -> bytes:
        """The numbers among the options, cheap to compare in every step. Not of what optimizers add to their groups:
        one that has nothing to update may not."""
        return b"".join([it.encode(group) for it, group in zip(self._option_encoders, groups, strict=False)])

    def _require_same_options(
        self, call: str, status: Status, groups: Sequence[ParamGroup], arguments: Sequence[str] = ()
    ) -> None:
        if not status.has_same_options and not status.failure_level:
            raise_first_mismatch(self.comm, call, [*arguments, *describe_groups(groups)])


class GroupOptionsEncoder:
    """The numbers and words among the options that a group came with, as bytes that are equal on all ranks."""

    def __init__(self, group: ParamGroup) -> None:
        keys = sorted(set(group) - {"params", "param_names"})
        self._keys = keys
        self._get_values: Callable[[ParamGroup], Any] = itemgetter(*keys) if len(keys) > 1 else self._lookup
        self._cached_values: Any = None
        self._cached_bytes = b""

    def encode(self, group: ParamGroup) -> bytes:
        try:
            if self._get_values(group) == self._cached_values:
                return self._cached_bytes
        except (KeyError, RuntimeError):  # an option is missing, or a number has become a tensor of several elements
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
    words: list[str] = []
    for value in values:
        if isinstance(value, (int, float)):
            numbers.append(value)
        elif isinstance(value, str):
            words.append(value)
        elif value is not None:
            numbers.extend(_extract_numbers(value))
    return array("d", numbers).tobytes() + encode_text("\n".join(words))


def _extract_numbers(value: Any) -> Iterable[float]:
    """Those in an option. To read a tensor on a GPU would be to wait for it."""
    if isinstance(value, (int, float)):
        return (value,)
    if isinstance(value, (tuple, list)):
        return chain.from_iterable(map(_extract_numbers, value))
    is_near = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return (value.item(),) if is_near and value.numel() == 1 and not value.is_complex() else ()


class StepOutcome:
    """What became of this rank's part of a step."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.failure = Failure.NONE

    def run(self, action: Callable[[], Any]) -> None:
        """The inner step."""
        try:
            self.result = action()
        except Exception as error:
            self.error, self.failure = error, Failure.FAILED

    def raise_if_closure_failed(self, closure: "CollectiveClosure | None") -> None:
        """A closure that failed is known on all ranks, before anything was updated: raise there alike."""
        if closure is not None and closure.has_failed and self.error is not None:
            raise self.error

    def check(self, action: Callable[[], object]) -> None:
        """A check without which this rank cannot take part in what follows."""
        try:
            action()
        except Exception as error:
            self.error, self.failure = self.error or error, Failure.CANNOT_CONTINUE


class CollectiveClosure:
    """The user's closure, after which all ranks learn whether it failed on one, before any of them updates."""

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
        """`then` is called on all ranks after each call of the closure that succeeded on all, `otherwise` if not,
        `again` before each but the first. What that raises it must raise on all ranks alike."""
        self._comm, self._call, self._closure, self._on_success = comm, call, closure, on_success
        self._on_failure, self._before_retry = on_failure, before_retry
        self._call_count = 0
        self.has_failed = False

    def __call__(self) -> Any:
        self._call_count += 1
        self.has_failed = True
        if self._call_count > 1:
            self._before_retry()
        failure: Exception | None = None
        loss = None
        try:
            with self._comm.profiler.phase(Phase.CLOSURE):
                loss = self._closure()
        except Exception as error:
            # Hazard: the other ranks may be in a collective of the closure, where our agreement never reaches them.
            log_rank(logging.ERROR, self._comm.data_parallel.group.rank, "the closure failed: %r", error)
            failure = error
        self._exchange_failure(f"closure {self._call_count} of {self._call}", failure)
        self.has_failed = False
        self._on_success()
        return loss

    def _exchange_failure(self, call: str, error: Exception | None) -> None:
        trouble = Failure.NONE if error is None else Failure.FAILED
        if exchange_status(self._comm, call, b"", trouble).failure_level:
            self._on_failure()
            raise_failure(self._comm, call, error)


class PrecomputedClosure:
    """A closure that is called now. The first call that follows gets what came of that, a later one calls it again."""

    def __init__(self, closure: Closure) -> None:
        self._closure, self._has_unused_loss = closure, True
        with torch.enable_grad():
            self._loss = closure()

    def __call__(self) -> Any:
        if not self._has_unused_loss:
            return self._closure()
        self._has_unused_loss = False
        return self._loss
