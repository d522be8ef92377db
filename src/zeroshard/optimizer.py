"""`ZeroRedundancyOptimizer`: the optimizer that users hold.

The class parses arguments, builds an engine and delegates to it:

- `build_engine` (build.py) constructs the engine, and `ModelBinding` installs any hooks on the model.
- `StepDriver` runs a step: directly, under a GradScaler, or inside `Join`.
- `StateDictMixin` gathers and loads state.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from . import zero_redundancy_optimizer as compat
from ._formatting import format_count
from ._logging import warn_at_caller
from ._torch_compat import disable_dynamo, is_in_join
from ._types import GlobalRank, Rank
from .build import DropInArguments, OptimizerArguments, build_engine
from .comm.collectives import Comm
from .comm.consensus import Prepared, exchange_status, prepare_all, raise_failure, rollback_on_error
from .config import ZeroConfig
from .engine import amp, clip
from .engine.base import Engine
from .engine.checks import NonFiniteSteps
from .engine.ddp import CommHook, DDPOverlap, make_comm_hook
from .engine.grad_reducer import GradReducer
from .engine.grad_stage import Stage1
from .engine.inner import OptimizerConstructor, ParamGroup
from .engine.join import JoinedStep, broadcast_options
from .engine.model_binding import DDPHookBinding, ModelBinding
from .engine.plain_steps import watch_plain_steps
from .engine.step import Closure, StepOutcome
from .errors import ConfigError
from .layout.layout import Layout
from .layout.partition import Balance
from .params import parse_groups
from .profiling import Phase, StepProfiler
from .state import dcp_compat
from .state.state_dict import StateDict, describe_groups
from .state.tensor_utils import deepcopy_except_tensors, tensor_versions
from .state_dict_mixin import StateDictMixin, run_state_dict_hooks, state_dict_for_dcp
from .summary import log_summary

if TYPE_CHECKING:
    from .peer_checkpoint.snapshot import PeerCheckpointer, PeerSnapshots
    from .report import Report


# ---------------------------------------------------------------------------------------------------------------------
# Step driver: a plain step, a step under GradScaler, a step inside `Join`.


class StepDriver:
    """Runs the engine's step: directly, under a GradScaler, or inside `Join`.

    Methods take the optimizer that owns this driver: a reference to it would form a cycle.
    """

    def __init__(self, comm: Comm, profiler: StepProfiler) -> None:
        self._comm, self._profiler = comm, profiler
        self._has_cleared_grads = False
        self._has_checked_inf = False
        self._num_steps = 0

    def start_join(self) -> None:
        self._has_cleared_grads = False

    def step(
        self,
        optimizer: "ZeroRedundancyOptimizer",
        closure: Closure | None,
        kwargs: dict[str, Any],
        *,
        in_join: bool,
        is_joined: bool,
    ) -> Any:
        """Step on all ranks and return the result of the inner optimizer's step.

        Args:
            optimizer: The owner of this driver.
            closure: Passed to the inner optimizer, as are `kwargs`.
            kwargs: Further arguments of `step()`.
            in_join: The step runs inside `Join`, so some ranks may be out of inputs.
            is_joined: This rank is out of inputs.
        """
        engine = optimizer._engine
        try:
            self._check_consistency_if_due(engine)
            engine.grad_consistency.is_paused = in_join
            if in_join and not self._comm.is_single_rank:
                step = self._step_with_join_sharded if engine.grads.reduces else self._step_with_join
                return step(optimizer, closure, kwargs, is_joined=is_joined)
            if amp.is_scaler_step(optimizer) and self._scaler_skips_step(optimizer, in_join=False):
                return None
            return engine.step(optimizer.param_groups, closure, kwargs)
        except BaseException:
            amp.clear_scaler_attrs(optimizer)  # GradScaler removes its attributes only if step() returns
            raise
        finally:
            self._has_checked_inf = False
            amp.clear_scaler_attrs(*optimizer.inner_optimizers)

    def _check_consistency_if_due(self, engine: Engine) -> None:
        # All ranks count every step, including skipped ones and those after they joined, so checks stay in lockstep.
        self._num_steps += 1
        if engine.checks.is_consistency_check_due(self._num_steps):
            engine.check_consistency(f"before step {self._num_steps}", self._num_steps)

    def synchronize_sharded_grads(
        self,
        optimizer: "ZeroRedundancyOptimizer",
        call: str,
        read_arguments: Callable[[], list[str]] = list,
        *,
        in_join: bool,
    ) -> list[torch.Tensor] | None:
        """Finish reducing gradients and return this rank's shards, for clipping or unscaling in place.

        Call on all ranks. Returns None if gradients are not sharded, that is, if all of them are in `param.grad`.

        Args:
            optimizer: The owner of this driver.
            call: Name of the calling method, for error messages.
            read_arguments: As for `Engine.synchronize_grads`.
            in_join: The call is made inside `Join`.

        Raises:
            RuntimeError: If gradients are sharded and `in_join` is set.
        """
        engine = optimizer._engine
        if not engine.grads.reduces:
            return None
        if in_join:  # Hazard: joined ranks never make this call, so ranks cannot agree on it
            raise RuntimeError(
                f"{call} cannot be used inside Join when gradients are sharded: ranks without inputs never make this "
                "call. Move it out of Join."
            )
        engine.synchronize_grads(call, optimizer.param_groups, read_arguments)
        engine.grads.mark_scaled()
        return engine.grads.grad_tensors()

    def unscale(self, grads: list[torch.Tensor], inverse_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        self._has_checked_inf = True
        with self._profiler.phase(Phase.UNSCALE_GRADS):
            return amp.unscale_sharded_grads(grads, inverse_scale, self._comm)

    def _step_with_join(
        self,
        optimizer: "ZeroRedundancyOptimizer",
        closure: Closure | None,
        kwargs: dict[str, Any],
        *,
        is_joined: bool,
    ) -> Any:
        engine, groups = optimizer._engine, optimizer.param_groups
        joined_step = JoinedStep(engine, groups, kwargs, is_joined=is_joined, has_cleared_grads=self._has_cleared_grads)
        try:
            if closure is not None:
                return engine.step(groups, joined_step.wrap_closure(closure), kwargs, in_join=True)
            status = joined_step.gather_status(has_grad_scaler=amp.is_scaler_step(optimizer))
            if status.has_grad_scaler and self._scaler_skips_step(optimizer, in_join=True):
                return None
            joined_step.exchange_step_inputs(status)
            joined_closure = joined_step.make_joined_closure() if status.has_closure else None
            return engine.step(groups, joined_closure, joined_step.kwargs, in_join=True)
        finally:
            joined_step.finish()
            self._has_cleared_grads = is_joined

    def _step_with_join_sharded(
        self,
        optimizer: "ZeroRedundancyOptimizer",
        closure: Closure | None,
        kwargs: dict[str, Any],
        *,
        is_joined: bool,
    ) -> Any:
        # Joined ranks have no gradients of their own. They still own shards of the average and must update them.
        engine, groups = optimizer._engine, optimizer.param_groups

        def prepare() -> Prepared[None]:
            if amp.is_scaler_step(optimizer) or closure is not None:
                raise RuntimeError(
                    "inside Join, step() supports neither a closure nor a GradScaler when gradients are sharded"
                )
            return Prepared(None)

        prepare_all(self._comm, "a step inside Join", prepare)
        active_ranks = broadcast_options(self._comm, groups, is_current=not is_joined)
        optimizer._model_binding.before_join_step(active_ranks[-1])  # DDP broadcasts this rank's buffers, too
        if not is_joined:
            return engine.step(groups, None, kwargs)
        _clear_param_grads(engine)
        if not engine.grads.has_sent:  # otherwise they come from DDP's shadowed backward pass
            engine.grads.clear(set_to_none=True)
        try:
            return engine.step(groups, None, kwargs)
        finally:
            _clear_param_grads(engine)
            engine.grads.clear(set_to_none=True)

    def _scaler_skips_step(self, optimizer: "ZeroRedundancyOptimizer", *, in_join: bool) -> bool:
        engine = optimizer._engine
        # Fused kernels skip on their own, so the non-finite check could not tell whether to handle the step.
        fused_optimizers = optimizer.inner_optimizers if not engine.checks.should_check_grads else None
        if engine.grads.reduces:
            return amp.scaler_skips_sharded_step(
                optimizer,
                fused_optimizers,
                engine.grads.grad_tensors(),
                self._comm,
                is_inf_checked=self._has_checked_inf,
            )
        return amp.scaler_skips_step(
            optimizer, fused_optimizers, engine.params.tensors, self._comm, is_join_enabled=in_join
        )


def _clear_param_grads(engine: Engine) -> None:
    """Drop the gradients in `param.grad`: they are left over from this rank's last step with inputs."""
    engine.grads.drop_placeholders()
    for param in engine.params.tensors:
        param.grad = None


# ---------------------------------------------------------------------------------------------------------------------
# The drop-in replacement for torch's class.


class ZeroRedundancyOptimizer(StateDictMixin, Joinable):
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
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._construct(
            DropInArguments(
                params,
                optimizer_class,
                process_group,
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
                config=config,
                defaults=defaults,
            )
        )
        if overlap_with_ddp:
            self._ddp_overlap = DDPOverlap(
                self._comm,
                self._profiler,
                self.param_groups,
                build_engine=partial(self._builder.build_with_owners, groups=self.param_groups),
                set_engine=self._set_engine,
            )
            self._opt_called = True  # otherwise LR schedulers warn that step() is never called
            if parameters_as_bucket_view:
                warn_at_caller("parameters_as_bucket_view has no effect with overlap_with_ddp=True")
        self._comm.group.failure_detector.set_idle()

    def _construct(self, arguments: OptimizerArguments) -> None:
        Joinable.__init__(self)
        self.initialized = False
        self._ddp_overlap: DDPOverlap | None = None
        self._ddp_reducer: GradReducer | None = None
        self._view_cache: dict[str, tuple[Layout, Any]] = {}
        self._profiler = StepProfiler()
        self._comm = arguments.make_comm(self._profiler)
        self._builder, self._engine = build_engine(self, arguments, self._comm, self._profiler)
        self._model_binding = ModelBinding()
        self._step_driver = StepDriver(self._comm, self._profiler)
        self._peer_checkpointer = self._make_peer_checkpointer()
        self.initialized = True
        watch_plain_steps(self)
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
            raise AttributeError("this optimizer has several inner optimizers. Use inner_optimizers instead of optim.")
        return optimizer

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """This rank's inner optimizers, one per rule."""
        return [local_optimizer.optimizer for local_optimizer in self._engine.params.inner.local_optimizers]

    @property
    def state(self) -> Any:
        """This rank's shard of the optimizer state, by parameter. It is not a copy; make the same edits on all ranks.

        With `FlatShards()` the state of a parameter is this rank's slice, as a flat tensor. Assigned tensors may have
        the shape of the slice or of the parameter; from the latter, this rank copies its slice.
        """
        if dcp_compat.is_dcp_initializing_state():
            if dcp_compat.is_dcp_loading_flattened():
                self._engine.state.materialize_initial_state()  # DCP loads into it
            return self._engine.state.view() or {None: "placeholder"}
        return self._engine.state.view()

    @state.setter
    def state(self, value: Any) -> None:
        if self.initialized:
            self._engine.state.replace(value)

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
        return self._engine.grads.reduces

    @property
    def _is_superseded(self) -> bool:
        """Whether a later `shard()` call took over parameters of this optimizer."""
        return self._model_binding.is_superseded

    @property
    def balance(self) -> Balance:
        """How evenly memory and compute are distributed over the ranks."""
        return self._builder.compute_balance(self.layout, self.param_groups)

    @property
    def _required_ddp_overlap(self) -> DDPOverlap:
        """The `DDPOverlap`; raises `ConfigError` without `overlap_with_ddp=True`."""
        if self._ddp_overlap is None:
            raise ConfigError(
                "this optimizer was created without overlap_with_ddp=True, so a DDP hook cannot step it. Pass "
                "overlap_with_ddp=True."
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
                "this rank holds only its own shard of the state. Call full_state_dict(to=0) on all ranks, which "
                "returns all state on rank 0. Or call consolidate_state_dict(to=0) on all ranks, then state_dict() "
                "on rank 0."
            )
        age = self._engine.steps - self._consolidated_state.num_steps
        if age:
            warn_at_caller(
                f"state_dict() returns the state of {format_count(age, 'step')} ago. Call consolidate_state_dict() "
                "on all ranks first to get the current state.",
                on_all_ranks=True,
            )
        if tensor_versions(self._consolidated_state.state_dict) != self._consolidated_state.tensor_versions:
            raise RuntimeError(
                "tensors of an earlier state_dict() were changed in place, and the consolidated state shares their "
                "memory. Call consolidate_state_dict() again, and change a copy."
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
                    "GradScaler cannot be used with overlap_with_ddp=True: the hook steps before gradients are "
                    "unscaled. Use bfloat16, or step without overlap."
                )
            warn_at_caller(
                "step() does nothing with overlap_with_ddp=True: DDP's hook steps the optimizer. Remove the call."
            )
            return None
        Join.notify_join_context(self)
        return self._step(closure, kwargs, is_joined=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, including this rank's gradient shards."""
        if self._ddp_overlap is not None:
            self._ddp_overlap.check_trainable_unchanged()
        if not set_to_none:
            self._engine.grads.drop_placeholders()
        super().zero_grad(set_to_none)
        self._engine.grads.clear(set_to_none=set_to_none)

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
        with self._profiler.phase(Phase.CLIP_GRADS):
            grads = self._synchronize_sharded_grads(
                "clip_grad_norm_",
                lambda: [
                    *(f"max_norm={float(max_norm)}", f"norm_type={float(norm_type)}"),
                    f"error_if_nonfinite={bool(error_if_nonfinite)}",
                ],
            )
            if grads is None:
                return torch.nn.utils.clip_grad_norm_(
                    self._engine.params.tensors, max_norm, norm_type, error_if_nonfinite
                )
            return clip.clip_grad_norm(
                grads, float(max_norm), float(norm_type), self._comm, error_if_nonfinite=error_if_nonfinite
            )

    @disable_dynamo
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp all gradients to +/- `clip_value`, like `torch.nn.utils.clip_grad_value_`. Call on all ranks."""
        with self._profiler.phase(Phase.CLIP_GRADS):
            grads = self._synchronize_sharded_grads("clip_grad_value_", lambda: [f"clip_value={float(clip_value)}"])
            if grads is None:
                torch.nn.utils.clip_grad_value_(self._engine.params.tensors, clip_value)
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
        if not self._builder.partitioning.is_flat:
            raise ConfigError(
                "ddp_hook() needs ZeroConfig(partition=FlatShards()): it reduces gradients to flat shards"
            )
        if self._ddp_reducer is None:
            self._ddp_reducer = self._builder.make_reducer(Stage1())
            self._engine.set_grad_source(self._ddp_reducer)
            self._model_binding = DDPHookBinding(self._ddp_reducer, self._engine.params.tensors)
        self._model_binding.extend(first_bucket=0)
        return make_comm_hook(self._ddp_reducer, self._engine.params.tensors)

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

    # ---- train and eval modes: schedule-free optimizers keep different parameter values for training and evaluation

    @property
    def train(self) -> Callable[[], None]:
        """Switch parameters to their training values. Call on all ranks; needs an inner `train()`."""
        return self._mode_setter("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Switch parameters to the values to evaluate and save. Call on all ranks; needs an inner `eval()`."""
        return self._mode_setter("eval")

    def _mode_setter(self, mode: str) -> Callable[[], None]:
        if not self.initialized or not any(
            local_optimizer.has_mode(mode) for local_optimizer in self._engine.params.inner.local_optimizers
        ):
            raise AttributeError(f"the inner optimizer has no {mode}()")
        return partial(self._set_mode, mode)

    def _set_mode(self, mode: str) -> None:
        """Switch this rank's shards and all-gather the result. An error on one rank is raised on all ranks."""
        engine, groups = self._engine, self.param_groups

        def prepare() -> Prepared[Callable[[], None]]:
            self._require_final_layout(mode)
            engine.params.groups.check(groups)
            engine.param_sync.wait_until_idle()
            return Prepared(engine.params.snapshot(groups), describe_groups(groups))

        restore = prepare_all(engine.comm, f"{mode}()", prepare)
        outcome = StepOutcome()
        outcome.run(lambda: engine.params.set_mode(groups, mode))
        status = exchange_status(engine.comm, f"the end of {mode}()", b"", outcome.failure)
        if status.failure_level:
            restore()
        engine.param_sync.sync_all()
        if status.failure_level:
            raise_failure(engine.comm, f"{mode}()", outcome.error)

    # ---- Join

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook with which a rank that is out of inputs takes part in the others' steps, for `Join`."""
        if self._ddp_overlap is None:
            self._step_driver.start_join()
        return compat._ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter, for `Join`."""
        return self._engine.params.tensors[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All data-parallel ranks, for `Join`."""
        return self._comm.data_parallel.group.process_group

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its state is spread over {self.world_size} ranks. "
            "Save full_state_dict() and load it into a new one."
        )

    # ---- construction

    def _add_groups(self, call: str, groups: Any) -> None:
        if self._ddp_overlap is not None:
            raise RuntimeError(
                "parameter groups cannot be added with overlap_with_ddp=True, because DDP's buckets are fixed"
            )
        if self._engine.grads.reduces:  # gradients in flight belong to the existing buckets
            self._engine.synchronize_grads(call, self.param_groups)
        first_bucket = len(self._engine.layout.buckets)
        layout = prepare_all(self._comm, call, lambda: self._prepare_groups(self._parse_groups(groups)))
        self._engine.extend(layout, self.param_groups)
        self._model_binding.extend(first_bucket=first_bucket)
        watch_plain_steps(self)
        self._discard_consolidated_state()

    def _parse_groups(self, groups: Any) -> list[ParamGroup]:
        """Normalize new groups and, if the existing groups are named, name their parameters as in the model."""
        parsed = parse_groups(groups)
        if "param_names" not in self.param_groups[0]:
            return parsed
        return self._model_binding.name_params(parsed, first_index=len(self._engine.params.tensors))

    def _prepare_groups(self, groups: Sequence[ParamGroup]) -> Prepared[Layout]:
        """Add `groups` here and to the inner optimizer, and return the extended layout with an undo function."""
        num_existing, engine = len(self.param_groups), self._engine

        def undo() -> None:
            del self.param_groups[num_existing:]
            engine.params.rollback(num_existing)

        with rollback_on_error(undo):
            for group in groups:
                super().add_param_group(group)
            return self._builder.prepare_new_groups(engine, self.param_groups, num_existing, undo)

    def _set_engine(self, engine: Engine) -> None:
        """Replace the engine by one with other owners, before there is any state."""
        self._engine = engine

    def _step(self, closure: Closure | None, kwargs: dict[str, Any], *, is_joined: bool) -> Any:
        binding = self._model_binding
        binding.require_current("step()")
        try:
            with self._profiler.step():
                in_join = is_in_join(self)
                result = self._step_driver.step(self, closure, kwargs, in_join=in_join, is_joined=is_joined)
                binding.after_step()
                if self._peer_checkpointer is not None:
                    self._peer_checkpointer.after_step(self._engine, self.param_groups, binding.buffers)
            binding.warn_once_about_unreduced_grads()
            return result
        finally:
            binding.finish_step()

    def _shadow_step(self) -> None:
        """Take part in the step of the other ranks, as a joined rank inside `Join`."""
        if self._ddp_overlap is not None:
            self._ddp_overlap.run_deferred()
        else:
            self._step(None, {}, is_joined=True)

    def _make_peer_checkpointer(self) -> "PeerCheckpointer | None":
        if self._builder.config.peer_checkpoint is None:
            return None
        from .peer_checkpoint.snapshot import make_peer_checkpointer

        return make_peer_checkpointer(self._comm, self._builder.config.peer_checkpoint)

    def _invalidate_peer_snapshots(self) -> None:
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.invalidate_snapshots()

    def _synchronize_sharded_grads(
        self, call: str, read_arguments: Callable[[], list[str]] = list
    ) -> list[torch.Tensor] | None:
        # Includes parameters unfrozen since the last step: the next pass may add to gradients clipped or unscaled now.
        self._model_binding.refresh_hooks()
        return self._step_driver.synchronize_sharded_grads(self, call, read_arguments, in_join=is_in_join(self))

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
