"""Hugging Face Accelerate: an `Accelerator` whose `prepare` shards the optimizer and does not wrap the model in DDP."""

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
"""Folder in a checkpoint to which all ranks write their shards."""
_PLACEHOLDER_STATE = {"saved in": SHARD_DIR_NAME}
"""Content of Accelerate's optimizer file, in place of the state."""
_CONFLICTING_PLUGINS = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "parallelism_config",
)


class PreparedOptimizer(AcceleratedOptimizer):
    """The optimizer that `prepare` returns. All ranks save its state; Accelerate's file has only a placeholder."""

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
        elif not self._has_shard_dir:  # else all ranks load their shards
            raise CheckpointError(
                f"this state dict is a placeholder: all ranks saved their state in the folder {SHARD_DIR_NAME} of the "
                "checkpoint. Load it with load_state(), or save optimizer.optimizer.full_state_dict()."
            )

    def detect_shard_dir(self, directory: Path, file: Path) -> bool:
        """Return whether the state is in `directory`, as shards, and not in `file`. Call on all ranks.

        Raises:
            CheckpointError: `file` has only the placeholder, and `directory` is missing.
        """
        self._has_shard_dir = check_on_rank0(directory.is_dir)
        if not self._has_shard_dir and check_on_rank0(lambda: _is_placeholder_file(file)):
            raise CheckpointError(
                f"{directory} is missing: it holds the optimizer state of all ranks, and {file.name} is only a "
                "placeholder. Copy the checkpoint with all of its folders, or resume from another one."
            )
        return self._has_shard_dir


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` with sharded optimizers. Plugins that shard otherwise (FSDP, DeepSpeed) are rejected.

    Args:
        *args: Passed to Accelerate's `Accelerator`.
        config: Options of sharding.
        shard_group_size: "node" or the number of ranks to shard over, as in `zeroshard.shard`.
        **options: Passed to Accelerate's `Accelerator`.
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
        conflicts = [name for name in _CONFLICTING_PLUGINS if options.get(name) is not None]
        if conflicts:
            raise ConfigError(f"zeroshard shards the optimizer itself: leave out {', '.join(conflicts)}")
        super().__init__(*args, **options)
        if self.ddp_handler is not None:
            raise ConfigError("zeroshard averages gradients without DDP: leave out DistributedDataParallelKwargs")
        self.enable_sharding(config, shard_group_size)

    def enable_sharding(self, config: ZeroConfig | None, shard_group_size: ShardGroupSize | None) -> None:
        """Check the job, use a scaler for sharded gradients, and register the checkpoint hooks."""
        distributed_type = str(self.distributed_type).rpartition(".")[2]
        if distributed_type != "NO" and not distributed_type.startswith("MULTI_"):
            raise ConfigError(
                f"zeroshard shards the optimizer itself: leave out the plugin or option for {distributed_type}"
            )
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != self.num_processes:
            raise ConfigError(
                f"expected {world_size} processes, as started by the launcher, but Accelerate uses "
                f"{self.num_processes}. On CPUs pass Accelerator(cpu=True)."
            )
        self._shard_options = {"config": config, "shard_group_size": shard_group_size}
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            self.scaler = make_scaler(self.scaler, self.device.type)
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)

    # ---- prepare

    def prepare(self, *args: Any, device_placement: list[Any] | None = None) -> Any:
        """Prepare models, then optimizers, then everything else, in any order of arguments.

        An optimizer is sharded after its model has been moved to its device.
        """
        placements = device_placement or [None] * len(args)
        if len(placements) != len(args):
            raise ConfigError(
                f"expected {len(args)} entries in device_placement, one per object, got {len(placements)}"
            )
        prepared = list(args)
        for index, (arg, placement) in enumerate(zip(args, placements, strict=True)):
            if isinstance(arg, torch.nn.Module):
                prepared[index] = self.prepare_model(arg, device_placement=placement)
        for index, arg in enumerate(args):
            if isinstance(arg, Optimizer):
                prepared[index] = self.prepare_optimizer(arg)
        rest = [index for index, arg in enumerate(args) if not isinstance(arg, (torch.nn.Module, Optimizer))]
        for index in rest:
            prepared[index] = super().prepare(prepared[index], device_placement=[placements[index]])
        return tuple(prepared) if len(prepared) != 1 else prepared[0]

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        del evaluation_mode  # always True below, which prevents the DDP wrapper
        prepared: torch.nn.Module = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        del device_placement  # state is on the device of the parameters
        if isinstance(optimizer, AcceleratedOptimizer):
            if not isinstance(optimizer, PreparedOptimizer):
                raise ConfigError(
                    "the optimizer was prepared by Accelerate's own Accelerator. Prepare it with "
                    "zeroshard.integrations.accelerate.Accelerator."
                )
            prepared = optimizer
        else:
            model = self._find_model(optimizer)
            sharded = shard_optimizer(model, optimizer, self._shard_options)
            prepared = PreparedOptimizer(sharded, model, optimizer, self.scaler)
            prepared._is_accelerate_prepared = True
        if prepared not in self._optimizers:
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        for prepared in self._optimizers:
            retarget_scheduler(scheduler, prepared.original_optimizer, prepared.optimizer)
        return super().prepare_scheduler(scheduler)

    def _find_model(self, optimizer: Optimizer) -> torch.nn.Module:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        models: list[torch.nn.Module] = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        matches = [model for model in models if params & {id(param) for param in model.parameters()}]
        if len(matches) != 1:
            raise ConfigError(
                f"expected the parameters of {type(optimizer).__name__} to belong to one prepared model, got "
                f"{len(matches)} of {len(models)}. Prepare the model that it trains in the same call, or before."
            )
        if self._find_optimizers(matches[0]):
            raise ConfigError(
                f"{type(matches[0]).__name__} already has an optimizer. To use several optimizer classes, prepare "
                "zeroshard.shard(model, [ParamRule(...), ParamRule(...)])."
            )
        return matches[0]

    def _find_optimizers(self, model: torch.nn.Module) -> list[PreparedOptimizer]:
        """Return the optimizer of a model in a list, which is empty if there is none."""
        unwrapped = self.unwrap_model(model, keep_torch_compile=False)
        return [prepared for prepared in self._optimizers if prepared.model is unwrapped]

    # ---- train

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(loss, **options)
        for model in self._models:
            if not self._find_optimizers(model) and any(param.grad is not None for param in model.parameters()):
                raise ConfigError(
                    f"gradients of {type(model).__name__} are not averaged, since its optimizer is not prepared. "
                    "Prepare it."
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
        """Return the sharded optimizer of these parameters; None if their gradients are in `param.grad`."""
        param_ids = {id(param) for param in params}
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        ids_by_optimizer = [
            (optimizer, {id(param) for param in optimizer._engine.params.tensors}) for optimizer in optimizers
        ]
        matches = [(optimizer, ids) for optimizer, ids in ids_by_optimizer if param_ids & ids]
        if not matches:
            return None
        if len(matches) > 1 or matches[0][1] - param_ids:
            raise ConfigError(
                "sharded gradients can only be clipped for all parameters of one optimizer. Pass the parameters of its "
                "model."
            )
        return matches[0][0]

    # ---- checkpoint

    def load_state(self, *args: Any, **options: Any) -> None:
        super().load_state(*args, **options)
        self.step = broadcast_from_rank0(self.step)  # ranks beyond the saved world size did not load it

    def _save_shards(self, models: list[torch.nn.Module], weights: list[Any], output_dir: str) -> None:
        """Write the shards, and take the models that these contain out of `weights`. Accelerate saves the others."""
        for index, prepared in enumerate(self._optimizers):
            write_checkpoint(Path(output_dir) / f"{SHARD_DIR_NAME}_{index}", prepared.model, prepared.optimizer)
        weights[:] = [
            state_dict for model, state_dict in zip(models, weights, strict=True) if not self._find_optimizers(model)
        ]

    def _load_shards(self, models: list[torch.nn.Module], input_dir: str) -> None:
        """Load the shards, and take the models that these contain out of `models`. Accelerate loads the others."""
        for index, prepared in enumerate(self._optimizers):
            shard_dir = Path(input_dir) / f"{SHARD_DIR_NAME}_{index}"
            file = Path(input_dir) / f"{OPTIMIZER_NAME}{f'_{index}' if index else ''}.bin"
            if prepared.detect_shard_dir(shard_dir, file):  # else Accelerate's own Accelerator saved the checkpoint
                load(shard_dir, model=prepared.model, optimizer=prepared.optimizer)
                models[:] = [model for model in models if prepared not in self._find_optimizers(model)]


def _is_placeholder_file(file: Path) -> bool:
    with suppress(Exception):  # not a placeholder if it cannot be read; Accelerate raises the error when it loads it
        return bool(torch.load(file, map_location="cpu", weights_only=True, mmap=True) == _PLACEHOLDER_STATE)
    return False


def _as_list(parameters: Any) -> list[torch.Tensor]:
    tensors: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return list(tensors)
