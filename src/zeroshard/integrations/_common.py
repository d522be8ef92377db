"""Shared by the integrations: replace a plain optimizer, its schedulers and its gradient scaler by sharded ones."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._formatting import format_count
from .._torch_compat import mark_stepped, share_step_hooks
from ..checkpoint import latest, save
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..comm.process_group import Group, init_single_rank
from ..errors import ConfigError
from ..grad_scaler import GradScaler
from ..optimizer import ZeroRedundancyOptimizer
from ..shard import ShardedOptimizer, shard
from ..zero_redundancy_optimizer import broadcast_object

_SHARD_HINT = "Create the sharded optimizer yourself: zeroshard.shard(model, ...)."


def shard_optimizer(model: torch.nn.Module, optimizer: Optimizer, shard_options: Mapping[str, Any]) -> ShardedOptimizer:
    """Return a sharded optimizer that replaces `optimizer`. Call on all ranks.

    Class, groups, options, state and hooks are taken from `optimizer`, which must not be used afterwards. An optimizer
    that `shard` returned is returned unchanged.

    Args:
        model: The model that `optimizer` updates.
        optimizer: A plain optimizer.
        shard_options: Further arguments of `shard`.

    Raises:
        ConfigError: The optimizer cannot be replaced, for example because its constructor arguments are unknown.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    init_single_rank()  # some frameworks do not initialize a process group for a single process
    args = prepare_all(Comm(Group()), "replacing the optimizer", lambda: _prepare_constructor_args(optimizer))
    sharded = shard(model, type(optimizer), params=_iter_named_groups(model, optimizer), **args, **shard_options)
    if optimizer.state:
        saved = optimizer.state_dict()
        sharded.load_state_dict({**saved, "param_groups": _merge_saved_groups(sharded, saved)})
    share_step_hooks(optimizer, sharded)
    # Schedulers that are never passed to retarget_scheduler still set the options of the sharded optimizer.
    optimizer.param_groups = sharded.param_groups
    mark_stepped(optimizer)  # else schedulers warn that the optimizer never steps
    return sharded


def retarget_scheduler(scheduler: Any, old_optimizer: Optimizer, new_optimizer: Optimizer) -> None:
    """Make a scheduler, and those nested in it, set the options of `new_optimizer`."""
    for name, value in list(vars(scheduler).items()):
        if value is old_optimizer and old_optimizer is not new_optimizer:
            setattr(scheduler, name, new_optimizer)
            _StepCounter(new_optimizer)
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, LRScheduler):
                retarget_scheduler(inner, old_optimizer, new_optimizer)


def make_scaler(scaler: Any, device: str) -> GradScaler:
    """Return a gradient scaler for sharded gradients, with the settings and state of `scaler`."""
    sharded_scaler = GradScaler(device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        sharded_scaler.load_state_dict(scaler.state_dict())
    return sharded_scaler


def let_scaler_skip_steps(optimizer: ShardedOptimizer) -> None:
    """Make the gradient scaler unscale before `step()` and skip steps with non-finite gradients.

    Frameworks clip between unscaling and the step, so the optimizer must not unscale inside of `step()`.
    """
    optimizer._step_supports_amp_scaling = False


def write_checkpoint(
    directory: Path, model: torch.nn.Module | None, optimizer: Optimizer | None, extra: Any = None, *, step: int = 0
) -> Path:
    """Save a checkpoint that replaces the folder's previous one once it is complete. Call on all ranks.

    Step numbers in a folder increase: saving again for the same or an earlier step uses the next free number.
    """
    checkpoint_step = broadcast_from_rank0(max(step, _next_checkpoint_step(directory)))
    return save(directory, step=checkpoint_step, model=model, optimizer=optimizer, extra=extra, keep=1)


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value on all ranks. Call on all ranks."""
    return broadcast_object(value, 0) if dist.is_initialized() else value


def check_on_rank0(check: Callable[[], bool]) -> bool:
    """Return rank 0's result of a check of files on all ranks; False if it raises `OSError`. Call on all ranks.

    Other ranks may see files later than rank 0, or not at all.
    """
    result = False
    with suppress(OSError):
        result = check()
    return bool(broadcast_from_rank0(result))


class _StepCounter(LRScheduler):
    """Constant schedule, created only because its constructor makes torch count the optimizer's steps.

    Retargeted schedulers would otherwise warn that `optimizer.step()` is never called.
    """

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _next_checkpoint_step(directory: Path) -> int:
    newest = None
    with suppress(OSError):
        newest = latest(directory)
    return 0 if newest is None else int(newest.name.rpartition("-")[2]) + 1


def _iter_named_groups(model: torch.nn.Module, optimizer: Optimizer) -> Iterable[dict[str, Any]]:
    """Yield the optimizer's groups with named parameters.

    A generator: `shard` iterates it where all ranks agree, which raises an error of one rank on all.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    unknown = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
    if unknown:
        raise ConfigError(
            f"expected {type(optimizer).__name__} to update parameters of {type(model).__name__}, got "
            f"{format_count(len(unknown), 'parameter')} not in the model, the first with shape "
            f"{tuple(unknown[0].shape)}. Create the optimizer over the model's parameters."
        )
    defaults = optimizer.defaults
    for group in optimizer.param_groups:
        # Leave out defaults: the sharded optimizer may then choose a fused implementation.
        options = {
            key: value
            for key, value in group.items()
            if key != "param_names" and (key not in defaults or _differs_from_default(value, defaults[key]))
        }
        if not group["params"]:
            options["param_names"] = []  # else torch takes an empty group for one without names and refuses it
        yield {**options, "params": [(names[id(param)], param) for param in group["params"]]}


def _prepare_constructor_args(optimizer: Optimizer) -> Prepared[dict[str, Any]]:
    """Return the constructor arguments of an optimizer that differ from the defaults of its class."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ConfigError(f"{type(optimizer).__name__} needs DDP, which this integration replaces. {_SHARD_HINT}")
    values = {**vars(optimizer), **optimizer.defaults}
    _, *arguments = signature(type(optimizer)).parameters.values()
    unknown = [arg.name for arg in arguments if arg.name not in values and arg.kind is not Parameter.VAR_KEYWORD]
    if unknown:
        raise ConfigError(
            f"{type(optimizer).__name__} does not store its arguments {', '.join(unknown)}, so it cannot be recreated. "
            f"{_SHARD_HINT}"
        )
    changed = {
        arg.name: values[arg.name]
        for arg in arguments
        if arg.name in values and _differs_from_default(values[arg.name], arg.default)
    }
    return Prepared(changed, [type(optimizer).__name__, f"{'some' if optimizer.state else 'no'} state"])


def _differs_from_default(value: Any, default: Any) -> bool:
    if value is default:
        return False
    return isinstance(value, torch.Tensor) or type(value) is not type(default) or bool(value != default)


def _merge_saved_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of a state dict with the options of `optimizer`, such as the chosen implementation."""
    return [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": saved_group["params"]}
        for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
