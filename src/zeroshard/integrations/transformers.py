"""Hugging Face Transformers: a `Trainer` that shards its optimizer and does not wrap the model in DDP."""

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
"""Private methods of the base class. A version without them would never call the overrides."""


class Trainer(transformers.Trainer):
    """Transformers' `Trainer` with a sharded optimizer. `TrainingArguments` must not enable FSDP or DeepSpeed.

    A checkpoint has Transformers' usual model files, and a folder to which each rank writes its shard of the optimizer
    state. It loads at any world size.

    Args:
        *args: Passed to Transformers' `Trainer`.
        config: Options of sharding.
        shard_group_size: "node" or the number of ranks to shard over, as in `zeroshard.shard`.
        **options: Passed to Transformers' `Trainer`.
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
                f"the Trainer of Transformers {transformers.__version__} has no {', '.join(missing)}, which zeroshard "
                "overrides. Install a supported version: docs/frameworks.md lists them."
            )
        self._shard_options = (config, shard_group_size)
        super().__init__(*args, **options)
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"zeroshard needs one process per GPU, got one process with {self.args.n_gpu} GPUs. Start the script "
                "with torchrun --nproc-per-node."
            )

    def create_accelerator_and_postprocess(self) -> None:
        conflicts = [name for name in _CONFLICTING_ARGS if getattr(self.args, name, None)]
        if conflicts:
            raise ConfigError(f"zeroshard shards the optimizer itself. Leave out {', '.join(conflicts)}.")
        if getattr(self.args, "ddp_broadcast_buffers", None) is False:
            raise ConfigError(
                "ddp_broadcast_buffers=False has no effect without DDP. Pass ZeroConfig(broadcast_buffers=False)."
            )
        super().create_accelerator_and_postprocess()
        # Hazard: the base class hard-codes the accelerator's class and has already passed on its bound methods. The
        # object must stay; only its class can change.
        self.accelerator.__class__ = Accelerator
        self.accelerator.enable_sharding(*self._shard_options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_checkpoint(Path(output_dir) / SHARD_DIR_NAME, None, self.optimizer.optimizer, step=self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Retarget the scheduler and load. Each training calls this once its optimizer is prepared.

        The scheduler may have been created before, for the plain optimizer.
        """
        retarget_scheduler(self.lr_scheduler, self.optimizer.original_optimizer, self.optimizer.optimizer)
        shard_dir = Path(checkpoint or "") / SHARD_DIR_NAME
        has_shard_dir = checkpoint is not None and self.optimizer.detect_shard_dir(
            shard_dir, shard_dir.with_name(OPTIMIZER_NAME)
        )
        super()._load_optimizer_and_scheduler(checkpoint)
        if has_shard_dir:
            load(shard_dir, optimizer=self.optimizer.optimizer)
