"""`shard`: an optimizer for a whole model, without DDP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ._logging import warn_at_caller
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
    """An optimizer for `model` of which every rank holds 1/N: of the state, and of the gradients.

    The model is neither wrapped nor changed in what it computes. Its parameters and buffers become those of rank 0, its
    parameters move into flat buffers, and gradients are averaged over the ranks while backward runs. Called on all
    ranks.

    Args:
        model: a module that no `DistributedDataParallel` wraps.
        optimizer_class: the class, or any callable, that makes the optimizer to shard. Or a list of `ParamRule`s: which
            class updates which parameters.
        params: parameters or groups of them, if not all of the model in one group. Not with rules.
        process_group: the ranks that train together; by default all. All of them share the state, unless `mesh` or
            `shard_group_size` say otherwise.
        mesh: those ranks, in one dimension along which they share, or in two (replicate, shard): the state is divided
            along the second, and every row has all of it. Gradients are averaged over all ranks in any case.
        shard_group_size: the same by words: "node" for the ranks of one host, or a number of consecutive ranks.
        config: how to shard.
        defaults: everything else goes to `optimizer_class`. On GPUs the fused implementation is
            taken where torch has one, unless `fused` or `foreach` are given.
    """
    rules = _is_rule_list(optimizer_class)
    given = _iter_named_params(model, include_duplicates=rules) if params is None else params
    if rules and params is not None:
        given = _reject_params_with_rules()
    ranks = (mesh, shard_group_size)
    return ShardedOptimizer(model, given, optimizer_class, process_group, mesh_options=ranks, config=config, **defaults)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """What `shard` returns. Gradients come from autograd's hooks and are on their way to their owners at once.

    After a backward pass with `stage=2`, the default, `param.grad` is a placeholder that raises when it is used. With
    `stage=1` it is the sum of this rank's own passes. Use `clip_grad_norm_` of this optimizer, and
    `zeroshard.GradScaler`.

    Where rows of ranks hold the same, `rank`, `world_size` and `process_group` are those of this rank's row, as in
    `layout`. The rank that `full_state_dict(to=...)` takes counts in all that train, `join_process_group`.
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
        others = [param for param in model.parameters() if id(param) not in self._engine.bucket_by_param_id]
        broadcast_coalesced(self._comm.data_parallel, others, Rank(0))
        self._double_reduce_guard = DoubleReduceGuard(model, self._engine, self._grad_hooks)
        self._param_prefetch = ParamPrefetch(model, self._engine) if self._config.overlap_param_gather else None
        vars(model)["zero_grad"] = ZeroGradWrapper(model, self._clear_grads)

    @property
    def _is_superseded(self) -> bool:
        hooks = vars(self).get("_grad_hooks")  # not there before it is made
        return hooks is not None and hooks.is_superseded

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside no gradients are sent: backward passes add up gradients in `param.grad`, in full size.

        The next pass outside, or the next step, sends the sum. Without it every pass is reduced, and with `stage=2`
        gradients never take more than 1/N.

        Buffers follow DDP: all passes up to the next one outside use those that the first of them has got. So after a
        step a rank may run the model alone here; without gradients it may anywhere. Right after a pass outside whose
        step is yet to come, the first pass inside broadcasts the buffers of rank 0, which all ranks must take part in.
        """
        before, self._grad_reducer.is_paused = self._grad_reducer.is_paused, True
        try:
            yield
        finally:
            self._grad_reducer.is_paused = before

    def wait_for_params(self) -> None:
        """All parameters have arrived. Needed with `overlap_param_gather` only, before parameters are read directly."""
        if self._param_prefetch is not None:
            self._param_prefetch.wait()

    def _add_groups(self, call: str, groups: Any) -> None:
        self._engine.synchronize_grads(call, self.param_groups)  # gradients in flight belong to the present buckets
        known = len(self._engine.layout.buckets)
        super()._add_groups(call, groups)
        self._engine.broadcast_from_rank(Rank(0), first_bucket=known)
        self._grad_hooks.attach(self._engine.params)
        if self._param_prefetch is not None:
            self._param_prefetch.refresh_buckets()

    def _parse_groups(self, groups: Any) -> list[ParamGroup]:
        """With the names that parameters have in the model, if our other groups have names."""
        new = super()._parse_groups(groups)
        if "param_names" not in self.param_groups[0]:
            return new
        names = {id(param): name for name, param in self._model.named_parameters()}
        start = len(self._engine.params)
        for group in new:
            entries = enumerate(group["params"], start)
            start += len(group["params"])
            group["params"] = [
                (names.get(id(it), f"added.{i}"), it) if isinstance(it, torch.Tensor) else it for i, it in entries
            ]
        return new

    def _step(self, closure: Any, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        self._require_not_superseded("step")
        try:
            result = super()._step(closure, kwargs, is_joined=is_joined)
            if self._should_check_unreduced:  # once, and not before now: another optimizer may have been made for them
                self._should_check_unreduced = False
                _warn_unreduced_params(self._model)
            return result
        finally:
            self._grad_hooks.attach(self._engine.params)  # also those that have been thawed since
            if self._param_prefetch is not None and self._engine.param_sync.is_in_flight:
                self._param_prefetch.arm()

    def _synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list
    ) -> list[torch.Tensor] | None:
        # Those that were unfrozen since the last step, too: the next pass may add to what is clipped or unscaled now.
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
        chosen = assign_params_to_rules(super()._parse_params(params).groups[0]["params"], self._rules)
        names = make_class_names(self._rules)
        return ParsedParams(
            [{"params": it, OPTIMIZER_KEY: name} for it, name in zip(chosen, names, strict=True)], is_bare_sequence=True
        )

    def _make_optimizer_specs(
        self, optimizer_class: Any, defaults: dict[str, Any], parsed_params: ParsedParams, *, overlap_with_ddp: bool
    ) -> list[OptimizerSpec]:
        if not self._rules:
            (kind,) = super()._make_optimizer_specs(
                optimizer_class, defaults, parsed_params, overlap_with_ddp=overlap_with_ddp
            )
            return [OptimizerSpec(kind.name, enable_fused(kind.factory))]
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
        order = {id(param): place for place, param in enumerate(self._model.parameters())}
        return EngineBuilder(
            self._comm,
            self._config,
            optimizer_specs,
            overlap_with_ddp=overlap_with_ddp,
            reduces_grads=True,
            param_order=order,
        )

    def _must_match_across_ranks(self, layout: Layout) -> list[str]:
        return [
            *super()._must_match_across_ranks(layout),
            *describe_for_broadcast(self._comm.data_parallel, self._unmanaged_tensors()),
        ]

    def _unmanaged_tensors(self) -> dict[str, torch.Tensor]:
        """What the model has beside our parameters."""
        ours = {id(param) for group in self.param_groups for param in group["params"]}
        foreign = {name: param for name, param in self._model.named_parameters() if id(param) not in ours}
        return foreign | {f"buffer {name}": buffer for name, buffer in self._model.named_buffers()}

    def _model_buffers(self) -> "NamedBuffers":
        return dict(self._model.named_buffers())

    def _before_join_step(self, source: Rank) -> None:
        self._buffer_broadcast.broadcast(source)

    def _after_step(self) -> None:
        if not self._is_buffer_broadcast_disabled():
            self._buffer_broadcast.broadcast(
                Rank(0)
            )  # for the next passes, also those without gradients, which send nothing
        super()._after_step()

    def broadcast_buffers(self) -> None:
        """Buffers become those of rank 0 now, for instance after passes without gradients that have changed them.

        Called on all ranks, and not inside `Join`.
        """
        self._require_not_superseded("sync")
        check_all_equal(self._comm, "broadcast_buffers", ())
        self._buffer_broadcast.broadcast(Rank(0))

    def _should_forward_skip_broadcast(self) -> bool:
        """So that one rank may make the forward pass that is next alone."""
        return not torch.is_grad_enabled() or self._is_buffer_broadcast_disabled()

    def _is_accumulating(self) -> bool:
        return self._grad_reducer.is_paused

    def _require_not_superseded(self, action: str) -> None:
        if self._grad_hooks.is_superseded:
            raise RuntimeError(f"another optimizer was made by shard() for parameters of this one: {action} that one")

    def _is_buffer_broadcast_disabled(self) -> bool:
        replaced = self._grad_hooks.is_superseded  # the ranks of this one need no longer be there
        return replaced or not self._config.broadcast_buffers or self._join_config.enable

    def _clear_grads(self, set_to_none: bool) -> None:
        self._engine.clear_grads(set_to_none=set_to_none)


def _is_rule_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


def _validate_rules(rules: Sequence[ParamRule]) -> None:
    strange = [it for it in rules if not isinstance(it, ParamRule)]
    if strange:
        raise TypeError(f"a list for shard() holds ParamRule(...)s only, not {strange[0]!r}")
    for rule in rules:
        reject_config_options(rule.optimizer_class, rule.options)


def _reject_params_with_rules() -> Iterator[Any]:
    """Raises when it is read, with all ranks."""
    raise ConfigError("rules choose among all parameters of the model: shard() takes either them or params")
    yield


def _warn_unreduced_params(model: torch.nn.Module) -> None:
    """Tell of parameters that have gradients which are averaged by nobody, as far as this rank can see."""
    wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    averaged = hooked_param_ids() | {id(param) for part in wrapped for param in part.parameters()}
    candidates = ((name, param) for name, param in model.named_parameters() if id(param) not in averaged)
    strays = [name for name, param in candidates if param.requires_grad and param.grad is not None]
    if strays:
        shown = ", ".join(strays[:_MAX_LISTED_NAMES]) + (", ..." if len(strays) > _MAX_LISTED_NAMES else "")
        warn_at_caller(
            f"nobody averages the gradients of {len(strays)} parameters of the model, since no group of a sharded "
            f"optimizer has them: {shown}. Ranks that train them would drift apart. Put them into the params of "
            "shard(), freeze them with requires_grad_(False), or average their gradients yourself."
        )


def _iter_named_params(model: torch.nn.Module, *, include_duplicates: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Read only when all ranks are about to agree: what is wrong on one is then raised on all.

    `every_name`: also the second of a tied weight.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"shard() takes a torch.nn.Module, not a {type(model).__name__}: pass the model, and groups as params=..."
        )
    yield from model.named_parameters(remove_duplicate=not include_duplicates)
