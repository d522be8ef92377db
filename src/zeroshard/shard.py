"""`shard`: ZeRO-1 and ZeRO-2 for a model that DDP does not wrap.

`ShardedOptimizer` extends `ZeroRedundancyOptimizer` with hooks on the model: gradients are reduced during backward,
buffers are broadcast from rank 0, and parameters may be all-gathered during the next forward pass.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch_compat import is_in_join
from .build import ShardArguments
from .comm.mesh import ShardGroupSize
from .config import ZeroConfig
from .engine.inner import OptimizerConstructor
from .engine.model_binding import ShardBinding
from .errors import ConfigError
from .optimizer import ZeroRedundancyOptimizer
from .rules import ParamRule


def shard(
    model: torch.nn.Module,
    optimizer_class: OptimizerConstructor | Sequence[ParamRule],
    *,
    params: Any = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    shard_group_size: ShardGroupSize | None = None,
    config: ZeroConfig | None = None,
    **defaults: Any,
) -> "ShardedOptimizer":
    """Shard `optimizer_class` over the data-parallel ranks: each rank keeps 1/N of optimizer state and gradients.

    Call on all ranks. The model is not wrapped and computes the same as before. Its parameters and buffers are
    broadcast from rank 0, its parameters become views of flat buffers, and backward passes average gradients over all
    ranks.

    Args:
        model: Module that is not wrapped in `DistributedDataParallel`.
        optimizer_class: Class, or any callable, that constructs the optimizer to shard; or a list of `ParamRule`s that
            assign parameters to several classes.
        params: Parameters or parameter groups. Defaults to all parameters of the model in one group. Not allowed with
            rules.
        process_group: The data-parallel ranks. Defaults to all ranks. State is sharded over all of them unless `mesh`
            or `shard_group_size` is given.
        mesh: The data-parallel ranks as a mesh of one dimension (shard) or two (replicate, shard). State is sharded
            along the last dimension and replicated along the first. Gradients are always averaged over all ranks.
        shard_group_size: Shard within groups of this many consecutive ranks, or within each host with `"node"`, and
            replicate across the groups. An alternative to `mesh`.
        config: How to shard.
        **defaults: Passed to `optimizer_class`. On GPUs the fused implementation is used if torch has one, unless
            `fused` or `foreach` is given.

    Returns:
        The optimizer. Use its `clip_grad_norm_` and, for float16, `zeroshard.GradScaler`.

    Raises:
        ConfigError: If the model, the options or the optimizer class cannot be sharded.
        RankMismatchError: If the ranks pass different models or options.
        RankFailedError: If the call fails on another rank.
    """
    arguments = ShardArguments(
        model,
        optimizer_class,
        params=params,
        process_group=process_group,
        mesh=mesh,
        shard_group_size=shard_group_size,
        config=config,
        defaults=defaults,
    )
    return ShardedOptimizer(model, arguments)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """The optimizer that `shard` returns. It reduces gradients to their owners during backward.

    After a backward pass with `stage=2`, the default, `param.grad` is a placeholder that raises when used. With
    `stage=1` it is the sum of this rank's own backward passes. Use this optimizer's `clip_grad_norm_`, and
    `zeroshard.GradScaler` instead of torch's.

    With several shard groups, `rank`, `world_size`, `process_group` and `layout` refer to this rank's shard group. The
    rank in `full_state_dict(to=...)` counts in all data-parallel ranks, `join_process_group`.
    """

    _model_binding: ShardBinding

    def __init__(self, model: torch.nn.Module, arguments: ShardArguments) -> None:
        self.parameters_as_bucket_view = False
        self._construct(arguments)
        # Hazard: the optimizer owns its binding, which therefore must not refer to it strongly.
        in_join = partial(is_in_join, weakref.proxy(self))
        self._model_binding = ShardBinding(
            model, self._engine, self._profiler, self._builder.config, is_in_join=in_join
        )
        self._comm.group.failure_detector.set_idle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in `param.grad`, at full size, without communication.

        The next backward pass outside the context, or the next step, reduces the sum. Outside of `no_sync()` every
        backward pass is reduced, and with `stage=2` gradients never take more than 1/N of their full size.

        Buffers follow DDP's schedule: all forward passes up to and including the next one outside use the buffers of
        the first one inside. Directly after a step, forward passes inside do not communicate, so a single rank may run
        the model here (under `no_grad()` it may do so anywhere). If a pass outside has not been followed by a step yet,
        the first pass inside broadcasts rank 0's buffers, and all ranks must take part.
        """
        with self._model_binding.reducer.pause():
            yield

    def wait_for_params(self) -> None:
        """Wait until all parameters are gathered.

        Only needed with `overlap_param_gather`, before parameters are read other than through the model.
        """
        self._model_binding.wait_for_params()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers now, for example after passes under `no_grad()` that changed them.

        Call on all ranks, and not inside `Join`.

        Raises:
            RuntimeError: If a later `shard()` call took over parameters of this optimizer.
        """
        self._model_binding.broadcast_buffers()

    def ddp_hook(self) -> NoReturn:
        """Raise `ConfigError`: this optimizer reduces gradients itself, without DDP."""
        raise ConfigError(
            "ddp_hook() is for ZeroRedundancyOptimizer under DistributedDataParallel; an optimizer made by shard() "
            "reduces gradients itself. Remove the call, and do not wrap the model in DistributedDataParallel."
        )
