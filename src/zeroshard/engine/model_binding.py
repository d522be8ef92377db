"""What an optimizer does to the model whose parameters it updates.

The drop-in leaves the model to DDP (`ModelBinding`) until `ddp_hook()` makes it reduce gradients (`DDPHookBinding`).
`shard` hooks the model itself (`ShardBinding`): gradients, buffers, `zero_grad`, prefetched parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from .._formatting import format_names
from .._logging import warn_at_caller
from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import check_all_equal
from ..config import ZeroConfig
from ..profiling import StepProfiler
from .autograd_hooks import GradHooks, hooked_param_ids, register_accumulation_hook
from .base import Engine
from .flat_shards import FlatShardStore
from .grad_reducer import GradReducer
from .inner import ParamGroup
from .module_hooks import BufferBroadcast, DoubleReduceGuard, ParamPrefetch, ZeroGradWrapper, broadcast_coalesced
from .param_sync import ParamAllGather

NamedBuffers = dict[str, torch.Tensor]


class ModelBinding:
    """Leaves the model alone: DDP, or the user, reduces gradients and broadcasts buffers."""

    @property
    def is_superseded(self) -> bool:
        """Whether a later `shard()` call took over parameters of this optimizer."""
        return False

    def require_current(self, method: str) -> None:
        """Raise `RuntimeError` if the optimizer is superseded."""

    def name_params(self, groups: list[ParamGroup], *, first_index: int) -> list[ParamGroup]:  # noqa: ARG002
        """Return new groups, whose parameters start at `first_index`, with the names that the model has for them."""
        return groups

    def extend(self, *, first_bucket: int) -> None:
        """Bind parameters that were added, in buckets from `first_bucket` on. Call on all ranks."""

    def refresh_hooks(self) -> None:
        """Hook parameters that were unfrozen since the last call."""

    def before_join_step(self, source: Rank) -> None:
        """Called on all ranks before a step in which some have joined; `source` is a rank that still trains."""

    def after_step(self) -> None:
        """Called on all ranks after a step, also after a skipped one."""

    def warn_once_about_unreduced_grads(self) -> None:
        """Warn, after the first step, about gradients that nobody reduces."""

    def finish_step(self) -> None:
        """Called after every step, also after one that failed."""

    def buffers(self) -> NamedBuffers:
        """Return the buffers to include in peer snapshots."""
        return {}


class DDPHookBinding(ModelBinding):
    """DDP's communication hook gives gradients to a reducer of the drop-in."""

    def __init__(self, reducer: GradReducer, params: Sequence[torch.Tensor]) -> None:
        """Hook `params`, to which the optimizer appends parameters that are added later."""
        self.reducer, self._params = reducer, params
        self.extend(first_bucket=0)

    def extend(self, *, first_bucket: int) -> None:  # noqa: ARG002
        for index, param in enumerate(self._params):
            if param.requires_grad:
                register_accumulation_hook(self.reducer, index, param)


class ShardBinding(ModelBinding):
    """The hooks of `shard` on the model and its parameters. Referenced by them weakly, and owned by the optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        engine: Engine,
        profiler: StepProfiler,
        config: ZeroConfig,
        *,
        is_in_join: Callable[[], bool],
    ) -> None:
        """Broadcast parameters and buffers from rank 0, and install all hooks. Call on all ranks."""
        self.model, self._config, self._is_in_join = model, config, is_in_join
        self.comm: Comm = engine.comm
        # `shard` has no other stores, sources and syncs.
        self.reducer = cast(GradReducer, engine.grads)
        self._store, self._param_sync = cast(FlatShardStore, engine.params), cast(ParamAllGather, engine.param_sync)
        self._should_check_unreduced = not self.comm.is_single_rank
        self._param_sync.broadcast_from_rank(Rank(0))
        self._grad_hooks = GradHooks(self.reducer)
        self.refresh_hooks()
        self._buffer_broadcast = BufferBroadcast(
            self.comm.data_parallel, profiler, model, self._should_forward_skip_broadcast, self._is_accumulating
        )
        self._buffer_broadcast.broadcast(Rank(0))
        unmanaged = [param for param in model.parameters() if id(param) not in self._store.bucket_by_param_id]
        broadcast_coalesced(self.comm.data_parallel, unmanaged, Rank(0))
        self._double_reduce_guard = DoubleReduceGuard(model, self._store, self._grad_hooks)
        self._prefetch = (
            ParamPrefetch(model, profiler, self._store, self._param_sync) if config.overlap_param_gather else None
        )
        vars(model)["zero_grad"] = ZeroGradWrapper(model, self._clear_grads)

    @property
    def is_superseded(self) -> bool:
        return self._grad_hooks.is_superseded

    def require_current(self, method: str) -> None:
        if self.is_superseded:
            raise RuntimeError(
                f"a later shard() call took over parameters of this optimizer. Call {method} of the later optimizer."
            )

    def name_params(self, groups: list[ParamGroup], *, first_index: int) -> list[ParamGroup]:
        names = {id(param): name for name, param in self.model.named_parameters()}
        for group in groups:
            entries = list(enumerate(group["params"], first_index))
            first_index += len(entries)
            group["params"] = [
                (names.get(id(entry), f"added.{index}"), entry) if isinstance(entry, torch.Tensor) else entry
                for index, entry in entries
            ]
        return groups

    def extend(self, *, first_bucket: int) -> None:
        self._param_sync.broadcast_from_rank(Rank(0), first_bucket=first_bucket)
        self.refresh_hooks()
        if self._prefetch is not None:
            self._prefetch.refresh_buckets()

    def refresh_hooks(self) -> None:
        self._grad_hooks.attach(self._store.tensors)

    def before_join_step(self, source: Rank) -> None:
        self._buffer_broadcast.broadcast(source)

    def after_step(self) -> None:
        if not self._is_buffer_broadcast_disabled():
            # For all following passes, including those under no_grad(), which do not communicate.
            self._buffer_broadcast.broadcast(Rank(0))

    def warn_once_about_unreduced_grads(self) -> None:
        if self._should_check_unreduced:  # only now: another optimizer may have taken these parameters before
            self._should_check_unreduced = False
            _warn_about_unreduced_grads(self.model)

    def finish_step(self) -> None:
        self.refresh_hooks()
        if self._prefetch is not None and self._param_sync.is_in_flight:
            self._prefetch.arm()

    def buffers(self) -> NamedBuffers:
        return dict(self.model.named_buffers())

    def wait_for_params(self) -> None:
        """Wait for prefetched parameters."""
        if self._prefetch is not None:
            self._prefetch.wait()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers now. Call on all ranks."""
        self.require_current("broadcast_buffers()")
        check_all_equal(self.comm, "broadcast_buffers", ())
        self._buffer_broadcast.broadcast(Rank(0))

    def _should_forward_skip_broadcast(self) -> bool:
        # Under no_grad() a rank may run the model alone.
        return not torch.is_grad_enabled() or self._is_buffer_broadcast_disabled()

    def _is_accumulating(self) -> bool:
        return self.reducer.is_paused

    def _is_buffer_broadcast_disabled(self) -> bool:
        # The ranks of a superseded optimizer may be gone.
        return self.is_superseded or not self._config.broadcast_buffers or self._is_in_join()

    def _clear_grads(self, set_to_none: bool) -> None:
        self.reducer.clear(set_to_none=set_to_none)


def _warn_about_unreduced_grads(model: torch.nn.Module) -> None:
    """Warn about parameters that have gradients on this rank, but no optimizer or DDP module that reduces them."""
    ddp_modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced_ids = hooked_param_ids() | {id(param) for module in ddp_modules for param in module.parameters()}
    candidates: list[tuple[str, Any]] = [
        (name, param) for name, param in model.named_parameters() if id(param) not in reduced_ids
    ]
    unreduced = [name for name, param in candidates if param.requires_grad and param.grad is not None]
    if unreduced:
        warn_at_caller(
            f"{len(unreduced)} parameters have gradients but belong to no sharded optimizer, so their gradients are "
            f"not averaged and ranks will diverge: {format_names(unreduced)}. Add them to the params of shard(), "
            "freeze them with requires_grad_(False), or average their gradients yourself.",
            on_all_ranks=True,
        )
