"""Lightning: `Trainer(strategy=ZeroShardStrategy())` shards the optimizer over all ranks."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("zeroshard.integrations.lightning needs Lightning: pip install 'lightning>=2.6'") from error

from .._logging import warn_at_caller
from ..checkpoint import load
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all, rollback_on_error
from ..comm.mesh import ShardGroupSize
from ..comm.process_group import Group
from ..config import ZeroConfig
from ..errors import CheckpointError, ConfigError
from ..grad_scaler import GradScaler
from ..shard import ShardedOptimizer
from ._common import (
    check_on_rank0,
    let_scaler_skip_steps,
    make_scaler,
    retarget_scheduler,
    shard_optimizer,
    write_checkpoint,
)

_ALLOWED_OPTIONS = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
}
_SHARDED_KEYS = ("state_dict", "optimizer_states")
"""Keys of Lightning's checkpoint that all ranks save as shards."""


class ZeroShardStrategy(DDPStrategy):
    """Shards the optimizer that `configure_optimizers` returns, and does not wrap the module in DDP.

    The optimizer may be a plain one or the result of `zeroshard.shard(self, ...)`. Checkpoints are directories to
    which each rank writes its shard; they load at any world size. Checkpoint files of other strategies load, too.

    Args:
        config: Options of sharding.
        shard_group_size: "node" or the number of ranks to shard over, as in `zeroshard.shard`.
        sync_every_pass: With gradient accumulation, reduce-scatter gradients after each backward pass, which
            keeps only 1/N of them. By default they accumulate in full size and are reduced once, with results that
            are bit-identical to DDP.
        **options: Options of `DDPStrategy` that do not concern DDP.
    """

    strategy_name = "zeroshard"
    model: Any
    optimizers: list[Any]

    def __init__(
        self,
        *,
        config: ZeroConfig | None = None,
        shard_group_size: ShardGroupSize | None = None,
        sync_every_pass: bool = False,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - _ALLOWED_OPTIONS)
        if unknown:
            raise ConfigError(
                f"ZeroShardStrategy does not use DDP and does not support {', '.join(unknown)}. Leave out these "
                "options."
            )
        super().__init__(**options)
        self._shard_options = {"config": config, "shard_group_size": shard_group_size}
        self._sync_every_pass = sync_every_pass

    def configure_ddp(self) -> None:
        self.model = _ForwardWrapper(self.model)

    def setup(self, trainer: Any) -> None:
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                f"ZeroShardStrategy writes checkpoints itself, from all ranks, and does not support "
                f"{type(self.checkpoint_io).__name__}. Leave out checkpoint_io."
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"ZeroShardStrategy expects one optimizer from configure_optimizers, got {len(self.optimizers)}. To "
                "use several optimizer classes, return zeroshard.shard(self, [ParamRule(...), ParamRule(...)])."
            )
        (original,) = self.optimizers
        sharded = shard_optimizer(self.lightning_module, original, self._shard_options)
        for config in self.lr_scheduler_configs:
            retarget_scheduler(config.scheduler, original, sharded)
        self.optimizers = [sharded]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = partial(_clip_grads, "clip_grad_norm_")
        plugin.clip_grad_by_value = partial(_clip_grads, "clip_grad_value_")
        for optimizer in self.optimizers:
            let_scaler_skip_steps(optimizer)
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, GradScaler):
            plugin.scaler = make_scaler(scaler, self.root_device.type)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in [] if self._sync_every_pass else self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def teardown(self) -> None:
        self.model = self.lightning_module
        super().teardown()

    # ---- checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save module and optimizer as shards, and everything else from rank 0. Call on all ranks."""
        path = self._broadcast_path(filepath)
        others = {key: value for key, value in checkpoint.items() if key not in _SHARDED_KEYS}
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None

        def prepare() -> Prepared[_ReplacedFile]:
            if storage_options is not None:
                raise ConfigError("ZeroShardStrategy writes checkpoints itself. Leave out storage_options.")
            self._check_module_state(checkpoint["state_dict"])
            replaced = _ReplacedFile(path)
            if self.is_global_zero:
                replaced.move_aside()
            return Prepared(replaced, rollback=replaced.restore)

        extra, step = others if self.is_global_zero else None, checkpoint.get("global_step", 0)
        replaced = prepare_all(Comm(Group()), "save_checkpoint", prepare)
        with rollback_on_error(replaced.restore), self._on_training_device():
            write_checkpoint(path, self.lightning_module, optimizer, extra, step=step)
        replaced.remove_backup()

    @contextmanager
    def _on_training_device(self) -> Iterator[None]:
        """Move the module back to the training device for a save.

        After training, Lightning moves the module to the CPU while the optimizer's shards stay on the GPU.
        """
        module = self.lightning_module
        device = next((param.device for param in module.parameters()), self.root_device)
        try:  # collective, since a single rank may run out of GPU memory
            prepare_all(Comm(Group()), "save_checkpoint", lambda: Prepared(module.to(self.root_device)))
            yield
        finally:
            module.to(device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._broadcast_path(checkpoint_path)
        if check_on_rank0(path.is_file):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return checkpoint
        is_training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if is_training else None  # otherwise left over from an earlier fit
        strict = self.lightning_module.strict_loading
        result = load(path, model=self.lightning_module, optimizer=optimizer, strict=strict)
        others = result.extra_by_rank.get(0)
        if not isinstance(others, dict) or "loops" not in others:
            raise CheckpointError(f"{path} was not saved by a Trainer. Load it with zeroshard.checkpoint.load().")
        return {**others, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # otherwise load_checkpoint has loaded the module
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def _broadcast_path(self, filepath: Any) -> Path:
        path = self.broadcast(filepath)
        if "://" in str(path):
            raise ConfigError(f"ZeroShardStrategy expects a local path for checkpoints, got {path}")
        return Path(path)

    def _check_module_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a hook has replaced values of the module's state dict, which would not be saved."""
        own = self.lightning_module.state_dict()
        changed = [key for key in {**own, **state_dict} if not _is_same_value(own.get(key), state_dict.get(key))]
        if changed:
            raise ConfigError(
                f"on_save_checkpoint changed 'state_dict' at {changed[0]}, but ZeroShardStrategy saves the module "
                "itself. Store such values under another key of the checkpoint."
            )


class _ReplacedFile:
    """A checkpoint file of another strategy; removed once the directory that replaces it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._backup = path, path.with_name(f"{path.name}.former")
        self._is_moved = False

    def move_aside(self) -> None:
        if self._path.is_file():
            self._path.replace(self._backup)
            self._is_moved = True

    def restore(self) -> None:
        if self._is_moved:
            shutil.rmtree(self._path, ignore_errors=True)  # the incomplete directory
            self._backup.replace(self._path)

    def remove_backup(self) -> None:
        """Remove the replaced file.

        Hazard: only rank 0 has something to remove, and the checkpoint is complete, so this must not raise.
        """
        try:
            if self._is_moved:
                self._backup.unlink()
        except OSError as error:
            warn_at_caller(f"removing {self._backup}, which {self._path} replaces, failed: {error}")


class _ForwardWrapper(torch.nn.Module):
    """Makes Lightning run its steps as forward passes, whose hooks wait for parameters and broadcast buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


def _clip_grads(method: str, optimizer: Any, limit: float) -> None:
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # unwrap a LightningOptimizer
    assert isinstance(optimizer, ShardedOptimizer)
    getattr(optimizer, method)(limit)


def _is_same_value(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.data_ptr() == b.data_ptr() and a.shape == b.shape
    return bool(a == b)


StrategyRegistry.register(
    ZeroShardStrategy.strategy_name, ZeroShardStrategy, description="optimizer state sharded by zeroshard"
)
