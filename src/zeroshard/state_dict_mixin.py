"""State dicts: gather the state of all ranks into a dict in torch's format, return this rank's shard, load.

`gather_state_dict` gathers on one rank, `all_gather_state_dict` on all ranks; `local_state_dict` communicates nothing.
`StateDictMixin` adds the corresponding methods to the optimizer. These functions need an engine, so they cannot be in
`state/`, which knows none.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ._formatting import format_names
from ._torch_compat import load_state_dict_hooks, state_dict_hooks
from ._types import Rank
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all
from .engine.base import Engine
from .engine.ddp import DDPOverlap
from .engine.inner import OPTIMIZER_KEY, ParamGroup, has_builtin_load
from .errors import CheckpointError
from .profiling import Phase, StepProfiler
from .state.dcp_compat import DcpRequest, StateDictType
from .state.serialization import GatherInput, broadcast_state, gather_state
from .state.state_dict import (
    SavedState,
    StateAssembler,
    StateDict,
    as_checkpoint_error,
    describe_groups,
    describe_options,
    drop_param_names,
    pack_param_groups,
    parse_state_dict,
)
from .state.tensor_utils import map_tensors, snapshot_to_host, tensor_versions


def gather_state_dict(
    engine: Engine,
    groups: Sequence[ParamGroup],
    call: str,
    to: int,
    on_agreed: Callable[[], object] = lambda: None,
    *,
    include_initial: bool = False,
) -> StateDict | None:
    """Gather the unsharded optimizer's state dict in host memory of one rank. Call on all ranks.

    Args:
        engine: The engine whose state is gathered.
        groups: The parameter groups of the user-facing optimizer.
        call: Name of the calling method, for error messages.
        to: The rank in `Comm.data_parallel` that receives the dict.
        on_agreed: Called when all ranks have agreed, before anything is gathered.
        include_initial: As for `local_state_dict`.

    Returns:
        The state dict on rank `to`, None on all others.
    """
    metadata: StateDict = {}
    assembler, global_state = StateAssembler(engine.layout.params), dict[Any, Any]()

    def prepare_local_state() -> GatherInput:
        engine.params.groups.check(groups)
        extra = snapshot_to_host(engine.params.inner.extra_state())
        metadata.update({"param_groups": pack_param_groups(groups), **extra})
        must_match = [
            *describe_groups(groups),
            f"what the optimizer adds to its dict: {describe_options(extra)}",
        ]
        with engine.state.temporary_initial_state() if include_initial else nullcontext():
            local_params = {shard.param: shard.to_portable() for shard in engine.state.shards()}
        return GatherInput({"params": local_params, "others": _collect_global_state(engine)}, must_match)

    def merge_local_state(local_state: Any) -> None:
        assembler.add(local_state["params"])
        for key, value in local_state["others"].items():
            global_state.setdefault(key, value)

    with engine.profiler.phase(Phase.GATHER_STATE):
        is_target = gather_state(
            engine.comm, call, prepare_local_state, Rank(to), on_consensus=on_agreed, on_value=merge_local_state
        )
    if not is_target:
        return None
    return {"state": assembler.assemble() | global_state, **metadata}


def local_state_dict(
    engine: Engine, groups: Sequence[ParamGroup], *, include_initial: bool, as_load_target: bool = False
) -> StateDict:
    """Return this rank's shard of the state for `torch.distributed.checkpoint`. Every parameter has an entry.

    Args:
        engine: The engine whose state is returned.
        groups: The parameter groups of the user-facing optimizer.
        include_initial: For trainable parameters without state, include the state that their first step would start
            from. The optimizer does not keep it.
        as_load_target: Allocate new tensors to load into; otherwise the dict shares its tensors with the optimizer.
    """
    engine.params.groups.check(groups)
    state: dict[Any, Any] = {spec.index: {} for spec in engine.layout.params}
    with engine.state.temporary_initial_state() if include_initial else nullcontext():
        for shard in engine.state.shards():
            state[shard.param] = shard.to_dcp(engine.layout.params[shard.param], as_load_target=as_load_target)
    return {
        "state": state | _collect_global_state(engine),
        "param_groups": pack_param_groups(groups),
        **snapshot_to_host(engine.params.inner.extra_state()),
    }


def _collect_global_state(engine: Engine) -> dict[Any, Any]:
    """Return the state that belongs to no parameter."""
    return {
        key: value
        for local_optimizer in engine.params.inner.local_optimizers
        for key, value in local_optimizer.shared_state().items()
    }


def state_dict_for_dcp(engine: Engine, groups: Sequence[ParamGroup], request: DcpRequest) -> StateDict:
    """Return the state dict that a DCP helper requests. Call on all ranks."""
    if request.state_dict_type is StateDictType.FULL:
        state_dict = all_gather_state_dict(engine, groups, "state_dict")
    elif request.state_dict_type is StateDictType.FULL_ON_RANK0:
        rank0 = engine.comm.data_parallel.group.from_global(0)
        gathered = gather_state_dict(engine, groups, "state_dict", to=rank0, include_initial=True)
        state_dict = gathered or {"state": {}, "param_groups": pack_param_groups(groups)}
    else:
        state_dict = local_state_dict(
            engine, groups, include_initial=True, as_load_target=request.state_dict_type is StateDictType.LOAD_TARGET
        )
    state_dict = state_dict if request.needs_param_names else drop_param_names(state_dict)
    return state_dict if len(engine.params.inner.local_optimizers) == 1 else _strip_optimizer_key(state_dict)


def _strip_optimizer_key(saved: StateDict) -> StateDict:
    """Remove `OPTIMIZER_KEY` from groups: torch's helpers expect every option in the optimizer they load into."""
    groups = [{key: value for key, value in group.items() if key != OPTIMIZER_KEY} for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


def all_gather_state_dict(engine: Engine, groups: Sequence[ParamGroup], call: str) -> StateDict:
    """Return the unsharded optimizer's state dict on all ranks, on the devices of the parameters. Call on all ranks."""
    gathered = gather_state_dict(engine, groups, call, to=0, include_initial=True)
    state_dict: StateDict = broadcast_state(engine.comm.data_parallel, gathered, Rank(0))
    devices = {spec.index: spec.device for spec in engine.layout.params}
    state = state_dict["state"]
    for index in state.keys() & devices.keys():
        state[index] = map_tensors(state[index], partial(_move_to_param_device, device=devices[index]))
    return state_dict


def _move_to_param_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Scalars are step counts, which torch keeps in host memory.
    return tensor.to(device) if tensor.dim() else tensor


def prepare_load(engine: Engine, saved: StateDict, *, assign: bool) -> Prepared[None]:
    """Load this rank's shard of `saved`; `prepare_all` commits or undoes it on all ranks."""
    parsed = validate_state_dict(engine, saved)
    is_builtin = all(
        has_builtin_load(local_optimizer.optimizer) for local_optimizer in engine.params.inner.local_optimizers
    )
    try:
        with as_checkpoint_error() if is_builtin else nullcontext():  # keep the errors of user-defined loading
            must_match = parsed.must_match(is_sharded=assign or parsed.is_sharded)
            undo = engine.state.load(parsed, assign=assign)
            if is_builtin and (unusable := _describe_unusable_groups(engine, parsed.groups)):
                undo()
                raise CheckpointError(f"the state dict does not fit the optimizer. {unusable}")
            return Prepared(None, must_match, undo)
    except CheckpointError as error:
        differences = _describe_other_class(engine, parsed.groups)
        if differences and differences not in str(error):
            raise CheckpointError(f"{str(error).rstrip('.')}. {differences}") from error
        raise


def _describe_unusable_groups(engine: Engine, saved_groups: Sequence[ParamGroup]) -> str:
    """Say why loaded groups cannot be used: they lack options, which `__setstate__` of the class has not added."""
    optimizer = engine.params.inner.local_optimizers[0].optimizer
    is_complete = all(set(optimizer.defaults) <= set(group) for group in optimizer.param_groups)
    return "" if is_complete else _describe_other_class(engine, saved_groups)


def _describe_other_class(engine: Engine, saved_groups: Sequence[ParamGroup]) -> str:
    """Say by which options a state dict was saved by another optimizer class; "" if they do not show it."""
    (local_optimizer, *others) = engine.params.inner.local_optimizers
    saved_options = dict.fromkeys(
        key for group in saved_groups for key in group if key not in ("params", "param_names", "initial_lr")
    )
    options = local_optimizer.optimizer.defaults
    missing = [key for key in options if key not in saved_options]
    unknown = [key for key in saved_options if key not in options]
    if others or not missing or not unknown:
        return ""
    return (
        f"It was saved by an optimizer class other than {local_optimizer.factory.name}: its groups have the options "
        f"{format_names(unknown)}, but not {format_names(missing)}. Load it into the class that saved it."
    )


def validate_state_dict(engine: Engine, saved: StateDict) -> SavedState:
    """Parse `saved`; raise `CheckpointError` if it does not fit this optimizer."""
    num_groups = sum(
        len(local_optimizer.optimizer.param_groups) for local_optimizer in engine.params.inner.local_optimizers
    )
    with as_checkpoint_error():
        parsed = parse_state_dict(saved, engine.layout.params, num_groups, engine.state.param_shaped_keys)
        engine.params.inner.check_optimizer_classes(parsed.groups)
        return parsed


def run_state_dict_hooks(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Run the optimizer's state-dict hooks and return `state_dict` as they leave it."""
    for pre_hook in state_dict_hooks(optimizer).pre.values():
        pre_hook(optimizer)
    result = state_dict
    for post_hook in state_dict_hooks(optimizer).post.values():
        result = post_hook(optimizer, result) or result
    return result


def run_load_state_dict_pre_hooks(optimizer: Optimizer, saved: StateDict) -> StateDict:
    """Run the optimizer's load hooks on a shallow copy of `saved` and return the result."""
    result = saved.copy() if isinstance(saved, dict) else saved
    for pre_hook in load_state_dict_hooks(optimizer).pre.values():
        result = pre_hook(optimizer, result) or result
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer's methods.


class _ConsolidatedState(NamedTuple):
    state_dict: StateDict
    num_steps: int
    tensor_versions: list[int]
    """Version counters of its tensors, to detect in-place changes."""


class StateDictMixin(Optimizer):
    """State-dict methods of the sharded optimizers. Call all of them on all ranks.

    `state_dict` and `load_state_dict` are not defined here: as with torch's class,
    `super(ZeroRedundancyOptimizer, optimizer).state_dict()` must reach `torch.optim.Optimizer`.
    """

    _engine: Engine
    _comm: Comm
    _profiler: StepProfiler
    _ddp_overlap: DDPOverlap | None
    _consolidated_state: _ConsolidatedState | None = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on one rank, for `state_dict()` there. Call on all ranks.

        Args:
            to: The rank in `join_process_group` that receives the state.
        """
        self._require_final_layout("consolidate_state_dict")

        def discard_previous() -> None:
            # Free the previous state before gathering, so the target never holds both.
            if self._comm.data_parallel.group.rank == to:
                self._discard_consolidated_state()

        state_dict = gather_state_dict(self._engine, self.param_groups, "consolidate_state_dict", to, discard_previous)
        if state_dict is not None:
            self._consolidated_state = _ConsolidatedState(state_dict, self._engine.steps, tensor_versions(state_dict))

    def full_state_dict(self, to: int = 0) -> StateDict | None:
        """Gather the full state on one rank, in the unsharded optimizer's format. Call on all ranks.

        Unlike `consolidate_state_dict`, the optimizer does not keep the result.

        Args:
            to: The rank in `join_process_group` that receives the state.

        Returns:
            The state dict in host memory on rank `to`, None on all others.
        """
        self._require_final_layout("full_state_dict")
        state_dict = gather_state_dict(self._engine, self.param_groups, "full_state_dict", to)
        return None if state_dict is None else run_state_dict_hooks(self, state_dict)

    def sharded_state_dict(self) -> StateDict:
        """Return this rank's shard of the state for `torch.distributed.checkpoint`. Call on all ranks.

        The dict has the unsharded optimizer's format and shares its tensors with the optimizer: nothing is gathered or
        copied. A split tensor has the shape of its parameter and records which part this rank holds. DCP saves it in
        a form that loads at any world size.

        DCP also loads into this dict. As with torch's helpers, it therefore contains initial state for trainable
        parameters that were never updated. The optimizer does not keep that state.
        """
        self._require_final_layout("sharded_state_dict")
        return local_state_dict(self._engine, self.param_groups, include_initial=True)

    def _check_state_dict(self, state_dict: StateDict) -> None:
        """Raise `CheckpointError` if `state_dict` does not fit this optimizer. Tensor values are not checked."""
        validate_state_dict(self._engine, state_dict)

    def _load_state_dict(self, state_dict: StateDict, *, assign: bool) -> None:
        self._require_final_layout("load_state_dict")

        def prepare() -> Prepared[None]:
            saved = run_load_state_dict_pre_hooks(self, state_dict)
            return prepare_load(self._engine, saved, assign=assign)

        with self._profiler.phase(Phase.LOAD_STATE):
            prepare_all(self._comm, "load_state_dict", prepare)
        self._engine.params.inner.pull_options(self.param_groups)
        self._discard_consolidated_state()
        self._invalidate_peer_snapshots()
        for hook in load_state_dict_hooks(self).post.values():
            hook(self)

    def _invalidate_peer_snapshots(self) -> None:
        """Discard peer snapshots, if there are any: they do not contain the loaded state."""

    def _discard_consolidated_state(self) -> None:
        self._consolidated_state = None

    def _count_local_step(self) -> None:
        """Count a step that only this rank performs as a change since the state was consolidated."""
        if self._consolidated_state is not None:
            self._consolidated_state = self._consolidated_state._replace(
                num_steps=self._consolidated_state.num_steps - 1
            )

    def _require_final_layout(self, call: str) -> None:
        """Raise if the owners of parameters may still change: DDP's buckets are not final yet."""
        if self._ddp_overlap is not None and not self._ddp_overlap.is_initialized:
            raise RuntimeError(
                f"{call}() cannot be called before DDP has rebuilt its buckets, which decide the owners of "
                f"parameters. Call it after {self._ddp_overlap.warmup_passes} backward passes."
            )
