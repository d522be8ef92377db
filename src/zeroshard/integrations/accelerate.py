"""Accelerate: an `Accelerator` whose `prepare` shards the optimizer, and wraps the model in nothing."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import OPTIMIZER_NAME
except ImportError as error:
    raise ImportError("zeroshard.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.13'") from error

from ..checkpoint import load
from ..comm.mesh import ShardGroupSize
from ..config import ZeroConfig
from ..errors import CheckpointError, ConfigError
from ..grad_scaler import GradScaler
from ..shard import ShardedOptimizer
from ._common import (
    broadcast_from_rank0,
    check_on_rank0,
    let_scaler_skip_steps,
    make_scaler,
    retarget_scheduler,
    shard_optimizer,
    write_checkpoint,
)

SHARD_DIR_NAME = "zeroshard"
"""Of a checkpoint: what all ranks have written."""
_PLACEHOLDER_STATE = {"saved in": SHARD_DIR_NAME}
"""What a file says that would else have the optimizer's state."""
_CONFLICTING_PLUGINS = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "parallelism_config",
)


class PreparedOptimizer(AcceleratedOptimizer):
    """What `prepare` makes of an optimizer. Its state is saved by all ranks, not in the file that Accelerate makes."""

    optimizer: ShardedOptimizer

    def __init__(
        self, optimizer: ShardedOptimizer, model: torch.nn.Module, original_optimizer: Optimizer, scaler: Any
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.model, self.original_optimizer = model, original_optimizer
        self._has_shard_dir = False
        let_scaler_skip_steps(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return dict(_PLACEHOLDER_STATE)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict != _PLACEHOLDER_STATE:
            super().load_state_dict(state_dict)
        elif not self._has_shard_dir:  # else it is loaded by all ranks, each its part
            raise CheckpointError(
                f"this has no state in it, but says that all ranks have saved theirs in a folder {SHARD_DIR_NAME} "
                "beside it: load the whole checkpoint as it was saved, or take optimizer.optimizer.full_state_dict()"
            )

    def detect_shard_dir(self, directory: Path, file: Path) -> bool:
        """Whether the ranks have saved the state in `folder`, or it is all in `file`. Called on all ranks."""
        self._has_shard_dir = check_on_rank0(directory.is_dir)
        if not self._has_shard_dir and check_on_rank0(lambda: _is_placeholder_file(file)):
            raise CheckpointError(
                f"{directory} is missing, into which all ranks have saved the optimizer's state: {file.name} says only "
                "that it is there. Copy the checkpoint with all of its folders, or go on from another one."
            )
        return self._has_shard_dir


class Accelerator(accelerate.Accelerator):
    """Takes the arguments of Accelerate's, less those of other ways to shard.

    Args:
        config: how to shard.
        shard_group_size: "node" or a number of ranks that share the state, as for `zeroshard.shard`.
    """

    scaler: Any
    step: int
    _models: list[torch.nn.Module]
    _optimizers: list[PreparedOptimizer]

    def __init__(
        self,
        *args: Any,
        config: ZeroConfig | None = None,
        shard_group_size: ShardGroupSize | None = None,
        **options: Any,
    ) -> None:
        others = [name for name in _CONFLICTING_PLUGINS if options.get(name) is not None]
        if others:
            raise ConfigError(f"zeroshard shards the optimizer itself: leave out {', '.join(others)}")
        super().__init__(*args, **options)
        if self.ddp_handler is not None:
            raise ConfigError("zeroshard averages gradients without DDP: leave out DistributedDataParallelKwargs")
        self.enable_sharding(config, shard_group_size)

    def enable_sharding(self, config: ZeroConfig | None, shard_group_size: ShardGroupSize | None) -> None:
        kind = str(self.distributed_type).rpartition(".")[2]
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ConfigError(f"zeroshard shards the optimizer itself: leave out the plugin or option for {kind}")
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != self.num_processes:
            raise ConfigError(
                f"{started} processes were started, and Accelerate sees {self.num_processes}: on CPUs tell it so, with "
                "Accelerator(cpu=True)"
            )
        self._shard_options = {"config": config, "shard_group_size": shard_group_size}
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            self.scaler = make_scaler(self.scaler, self.device.type)
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)

    # ---- preparing

    def prepare(self, *args: Any, device_placement: list[Any] | None = None) -> Any:
        """Models first, whatever the order: an optimizer is sharded when its model is where it stays."""
        places = device_placement or [None] * len(args)
        if len(places) != len(args):
            raise ConfigError(f"device_placement has {len(places)} entries for {len(args)} objects")
        made = list(args)
        for at, (it, place) in enumerate(zip(args, places, strict=True)):
            if isinstance(it, torch.nn.Module):
                made[at] = self.prepare_model(it, device_placement=place)
        for at, it in enumerate(args):
            if isinstance(it, Optimizer):
                made[at] = self.prepare_optimizer(it)
        rest = [at for at, it in enumerate(args) if not isinstance(it, (torch.nn.Module, Optimizer))]
        for at in rest:
            made[at] = super().prepare(made[at], device_placement=[places[at]])
        return tuple(made) if len(made) != 1 else made[0]

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        del evaluation_mode  # which is to say, without DDP
        made: torch.nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return made

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        del device_placement  # state is made where the parameters are
        if isinstance(optimizer, AcceleratedOptimizer):
            if not isinstance(optimizer, PreparedOptimizer):
                raise ConfigError("the optimizer was prepared by an Accelerator of Accelerate's own")
            made = optimizer
        else:
            model = self._find_model(optimizer)
            made = PreparedOptimizer(
                shard_optimizer(model, optimizer, self._shard_options), model, optimizer, self.scaler
            )
            made._is_accelerate_prepared = True
        if made not in self._optimizers:
            self._optimizers.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> Any:
        for prepared in self._optimizers:
            retarget_scheduler(scheduler, prepared.original_optimizer, prepared.optimizer)
        return super().prepare_scheduler(scheduler)

    def _find_model(self, optimizer: Optimizer) -> torch.nn.Module:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        models: list[torch.nn.Module] = [self.unwrap_model(it, keep_torch_compile=False) for it in self._models]
        found = [model for model in models if params & {id(param) for param in model.parameters()}]
        if len(found) != 1:
            raise ConfigError(
                f"the parameters of the {type(optimizer).__name__} belong to {len(found)} of the {len(models)} models "
                "that were prepared: prepare the one model that it trains in the same call, or before"
            )
        if self._find_optimizers(found[0]):
            raise ConfigError(
                f"the {type(found[0]).__name__} has an optimizer already. For several classes in one prepare "
                "zeroshard.shard(model, [ParamRule(...), ParamRule(...)])."
            )
        return found[0]

    def _find_optimizers(self, model: torch.nn.Module) -> list[PreparedOptimizer]:
        """The optimizer that trains a model, if one does."""
        bare = self.unwrap_model(model, keep_torch_compile=False)
        return [it for it in self._optimizers if it.model is bare]

    # ---- training

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(loss, **options)
        for model in self._models:
            if not self._find_optimizers(model) and any(param.grad is not None for param in model.parameters()):
                raise ConfigError(
                    f"nobody averages the gradients of the {type(model).__name__}: prepare its optimizer, too"
                )

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for prepared in self._find_optimizers(model):
                stack.enter_context(prepared.optimizer.no_sync())
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        params = _as_list(parameters)
        optimizer = self._find_optimizer_to_clip(params)
        if optimizer is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        params = _as_list(parameters)
        optimizer = self._find_optimizer_to_clip(params)
        if optimizer is None:
            super().clip_grad_value_(params, clip_value)
            return
        self.unscale_gradients(optimizer)
        optimizer.clip_grad_value_(clip_value)

    def _find_optimizer_to_clip(self, params: list[torch.Tensor]) -> ShardedOptimizer | None:
        """The optimizer that has gradients of these parameters; None if they are in `param.grad`."""
        given = {id(param) for param in params}
        theirs = [(it.optimizer, {id(param) for param in it.optimizer._engine.params}) for it in self._optimizers]
        found = [(optimizer, owned) for optimizer, owned in theirs if given & owned]
        if not found:
            return None
        if len(found) > 1 or found[0][1] - given:
            raise ConfigError(
                "gradients are spread over ranks, and are clipped for all parameters of one optimizer at a time: "
                "give the parameters of its model"
            )
        return found[0][0]

    # ---- checkpoints

    def load_state(self, *args: Any, **options: Any) -> None:
        super().load_state(*args, **options)
        self.step = broadcast_from_rank0(self.step)  # only ranks that had been there when it was saved know it

    def _save_shards(self, models: list[torch.nn.Module], weights: list[Any], output_dir: str) -> None:
        for number, prepared in enumerate(self._optimizers):
            write_checkpoint(Path(output_dir) / f"{SHARD_DIR_NAME}_{number}", prepared.model, prepared.optimizer)
        weights[:] = [it for model, it in zip(models, weights, strict=True) if not self._find_optimizers(model)]

    def _load_shards(self, models: list[torch.nn.Module], input_dir: str) -> None:
        for number, prepared in enumerate(self._optimizers):
            folder = Path(input_dir) / f"{SHARD_DIR_NAME}_{number}"
            file = Path(input_dir) / f"{OPTIMIZER_NAME}{f'_{number}' if number else ''}.bin"
            if prepared.detect_shard_dir(folder, file):  # else it is a checkpoint of Accelerate's own
                load(folder, model=prepared.model, optimizer=prepared.optimizer)
                models[:] = [model for model in models if prepared not in self._find_optimizers(model)]


def _is_placeholder_file(file: Path) -> bool:
    with suppress(Exception):  # what cannot be read is not ours, and is told by who reads it next
        return bool(torch.load(file, map_location="cpu", weights_only=True, mmap=True) == _PLACEHOLDER_STATE)
    return False


def _as_list(parameters: Any) -> list[torch.Tensor]:
    given: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return list(given)
