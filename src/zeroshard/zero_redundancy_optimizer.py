"""Names that torch marks private in its file of this name, and that public code and PyTorch's own tests use.

Attributes are read-only views of the layout, and methods call what the optimizer has under another name. torch's
meaning holds, and so do torch's values where parameters are dealt out in the same way. `ZeroRedundancyOptimizer`
assigns them in its body.

Parameters of a rank are listed in the order of the groups, as in `optim.param_groups`; torch lists the largest first.
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

from ._types import Rank
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all
from .comm.process_group import Group
from .engine.base import Closure
from .engine.inner import PER_RANK_KEYS, OptimizerConstructor, ParamGroup
from .engine.join import ZeroJoinHook
from .engine.param_store import FlatParamBuffers
from .engine.whole_engine import WholeParamEngine
from .errors import ConfigError
from .state.serialization import check_types_allowed, dumps, find_custom_types, loads
from .state.tensor_utils import map_tensors
from .state_dict_mixin import StateDictMixin

if TYPE_CHECKING:
    from .optimizer import ZeroRedundancyOptimizer


# ---------------------------------------------------------------------------------------------------------------------
# Python objects between ranks, without running code.


def broadcast_object(
    obj: Any,
    src_rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The source's object on every rank of the group, its tensors on `device`; the source returns its own.

    `src_rank` is a global rank. What `torch.load(weights_only=True)` would not read is refused, on all ranks.
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
    """Where it is not there, that is found before anything is sent."""
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise ConfigError(f"broadcast_object: device={device!r:.200} is none that this rank has: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Names that torch marks private in its file of this name, and that public code and PyTorch's own tests use.
#
# Attributes are read-only views of the layout, and methods call what the optimizer has under another name. torch's
# meaning holds, and so do torch's values where parameters are dealt out in the same way. `ZeroRedundancyOptimizer`
# assigns them in its body.
#
# Parameters of a rank are listed in the order of the groups, as in `optim.param_groups`; torch lists the largest first.


__all__ = ["ZeroRedundancyOptimizer"]

PATCHED_NAMES = (
    *("ZeroRedundancyOptimizer", "_ZeROJoinHook", "_DDPBucketAssignment", "_OverlapStatus", "_OverlapInfo"),
    *("_broadcast_object", "_recursive_copy_to_device", "_is_trainable"),
)
"""What `replace_torch()` puts in the place of torch's. `functional_optim_map` is torch's own."""

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """Imported on use: the class is made of this module, and torch's functional optimizers warn when imported."""
    if name == "ZeroRedundancyOptimizer":
        return import_module(".optimizer", __package__).ZeroRedundancyOptimizer
    if name == "functional_optim_map":
        return import_module("torch.distributed.optim.utils").functional_optim_map
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- types and functions


class _ZeROJoinHook(ZeroJoinHook):
    """What `join_hook()` returns."""

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
        # Hazard: torch's Join leaves this on, so that later steps would count as uneven ones, too.
        self.zero._join_config = self.zero._join_config._replace(enable=False)


class _DDPBucketAssignment:
    """The parameters of a DDP bucket that one rank owns.

    `offset` is the place of the first of them in the bucket. With `shard_buckets=True` they need not be neighbors.
    `tensor` is None: parameters stay in their own memory.
    """

    def __init__(self, bucket_index: int, parameters: list[torch.Tensor], offset: int) -> None:
        if not parameters:
            raise ValueError(f"expected parameters of bucket {bucket_index}, got none: leave out ranks that own none.")
        self.bucket_index, self.parameters, self.offset = bucket_index, parameters, offset
        self.device = parameters[0].device
        self.tensor: torch.Tensor | None = None


class _OverlapStatus(IntEnum):
    """Whether DDP's buckets are known. Between the first and the last there is nothing to be seen here."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


@dataclass(frozen=True)
class _OverlapInfo:
    """DDP's buckets and their owners, as far as they are known."""

    world_size: InitVar[int]
    status: _OverlapStatus = _OverlapStatus.UNINITIALIZED
    shard_buckets: bool = False
    params_per_bucket: list[list[torch.Tensor]] = field(default_factory=list)
    params_per_rank: list[list[torch.Tensor]] = field(default_factory=list)
    """In the order of buckets, and of the parameters in them."""
    offsets: dict[int, int] = field(default_factory=dict)
    """By bucket, where this rank's parameters of it start in `params_per_rank`."""
    assigned_ranks_per_bucket: list[set[int]] = field(default_factory=list)
    total_size: int | None = None
    """Elements of all buckets."""

    def __post_init__(self, world_size: int) -> None:
        self.params_per_rank.extend([] for _ in range(world_size - len(self.params_per_rank)))


_broadcast_object = broadcast_object


def _recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """A copy of nested containers with all tensors on `device`."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _is_trainable(param: torch.Tensor) -> bool:
    return param.requires_grad


# ---- attributes


class LayoutView(Generic[T]):
    """A read-only attribute that is computed on each access."""

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
    """One that is kept until the layout changes: code asks for it once per parameter."""

    def _get_value(self, zero: ZeroRedundancyOptimizer) -> T:
        layout, value = zero._view_cache.get(self._name, (None, None))
        if layout is not zero.layout:
            value = self._compute(zero)
            zero._view_cache[self._name] = (zero.layout, value)
        return cast(T, value)


@LayoutView
def all_params(zero: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """All parameters of all groups."""
    return list(zero._engine.params)


@LayoutView
def index_to_param(zero: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    """Parameters by their index in the state dict."""
    return list(zero._engine.params)


@CachedLayoutView
def param_to_index(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    """The index of each parameter in the state dict."""
    return {param: index for index, param in enumerate(zero._engine.params)}


@CachedLayoutView
def param_to_rank(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    """The rank in the group that owns each parameter."""
    if not all(bucket.has_whole_params for bucket in zero.layout.buckets):
        raise AttributeError(
            "_param_to_rank needs whole parameters, and FlatShards() divides them among ranks. "
            "Use partition=WholeParams(), or read optimizer.layout."
        )
    return {param: zero.layout.owner_of(index) for index, param in enumerate(zero._engine.params)}


@LayoutView
def device_to_params_per_rank(zero: ZeroRedundancyOptimizer) -> dict[torch.device, list[list[torch.Tensor]]]:
    """By device, the parameters that each rank owns."""
    owned = [zero._engine.owned_params(Rank(rank)).values() for rank in range(zero.world_size)]
    devices = dict.fromkeys(spec.device for spec in zero.layout.params)
    return {device: [[it for it in mine if it.device == device] for mine in owned] for device in devices}


@LayoutView
def buckets(zero: ZeroRedundancyOptimizer) -> list[list[torch.Tensor]]:
    """The part of each rank in each flat buffer, padding included; none unless parameters are views of buffers.

    torch has one buffer for each device. Here there is one for each device, dtype and call of `add_param_group`.
    """
    store = zero._engine.param_store
    if not isinstance(store, FlatParamBuffers):
        return []
    return [[store.span_view(it.index, shard) for shard in it.shards] for it in zero.layout.buckets]


@LayoutView
def device_to_device_index(zero: ZeroRedundancyOptimizer) -> dict[torch.device, int]:
    """The index in `_buckets` of the first buffer on each device."""
    return {bucket.device: bucket.index for bucket in reversed(zero.layout.buckets)}


@LayoutView
def overlap_with_ddp(zero: ZeroRedundancyOptimizer) -> bool:
    """A DDP hook makes the steps."""
    return zero._ddp_overlap is not None


@LayoutView
def overlap_info(zero: ZeroRedundancyOptimizer) -> _OverlapInfo:
    """DDP's buckets and their owners. Only with `overlap_with_ddp=True`, as with torch."""
    if zero._ddp_overlap is None:
        raise AttributeError("_overlap_info needs overlap_with_ddp=True: without it there are no DDP buckets.")
    overlap, params = zero._ddp_overlap, zero._engine.params
    if not overlap.is_initialized:
        return _OverlapInfo(zero.world_size, shard_buckets=overlap.shard_buckets)
    owners = {index: zero.layout.owner_of(index) for members in overlap.buckets for index in members}
    mine = [sum(owners[index] == zero.rank for index in members) for members in overlap.buckets]
    return _OverlapInfo(
        zero.world_size,
        status=_OverlapStatus.INITIALIZED,
        shard_buckets=overlap.shard_buckets,
        params_per_bucket=[[params[index] for index in members] for members in overlap.buckets],
        params_per_rank=[[params[i] for i, it in owners.items() if it == rank] for rank in range(zero.world_size)],
        offsets={i: end - mine[i] for i, end in enumerate(accumulate(mine)) if mine[i]},
        assigned_ranks_per_bucket=[{owners[index] for index in members} for members in overlap.buckets],
        total_size=sum(params[index].numel() for index in owners),
    )


@LayoutView
def bucket_assignments_per_rank(zero: ZeroRedundancyOptimizer) -> list[dict[int, _DDPBucketAssignment]]:
    """By rank and bucket, the parameters that the rank owns. Only when DDP's buckets are known."""
    info = zero._overlap_info
    zero._require_final_layout("_bucket_assignments_per_rank")
    found: list[dict[int, _DDPBucketAssignment]] = [{} for _ in info.params_per_rank]
    for number, members in enumerate(info.params_per_bucket):
        for rank in info.assigned_ranks_per_bucket[number]:
            places = [place for place, param in enumerate(members) if zero._param_to_rank[param] == rank]
            found[rank][number] = _DDPBucketAssignment(number, [members[place] for place in places], places[0])
    return found


@LayoutView
def optim_constructor(zero: ZeroRedundancyOptimizer) -> OptimizerConstructor:
    """The class to shard. With `overlap_with_ddp=True` torch has its functional twin here."""
    zero.optim  # noqa: B018 (raises if there are several)
    return zero._engine.inner.local_optimizers[0].factory.optimizer_class


@LayoutView
def optim_defaults(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """What was given for that class."""
    zero.optim  # noqa: B018 (raises if there are several)
    return dict(zero._engine.inner.local_optimizers[0].factory.defaults)


@LayoutView
def default_device(zero: ZeroRedundancyOptimizer) -> torch.device:
    """That of the first parameter."""
    return zero.join_device


@LayoutView
def is_trainable_mask(zero: ZeroRedundancyOptimizer) -> list[bool]:
    """For each parameter, whether it was trainable when it was given."""
    return [spec.trainable for spec in zero.layout.params]


@LayoutView
def functional_map(zero: ZeroRedundancyOptimizer) -> dict[Any, Any]:  # noqa: ARG001
    """torch's functional twins of its optimizers."""
    found: dict[Any, Any] = __getattr__("functional_optim_map")
    return found


# ---- methods


def partition_parameters(zero: ZeroRedundancyOptimizer) -> list[list[ParamGroup]]:
    """For each rank all groups, with the parameters that it owns: with `FlatShards()`, all or a part of each."""

    def select_owned(group: ParamGroup, owned_ids: set[int]) -> ParamGroup:
        chosen = [id(param) in owned_ids for param in group["params"]]
        return {key: list(compress(value, chosen)) if key in PER_RANK_KEYS else value for key, value in group.items()}

    ids = [set(map(id, zero._engine.owned_params(Rank(rank)).values())) for rank in range(zero.world_size)]
    return [[select_owned(group, owned) for group in zero.param_groups] for owned in ids]


def sync_params(zero: ZeroRedundancyOptimizer) -> None:
    """Bring all parameters from their owners to all ranks, as after a step. Called on all ranks."""
    zero._engine.sync_params("_sync_params", zero.param_groups)


def sync_param_groups(src_param_groups: list[ParamGroup], dst_param_groups: list[ParamGroup]) -> None:
    """Copy the options of groups to other groups, not their parameters."""
    for source, target in zip(src_param_groups, dst_param_groups, strict=True):
        target.update({key: value for key, value in source.items() if key not in PER_RANK_KEYS})


def local_step(
    zero: ZeroRedundancyOptimizer,
    gradients: list[torch.Tensor | None] | None = None,
    closure: Closure | None = None,
    **kwargs: Any,
) -> Any:
    """Update what this rank owns and tell no other rank: `_sync_params()` then makes ranks equal.

    Args:
        gradients: those of `_overlap_info.params_per_rank[rank]`, None for parameters to leave alone. Only with
            `overlap_with_ddp=True`; else gradients are those in `param.grad`.
        closure: goes to the inner optimizer, as do `kwargs`.
    """
    engine, groups = zero._engine, zero.param_groups
    if not isinstance(engine, WholeParamEngine):
        raise ConfigError("_local_step() needs whole parameters, and FlatShards() divides them: call step().")
    zero._require_final_layout("_local_step")
    if gradients is None:
        zero._count_local_step()
        return engine.local_step(groups, closure, kwargs)
    zero._required_ddp_overlap  # noqa: B018 (raises if there is none)
    params = zero._overlap_info.params_per_rank[zero.rank]
    if len(gradients) != len(params) or closure is not None or kwargs:
        raise ValueError(
            f"expected {len(params)} gradients and nothing else, got {len(gradients)} gradients, closure={closure!r} "
            f"and {kwargs}. Pass one for each of _overlap_info.params_per_rank[{zero.rank}], or None in its place."
        )
    zero._count_local_step()
    engine.update_params(
        groups, {param: grad for param, grad in zip(params, gradients, strict=True) if grad is not None}
    )
    engine.inner.pull_options(groups)
    return None


def get_assigned_rank(zero: ZeroRedundancyOptimizer, bucket_index: int) -> int:
    """The rank that owns a DDP bucket."""
    if zero._required_ddp_overlap.shard_buckets:
        raise RuntimeError("with shard_buckets=True a bucket may have several owners: read _overlap_info.")
    return zero._required_ddp_overlap.round_robin_owner(bucket_index)


def init_zero_for_overlap(zero: ZeroRedundancyOptimizer) -> None:
    """Do nothing: the DDP hook does it in its last backward pass without an update. Raises before."""
    zero._required_ddp_overlap  # noqa: B018 (raises if there is none)
    zero._require_final_layout("_init_zero_for_overlap")


def check_overlap_initialized(zero: ZeroRedundancyOptimizer) -> None:
    """Raise if a DDP hook makes the steps and DDP's buckets are not known yet."""
    zero._require_final_layout("_check_overlap_initialized")


def clear_cache(zero: ZeroRedundancyOptimizer) -> None:
    """Forget views that are kept. They never need it: each is computed again when the layout changes."""
    zero._view_cache.clear()
