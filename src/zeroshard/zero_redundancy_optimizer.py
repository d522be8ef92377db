"""Private names of torch's `zero_redundancy_optimizer` module that public code and PyTorch's own tests use.

Attributes are read-only views of the layout, and methods forward to their counterparts in the optimizer;
`ZeroRedundancyOptimizer` assigns both in its class body. They mean the same as in torch, and have the same values where
both assign parameters to ranks in the same way. Parameters of a rank are listed in the order of the groups, as in
`optim.param_groups`; torch lists the largest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from importlib import import_module
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist

from ._torch_compat import leave_join
from ._types import Rank
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all
from .comm.process_group import Group
from .engine.inner import PER_RANK_KEYS, OptimizerConstructor, ParamGroup
from .engine.join import ZeroJoinHook
from .engine.step import Closure
from .engine.whole_params import WholeParamStore
from .errors import ConfigError
from .state.serialization import check_types_allowed, dumps, find_custom_types, loads
from .state.tensor_utils import map_tensors
from .state_dict_mixin import StateDictMixin

if TYPE_CHECKING:
    from .optimizer import ZeroRedundancyOptimizer


# ---------------------------------------------------------------------------------------------------------------------
# Broadcast of Python objects, without executing code.


def broadcast_object(
    obj: Any,
    src_rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Broadcast a Python object to all ranks of a group. Call on all of them.

    Only types that `torch.load(weights_only=True)` accepts are sent; all ranks raise for any other.

    Args:
        obj: The object to send; ignored on all ranks but the source.
        src_rank: Global rank of the source.
        group: Process group. Defaults to all ranks.
        device: Device of the received tensors.

    Returns:
        The received object; on the source `obj` itself.

    Raises:
        ConfigError: If this rank has no such `device`.
        RankMismatchError: If the ranks pass different `src_rank`s.
    """
    comm = Comm(Group(group))

    def prepare() -> Prepared[tuple[bytes | None, list[str]]]:
        _check_device_exists(device)
        data = dumps(obj) if comm.group.from_global(src_rank) == comm.group.rank else None
        return Prepared((data, find_custom_types(data) if data is not None else []), [f"src_rank={src_rank}"])

    data, types = prepare_all(comm, "broadcast_object", prepare)
    check_types_allowed(comm, "broadcast_object", types)
    received = comm.broadcast_bytes(data, comm.group.from_global(src_rank))
    if data is not None:
        return obj
    return map_tensors(loads(received), lambda tensor: tensor.to(device))


def _check_device_exists(device: torch.device | str) -> None:
    """Raise before anything is sent if this rank has no such device."""
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise ConfigError(f"broadcast_object: this rank has no device {device!r:.200}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Names of torch's module.


__all__ = ["ZeroRedundancyOptimizer"]

PATCHED_NAMES = (
    *("ZeroRedundancyOptimizer", "_ZeROJoinHook", "_DDPBucketAssignment", "_OverlapStatus", "_OverlapInfo"),
    *("_broadcast_object", "_recursive_copy_to_device", "_is_trainable"),
)
"""The names that `replace_torch()` replaces. `functional_optim_map` stays torch's own."""

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """Import lazily: `optimizer` imports this module, and torch's functional optimizers warn when imported."""
    if name == "ZeroRedundancyOptimizer":
        return import_module(".optimizer", __package__).ZeroRedundancyOptimizer
    if name == "functional_optim_map":
        return import_module("torch.distributed.optim.utils").functional_optim_map
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- types and functions


class _ZeROJoinHook(ZeroJoinHook):
    """The hook that `ZeroRedundancyOptimizer.join_hook()` returns."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        if not isinstance(zero, StateDictMixin):
            raise TypeError(
                f"expected an optimizer of zeroshard, got a {type(zero).__module__}.{type(zero).__qualname__}. "
                "Construct optimizers after replace_torch(), or undo it before joining one of torch's."
            )
        super().__init__(zero._shadow_step, zero._comm, zero.param_groups)
        self.zero = zero

    def post_hook(self, is_last_joiner: bool) -> None:
        super().post_hook(is_last_joiner)
        # Hazard: torch's Join leaves `enable` set, so later steps would count as steps inside Join, too.
        leave_join(self.zero)


class _DDPBucketAssignment:
    """The parameters of a DDP bucket that one rank owns.

    `offset` is the position of the first one in the bucket. With `shard_buckets=True` they need not be adjacent.
    `tensor` is None: parameters keep their own memory.
    """

    def __init__(self, bucket_index: int, parameters: list[torch.Tensor], offset: int) -> None:
        if not parameters:
            raise ValueError(f"expected parameters of bucket {bucket_index}, got none: leave out ranks that own none.")
        self.bucket_index, self.parameters, self.offset = bucket_index, parameters, offset
        self.device = parameters[0].device
        self.tensor: torch.Tensor | None = None


class _OverlapStatus(IntEnum):
    """Whether DDP's buckets are final. zeroshard never reports `DDP_HAS_REBUILT_BUCKETS`."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


@dataclass(frozen=True)
class _OverlapInfo:
    """DDP's buckets and their owners; empty until DDP's buckets are final."""

    world_size: InitVar[int]
    status: _OverlapStatus = _OverlapStatus.UNINITIALIZED
    shard_buckets: bool = False
    params_per_bucket: list[list[torch.Tensor]] = field(default_factory=list)
    params_per_rank: list[list[torch.Tensor]] = field(default_factory=list)
    """In bucket order, then in the order within the bucket."""
    offsets: dict[int, int] = field(default_factory=dict)
    """For each bucket, the index in `params_per_rank[rank]` at which this rank's parameters of it start."""
    assigned_ranks_per_bucket: list[set[int]] = field(default_factory=list)
    total_size: int | None = None
    """Number of elements in all buckets."""

    def __post_init__(self, world_size: int) -> None:
        self.params_per_rank.extend([] for _ in range(world_size - len(self.params_per_rank)))


_broadcast_object = broadcast_object


def _recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """Return a copy of nested containers with all tensors on `device`."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _is_trainable(param: torch.Tensor) -> bool:
    return param.requires_grad


# ---- attributes


class LayoutView(Generic[T]):
    """Descriptor of a read-only attribute that is computed on each access."""

    def __init__(self, compute: Callable[[ZeroRedundancyOptimizer], T]) -> None:
        self._compute, self._name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, zero: None, owner: type) -> LayoutView[T]: ...
    @overload
    def __get__(self, zero: ZeroRedundancyOptimizer, owner: type | None = None) -> T: ...
    def __get__(self, zero: ZeroRedundancyOptimizer | None, owner: type | None = None) -> LayoutView[T] | T:
        return self if zero is None else self._get_value(zero)

    def __set__(self, zero: ZeroRedundancyOptimizer, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} is a read-only view of the optimizer's layout and cannot be set.")

    def _get_value(self, zero: ZeroRedundancyOptimizer) -> T:
        return self._compute(zero)


class CachedLayoutView(LayoutView[T]):
    """A `LayoutView` that is cached until the layout changes, since callers read it once per parameter."""

    def _get_value(self, zero: ZeroRedundancyOptimizer) -> T:
        layout, value = zero._view_cache.get(self._name, (None, None))
        if layout is not zero.layout:
            value = self._compute(zero)
            zero._view_cache[self._name] = (zero.layout, value)
        return cast(T, value)


@LayoutView
def all_params(zero: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """All parameters of all groups."""
    return list(zero._engine.params.tensors)


@LayoutView
def index_to_param(zero: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """Parameters by their index in the state dict."""
    return list(zero._engine.params.tensors)


@CachedLayoutView
def param_to_index(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    """The index of each parameter in the state dict."""
    return {param: index for index, param in enumerate(zero._engine.params.tensors)}


@CachedLayoutView
def param_to_rank(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    """The owner of each parameter, as a rank in the process group."""
    if not all(bucket.has_whole_params for bucket in zero.layout.buckets):
        raise AttributeError(
            "_param_to_rank needs whole parameters, and FlatShards() divides them among ranks. "
            "Use partition=WholeParams(), or read optimizer.layout."
        )
    return {param: zero.layout.owner_of(index) for index, param in enumerate(zero._engine.params.tensors)}


@LayoutView
def device_to_params_per_rank(zero: ZeroRedundancyOptimizer) -> dict[torch.device, list[list[torch.Tensor]]]:
    """The parameters that each rank owns, by device."""
    owned = [zero._engine.params.owned_by(Rank(rank)).values() for rank in range(zero.world_size)]
    devices = dict.fromkeys(spec.device for spec in zero.layout.params)
    return {
        device: [[param for param in rank_params if param.device == device] for rank_params in owned]
        for device in devices
    }


@LayoutView
def buckets(zero: ZeroRedundancyOptimizer) -> list[list[torch.Tensor]]:
    """Each rank's span of each flat buffer, including padding; empty unless parameters are views of buffers.

    torch has one buffer per device. zeroshard has one per device, dtype and call of `add_param_group`.
    """
    return zero._engine.params.memory.shard_views()


@LayoutView
def device_to_device_index(zero: ZeroRedundancyOptimizer) -> dict[torch.device, int]:
    """The index in `_buckets` of the first buffer on each device."""
    return {bucket.device: bucket.index for bucket in reversed(zero.layout.buckets)}


@LayoutView
def overlap_with_ddp(zero: ZeroRedundancyOptimizer) -> bool:
    """Whether a DDP hook drives the steps."""
    return zero._ddp_overlap is not None


@LayoutView
def overlap_info(zero: ZeroRedundancyOptimizer) -> _OverlapInfo:
    """DDP's buckets and their owners. As in torch, only with `overlap_with_ddp=True`."""
    if zero._ddp_overlap is None:
        raise AttributeError("_overlap_info needs overlap_with_ddp=True: without it there are no DDP buckets.")
    overlap, params = zero._ddp_overlap, zero._engine.params.tensors
    if not overlap.is_initialized:
        return _OverlapInfo(zero.world_size, shard_buckets=overlap.shard_buckets)
    owners = {index: zero.layout.owner_of(index) for bucket in overlap.buckets for index in bucket}
    num_owned = [sum(owners[index] == zero.rank for index in bucket) for bucket in overlap.buckets]
    return _OverlapInfo(
        zero.world_size,
        status=_OverlapStatus.INITIALIZED,
        shard_buckets=overlap.shard_buckets,
        params_per_bucket=[[params[index] for index in bucket] for bucket in overlap.buckets],
        params_per_rank=[
            [params[index] for index, owner in owners.items() if owner == rank] for rank in range(zero.world_size)
        ],
        offsets={i: end - num_owned[i] for i, end in enumerate(accumulate(num_owned)) if num_owned[i]},
        assigned_ranks_per_bucket=[{owners[index] for index in bucket} for bucket in overlap.buckets],
        total_size=sum(params[index].numel() for index in owners),
    )


@LayoutView
def bucket_assignments_per_rank(zero: ZeroRedundancyOptimizer) -> list[dict[int, _DDPBucketAssignment]]:
    """The parameters that each rank owns, by bucket. Only available when DDP's buckets are final."""
    info = zero._overlap_info
    zero._require_final_layout("_bucket_assignments_per_rank")
    assignments: list[dict[int, _DDPBucketAssignment]] = [{} for _ in info.params_per_rank]
    for bucket_index, params in enumerate(info.params_per_bucket):
        for rank in info.assigned_ranks_per_bucket[bucket_index]:
            positions = [position for position, param in enumerate(params) if zero._param_to_rank[param] == rank]
            owned = [params[position] for position in positions]
            assignments[rank][bucket_index] = _DDPBucketAssignment(bucket_index, owned, positions[0])
    return assignments


@LayoutView
def optim_constructor(zero: ZeroRedundancyOptimizer) -> OptimizerConstructor:
    """The class of the inner optimizer. With `overlap_with_ddp=True` torch has its functional counterpart here."""
    zero.optim  # noqa: B018 (raises if there are several)
    return zero._engine.params.inner.local_optimizers[0].factory.optimizer_class


@LayoutView
def optim_defaults(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The keyword arguments of the inner optimizer's class."""
    zero.optim  # noqa: B018 (raises if there are several)
    return dict(zero._engine.params.inner.local_optimizers[0].factory.defaults)


@LayoutView
def default_device(zero: ZeroRedundancyOptimizer) -> torch.device:
    """The device of the first parameter."""
    return zero.join_device


@LayoutView
def is_trainable_mask(zero: ZeroRedundancyOptimizer) -> list[bool]:
    """For each parameter, whether it was trainable when it was added."""
    return [spec.trainable for spec in zero.layout.params]


@LayoutView
def functional_map(zero: ZeroRedundancyOptimizer) -> dict[Any, Any]:  # noqa: ARG001
    """torch's functional counterparts of its optimizers."""
    optim_map: dict[Any, Any] = __getattr__("functional_optim_map")
    return optim_map


# ---- methods


def partition_parameters(zero: ZeroRedundancyOptimizer) -> list[list[ParamGroup]]:
    """Return, for each rank, all groups reduced to the parameters that the rank owns, in full or in part."""

    def select_owned(group: ParamGroup, owned_ids: set[int]) -> ParamGroup:
        is_owned = [id(param) in owned_ids for param in group["params"]]
        return {key: list(compress(value, is_owned)) if key in PER_RANK_KEYS else value for key, value in group.items()}

    ids_per_rank = [set(map(id, zero._engine.params.owned_by(Rank(rank)).values())) for rank in range(zero.world_size)]
    return [[select_owned(group, owned_ids) for group in zero.param_groups] for owned_ids in ids_per_rank]


def sync_params(zero: ZeroRedundancyOptimizer) -> None:
    """Broadcast all parameters from their owners, as after a step. Call on all ranks."""
    engine = zero._engine

    def prepare() -> Prepared[None]:
        engine.params.groups.check(zero.param_groups)
        engine.param_sync.wait_until_idle()
        return Prepared(None)

    prepare_all(engine.comm, "_sync_params", prepare)
    engine.param_sync.sync_all()


def sync_param_groups(src_param_groups: list[ParamGroup], dst_param_groups: list[ParamGroup]) -> None:
    """Copy the options of the source groups to the target groups, but not their parameters."""
    for source, target in zip(src_param_groups, dst_param_groups, strict=True):
        target.update({key: value for key, value in source.items() if key not in PER_RANK_KEYS})


def local_step(
    zero: ZeroRedundancyOptimizer,
    gradients: list[torch.Tensor | None] | None = None,
    closure: Closure | None = None,
    **kwargs: Any,
) -> Any:
    """Update this rank's parameters without communication. Call `_sync_params()` afterwards.

    Args:
        gradients: Gradients of `_overlap_info.params_per_rank[rank]`, None for parameters to skip. Only with
            `overlap_with_ddp=True`; by default the gradients in `param.grad` are used.
        closure: Passed to the inner optimizer, as are `kwargs`.
    """
    store, groups = zero._engine.params, zero.param_groups
    if not isinstance(store, WholeParamStore):
        raise ConfigError("_local_step() needs whole parameters, and FlatShards() divides them: call step().")
    zero._require_final_layout("_local_step")
    if gradients is None:
        zero._count_local_step()
        zero._engine.params.groups.check(groups)
        return store.local_step(groups, closure, kwargs)
    zero._required_ddp_overlap  # noqa: B018 (raises if there is none)
    params = zero._overlap_info.params_per_rank[zero.rank]
    if len(gradients) != len(params) or closure is not None or kwargs:
        raise ValueError(
            f"expected {len(params)} gradients and nothing else, got {len(gradients)} gradients, closure={closure!r} "
            f"and {kwargs}. Pass one for each of _overlap_info.params_per_rank[{zero.rank}], or None in its place."
        )
    zero._count_local_step()
    store.update_params(
        groups, {param: grad for param, grad in zip(params, gradients, strict=True) if grad is not None}
    )
    store.inner.pull_options(groups)
    return None


def get_assigned_rank(zero: ZeroRedundancyOptimizer, bucket_index: int) -> int:
    """Return the rank that owns a DDP bucket."""
    if zero._required_ddp_overlap.shard_buckets:
        raise RuntimeError("with shard_buckets=True a bucket may have several owners: read _overlap_info.")
    return zero._required_ddp_overlap.round_robin_owner(bucket_index)


def init_zero_for_overlap(zero: ZeroRedundancyOptimizer) -> None:
    """Do nothing: the DDP hook initializes the overlap in its last warmup pass. Raise before that pass."""
    zero._required_ddp_overlap  # noqa: B018 (raises if there is none)
    zero._require_final_layout("_init_zero_for_overlap")


def check_overlap_initialized(zero: ZeroRedundancyOptimizer) -> None:
    """Raise if a DDP hook drives the steps and DDP's buckets are not final yet."""
    zero._require_final_layout("_check_overlap_initialized")


def clear_cache(zero: ZeroRedundancyOptimizer) -> None:
    """Clear cached views. Never required: they are recomputed when the layout changes."""
    zero._view_cache.clear()
