"""`ZeroRedundancyOptimizer`: the optimizer that users hold.

The class parses arguments, builds an engine and delegates to it:

- `StepDriver` runs a step: directly, under a GradScaler, or inside `Join`.
- `TrainEvalMixin` forwards `train()` and `eval()` of schedule-free optimizers.
- `StateDictMixin` gathers and loads state.
- `EngineBuilder` chooses the layout and the engine.
"""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from . import zero_redundancy_optimizer as compat
from ._logging import warn_at_caller
from ._torch_compat import disable_dynamo, is_in_join
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
from .state import dcp_compat
from .state.state_dict import StateDict, describe_groups
from .state.tensor_utils import deepcopy_except_tensors, tensor_versions
from .state_dict_mixin import StateDictMixin, run_state_dict_hooks, state_dict_for_dcp

if TYPE_CHECKING:
    from .peer_checkpoint.snapshot import NamedBuffers, PeerCheckpointer, PeerSnapshots
    from .report import Report


# ---------------------------------------------------------------------------------------------------------------------
# Step driver: a plain step, a step under GradScaler, a step inside `Join`.


class SteppableOptimizer(Protocol):
    """The part of the user-facing optimizer that `StepDriver` needs."""

    param_groups: list[ParamGroup]
    _engine: Engine

    def _before_join_step(self, source: Rank) -> None:
        """Run on all ranks before a step in which some ranks have joined; `source` is a rank that still trains."""

    def _after_step(self) -> None:
        """Run on all ranks after a step, also after a skipped one."""


class StepDriver:
    """Runs the engine's step on behalf of the user-facing optimizer."""

    def __init__(self, optimizer: "SteppableOptimizer", comm: Comm) -> None:
        # Weak: the optimizer owns this driver, and a cycle would delay its release until garbage collection.
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
        """Step on all ranks and return the result of the inner optimizer's step.

        Args:
            closure: Passed to the inner optimizer, as are `kwargs`.
            kwargs: Further arguments of `step()`.
            in_join: The step runs inside `Join`, so some ranks may be out of inputs.
            is_joined: This rank is out of inputs.
        """
        with self._comm.profiler.step():
            result = self._run_step(closure, kwargs, in_join=in_join, is_joined=is_joined)
            self._optimizer._after_step()
            return result

    def _run_step(self, closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool, is_joined: bool) -> Any:
        try:
            self._check_consistency_if_due()
            self._engine.grad_check.is_paused = in_join
            if in_join and not self._comm.is_single_rank:
                step = self._step_with_join_sharded if self._engine.reduces_grads else self._step_with_join
                return step(closure, kwargs, is_joined=is_joined)
            if amp.is_scaler_step(self._optimizer) and self._should_skip_step(in_join=False):
                return None
            return self._engine.step(self._optimizer.param_groups, closure, kwargs)
        except BaseException:
            amp.clear_scaler_attrs(self._optimizer)  # GradScaler removes its attributes only if step() returns
            raise
        finally:
            self._has_checked_inf = False
            amp.clear_scaler_attrs(*self._inner_optimizers)

    def _check_consistency_if_due(self) -> None:
        # All ranks count every step, including skipped ones and those after they joined, so checks stay in lockstep.
        self._num_steps += 1
        if self._engine.checks.is_consistency_check_due(self._num_steps):
            self._engine.check_consistency(f"before step {self._num_steps}", self._num_steps)

    def synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list, *, in_join: bool
    ) -> list[torch.Tensor] | None:
        """Finish reducing gradients and return this rank's shards, for clipping or unscaling in place.

        Call on all ranks. Returns None if gradients are not sharded, that is, if all of them are in `param.grad`.

        Args:
            call: Name of the calling method, for error messages.
            read_arguments: As for `FlatShardEngine.synchronize_grads`.
            in_join: The call is made inside `Join`.

        Raises:
            RuntimeError: If gradients are sharded and `in_join` is set.
        """
        engine = self._engine
        if not isinstance(engine, FlatShardEngine) or not engine.reduces_grads:
            return None
        if in_join:  # Hazard: joined ranks never make this call, so ranks cannot agree on it
            raise RuntimeError(f"{call} cannot be used inside Join when gradients are sharded")
        engine.synchronize_grads(call, self._optimizer.param_groups, read_arguments)
        engine.grads.mark_scaled()
        return engine.grads.grad_tensors()

    def unscale(self, grads: list[torch.Tensor], inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        self._has_checked_inf = True
        with self._comm.profiler.phase(Phase.UNSCALE_GRADS):
            return amp.unscale_sharded_grads(grads, inverse_scale, self._comm)

    def _step_with_join(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        engine, groups = self._engine, self._optimizer.param_groups
        joined_step = JoinedStep(engine, groups, kwargs, is_joined=is_joined, has_cleared_grads=self._has_cleared_grads)
        try:
            if closure is not None:
                return engine.step(groups, joined_step.wrap_closure(closure), kwargs)
            status = joined_step.gather_status(has_grad_scaler=amp.is_scaler_step(self._optimizer))
            if status.has_grad_scaler and self._should_skip_step(in_join=True):
                return None
            joined_step.exchange_step_inputs(status)
            joined_closure = joined_step.make_joined_closure() if status.has_closure else None
            return engine.step(groups, joined_closure, joined_step.kwargs)
        finally:
            joined_step.finish()
            self._has_cleared_grads = is_joined

    def _step_with_join_sharded(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        # Joined ranks have no gradients of their own. They still own shards of the average and must update them.

        def prepare() -> Prepared[None]:
            if amp.is_scaler_step(self._optimizer) or closure is not None:
                raise RuntimeError(
                    "inside Join, step() takes neither a closure nor a GradScaler when gradients are sharded"
                )
            return Prepared(None)

        prepare_all(self._comm, "a step inside Join", prepare)
        active_ranks = broadcast_options(self._comm, self._optimizer.param_groups, is_current=not is_joined)
        self._optimizer._before_join_step(active_ranks[-1])  # DDP broadcasts this rank's buffers, too
        if not is_joined:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        self._clear_param_grads()
        if not self._engine.is_reducing:  # otherwise they come from DDP's shadowed backward pass
            self._engine.clear_grads(set_to_none=True)
        try:
            return self._engine.step(self._optimizer.param_groups, None, kwargs)
        finally:
            self._clear_param_grads()
            self._engine.clear_grads(set_to_none=True)

    def _clear_param_grads(self) -> None:
        """Drop the gradients in `param.grad`: they are left over from this rank's last step with inputs."""
        self._engine.drop_placeholders()
        for param in self._engine.params:
            param.grad = None

    def _should_skip_step(self, *, in_join: bool) -> bool:
        engine = self._engine
        # Fused kernels skip on their own, so the non-finite check could not tell whether to handle the step.
        fused_optimizers = self._inner_optimizers if not engine.checks.should_check_grads else None
        if isinstance(engine, FlatShardEngine) and engine.reduces_grads:
            return amp.should_skip_sharded_step(
                self._optimizer,
                fused_optimizers,
                engine.grads.grad_tensors(),
                self._comm,
                is_inf_checked=self._has_checked_inf,
            )
        return amp.should_skip_step(
            self._optimizer, fused_optimizers, engine.params, self._comm, is_join_enabled=in_join
        )

    @property
    def _inner_optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self._engine.inner.local_optimizers]


# ---------------------------------------------------------------------------------------------------------------------
# Train and eval modes: schedule-free optimizers keep different parameter values for training and for evaluation.


class TrainEvalMixin:
    """Provides `train()` and `eval()` if the inner optimizer has them. Call them on all ranks."""

    _engine: Engine
    param_groups: list[ParamGroup]
    initialized: bool

    @property
    def train(self) -> Callable[[], None]:
        """Switch parameters to their training values. Call on all ranks; needs an inner `train()`."""
        return self._mode_setter("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Switch parameters to the values to evaluate and save. Call on all ranks; needs an inner `eval()`."""
        return self._mode_setter("eval")

    def _mode_setter(self, mode: str) -> Callable[[], None]:
        if not self.initialized or not any(member.has_mode(mode) for member in self._engine.inner.local_optimizers):
            raise AttributeError(f"the optimizer that is sharded has no {mode}()")
        return partial(self._set_mode, mode)

    @abstractmethod
    def _require_final_layout(self, call: str) -> None:
        """Raise if the owners of parameters may still change. `StateDictMixin` implements it."""

    def _set_mode(self, mode: str) -> None:
        """Switch this rank's shards and all-gather the result. An error on one rank is raised on all ranks."""
        engine, groups = self._engine, self.param_groups

        def prepare() -> Prepared[Callable[[], None]]:
            self._require_final_layout(mode)
            engine.check_groups(groups)
            engine.wait_until_idle()
            return Prepared(engine.snapshot(groups), describe_groups(groups))

        restore = prepare_all(engine.comm, f"{mode}()", prepare)
        outcome = StepOutcome()
        outcome.run(lambda: engine.set_mode(groups, mode))
        status = exchange_status(engine.comm, f"the end of {mode}()", b"", outcome.failure)
        if status.failure_level:
            restore()
        engine.broadcast_params()()
        if status.failure_level:
            raise_failure(engine.comm, f"{mode}()", outcome.error)


# ---------------------------------------------------------------------------------------------------------------------
# The drop-in replacement for torch's class.


class ZeroRedundancyOptimizer(StateDictMixin, TrainEvalMixin, Joinable):
    """Shard optimizer state over the ranks of a process group (ZeRO-1): a drop-in replacement for torch's class.

    Each rank updates the parameters it owns with its own instance of `optimizer_class` and broadcasts them. The
    result is bit-identical to the unsharded optimizer for the same gradients. Gradients must be equal on all ranks, as
    they are under `DistributedDataParallel`; if they differ in the first step, the optimizer warns.

    Constructing, stepping, adding groups, loading and consolidating are collective: call them on all ranks of the
    group in the same order. An error on one rank is raised on all ranks.

    Args:
        params: Parameters, named parameters, or dicts of them with options, as for any torch optimizer.
        optimizer_class: Class, or any callable, that constructs the optimizer to shard.
        process_group: Ranks to shard over. Defaults to all ranks.
        parameters_as_bucket_view: Keep parameters as views of flat buffers, which saves the copies of a step.
        overlap_with_ddp: Step inside the backward pass, driven by a hook of `zeroshard.ddp_hooks`.
        config: Options beyond torch's signature.
        **defaults: Passed to `optimizer_class`.

    Raises:
        ConfigError: If the options or the optimizer class cannot be sharded.
        RankMismatchError: If the ranks pass different parameters or options.
        RankFailedError: If construction fails on another rank.
    """

    # Makes GradScaler call `step` on every rank, even if this rank's gradients are not finite.
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
            self._opt_called = True  # otherwise LR schedulers warn that step() is never called
            if parameters_as_bucket_view:
                warnings.warn("parameters_as_bucket_view has no effect with overlap_with_ddp=True", stacklevel=2)
        self._peer_checkpointer = self._make_peer_checkpointer()
        self.initialized = True
        watch_plain_steps(self)
        from .report import log_summary

        log_summary(self._builder, self._engine)

    # ---- properties

    @property
    def optim(self) -> Optimizer:
        """This rank's inner optimizer, an instance of `optimizer_class`.

        Raises:
            AttributeError: If there are several, see `inner_optimizers`.
        """
        optimizer, *others = self.inner_optimizers
        if others:
            raise AttributeError(
                "this optimizer has several inner optimizers, of several classes: see `inner_optimizers`"
            )
        return optimizer

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """This rank's inner optimizers, one per rule."""
        return [member.optimizer for member in self._engine.inner.local_optimizers]

    @property
    def state(self) -> Any:
        """This rank's shard of the optimizer state, by parameter. It is not a copy; make the same edits on all ranks.

        With `FlatShards()` the state of a parameter is this rank's slice, as a flat tensor. Assigned tensors may have
        the shape of the slice or of the parameter; from the latter, this rank copies its slice.
        """
        if dcp_compat.is_dcp_initializing_state():
            if dcp_compat.is_dcp_loading_flattened():
                self._engine.materialize_initial_state()  # DCP loads into it
            return self._engine.state() or {None: "nothing to be made by a step"}
        return self._engine.state()

    @state.setter
    def state(self, value: Any) -> None:
        if self.initialized:
            self._engine.replace_state(value)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the optimizer state."""
        return self._comm.group.process_group

    @property
    def world_size(self) -> int:
        """Number of ranks in `process_group`."""
        return self._comm.group.size

    @property
    def rank(self) -> Rank:
        """This process's rank in `process_group`."""
        return self._comm.group.rank

    @property
    def global_rank(self) -> GlobalRank:
        """This process's rank in the default process group."""
        return self._comm.group.global_rank

    @property
    def layout(self) -> Layout:
        """Which rank owns which parameter."""
        return self._engine.layout

    @property
    def _reduces_grads(self) -> bool:
        """Whether this optimizer reduces gradients to their owners, instead of DDP."""
        return self._engine.reduces_grads

    @property
    def _is_superseded(self) -> bool:
        """Whether a later `shard()` call took over parameters of this optimizer."""
        return False

    @property
    def balance(self) -> Balance:
        """How evenly memory and compute are distributed over the ranks."""
        return self._builder.compute_balance(self.layout, self.param_groups)

    @property
    def _required_ddp_overlap(self) -> DDPOverlap:
        """The `DDPOverlap`; raises `ConfigError` without `overlap_with_ddp=True`."""
        if self._ddp_overlap is None:
            raise ConfigError(
                "this optimizer steps when step() is called; construct it with overlap_with_ddp=True "
                "to have a DDP hook step it"
            )
        return self._ddp_overlap

    @property
    def nonfinite(self) -> NonFiniteSteps:
        """Counts steps with non-finite gradients. Only updated with `ZeroConfig(nonfinite=...)`."""
        return self._engine.checks.nonfinite

    @property
    def peer_snapshots(self) -> "PeerSnapshots | None":
        """The snapshots that this rank holds under `PeerCheckpoint(...)`, for `restore_from_peers`; else None."""
        return None if self._peer_checkpointer is None else self._peer_checkpointer.snapshots

    def report(self) -> "Report":
        """Report the layout, this rank's memory use, and the time and traffic of the last step.

        Not collective: any rank may call it.
        """
        from .report import make_report

        is_final = self._ddp_overlap is None or self._ddp_overlap.is_initialized
        return make_report(
            self._builder, self._engine, self.param_groups, self.peer_snapshots, is_layout_final=is_final
        )

    # ---- state

    def state_dict(self) -> StateDict:
        """Return the state that `consolidate_state_dict` gathered on this rank, in the unsharded optimizer's format.

        To save memory the dict shares its tensors with the gathered state. Called by `torch.distributed.checkpoint` or
        its helpers, it returns this rank's shard, or the full state if they request it; then call it on all ranks.

        Raises:
            RuntimeError: If no state was gathered on this rank, or the gathered tensors were modified in place.
        """
        self._require_final_layout("state_dict")
        request = dcp_compat.detect_dcp_call()
        if request is not None:
            return run_state_dict_hooks(self, state_dict_for_dcp(self._engine, self.param_groups, request))
        if self._consolidated_state is None:
            raise RuntimeError(
                "this rank holds only its own share of the state. Call full_state_dict(to=0) on "
                "all ranks: it returns everything on rank 0. Or call consolidate_state_dict(to=0) on all ranks, then "
                "state_dict() on rank 0 only."
            )
        age = self._engine.steps - self._consolidated_state.num_steps
        if age:
            warnings.warn(
                f"state_dict() returns the state of {age} steps ago: call consolidate_state_dict() on all ranks "
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
        """Load this rank's shard of a state dict. Call on all ranks; either all ranks load it or none does.

        Args:
            state_dict: The result of `full_state_dict` at any world size or of the unsharded optimizer, or this rank's
                shard of it.
            assign: Use the dict's tensors as state where they fit, instead of copying them. Do not use the dict
                afterwards. By default the dict is not modified.

        Raises:
            CheckpointError: If the dict does not fit this optimizer.
            RankFailedError: If loading fails on another rank.
        """
        self._load_state_dict(state_dict, assign=assign)

    # ---- training (a compiled training loop breaks its graph here: collectives are not traced)

    @disable_dynamo
    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Update this rank's shards and bring the updated parameters to all ranks. Call on all ranks.

        With `overlap_with_ddp=True` it does nothing but warn: the DDP hook steps.

        Args:
            closure: Reevaluates the model and returns the loss, as for any torch optimizer.
            **kwargs: Passed to the inner optimizer's step.

        Returns:
            The result of the inner optimizer's step; None if the step is skipped.
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
        """Reset the gradients of all parameters, including this rank's gradient shards."""
        if self._ddp_overlap is not None:
            self._ddp_overlap.check_trainable_unchanged()
        self._engine.drop_placeholders()
        super().zero_grad(set_to_none)
        self._engine.clear_grads(set_to_none=set_to_none)

    @disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients, like `torch.nn.utils.clip_grad_norm_`. Call on all ranks.

        It works for sharded gradients as well as for those in `param.grad`.

        Args:
            max_norm: Maximum norm of the gradients.
            norm_type: Order of the norm; may be `inf`.
            error_if_nonfinite: Raise if the norm is inf or NaN.

        Returns:
            The norm before clipping.
        """
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

    @disable_dynamo
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp all gradients to +/- `clip_value`, like `torch.nn.utils.clip_grad_value_`. Call on all ranks."""
        with self._comm.profiler.phase(Phase.CLIP_GRADS):
            grads = self._synchronize_sharded_grads("clip_grad_value_", lambda: [f"clip_value={float(clip_value)}"])
            if grads is None:
                torch.nn.utils.clip_grad_value_(self._engine.params, clip_value)
            else:
                clip.clip_grad_value(grads, clip_value)

    def check_consistency(self) -> None:
        """Compare all parameters bitwise across ranks. Call on all ranks.

        `ConsistencyCheck` runs this check periodically; its documentation says what the check cannot find.

        Raises:
            ReplicaMismatchError: If parameters differ, on all ranks.
        """
        self._engine.check_consistency("check_consistency()")

    def ddp_hook(self) -> CommHook:
        """Return a DDP communication hook that reduces gradients to their owners only, instead of all-reducing them.

        Call on all ranks, in the same order as the hooks of other optimizers. After backward `param.grad` holds this
        rank's own gradients, as with `stage=1`. Clip with this optimizer's `clip_grad_norm_`. `step()` raises if
        `param.grad` was modified after it was reduced.

        Raises:
            ConfigError: If the optimizer was constructed without `ZeroConfig(partition=FlatShards())`.
        """
        if not isinstance(self._engine, FlatShardEngine):
            raise ConfigError("ddp_hook() brings slices of gradients to their owners: it needs partition=FlatShards()")
        reducer = self._engine.grads
        if not isinstance(reducer, GradReducer):
            reducer = GradReducer(self._comm, ZeroStage1(), self._config._reduce_policy, self._config._master_policy)
            self._engine.set_grad_source(reducer)
        self._attach_accumulation_hooks(reducer)
        return make_comm_hook(reducer, self._engine.params)

    def _attach_accumulation_hooks(self, grad_reducer: GradReducer) -> None:
        for index, param in enumerate(self._engine.params):
            if param.requires_grad:
                register_accumulation_hook(grad_reducer, index, param)

    def _unscale_grads(self, inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """Unscale sharded gradients and return the found-inf flag of each device, for `zeroshard.GradScaler`."""
        grads = self._synchronize_sharded_grads("unscaling gradients")
        return self._step_driver.unscale(grads or [], inverse_scale)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group during training. Call on all ranks. Earlier parameters keep their owners.

        To add many groups, `add_param_groups` is faster and sends fewer, larger messages.

        Args:
            param_group: Dict with the key `params` and the options of the group, as for any torch optimizer.

        Raises:
            RankMismatchError: If the ranks add different groups.
            RankFailedError: If another rank rejects the group.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        self._add_groups("add_param_group", [param_group])

    def add_param_groups(self, param_groups: Iterable[ParamGroup]) -> None:
        """Add several groups during training, all of them or none. Call on all ranks.

        Equivalent to `add_param_group` for each group in order, with one consensus round for all groups. If any rank
        rejects a group, all ranks raise and no group is added.

        Args:
            param_groups: Dicts with the key `params` and the options of the group, as for any torch optimizer.

        Raises:
            RankMismatchError: If the ranks add different groups.
            RankFailedError: If another rank rejects a group.
        """
        self._add_groups("add_param_groups", param_groups)

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook with which a rank that is out of inputs takes part in the others' steps, for `Join`."""
        if self._ddp_overlap is None:
            self._step_driver.start_join()
        return compat._ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter, for `Join`."""
        return self._engine.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All data-parallel ranks, for `Join`."""
        return self._comm.data_parallel.group.process_group

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it is one part of an optimizer that lives on "
            f"{self.world_size} ranks. Save full_state_dict() and load it into a new one."
        )

    # ---- construction

    def _build(
        self, params: Any, optimizer_class: Any, overlap_with_ddp: bool, defaults: dict[str, Any]
    ) -> Prepared[Layout]:
        """Parse the user's arguments and build this rank's engine; `prepare_all` commits or undoes the result."""
        if not isinstance(self._config, ZeroConfig):
            raise TypeError(f"config must be a ZeroConfig, not {type(self._config).__name__}")
        if self._config.stage is None:
            self._config = replace(self._config, stage=self._default_stage)
        parsed_params = self._parse_params(params)
        Optimizer.__init__(self, parsed_params.groups, {})
        self._builder = self._make_builder(
            self._make_optimizer_specs(optimizer_class, defaults, parsed_params, overlap_with_ddp=overlap_with_ddp),
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
        """Describe everything that must be equal on all ranks at construction."""
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
        """Normalize new groups. Runs inside `prepare_all`, so errors are raised on all ranks."""
        return parse_groups(groups)

    def _prepare_groups(self, groups: Sequence[ParamGroup]) -> Prepared[Layout]:
        """Add `groups` here and to the inner optimizer, and return the extended layout with an undo function."""
        num_existing, engine = len(self.param_groups), self._engine

        def undo() -> None:
            del self.param_groups[num_existing:]
            engine.rollback(num_existing)

        with rollback_on_error(undo):
            for group in groups:
                super().add_param_group(group)
            layout = self._builder.extend_layout(self.layout, self.param_groups, num_existing)
            self._builder.prepare_engine(engine, layout, self.param_groups)
            engine.inner.pull_added_options(self.param_groups, num_existing)
            must_match = self._builder.must_match_for_new_groups(self.layout, layout, self.param_groups, num_existing)
            # Ranks agreed on the existing groups, but their options may have changed since.
            options = engine.consensus_options(self.param_groups)
            return Prepared(layout, must_match, undo, format_param_count(self.param_groups), options)

    def _make_comm(self, process_group: dist.ProcessGroup | None) -> Comm:
        return Comm(Group(process_group))

    def _parse_params(self, params: Any) -> ParsedParams:
        return parse_params(params)

    def _make_optimizer_specs(
        self, optimizer_class: Any, defaults: dict[str, Any], parsed_params: ParsedParams, *, overlap_with_ddp: bool
    ) -> list[OptimizerSpec]:
        """Return one spec per inner optimizer to construct."""
        if not callable(optimizer_class):
            raise TypeError(
                f"optimizer_class must be a class such as torch.optim.AdamW, not a {type(optimizer_class).__name__}. "
                "A list of ParamRule(...)s, and not an empty one, is for zeroshard.shard."
            )
        reject_config_options(optimizer_class, defaults)
        factory = OptimizerFactory(
            resolve_optimizer_class(optimizer_class, overlap=overlap_with_ddp),
            self.param_groups,
            parsed_params.is_bare_sequence,
            defaults,
        )
        return [OptimizerSpec(factory.name, factory)]

    def _make_builder(self, optimizer_specs: list[OptimizerSpec], overlap_with_ddp: bool) -> EngineBuilder:
        return EngineBuilder(
            self._comm,
            self._config,
            optimizer_specs,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
            overlap_with_ddp=overlap_with_ddp,
        )

    def _repartition(self, partitioner: Partitioner) -> WholeParamEngine:
        """Replace the engine by one with other owners. Only valid before there is any state."""
        layout = partitioner.extend(Layout.empty(self.world_size), make_param_specs(self.param_groups))
        engine = self._builder.make_engine()
        assert isinstance(engine, WholeParamEngine), "overlap_with_ddp is rejected with any other engine"
        self._builder.prepare_engine(engine, layout, self.param_groups)
        self._engine = engine
        engine.extend(layout, self.param_groups)
        return engine

    def _step(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        return self._step_driver.step(closure, kwargs, in_join=is_in_join(self), is_joined=is_joined)

    def _shadow_step(self) -> None:
        """Take part in the step of the other ranks, as a joined rank inside `Join`."""
        if self._ddp_overlap is not None:
            self._ddp_overlap.run_deferred()
        else:
            self._step(None, {}, is_joined=True)

    def _make_peer_checkpointer(self) -> "PeerCheckpointer | None":
        if self._config.peer_checkpoint is None:
            return None
        from .peer_checkpoint.snapshot import make_peer_checkpointer

        return make_peer_checkpointer(self._comm, self._config.peer_checkpoint)

    def _invalidate_peer_snapshots(self) -> None:
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.invalidate_snapshots()

    def _model_buffers(self) -> "NamedBuffers":
        """Return the buffers to include in peer snapshots. Without a model there are none."""
        return {}

    def _synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list
    ) -> list[torch.Tensor] | None:
        return self._step_driver.synchronize_sharded_grads(call, read_arguments, in_join=is_in_join(self))

    def _before_join_step(self, source: Rank) -> None:
        """Implement `SteppableOptimizer`."""

    def _after_step(self) -> None:
        """Implement `SteppableOptimizer`."""
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.after_step(self._engine, self.param_groups, self._model_buffers)

    # ---- private names of torch's class

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
