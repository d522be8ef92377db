"""`shard`: ZeRO-1 and ZeRO-2 for a model that DDP does not wrap.

`ShardedOptimizer` extends `ZeroRedundancyOptimizer` with hooks on the model: gradients are reduced during backward,
buffers are broadcast from rank 0, and parameters may be all-gathered during the next forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ._logging import warn_at_caller
from ._torch_compat import is_in_join
from ._types import Rank
from .build import EngineBuilder
from .comm.collectives import Comm
from .comm.consensus import check_all_equal
from .comm.mesh import ShardGroupSize, make_comm
from .config import ZeroConfig, reject_config_options
from .engine.autograd_hooks import GradHooks, hooked_param_ids
from .engine.flat_engine import FlatShardEngine
from .engine.grad_reducer import GradReducer
from .engine.inner import OPTIMIZER_KEY, OptimizerConstructor, OptimizerFactory, ParamGroup, enable_fused
from .engine.module_hooks import (
    BufferBroadcast,
    DoubleReduceGuard,
    ParamPrefetch,
    ZeroGradWrapper,
    abandon_prefetches,
    broadcast_coalesced,
    describe_for_broadcast,
)
from .engine.optimizer_shard import OptimizerSpec
from .errors import ConfigError
from .layout.layout import Layout
from .optimizer import ZeroRedundancyOptimizer
from .params import ParsedParams, reject_dtensor
from .rules import ParamRule, assign_params_to_rules, make_class_names

if TYPE_CHECKING:
    from .peer_checkpoint.snapshot import NamedBuffers

_MAX_LISTED_NAMES = 5


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
    has_rules = _is_rule_list(optimizer_class)
    param_source = _iter_named_params(model, include_duplicates=has_rules) if params is None else params
    if has_rules and params is not None:
        param_source = _reject_params_with_rules()
    mesh_options = (mesh, shard_group_size)
    return ShardedOptimizer(
        model, param_source, optimizer_class, process_group, mesh_options=mesh_options, config=config, **defaults
    )


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """The optimizer that `shard` returns. It reduces gradients to their owners during backward.

    After a backward pass with `stage=2`, the default, `param.grad` is a placeholder that raises when used. With
    `stage=1` it is the sum of this rank's own backward passes. Use this optimizer's `clip_grad_norm_`, and
    `zeroshard.GradScaler` instead of torch's.

    With several shard groups, `rank`, `world_size`, `process_group` and `layout` refer to this rank's shard group. The
    rank in `full_state_dict(to=...)` counts in all data-parallel ranks, `join_process_group`.
    """

    _engine: FlatShardEngine
    _default_stage = 2

    def __init__(
        self,
        model: torch.nn.Module,
        params: Any,
        optimizer_class: Any,
        process_group: dist.ProcessGroup | None,
        *,
        mesh_options: tuple[DeviceMesh | None, ShardGroupSize | None] = (None, None),
        config: ZeroConfig | None,
        **defaults: Any,
    ) -> None:
        self._model, self._mesh_options = model, mesh_options
        self._rules = list(optimizer_class) if _is_rule_list(optimizer_class) else []
        super().__init__(params, optimizer_class, process_group, config=config, **defaults)
        self._engine.should_wait_for_params = not self._config.overlap_param_gather
        self._grad_reducer = GradReducer(
            self._comm, self._config._stage_policy, self._config._reduce_policy, self._config._master_policy
        )
        self._engine.set_grad_source(self._grad_reducer)
        self._engine.broadcast_from_rank(Rank(0))
        self._should_check_unreduced = not self._comm.is_single_rank
        self._grad_hooks = GradHooks(self._grad_reducer)
        self._grad_hooks.attach(self._engine.params)
        self._attach_to_model(model)

    def _attach_to_model(self, model: torch.nn.Module) -> None:
        self._buffer_broadcast = BufferBroadcast(
            self._comm.data_parallel, model, self._should_forward_skip_broadcast, self._is_accumulating
        )
        self._buffer_broadcast.broadcast(Rank(0))
        unmanaged = [param for param in model.parameters() if id(param) not in self._engine.bucket_by_param_id]
        broadcast_coalesced(self._comm.data_parallel, unmanaged, Rank(0))
        self._double_reduce_guard = DoubleReduceGuard(model, self._engine, self._grad_hooks)
        self._param_prefetch = ParamPrefetch(model, self._engine) if self._config.overlap_param_gather else None
        vars(model)["zero_grad"] = ZeroGradWrapper(model, self._clear_grads)

    @property
    def _is_superseded(self) -> bool:
        hooks = vars(self).get("_grad_hooks")  # not set yet during construction
        return hooks is not None and hooks.is_superseded

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
        was_paused, self._grad_reducer.is_paused = self._grad_reducer.is_paused, True
        try:
            yield
        finally:
            self._grad_reducer.is_paused = was_paused

    def wait_for_params(self) -> None:
        """Wait until all parameters are gathered.

        Only needed with `overlap_param_gather`, before parameters are read other than through the model.
        """
        if self._param_prefetch is not None:
            self._param_prefetch.wait()

    def _add_groups(self, call: str, groups: Any) -> None:
        self._engine.synchronize_grads(call, self.param_groups)  # gradients in flight belong to the existing buckets
        num_existing = len(self._engine.layout.buckets)
        super()._add_groups(call, groups)
        self._engine.broadcast_from_rank(Rank(0), first_bucket=num_existing)
        self._grad_hooks.attach(self._engine.params)
        if self._param_prefetch is not None:
            self._param_prefetch.refresh_buckets()

    def _parse_groups(self, groups: Any) -> list[ParamGroup]:
        """Normalize new groups and, if the existing groups are named, name their parameters as in the model."""
        new_groups = super()._parse_groups(groups)
        if "param_names" not in self.param_groups[0]:
            return new_groups
        names = {id(param): name for name, param in self._model.named_parameters()}
        start = len(self._engine.params)
        for group in new_groups:
            entries = enumerate(group["params"], start)
            start += len(group["params"])
            group["params"] = [
                (names.get(id(entry), f"added.{index}"), entry) if isinstance(entry, torch.Tensor) else entry
                for index, entry in entries
            ]
        return new_groups

    def _step(self, closure: Any, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        self._require_not_superseded("step()")
        try:
            result = super()._step(closure, kwargs, is_joined=is_joined)
            if self._should_check_unreduced:  # only now: another optimizer may have taken these parameters before
                self._should_check_unreduced = False
                _warn_unreduced_params(self._model)
            return result
        finally:
            self._grad_hooks.attach(self._engine.params)  # includes parameters unfrozen since the last step
            if self._param_prefetch is not None and self._engine.param_sync.is_in_flight:
                self._param_prefetch.arm()

    def _synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list
    ) -> list[torch.Tensor] | None:
        # Includes parameters unfrozen since the last step: the next pass may add to gradients clipped or unscaled now.
        self._grad_hooks.attach(self._engine.params)
        return super()._synchronize_sharded_grads(call, read_arguments)

    def _make_comm(self, process_group: dist.ProcessGroup | None) -> Comm:
        return make_comm(process_group, *self._mesh_options)

    def _parse_params(self, params: Any) -> ParsedParams:
        if isinstance(self._model, DistributedDataParallel):
            raise ConfigError(
                "shard() reduces gradients itself: give it the model without DistributedDataParallel. To keep that, "
                "use ZeroRedundancyOptimizer(..., config=ZeroConfig(partition=FlatShards())) and its ddp_hook()."
            )
        if isinstance(self._model, torch.nn.Module):
            abandon_prefetches(self._model)
        if not self._rules:
            return super()._parse_params(params)
        _validate_rules(self._rules)
        params_per_rule = assign_params_to_rules(super()._parse_params(params).groups[0]["params"], self._rules)
        names = make_class_names(self._rules)
        return ParsedParams(
            [
                {"params": rule_params, OPTIMIZER_KEY: name}
                for rule_params, name in zip(params_per_rule, names, strict=True)
            ],
            is_bare_sequence=True,
        )

    def _make_optimizer_specs(
        self, optimizer_class: Any, defaults: dict[str, Any], parsed_params: ParsedParams, *, overlap_with_ddp: bool
    ) -> list[OptimizerSpec]:
        if not self._rules:
            (spec,) = super()._make_optimizer_specs(
                optimizer_class, defaults, parsed_params, overlap_with_ddp=overlap_with_ddp
            )
            return [OptimizerSpec(spec.name, enable_fused(spec.factory))]
        if defaults:
            raise ConfigError(f"with rules, options belong into one: ParamRule(..., {next(iter(defaults))}=...)")
        return [
            OptimizerSpec(
                group[OPTIMIZER_KEY],
                enable_fused(OptimizerFactory(rule.optimizer_class, [group], True, rule.options)),
                rule.partition,
            )
            for rule, group in zip(self._rules, self.param_groups, strict=True)
        ]

    def _make_builder(self, optimizer_specs: list[OptimizerSpec], overlap_with_ddp: bool) -> EngineBuilder:
        for name, tensor in self._unmanaged_tensors().items():
            reject_dtensor(name, tensor)
        param_order = {id(param): position for position, param in enumerate(self._model.parameters())}
        return EngineBuilder(
            self._comm,
            self._config,
            optimizer_specs,
            overlap_with_ddp=overlap_with_ddp,
            reduces_grads=True,
            param_order=param_order,
        )

    def _must_match_across_ranks(self, layout: Layout) -> list[str]:
        return [
            *super()._must_match_across_ranks(layout),
            *describe_for_broadcast(self._comm.data_parallel, self._unmanaged_tensors()),
        ]

    def _unmanaged_tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers and its parameters that are in no group, by name."""
        managed_ids = {id(param) for group in self.param_groups for param in group["params"]}
        unmanaged = {name: param for name, param in self._model.named_parameters() if id(param) not in managed_ids}
        return unmanaged | {f"buffer {name}": buffer for name, buffer in self._model.named_buffers()}

    def _model_buffers(self) -> "NamedBuffers":
        return dict(self._model.named_buffers())

    def _before_join_step(self, source: Rank) -> None:
        self._buffer_broadcast.broadcast(source)

    def _after_step(self) -> None:
        if not self._is_buffer_broadcast_disabled():
            # For all following passes, including those under no_grad(), which do not communicate.
            self._buffer_broadcast.broadcast(Rank(0))
        super()._after_step()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers now, for example after passes under `no_grad()` that changed them.

        Call on all ranks, and not inside `Join`.

        Raises:
            RuntimeError: If a later `shard()` call took over parameters of this optimizer.
        """
        self._require_not_superseded("broadcast_buffers()")
        check_all_equal(self._comm, "broadcast_buffers", ())
        self._buffer_broadcast.broadcast(Rank(0))

    def _should_forward_skip_broadcast(self) -> bool:
        # Under no_grad() a rank may run the model alone.
        return not torch.is_grad_enabled() or self._is_buffer_broadcast_disabled()

    def _is_accumulating(self) -> bool:
        return self._grad_reducer.is_paused

    def _require_not_superseded(self, method: str) -> None:
        if self._grad_hooks.is_superseded:
            raise RuntimeError(
                "another optimizer was made by shard() for parameters of this one: "
                f"call {method} of that optimizer instead"
            )

    def _is_buffer_broadcast_disabled(self) -> bool:
        is_superseded = self._grad_hooks.is_superseded  # the ranks of this optimizer may be gone
        return is_superseded or not self._config.broadcast_buffers or is_in_join(self)

    def _clear_grads(self, set_to_none: bool) -> None:
        self._engine.clear_grads(set_to_none=set_to_none)


def _is_rule_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


def _validate_rules(rules: Sequence[ParamRule]) -> None:
    invalid = [rule for rule in rules if not isinstance(rule, ParamRule)]
    if invalid:
        raise TypeError(f"a list for shard() holds ParamRule(...)s only, not {invalid[0]!r}")
    for rule in rules:
        reject_config_options(rule.optimizer_class, rule.options)


def _reject_params_with_rules() -> Iterator[Any]:
    """Raise when iterated: that happens inside `prepare_all`, so the error is raised on all ranks."""
    raise ConfigError("rules choose among all parameters of the model: shard() takes either them or params")
    yield


def _warn_unreduced_params(model: torch.nn.Module) -> None:
    """Warn about parameters that have gradients on this rank, but no optimizer or DDP module that reduces them."""
    ddp_modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced_ids = hooked_param_ids() | {id(param) for module in ddp_modules for param in module.parameters()}
    candidates = ((name, param) for name, param in model.named_parameters() if id(param) not in reduced_ids)
    unreduced = [name for name, param in candidates if param.requires_grad and param.grad is not None]
    if unreduced:
        shown = ", ".join(unreduced[:_MAX_LISTED_NAMES]) + (", ..." if len(unreduced) > _MAX_LISTED_NAMES else "")
        warn_at_caller(
            f"nobody averages the gradients of {len(unreduced)} parameters of the model, since no group of a sharded "
            f"optimizer has them: {shown}. Ranks that train them would drift apart. Put them into the params of "
            "shard(), freeze them with requires_grad_(False), or average their gradients yourself."
        )


def _iter_named_params(model: torch.nn.Module, *, include_duplicates: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters, with `include_duplicates` once for each name of a tied weight.

    Lazy: it is iterated inside `prepare_all`, so an error on one rank is raised on all ranks.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"shard() takes a torch.nn.Module, not a {type(model).__name__}: pass the model, and groups as params=..."
        )
    yield from model.named_parameters(remove_duplicate=not include_duplicates)
