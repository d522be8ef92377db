"""A plain optimizer, as users of a framework make it, becomes a sharded one; so does what belongs to it."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint import latest, save
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..comm.process_group import Group, init_single_rank
from ..errors import ConfigError
from ..grad_scaler import GradScaler
from ..optimizer import ZeroRedundancyOptimizer
from ..shard import ShardedOptimizer, shard
from ..zero_redundancy_optimizer import broadcast_object

_SHARD_HINT = "Make the sharded one yourself: zeroshard.shard(model, ...) in its place."


def shard_optimizer(model: torch.nn.Module, optimizer: Optimizer, shard_options: Mapping[str, Any]) -> ShardedOptimizer:
    """One that goes on in the place of `optimizer`, which is not used any more. Called on all ranks.

    Its class, groups, options, state and hooks are taken over. `where` is what else `shard` is to know. One that
    `shard` has made stays as it is.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    init_single_rank()  # some frameworks begin no job where there is one process
    taken = prepare_all(Comm(Group()), "taking over an optimizer", lambda: _prepare_constructor_args(optimizer))
    made = shard(model, type(optimizer), params=_iter_named_groups(model, optimizer), **taken, **shard_options)
    if optimizer.state:
        saved = optimizer.state_dict()
        made.load_state_dict({**saved, "param_groups": _merge_saved_groups(made, saved)})
    # Shared, so that whoever has registered a hook can still remove it.
    made._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    made._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    # Schedulers that nobody hands over set the options of the sharded one all the same.
    optimizer.param_groups = made.param_groups
    vars(optimizer)["_opt_called"] = True  # they would warn that it makes no steps
    return made


def retarget_scheduler(scheduler: Any, old_optimizer: Optimizer, new_optimizer: Optimizer) -> None:
    """The scheduler, and those that it is made of, set the options of `made` from now on."""
    for name, value in list(vars(scheduler).items()):
        if value is old_optimizer and old_optimizer is not new_optimizer:
            setattr(scheduler, name, new_optimizer)
            _StepCounter(new_optimizer)
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, LRScheduler):
                retarget_scheduler(inner, old_optimizer, new_optimizer)


def make_scaler(scaler: Any, device: str) -> GradScaler:
    """One for gradients that are spread over ranks, with the same settings."""
    made = GradScaler(device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made


def let_scaler_skip_steps(optimizer: ShardedOptimizer) -> None:
    """A scaler looks at gradients before a step, as frameworks expect who clip between, and leaves bad steps out."""
    optimizer._step_supports_amp_scaling = False


def write_checkpoint(
    directory: Path, model: torch.nn.Module | None, optimizer: Optimizer | None, extra: Any = None, *, step: int = 0
) -> Path:
    """Save in the place of what the folder has, which is there until this is complete. Called on all ranks.

    A folder counts upwards: what is saved for the same step again, or for an earlier one, has the next number.
    """
    number = broadcast_from_rank0(max(step, _next_checkpoint_step(directory)))
    return save(directory, step=number, model=model, optimizer=optimizer, extra=extra, keep=1)


def broadcast_from_rank0(value: Any) -> Any:
    """Called on all ranks."""
    return broadcast_object(value, 0) if dist.is_initialized() else value


def check_on_rank0(check: Callable[[], bool]) -> bool:
    """What the first rank finds among files, which others may see later, or not at all. Called on all ranks."""
    found = False
    with suppress(OSError):
        found = check()
    return bool(broadcast_from_rank0(found))


class _StepCounter(LRScheduler):
    """Has torch note the steps of an optimizer: schedulers that come to it later would warn that nobody does."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _next_checkpoint_step(directory: Path) -> int:
    before = None
    with suppress(OSError):
        before = latest(directory)
    return 0 if before is None else int(before.name.rpartition("-")[2]) + 1


def _iter_named_groups(model: torch.nn.Module, optimizer: Optimizer) -> Iterable[dict[str, Any]]:
    """Read only when all ranks are about to agree: what is wrong on one is then raised on all."""
    names = {id(param): name for name, param in model.named_parameters()}
    strangers = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} parameters of the {type(optimizer).__name__} are not those of the "
            f"{type(model).__name__}, the first has the shape {tuple(strangers[0].shape)}. Make the optimizer of the "
            "parameters of the model that is trained with it."
        )
    known = optimizer.defaults
    for group in optimizer.param_groups:
        # What a group has by default it gets again; the implementation may become a fused one then.
        special = {key: it for key, it in group.items() if key not in known or _differs_from_default(it, known[key])}
        others = {key: value for key, value in special.items() if key != "param_names"}
        yield {**others, "params": [(names[id(param)], param) for param in group["params"]]}


def _prepare_constructor_args(optimizer: Optimizer) -> Prepared[dict[str, Any]]:
    """What it was made with, as far as it differs from what its class would take."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is sharded in a way that needs DDP. {_SHARD_HINT}")
    known = {**vars(optimizer), **optimizer.defaults}
    _, *asked = signature(type(optimizer)).parameters.values()
    unknown = [it.name for it in asked if it.name not in known and it.kind is not Parameter.VAR_KEYWORD]
    if unknown:
        raise ConfigError(
            f"a {type(optimizer).__name__} does not say what it was made with as {', '.join(unknown)}, so that no "
            f"other can be made in its place. {_SHARD_HINT}"
        )
    given = {
        it.name: known[it.name]
        for it in asked
        if it.name in known and _differs_from_default(known[it.name], it.default)
    }
    return Prepared(given, [type(optimizer).__name__, f"{'some' if optimizer.state else 'no'} state"])


def _differs_from_default(value: Any, default: Any) -> bool:
    if value is default:
        return False
    return isinstance(value, torch.Tensor) or type(value) is not type(default) or bool(value != default)


def _merge_saved_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of what is loaded, with options that were chosen for `made`, such as the implementation."""
    return [
        {**{key: value for key, value in mine.items() if key != "param_names"}, "params": theirs["params"]}
        for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
