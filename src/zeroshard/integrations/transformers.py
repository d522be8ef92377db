"""Transformers: a `Trainer` whose optimizer is sharded, and whose model is wrapped in nothing."""

from pathlib import Path
from typing import Any

try:
    import transformers
    from transformers.trainer import OPTIMIZER_NAME
except ImportError as error:
    raise ImportError(
        "zeroshard.integrations.transformers needs Transformers: pip install 'transformers>=5.22' 'accelerate>=1.13'"
    ) from error

from ..checkpoint import load
from ..comm.mesh import ShardGroupSize
from ..config import ZeroConfig
from ..errors import ConfigError
from ._common import retarget_scheduler, write_checkpoint
from .accelerate import SHARD_DIR_NAME, Accelerator

_CONFLICTING_ARGS = ("fsdp", "deepspeed", "parallelism_config")
_OVERRIDDEN_METHODS = (
    "create_accelerator_and_postprocess",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
"""Methods that a base class without them would never call."""


class Trainer(transformers.Trainer):
    """Takes the arguments of Transformers' `Trainer`, and `TrainingArguments` without FSDP and DeepSpeed.

    Checkpoints have the model as always, and a folder to which every rank writes its part of the optimizer's state;
    they load at any number of ranks.

    Args:
        config: how to shard.
        shard_group_size: "node" or a number of ranks that share the state, as for `zeroshard.shard`.
    """

    def __init__(
        self,
        *args: Any,
        config: ZeroConfig | None = None,
        shard_group_size: ShardGroupSize | None = None,
        **options: Any,
    ) -> None:
        missing = [name for name in _OVERRIDDEN_METHODS if not hasattr(transformers.Trainer, name)]
        if missing:
            raise ConfigError(
                f"the Trainer of Transformers {transformers.__version__} has no {', '.join(missing)}, in the place of "
                "which zeroshard shards, saves and loads. Take a version that its page on frameworks names."
            )
        self._shard_options = (config, shard_group_size)
        super().__init__(*args, **options)
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"one process has {self.args.n_gpu} GPUs here, and zeroshard needs one for each: start the script with "
                "torchrun --nproc-per-node"
            )

    def create_accelerator_and_postprocess(self) -> None:
        others = [name for name in _CONFLICTING_ARGS if getattr(self.args, name, None)]
        if others:
            raise ConfigError(f"zeroshard shards the optimizer itself: leave {', '.join(others)} out of the arguments")
        if getattr(self.args, "ddp_broadcast_buffers", None) is False:
            raise ConfigError(
                "there is no DDP: for ddp_broadcast_buffers=False give ZeroConfig(broadcast_buffers=False)"
            )
        super().create_accelerator_and_postprocess()
        # Hazard: the base class names the class of its accelerator itself, and has handed out methods of it already.
        self.accelerator.__class__ = Accelerator
        self.accelerator.enable_sharding(*self._shard_options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_checkpoint(Path(output_dir) / SHARD_DIR_NAME, None, self.optimizer.optimizer, step=self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called in each training, when the optimizer is prepared. A scheduler may have been made before that."""
        retarget_scheduler(self.lr_scheduler, self.optimizer.replaced, self.optimizer.optimizer)
        folder = Path(checkpoint or "") / SHARD_DIR_NAME
        is_apart = checkpoint is not None and self.optimizer.detect_shard_dir(folder, folder.with_name(OPTIMIZER_NAME))
        super()._load_optimizer_and_scheduler(checkpoint)
        if is_apart:
            load(folder, optimizer=self.optimizer.optimizer)
