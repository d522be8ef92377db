"""`ZeroRedundancyOptimizer`: wires the parts together and delegates."""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # as torch's own optimizers: the compiler is not imported before it is used
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from . import zero_redundancy_optimizer as compat
from ._logging import warn_at_caller
from ._types import GlobalRank, Rank
from .build import EngineBuilder, format_param_count
from .comm.collectives import Comm
from .comm.consensus import Prepared, exchange_status, prepare_all, raise_failure, rollback_on_error
from .comm.process_group import Group
from .config import ZeroConfig, ZeroStage1, reject_config_options
from .engine import amp, clip
from .engine.autograd_hooks import register_accumulation_hook, watch_plain_steps
from .engine.base import Closure, Engine, StepOutcome
from .engine.checks import NonFiniteSteps
from .engine.ddp import CommHook, DDPOverlap, make_comm_hook, resolve_optimizer_class
from .engine.flat_engine import FlatShardEngine
from .engine.grad_reducer import GradReducer
from .engine.inner import OptimizerConstructor, OptimizerFactory, ParamGroup
from .engine.join import JoinedStep, broadcast_options
from .engine.optimizer_shard import OptimizerSpec
from .engine.whole_engine import WholeParamEngine
from .errors import ConfigError
from .layout.layout import Layout
from .layout.partition import Balance, Partitioner
from .layout.spec import make_param_specs
from .params import ParsedParams, parse_groups, parse_params
from .profiling import Phase
from .state import dcp_compat as callers
from .state.state_dict import StateDict, describe_groups
from .state.tensor_utils import deepcopy_except_tensors, tensor_versions
from .state_dict_mixin import StateDictMixin, run_state_dict_hooks, state_dict_for_dcp

if TYPE_CHECKING:
    from .peer_checkpoint.snapshot import NamedBuffers, PeerCheckpointer, PeerSnapshots
    from .report import Report


# ---------------------------------------------------------------------------------------------------------------------
# How a step is driven: plainly, by a GradScaler, or with ranks that ran out of inputs.


class SteppableOptimizer(Protocol):
    """An optimizer as users hold it."""

    param_groups: list[ParamGroup]
    _engine: Engine

    def _before_join_step(self, source: Rank) -> None:
        """Called on all ranks before a step that some only shadow; `source` is one that still trains."""

    def _after_step(self) -> None:
        """Called on all ranks when all have made a step, or have skipped it."""


class StepDriver:
    """Steps an engine for the optimizer that users hold."""

    def __init__(self, optimizer: "SteppableOptimizer", comm: Comm) -> None:
        # The optimizer holds this, and shall be freed when its user drops it.
        self._optimizer: Any = weakref.proxy(optimizer)
        self._comm = comm
        self._has_cleared_grads = False
        self._has_checked_inf = False
        self._num_steps = 0

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._optimizer._engine
        return engine

    def start_join(self) -> None:
        self._has_cleared_grads = False

    def step(self, closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool, is_joined: bool) -> Any:
        """`uneven`: some ranks may only shadow the step; `joined`: this one does."""
        with self._comm.profiler.step():
            result = self._run_step(closure, kwargs, in_join=in_join, is_joined=is_joined)
            self._optimizer._after_step()
            return result

    def _run_step(self, closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool, is_joined: bool) -> Any:
        try:
            self._check_consistency_if_due()
            self._engine.grad_check.is_paused = in_join
            if in_join and not self._comm.is_single_rank:
                run = self._step_with_join_sharded if self._engine.reduces_grads else self._step_with_join
                return run(closure, kwargs, is_joined=is_joined)
            if amp.is_scaler_step(self._optimizer) and self._should_skip_step(in_join=False):
                return None
            return self._engine.step(self._optimizer.param_groups, closure, kwargs)
        except BaseException:
            amp.clear_scaler_attrs(self._optimizer)  # GradScaler takes back what it set only after a step that returns
            raise
        finally:
            self._has_checked_inf = False
            amp.clear_scaler_attrs(*self._inner_optimizers)

    def _check_consistency_if_due(self) -> None:
        """In the same steps on all ranks: all of them make each, if only as a shadow or to skip it."""
        self._num_steps += 1
        if self._engine.checks.is_consistency_check_due(self._num_steps):
            self._engine.check_consistency(f"before step {self._num_steps}", self._num_steps)

    def synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list, *, in_join: bool
    ) -> list[torch.Tensor] | None:
        """This rank's part of gradients that are spread over ranks, to be clipped or unscaled; None if all of them are
        in `param.grad`. `given`: as for `settle`."""
        engine = self._engine
        if not isinstance(engine, FlatShardEngine) or not engine.reduces_grads:
            return None
        if in_join:  # Hazard: ranks without inputs make no such call, so that none can be agreed on
            raise RuntimeError(f"{call} cannot be used inside Join where gradients are spread over ranks")
        engine.synchronize_grads(call, self._optimizer.param_groups, read_arguments)
        engine.grads.mark_scaled()
        return engine.grads.grad_tensors()

    def unscale(self, grads: list[torch.Tensor], inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        self._has_checked_inf = True
        with self._comm.profiler.phase(Phase.UNSCALE_GRADS):
            return amp.unscale_sharded_grads(grads, inverse_scale, self._comm)

    def _step_with_join(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        engine, groups = self._engine, self._optimizer.param_groups
        uneven = JoinedStep(engine, groups, kwargs, is_joined=is_joined, has_cleared_grads=self._has_cleared_grads)
        try:
            if closure is not None:
                return engine.step(groups, uneven.wrap_closure(closure), kwargs)
            survey = uneven.gather_status(has_grad_scaler=amp.is_scaler_step(self._optimizer))
            if survey.has_grad_scaler and self._should_skip_step(in_join=True):
                return None
            uneven.exchange_step_inputs(survey)
            shadow = uneven.make_joined_closure() if survey.has_closure else None
            return engine.step(groups, shadow, uneven.kwargs)
        finally:
            uneven.finish()
            self._has_cleared_grads = is_joined

    def _step_with_join_sharded(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        """Ranks without inputs have no gradients, and need none: they own slices of those of the others."""

        def prepare() -> Prepared[None]:
            if amp.is_scaler_step(self._optimizer) or closure is not None:
                raise RuntimeError(
                    "inside Join, step() takes neither a closure nor a GradScaler where gradients are spread"
                )
            return Prepared(None)

        prepare_all(self._comm, "a step inside Join", prepare)
        training = broadcast_options(self._comm, self._optimizer.param_groups, is_current=not is_joined)
        self._optimizer._before_join_step(training[-1])  # the rank whose buffers DDP broadcasts, too
        if not is_joined:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        self._clear_param_grads()
        if not self._engine.is_reducing:  # else they are what DDP has shadowed
            self._engine.clear_grads(set_to_none=True)
        try:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        finally:
            self._clear_param_grads()
            self._engine.clear_grads(set_to_none=True)

    def _clear_param_grads(self) -> None:
        """Those in `param.grad` are of this rank's last own step."""
        self._engine.drop_placeholders()
        for param in self._engine.params:
            param.grad = None

    def _should_skip_step(self, *, in_join: bool) -> bool:
        engine = self._engine
        # Kernels that skip by themselves would leave it open whether gradients that are not finite are the guard's.
        fused = self._inner_optimizers if not engine.checks.should_check_grads else None
        if isinstance(engine, FlatShardEngine) and engine.reduces_grads:
            return amp.should_skip_sharded_step(
                self._optimizer, fused, engine.grads.grad_tensors(), self._comm, is_inf_checked=self._has_checked_inf
            )
        return amp.should_skip_step(self._optimizer, fused, engine.params, self._comm, is_join_enabled=in_join)

    @property
    def _inner_optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self._engine.inner.local_optimizers]


# ---------------------------------------------------------------------------------------------------------------------
# Modes of optimizers: schedule-free ones have other values in the parameters while they train than for evaluation.


class TrainEvalMixin:
    """`train()` and `eval()`, where the inner optimizer has them. Called on all ranks."""

    _engine: Engine
    param_groups: list[ParamGroup]
    initialized: bool

    @property
    def train(self) -> Callable[[], None]:
        """Parameters become those that are trained, on all ranks."""
        return self._mode_setter("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Parameters become those to evaluate and to save, on all ranks."""
        return self._mode_setter("eval")

    def _mode_setter(self, mode: str) -> Callable[[], None]:
        if not self.initialized or not any(member.has_mode(mode) for member in self._engine.inner.local_optimizers):
            raise AttributeError(f"the optimizer that is sharded has no {mode}()")
        return partial(self._set_mode, mode)

    @abstractmethod
    def _require_final_layout(self, call: str) -> None:
        """Raise if owners may still change. That of the class that has modes comes first."""

    def _set_mode(self, mode: str) -> None:
        """Each rank switches what it owns, and all get everything. What fails on one rank is raised on all."""
        engine, groups = self._engine, self.param_groups

        def prepare() -> Prepared[Callable[[], None]]:
            self._require_final_layout(mode)
            engine.check_groups(groups)
            engine.wait_until_idle()
            return Prepared(engine.snapshot(groups), describe_groups(groups))

        put_back = prepare_all(engine.comm, f"{mode}()", prepare)
        attempt = StepOutcome()
        attempt.run(lambda: engine.set_mode(groups, mode))
        verdict = exchange_status(engine.comm, f"the end of {mode}()", b"", attempt.failure)
        if verdict.failure_level:
            put_back()
        engine.broadcast_params()()
        if verdict.failure_level:
            raise_failure(engine.comm, f"{mode}()", attempt.error)


# ---------------------------------------------------------------------------------------------------------------------
# `ZeroRedundancyOptimizer`: wires the parts together and delegates.


class ZeroRedundancyOptimizer(StateDictMixin, TrainEvalMixin, Joinable):
    """An optimizer whose state exists once across all ranks instead of once on each.

    Each rank updates the parameters it owns with its own instance of `optimizer_class` and sends them to the
    others. Parameters come out bit for bit as the unsharded optimizer would have made them of the same
    gradients, which must be equal on all ranks, as `DistributedDataParallel` makes them: if they differ in the first
    step, it warns.

    Constructing, stepping, adding groups, loading and consolidating are collective: call them on all ranks of
    the group in the same order. Ranks that disagree raise `RankMismatchError`; what fails on one rank is
    raised on all.

    Args:
        params: parameters, named parameters, or dicts of them with options, as any torch optimizer takes them.
        optimizer_class: the class, or any callable, that makes the optimizer to shard.
        process_group: the ranks to shard over; by default all.
        parameters_as_bucket_view: keep parameters in flat buffers, so that a step copies nothing.
        overlap_with_ddp: step inside the backward pass, driven by a hook of `zeroshard.ddp_hooks`.
        config: options beyond torch's signature.
        defaults: everything else goes to `optimizer_class`.
    """

    # GradScaler then calls `step` on every rank, also where this rank's gradients are not finite.
    _step_supports_amp_scaling = True
    _default_stage: Literal[1, 2] = 1

    def __init__(
        self,
        params: Any,
        optimizer_class: OptimizerConstructor,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        config: ZeroConfig | None = None,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.initialized = False
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._engine: Engine
        self._comm = self._make_comm(process_group)
        self._config = ZeroConfig() if config is None else config
        self._ddp_overlap: DDPOverlap | None = None
        self._view_cache: dict[str, tuple[Layout, Any]] = {}
        self._step_driver = StepDriver(self, self._comm)
        call = f"making a {type(self).__name__}"
        layout = prepare_all(self._comm, call, lambda: self._build(params, optimizer_class, overlap_with_ddp, defaults))
        self._engine.extend(layout, self.param_groups)
        if overlap_with_ddp:
            self._ddp_overlap = DDPOverlap(self._comm, self._repartition, self.param_groups)
            self._opt_called = True  # LR schedulers would warn that step() is never called
            if parameters_as_bucket_view:
                warnings.warn("parameters_as_bucket_view has no effect with overlap_with_ddp=True", stacklevel=2)
        self._peer_checkpointer = self._make_copying()
        self.initialized = True
        watch_plain_steps(self)
        from .report import log_summary

        log_summary(self._builder, self._engine)

    # ---- what it is made of

    @property
    def optim(self) -> Optimizer:
        """This rank's inner optimizer, an instance of the given class."""
        optimizer, *others = self.inner_optimizers
        if others:
            raise AttributeError(
                "this optimizer has several inner optimizers, of several classes: see `inner_optimizers`"
            )
        return optimizer

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """This rank's inner optimizers, one for each class."""
        return [member.optimizer for member in self._engine.inner.local_optimizers]

    @property
    def state(self) -> Any:
        """This rank's optimizer state, by parameter: the one copy there is. Make the same edits on all ranks.

        With flat shards a parameter shows this rank's slice of its state as a flat tensor. Assign tensors in the shape
        of the slice or of the parameter; of the latter, this rank keeps a copy of its slice.
        """
        if callers.is_dcp_initializing_state():
            if callers.is_dcp_loading_flattened():
                self._engine.materialize_initial_state()  # until it is loaded
            return self._engine.state() or {None: "nothing to be made by a step"}
        return self._engine.state()

    @state.setter
    def state(self, value: Any) -> None:
        if self.initialized:
            self._engine.replace_state(value)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._comm.group.process_group

    @property
    def world_size(self) -> int:
        return self._comm.group.size

    @property
    def rank(self) -> Rank:
        """This process's rank in the group."""
        return self._comm.group.rank

    @property
    def global_rank(self) -> GlobalRank:
        return self._comm.group.global_rank

    @property
    def layout(self) -> Layout:
        """Which rank owns which parameter."""
        return self._engine.layout

    @property
    def _reduces_grads(self) -> bool:
        """Gradients are averaged here, each slice at its owner, and not by DDP."""
        return self._engine.reduces_grads

    @property
    def _is_superseded(self) -> bool:
        """Another optimizer was made by `shard` for parameters of this one."""
        return False

    @property
    def balance(self) -> Balance:
        """How evenly the ranks are loaded."""
        return self._builder.compute_balance(self.layout, self.param_groups)

    @property
    def _required_ddp_overlap(self) -> DDPOverlap:
        """What drives this optimizer from inside DDP's backward."""
        if self._ddp_overlap is None:
            raise ConfigError(
                "this optimizer steps when step() is called; construct it with overlap_with_ddp=True "
                "to have a DDP hook step it"
            )
        return self._ddp_overlap

    @property
    def nonfinite(self) -> NonFiniteSteps:
        """Steps whose gradients were not all finite, counted where `ZeroConfig(nonfinite=...)` looks for them."""
        return self._engine.checks.nonfinite

    @property
    def peer_snapshots(self) -> "PeerSnapshots | None":
        """What this rank holds of the copies that `PeerCheckpoint(...)` asks for. Keep it: `restore` takes it."""
        return None if self._peer_checkpointer is None else self._peer_checkpointer.snapshots

    def report(self) -> "Report":
        """Who owns what, what it takes on this rank, what the last step took. Any rank may call it: nothing is sent."""
        from .report import make_report

        settled = self._ddp_overlap is None or self._ddp_overlap.is_initialized
        return make_report(self._builder, self._engine, self.param_groups, self.peer_snapshots, is_layout_final=settled)

    # ---- state

    def state_dict(self) -> StateDict:
        """What `consolidate_state_dict` gathered on this rank, in the format of the unsharded optimizer.

        To spare memory its tensors are those that were gathered, not copies. `torch.distributed.checkpoint` and its
        helpers get what they can save: this rank's part, or everything if they were asked for that.
        """
        self._require_final_layout("state_dict")
        asked = callers.detect_dcp_call()
        if asked is not None:
            return run_state_dict_hooks(self, state_dict_for_dcp(self._engine, self.param_groups, asked))
        if self._consolidated_state is None:
            raise RuntimeError(
                "this rank holds only its own share of the state. Call full_state_dict(to=0) on "
                "all ranks: it returns everything on rank 0. Or call consolidate_state_dict(to=0) on all ranks, then "
                "state_dict() on rank 0 only."
            )
        since = self._engine.steps - self._consolidated_state.num_steps
        if since:
            warnings.warn(
                f"state_dict() returns the state of {since} steps ago: call consolidate_state_dict() on all ranks "
                "again for the present one",
                stacklevel=2,
            )
        if tensor_versions(self._consolidated_state.state_dict) != self._consolidated_state.tensor_versions:
            raise RuntimeError(
                "the tensors of an earlier state_dict() were changed in place, and it shares them with what was "
                "gathered: call consolidate_state_dict() again, and change a copy"
            )
        return run_state_dict_hooks(self, deepcopy_except_tensors(self._consolidated_state.state_dict))

    def load_state_dict(self, state_dict: StateDict, *, assign: bool = False) -> None:
        """Load this rank's part of a dict saved at any world size, or by the plain optimizer. Called on all ranks.

        Either all ranks load it or none does.

        Args:
            state_dict: what `full_state_dict` or the plain optimizer returned, or this rank's part of it.
            assign: use the dict's tensors as the state where they fit, instead of copying them. The dict must not be
                used afterwards. By default it stays as it is.
        """
        self._load_state_dict(state_dict, assign=assign)

    # ---- training (who compiles a training loop leaves the graph here: messages to other ranks are in none)

    @_disable_dynamo
    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and bring everyone's updates to all ranks.

        Returns what the inner optimizer's step returned. `closure` and `kwargs` are handed on to it.
        """
        if self._ddp_overlap is not None:
            self._ddp_overlap.check_trainable_unchanged()
            if amp.is_scaler_step(self):
                raise RuntimeError(
                    "GradScaler cannot be used with overlap_with_ddp=True: the hook steps before gradients are unscaled"
                )
            warn_at_caller("step() does nothing with overlap_with_ddp=True: the DDP hook makes the steps")
            return None
        Join.notify_join_context(self)
        return self._step(closure, kwargs, is_joined=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._ddp_overlap is not None:
            self._ddp_overlap.check_trainable_unchanged()
        self._engine.drop_placeholders()
        super().zero_grad(set_to_none)
        self._engine.clear_grads(set_to_none=set_to_none)

    @_disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on all parameters, wherever their gradients are. Called on all ranks."""
        with self._comm.profiler.phase(Phase.CLIP_GRADS):
            grads = self._synchronize_sharded_grads(
                "clip_grad_norm_",
                lambda: [
                    *(f"max_norm={float(max_norm)}", f"norm_type={float(norm_type)}"),
                    f"error_if_nonfinite={bool(error_if_nonfinite)}",
                ],
            )
            if grads is None:
                return torch.nn.utils.clip_grad_norm_(self._engine.params, max_norm, norm_type, error_if_nonfinite)
            return clip.clip_grad_norm(
                grads, float(max_norm), float(norm_type), self._comm, error_if_nonfinite=error_if_nonfinite
            )

    @_disable_dynamo
    def clip_grad_value_(self, clip_value: float) -> None:
        """As `torch.nn.utils.clip_grad_value_` on all parameters, wherever their gradients are. Called on all ranks."""
        with self._comm.profiler.phase(Phase.CLIP_GRADS):
            grads = self._synchronize_sharded_grads("clip_grad_value_", lambda: [f"clip_value={float(clip_value)}"])
            if grads is None:
                torch.nn.utils.clip_grad_value_(self._engine.params, clip_value)
            else:
                clip.clip_grad_value(grads, clip_value)

    def check_consistency(self) -> None:
        """Raise `ReplicaMismatchError` on all ranks if they have different parameters, bit by bit. Called on all ranks.

        `ZeroConfig(consistency_check=ConsistencyCheck(every=...))` does it every so many steps, and
        says what it cannot find.
        """
        self._engine.check_consistency("check_consistency()")

    def ddp_hook(self) -> CommHook:
        """A communication hook for DDP that brings gradients to their owners only; `step()` then does as usual.

        For `config=ZeroConfig(partition=FlatShards())`. `param.grad` holds this rank's own gradients afterwards, as
        with `stage=1`: clip with `clip_grad_norm_` of this optimizer. `step()` raises if they were changed there after
        they had been reduced. Called on all ranks, in the same order as other optimizers' hooks.
        """
        if not isinstance(self._engine, FlatShardEngine):
            raise ConfigError("ddp_hook() brings slices of gradients to their owners: it needs partition=FlatShards()")
        sync = self._engine.grads
        if not isinstance(sync, GradReducer):
            sync = GradReducer(self._comm, ZeroStage1(), self._config._reduce_policy, self._config._master_policy)
            self._engine.set_grad_source(sync)
        self._attach_accumulation_hooks(sync)
        return make_comm_hook(sync, self._engine.params)

    def _attach_accumulation_hooks(self, grad_reducer: GradReducer) -> None:
        for index, param in enumerate(self._engine.params):
            if param.requires_grad:
                register_accumulation_hook(grad_reducer, index, param)

    def _unscale_grads(self, inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """For `zeroshard.GradScaler`: scale gradients that are spread over ranks, and say where some are not finite."""
        grads = self._synchronize_sharded_grads("unscaling gradients")
        return self._step_driver.unscale(grads or [], inverse_scale)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group in the middle of training. Call it on all ranks. No earlier parameter changes its owner.

        To add many groups, `add_param_groups` is faster and sends fewer, larger messages.

        Args:
            param_group: a dict with the key `params` and the options of the group, as for any torch optimizer.

        Raises:
            RankMismatchError: the ranks added different groups.
            RankFailedError: the group was refused on another rank.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        self._add_groups("add_param_group", [param_group])

    def add_param_groups(self, param_groups: Iterable[ParamGroup]) -> None:
        """Add several groups in the middle of training, all of them or none. Call it on all ranks.

        The result is that of `add_param_group` on each of them in order, with one agreement of all ranks instead of one
        a group. If a group is refused on any rank, all ranks raise and no group is added.

        Args:
            param_groups: dicts with the key `params` and the options of the group, as for any torch optimizer.

        Raises:
            RankMismatchError: the ranks added different groups.
            RankFailedError: a group was refused on another rank.
        """
        self._add_groups("add_param_groups", param_groups)

    def join_hook(self, **_: Any) -> JoinHook:
        """For `torch.distributed.algorithms.join.Join`."""
        if self._ddp_overlap is None:
            self._step_driver.start_join()
        return compat._ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._engine.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All ranks that train together."""
        return self._comm.data_parallel.group.process_group

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it is one part of an optimizer that lives on "
            f"{self.world_size} ranks. Save full_state_dict() and load it into a new one."
        )

    # ---- how it is put together

    def _build(
        self, params: Any, optimizer_class: Any, overlap_with_ddp: bool, defaults: dict[str, Any]
    ) -> Prepared[Layout]:
        """Read what the user gave and build this rank's engine of it."""
        if not isinstance(self._config, ZeroConfig):
            raise TypeError(f"config must be a ZeroConfig, not {type(self._config).__name__}")
        if self._config.stage is None:
            self._config = replace(self._config, stage=self._default_stage)
        given = self._parse_params(params)
        Optimizer.__init__(self, given.groups, {})
        self._builder = self._make_builder(
            self._make_optimizer_specs(optimizer_class, defaults, given, overlap_with_ddp=overlap_with_ddp),
            overlap_with_ddp,
        )
        self._builder.validate_options()
        layout = self._builder.extend_layout(Layout.empty(self.world_size), self.param_groups)
        self._engine = self._builder.make_engine()
        undo = self._engine.param_store.rollback
        with rollback_on_error(undo):
            self._builder.prepare_engine(self._engine, layout, self.param_groups)
            self._builder.warn_if_not_splittable()
            self._builder.warn_if_offload_unused()
            self._engine.inner.pull_options(self.param_groups)
            self.defaults = self.optim.defaults if len(self.inner_optimizers) == 1 else {}
            return Prepared(layout, self._must_match_across_ranks(layout), undo, format_param_count(self.param_groups))

    def _must_match_across_ranks(self, layout: Layout) -> list[str]:
        """What must be equal on all ranks that make one."""
        return self._builder.must_match_across_ranks(layout, self.param_groups)

    def _add_groups(self, call: str, groups: Any) -> None:
        if self._ddp_overlap is not None:
            raise RuntimeError("parameter groups cannot be added with overlap_with_ddp=True: DDP's buckets are fixed")
        layout = prepare_all(self._comm, call, lambda: self._prepare_groups(self._parse_groups(groups)))
        self._engine.extend(layout, self.param_groups)
        if isinstance(self._engine, FlatShardEngine) and isinstance(self._engine.grads, GradReducer):
            self._attach_accumulation_hooks(self._engine.grads)
        watch_plain_steps(self)
        self._discard_consolidated_state()

    def _parse_groups(self, groups: Any) -> list[ParamGroup]:
        """New groups in one form. What is wrong with them is raised on all ranks."""
        return parse_groups(groups)

    def _prepare_groups(self, groups: Sequence[ParamGroup]) -> Prepared[Layout]:
        """The layout with more groups, which our groups and those of the inner optimizer already have."""
        known, engine = len(self.param_groups), self._engine

        def undo() -> None:
            del self.param_groups[known:]
            engine.rollback(known)

        with rollback_on_error(undo):
            for group in groups:
                super().add_param_group(group)
            layout = self._builder.extend_layout(self.layout, self.param_groups, known)
            self._builder.prepare_engine(engine, layout, self.param_groups)
            engine.inner.pull_added_options(self.param_groups, known)
            facts = self._builder.must_match_for_new_groups(self.layout, layout, self.param_groups, known)
            # Ranks have agreed on the earlier groups, but their options may have been changed since.
            options = engine.consensus_options(self.param_groups)
            return Prepared(layout, facts, undo, format_param_count(self.param_groups), options)

    def _make_comm(self, process_group: dist.ProcessGroup | None) -> Comm:
        return Comm(Group(process_group))

    def _parse_params(self, params: Any) -> ParsedParams:
        return parse_params(params)

    def _make_optimizer_specs(
        self, optimizer_class: Any, defaults: dict[str, Any], parsed_params: ParsedParams, *, overlap_with_ddp: bool
    ) -> list[OptimizerSpec]:
        """What kinds of optimizers shall be made, for our groups."""
        if not callable(optimizer_class):
            raise TypeError(
                f"optimizer_class must be a class such as torch.optim.AdamW, not a {type(optimizer_class).__name__}. "
                "A list of ParamRule(...)s, and not an empty one, is for zeroshard.shard."
            )
        reject_config_options(optimizer_class, defaults)
        recipe = OptimizerFactory(
            resolve_optimizer_class(optimizer_class, overlap=overlap_with_ddp),
            self.param_groups,
            parsed_params.is_bare_sequence,
            defaults,
        )
        return [OptimizerSpec(recipe.name, recipe)]

    def _make_builder(self, optimizer_specs: list[OptimizerSpec], overlap_with_ddp: bool) -> EngineBuilder:
        return EngineBuilder(
            self._comm,
            self._config,
            optimizer_specs,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
            overlap_with_ddp=overlap_with_ddp,
        )

    def _repartition(self, partitioner: Partitioner) -> WholeParamEngine:
        """Start afresh with other owners, before there is any state."""
        layout = partitioner.extend(Layout.empty(self.world_size), make_param_specs(self.param_groups))
        engine = self._builder.make_engine()
        assert isinstance(engine, WholeParamEngine), "overlap_with_ddp is refused with anything else"
        self._builder.prepare_engine(engine, layout, self.param_groups)
        self._engine = engine
        engine.extend(layout, self.param_groups)
        return engine

    def _step(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        return self._step_driver.step(closure, kwargs, in_join=self._join_config.enable, is_joined=is_joined)

    def _shadow_step(self) -> None:
        """For a rank that ran out of inputs inside `Join`."""
        if self._ddp_overlap is not None:
            self._ddp_overlap.run_deferred()
        else:
            self._step(None, {}, is_joined=True)

    def _make_copying(self) -> "PeerCheckpointer | None":
        if self._config.peer_checkpoint is None:
            return None
        from .peer_checkpoint.snapshot import make_peer_checkpointer

        return make_peer_checkpointer(self._comm, self._config.peer_checkpoint)

    def _invalidate_peer_snapshots(self) -> None:
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.invalidate_snapshots()

    def _model_buffers(self) -> "NamedBuffers":
        """Those that a copy must have beside the parameters; of a model that is not known, none."""
        return {}

    def _synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list
    ) -> list[torch.Tensor] | None:
        return self._step_driver.synchronize_sharded_grads(call, read_arguments, in_join=self._join_config.enable)

    def _before_join_step(self, source: Rank) -> None:
        """For `Stepping`."""

    def _after_step(self) -> None:
        """For `Stepping`."""
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.after_step(self._engine, self.param_groups, self._model_buffers)

    # ---- names that torch marks private

    _all_params = compat.all_params
    _index_to_param = compat.index_to_param
    _param_to_index = compat.param_to_index
    _param_to_rank = compat.param_to_rank
    _device_to_params_per_rank = compat.device_to_params_per_rank
    _device_to_device_index = compat.device_to_device_index
    _buckets = compat.buckets
    _bucket_assignments_per_rank = compat.bucket_assignments_per_rank
    _overlap_with_ddp = compat.overlap_with_ddp
    _overlap_info = compat.overlap_info
    _optim_constructor = compat.optim_constructor
    _optim_defaults = compat.optim_defaults
    _default_device = compat.default_device
    _is_trainable_mask = compat.is_trainable_mask
    functional_optim_map = compat.functional_map
    _partition_parameters = compat.partition_parameters
    _sync_params = compat.sync_params
    _sync_param_groups = staticmethod(compat.sync_param_groups)
    _local_step = compat.local_step
    _get_assigned_rank = compat.get_assigned_rank
    _init_zero_for_overlap = compat.init_zero_for_overlap
    _check_overlap_initialized = compat.check_overlap_initialized
    _clear_cache = compat.clear_cache
