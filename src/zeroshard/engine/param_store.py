"""What this rank owns: parameters, the inner optimizers that update them, and the state of these.

There are two stores. `WholeParamStore` (whole_params.py) owns whole parameters and updates them in place.
`FlatShardStore` (flat_shards.py) owns a shard of every flat bucket, with or without master weights.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

import torch

from .._types import Rank
from ..comm.collectives import Comm, encode_text
from ..comm.consensus import EncodedOptions
from ..errors import BindingError
from ..layout.layout import Layout
from ..profiling import StepProfiler
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import MASTER_KEY, SavedState, StateShard, describe_groups
from .checks import GradSample
from .grad_source import GradSource
from .grad_stage import local_grad
from .inner import InnerMember, InnerOptimizer, LocalOptimizer, ParamGroup
from .param_memory import ParamMemory
from .probe import OptimizerTraits, init_state, is_init_neutral
from .state import StateKeys
from .step import Step

StateAllocator = Callable[[int, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns memory for this rank's part of a state tensor: (param index, key, shape, dtype)."""


# ---------------------------------------------------------------------------------------------------------------------
# The user's groups.


class TrackedGroups:
    """The user's parameter groups as they were added: finds parameters changed by hand, and encodes options."""

    def __init__(self) -> None:
        self._group_params: list[list[torch.Tensor]] = []
        self._scalar_params: list[tuple[int, int, torch.Tensor]] = []
        """Parameters with fewer than two elements, with their group and position."""
        self._option_encoders: list[_GroupOptionsEncoder] = []
        """One per group."""

    def extend(self, groups: Sequence[ParamGroup]) -> None:
        """Track new groups. `groups` are all groups, old and new."""
        first_new = len(self._group_params)
        new_groups = groups[first_new:]
        self._option_encoders.extend(map(_GroupOptionsEncoder, new_groups))
        self._group_params.extend(list(group["params"]) for group in new_groups)
        for group_id, group_params in enumerate(self._group_params[first_new:], first_new):
            self._scalar_params.extend(
                (group_id, position, param) for position, param in enumerate(group_params) if param.numel() < 2
            )

    def check(self, groups: Sequence[ParamGroup]) -> None:
        """Raise `BindingError` if the parameters of `groups` are not those that were added."""
        if not self._has_same_params([group["params"] for group in groups]):
            raise BindingError(
                "param_groups were changed by hand. Add parameters with add_param_group(), or make a new optimizer."
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

    def encode_options(self, groups: Sequence[ParamGroup]) -> bytes:
        """Encode numbers and strings in the options, cheap enough to compare in every step.

        Options that an optimizer adds during its step are left out: one without parameters on this rank may not add
        them.
        """
        return b"".join([encoder.encode(group) for encoder, group in zip(self._option_encoders, groups, strict=False)])

    def consensus_options(self, groups: Sequence[ParamGroup]) -> EncodedOptions:
        """Return the options of all groups, for comparison between ranks."""
        return EncodedOptions(
            self.encode_options(groups), lambda: describe_groups(groups[: len(self._option_encoders)])
        )


class _GroupOptionsEncoder:
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


# ---------------------------------------------------------------------------------------------------------------------
# Stores.


class StoreMember(InnerMember, Protocol):
    """One optimizer class of a store, with what probes found out about it."""

    @property
    def traits(self) -> OptimizerTraits: ...


class ParamStore(ABC):
    """All parameters, those that this rank owns, and the inner optimizers that update these.

    Param groups are added in two phases. `prepare` and `move_params` allocate everything and can be undone with
    `rollback`; once they have succeeded on all ranks, `extend` commits.
    """

    inner: InnerOptimizer
    members: Sequence[StoreMember]

    def __init__(self, comm: Comm, profiler: StepProfiler, memory: ParamMemory) -> None:
        self._comm, self._profiler, self.memory = comm, profiler, memory
        self.layout = Layout.empty(comm.group.size)
        self.tensors: list[torch.Tensor] = []
        """All parameters, by index."""
        self.groups = TrackedGroups()
        self.owned_indices: tuple[int, ...] = ()
        """Parameters that this rank owns, entirely or in part."""

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
        new_params = [param for group in groups for param in group["params"]][len(self.tensors) :]
        self.owned_indices += layout.params_owned_by(self._comm.group.rank, first_bucket=len(self.layout.buckets))
        self.layout = layout
        self.groups.extend(groups)
        self.tensors.extend(new_params)
        self.memory.extend(layout, new_params)

    def owned_by(self, rank: Rank) -> dict[int, torch.Tensor]:
        """Return the parameters that a rank owns, entirely or in part, by index."""
        return {index: self.tensors[index] for index in self.layout.params_owned_by(rank)}

    @abstractmethod
    def shard_tensor(self, index: int) -> ShardTensor:
        """Return this rank's shard of a parameter, in place, perhaps empty. Call `ParamSync.wait_until_idle` first."""

    def master_shard_tensor(self, index: int) -> ShardTensor | None:  # noqa: ARG002
        """Return the master weights of this rank's shard of a parameter, or None if it has none."""
        return None

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank keeps in memory, by purpose, without optimizer state."""
        grads = [grad for grad in map(local_grad, self.tensors) if grad is not None]
        params = self.memory.param_tensors()
        return {"parameters": params, "gradients": grads, "staging": self.memory.staging_buffers()}

    # ---- a step, in the order of the calls

    @abstractmethod
    def start_update(self, step: Step) -> None:
        """Prepare for the update, before the inner optimizers or the closure run."""

    @abstractmethod
    def assign_grads(self, step: Step, grads: GradSource) -> None:
        """Set `grad` of the tensors that the inner optimizers update, where it is not set already."""

    @abstractmethod
    def grad_samples(self, step: Step, grads: GradSource) -> Iterator[GradSample]:
        """Yield the gradients of this rank, to check that they are finite."""

    @abstractmethod
    def clear_assigned_grads(self) -> None:
        """Undo `assign_grads`."""

    @abstractmethod
    def write_back(self, step: Step) -> None:
        """Bring what the inner optimizers have updated to the memory of the parameters."""

    @abstractmethod
    def finish_update(self, step: Step) -> None:
        """Write updates back and complete `step.update_mask`, also after an update that failed."""

    def expand_to_updated(self, grad_mask: bytes) -> bytes:
        """Return a mask of the parameters that a step updates: some optimizers update those without gradients too."""
        update_all = [member for member in self.members if member.traits.updates_without_grads]
        if not update_all:
            return grad_mask
        group_ids = {group_id for member in update_all for group_id in member.group_ids}
        return bytes(
            has_grad or spec.group in group_ids for has_grad, spec in zip(grad_mask, self.layout.params, strict=True)
        )

    # ---- train and eval mode

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


class OptimizerState(ABC):
    """The state of the inner optimizers on this rank, by parameter of the user."""

    def __init__(self, rank: Rank, store: ParamStore) -> None:
        self._rank, self._store = rank, store
        self._init_neutral_cache: dict[int, bool] = {}

    @abstractmethod
    def view(self) -> dict[Any, Any]:
        """Return this rank's optimizer state by parameter. Changing it changes the inner optimizers' state."""

    @abstractmethod
    def replace(self, state: Any) -> None:
        """Replace all optimizer state (`optimizer.state = state`)."""

    @abstractmethod
    def shards(self) -> list[StateShard]:
        """Return the state of all parameters, or shards of them, that this rank owns."""

    def owns(self, index: int, key: Any) -> bool:
        """Return whether this rank has state of a parameter under this key, entirely or in part."""
        return key != MASTER_KEY and self._store.layout.param_shard(index, self._rank) is not None

    @abstractmethod
    def local_optimizer_of(self, index: int) -> LocalOptimizer:
        """Return the inner optimizer that has a parameter, or would have it if this rank owned it."""

    @abstractmethod
    def param_shaped_keys(self, index: int) -> frozenset[str]:
        """Return the state keys for which the probe saw tensors of the parameter's shape."""

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:  # noqa: B027 (optional)
        """Declare that state under these keys has the shape of its parameter."""

    @abstractmethod
    def allocator(self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]) -> StateAllocator:
        """Return an allocator for state that is being loaded.

        Args:
            state_keys: All state that the allocator will be called for.
            in_place: Reuse the memory of the present state wherever it fits; otherwise always allocate.
            param_shaped_keys: Keys of state that has the shape of its parameter.
        """

    @abstractmethod
    def load(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        """Load this rank's part of saved state; returns a function that undoes it. `assign`: may keep its tensors."""

    def snapshot_replica_status(self) -> Callable[[], None]:
        """Return a function that restores which replicas are known to have diverged.

        A load marks replicas as equal, even one that only restores what was there before.
        """
        return lambda: None

    @contextmanager
    def temporary_initial_state(self) -> Iterator[None]:
        """Give trainable parameters without state their initial state inside the block, and remove it afterwards.

        The initial state is the one that the first step would start with. Optimizers whose state cannot be initialized
        without side effects are left out.
        """
        with ExitStack() as undo:
            self._init_missing(undo)
            yield

    def materialize_initial_state(self) -> None:
        """Like `temporary_initial_state`, but keep the state."""
        with ExitStack() as undo:
            self._init_missing(undo)
            undo.pop_all()

    def _init_missing(self, undo: ExitStack) -> None:
        trainable = self._split_and_find_trainable()
        for local_optimizer in self._store.inner.local_optimizers:
            if self._is_init_neutral(local_optimizer):
                init_state(local_optimizer, trainable, undo)

    def _split_and_find_trainable(self) -> Set[int]:
        """Return the ids of the inner optimizers' tensors that can get gradients now, split from those that cannot."""
        return {id(param) for param in self._store.tensors if param.requires_grad}

    def _is_init_neutral(self, local_optimizer: LocalOptimizer) -> bool:
        if id(local_optimizer) not in self._init_neutral_cache:
            self._init_neutral_cache[id(local_optimizer)] = is_init_neutral(local_optimizer.factory)
        return self._init_neutral_cache[id(local_optimizer)]
