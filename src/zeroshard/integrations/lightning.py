"""Lightning: `Trainer(strategy=ZeroShardStrategy())` trains with an optimizer of which every rank holds 1/N."""

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
"""What is saved by all ranks, each its part."""


class ZeroShardStrategy(DDPStrategy):
    """`configure_optimizers` returns a plain optimizer, or one that `zeroshard.shard(self, ...)` has made.

    The module is not wrapped in DDP. Checkpoints are directories to which every rank writes its part; they load at any
    number of ranks. Files of other strategies load, too.

    Args:
        config: how to shard.
        shard_group_size: "node" or a number of ranks that share the state, as for `zeroshard.shard`.
        sync_every_pass: when gradients are accumulated, send them after each pass: they never take more than 1/N. By
            default they add up in full size and are sent once, with the bits that DDP makes.
        options: those of `DDPStrategy` that have nothing to do with DDP.
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
        strange = sorted(set(options) - _ALLOWED_OPTIONS)
        if strange:
            raise ConfigError(f"there is no DDP in a ZeroShardStrategy: it has no use for {', '.join(strange)}")
        super().__init__(**options)
        self._shard_options = {"config": config, "shard_group_size": shard_group_size}
        self._sync_every_pass = sync_every_pass

    def configure_ddp(self) -> None:
        self.model = _ForwardWrapper(self.model)

    def setup(self, trainer: Any) -> None:
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                f"a ZeroShardStrategy writes checkpoints itself, from all ranks: leave out the "
                f"{type(self.checkpoint_io).__name__}"
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and a ZeroShardStrategy takes one. "
                "For several classes in one return zeroshard.shard(self, [ParamRule(...), ParamRule(...)])."
            )
        (plain,) = self.optimizers
        made = shard_optimizer(self.lightning_module, plain, self._shard_options)
        for entry in self.lr_scheduler_configs:
            retarget_scheduler(entry.scheduler, plain, made)
        self.optimizers = [made]

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

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On all ranks. What is not the module's or the optimizer's comes from rank 0."""
        path = self._broadcast_path(filepath)
        others = {key: value for key, value in checkpoint.items() if key not in _SHARDED_KEYS}
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None

        def prepare() -> Prepared[_ReplacedFile]:
            if storage_options is not None:
                raise ConfigError("a ZeroShardStrategy writes checkpoints itself: it has no use for storage_options")
            self._check_module_state(checkpoint["state_dict"])
            former = _ReplacedFile(path)
            if self.is_global_zero:
                former.move_aside()
            return Prepared(former, rollback=former.restore)

        extra, step = others if self.is_global_zero else None, checkpoint.get("global_step", 0)
        former = prepare_all(Comm(Group()), "save_checkpoint", prepare)
        with rollback_on_error(former.restore), self._on_training_device():
            write_checkpoint(path, self.lightning_module, optimizer, extra, step=step)
        former.remove_backup()

    @contextmanager
    def _on_training_device(self) -> Iterator[None]:
        """After training Lightning moves the module to the CPU, and the optimizer has its shares on the GPU."""
        module = self.lightning_module
        found = next((param.device for param in module.parameters()), self.root_device)
        try:  # a GPU may be full on one rank alone
            prepare_all(Comm(Group()), "save_checkpoint", lambda: Prepared(module.to(self.root_device)))
            yield
        finally:
            module.to(found)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._broadcast_path(checkpoint_path)
        if check_on_rank0(path.is_file):
            found: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return found
        is_training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if is_training else None  # else it is one of a training that is over
        strict = self.lightning_module.strict_loading
        loaded = load(path, model=self.lightning_module, optimizer=optimizer, strict=strict)
        others = loaded.extra_by_rank.get(0)
        if not isinstance(others, dict) or "loops" not in others:
            raise CheckpointError(f"{path} was not saved by a Trainer: load it with zeroshard.checkpoint.load")
        return {**others, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # else it is loaded
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def _broadcast_path(self, filepath: Any) -> Path:
        path = self.broadcast(filepath)
        if "://" in str(path):
            raise ConfigError(f"a ZeroShardStrategy saves to and loads from directories, not {path}")
        return Path(path)

    def _check_module_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a hook has put other values in the place of the module's: these would not be saved."""
        mine = self.lightning_module.state_dict()
        changed = [key for key in {**mine, **state_dict} if not _is_same_value(mine.get(key), state_dict.get(key))]
        if changed:
            raise ConfigError(
                f"on_save_checkpoint has changed the 'state_dict' at {changed[0]}, and a ZeroShardStrategy saves the "
                "module itself: put such values under a key of their own"
            )


class _ReplacedFile:
    """The file of another strategy, where a directory is about to be: it goes when that is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._backup = path, path.with_name(f"{path.name}.former")
        self._is_moved = False

    def move_aside(self) -> None:
        if self._path.is_file():
            self._path.replace(self._backup)
            self._is_moved = True

    def restore(self) -> None:
        if self._is_moved:
            shutil.rmtree(self._path, ignore_errors=True)  # what there is of the directory
            self._backup.replace(self._path)

    def remove_backup(self) -> None:
        """Hazard: on rank 0 alone, and the directory is complete, so that nothing may be raised here."""
        try:
            if self._is_moved:
                self._backup.unlink()
        except OSError as error:
            warn_at_caller(f"{self._backup}, in whose place {self._path} is, could not be removed: {error}")


class _ForwardWrapper(torch.nn.Module):
    """Around a module, so that Lightning runs its steps as forward passes: these wait for parameters, share buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


def _clip_grads(method: str, optimizer: Any, limit: float) -> None:
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper around it
    assert isinstance(optimizer, ShardedOptimizer)
    getattr(optimizer, method)(limit)


def _is_same_value(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return bool(one == other)


StrategyRegistry.register(
    ZeroShardStrategy.strategy_name, ZeroShardStrategy, description="optimizer state sharded by zeroshard"
)
