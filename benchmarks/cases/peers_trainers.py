"""The contestants: trainers of one model on several ranks, all with the same interface."""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

from ..harness.models import Recipe
from ..harness.workloads import Workload


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Trainer:
    """The functions that a training loop calls, and values to measure."""

    loss: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], object]
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    params: Callable[[], list[Tensor]]
    """Returns all full parameters in the model's order. Call on all ranks."""
    state: Callable[[], Iterable[Any]]
    """Returns the optimizer state of this rank, nested in any containers."""
    finish: Callable[[], object] = _do_nothing
    """Waits for messages that the last step left in flight."""

    def iterate(self, batch: Tensor) -> None:
        self.backward(self.loss(batch))
        self.step()
        self.zero_grad()

    def state_bytes(self) -> int:
        return _bytes(self.state())


Make = Callable[[nn.Module, Workload, Recipe], Trainer]


@dataclass(frozen=True)
class Contestant:
    """A function that makes a trainer, and one that imports what the trainer needs."""

    make: Make
    load: Callable[[], object] = _do_nothing

    def find_error(self) -> str | None:
        """Return why it cannot run here, or None if it can."""
        try:
            self.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def ddp(model: nn.Module, _: Workload, recipe: Recipe) -> Trainer:
    wrapped = DistributedDataParallel(model)
    optimizer = recipe.plain(list(wrapped.parameters()))
    return _trainer(wrapped, optimizer)


def torch_zero(model: nn.Module, _: Workload, recipe: Recipe, *, bucket_view: bool = False) -> Trainer:
    wrapped = DistributedDataParallel(model)
    optimizer = TorchZero(wrapped.parameters(), recipe.make, parameters_as_bucket_view=bucket_view, **recipe.options)
    return _trainer(wrapped, optimizer)


def fairscale(model: nn.Module, _: Workload, recipe: Recipe) -> Trainer:
    sharded_ddp, oss = _fairscale()
    optimizer = oss(model.parameters(), optim=recipe.make, **recipe.options)
    wrapped = sharded_ddp(model, optimizer)
    # The optimizer's own `zero_grad` would detach gradients from their buckets.
    return replace(_trainer(wrapped, optimizer), zero_grad=partial(wrapped.zero_grad, set_to_none=True))


def deepspeed(model: nn.Module, _: Workload, recipe: Recipe, *, stage: int) -> Trainer:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = recipe.plain(list(model.parameters()))
    engine, wrapped, *_ = _deepspeed().initialize(model=model, optimizer=optimizer, config=config)
    return Trainer(
        loss=engine,
        backward=engine.backward,
        step=engine.step,
        zero_grad=_do_nothing,
        params=lambda: list(model.parameters()),
        state=lambda: (wrapped.optimizer.state.values(), wrapped.single_partition_of_fp32_groups),
    )


def fsdp2(model: nn.Module, workload: Workload, recipe: Recipe) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*workload.layers(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    optimizer = recipe.plain(list(model.parameters()))

    def params() -> list[Tensor]:
        return [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]

    return replace(_trainer(model, optimizer), params=params)


def dropin(model: nn.Module, _: Workload, recipe: Recipe, *, flat: bool = False) -> Trainer:
    zeroshard = _zeroshard()
    wrapped = DistributedDataParallel(model)
    config = {"config": zeroshard.ZeroConfig(partition=zeroshard.FlatShards())} if flat else {}
    optimizer = zeroshard.ZeroRedundancyOptimizer(wrapped.parameters(), recipe.make, **config, **recipe.options)
    return _trainer(wrapped, optimizer)


def flat(
    model: nn.Module, _: Workload, recipe: Recipe, *, stage: Literal[1, 2], overlap_param_gather: bool = False
) -> Trainer:
    zeroshard = _zeroshard()
    config = zeroshard.ZeroConfig(stage=stage, overlap_param_gather=overlap_param_gather)
    optimizer = zeroshard.shard(model, recipe.make, config=config, **recipe.options)
    return replace(_trainer(model, optimizer), finish=optimizer.wait_for_params)


def _trainer(model: nn.Module, optimizer: Any) -> Trainer:
    """Make a trainer for an optimizer that has the state itself, or in an attribute `optim`."""
    return Trainer(
        loss=model,
        backward=Tensor.backward,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        params=lambda: list(model.parameters()),
        state=lambda: list(getattr(optimizer, "optim", optimizer).state.values()),
    )


def _fairscale() -> tuple[Any, Any]:
    return (
        import_module("fairscale.nn.data_parallel").ShardedDataParallel,
        import_module("fairscale.optim.oss").OSS,
    )


def _deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    module = import_module("deepspeed")
    import_module("deepspeed.ops").__compatible_ops__.clear()  # do not compile an op that only inference uses
    import_module("deepspeed.utils").logger.setLevel(logging.ERROR)
    return module


def _zeroshard(*names: str) -> Any:
    """Import zeroshard. Raise if it does not have these names."""
    module = import_module("zeroshard")
    for name in names:
        getattr(module, name)
    return module


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(getattr(value, "_local_tensor", value).nbytes)
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0


BASELINE = "DDP + AdamW"
CONTESTANTS: dict[str, Contestant] = {
    BASELINE: Contestant(ddp),
    "torch ZeRO": Contestant(torch_zero),
    "torch ZeRO, bucket view": Contestant(partial(torch_zero, bucket_view=True)),
    "fairscale OSS": Contestant(fairscale, _fairscale),
    "DeepSpeed 1": Contestant(partial(deepspeed, stage=1), _deepspeed),
    "DeepSpeed 2": Contestant(partial(deepspeed, stage=2), _deepspeed),
    "FSDP2": Contestant(fsdp2),
    "zeroshard drop-in": Contestant(dropin, _zeroshard),
    "zeroshard drop-in, flat": Contestant(partial(dropin, flat=True), partial(_zeroshard, "ZeroConfig", "FlatShards")),
    "zeroshard ZeRO-1": Contestant(partial(flat, stage=1), partial(_zeroshard, "shard")),
    "zeroshard ZeRO-2": Contestant(partial(flat, stage=2), partial(_zeroshard, "shard")),
    "zeroshard ZeRO-2, overlap": Contestant(
        partial(flat, stage=2, overlap_param_gather=True), partial(_zeroshard, "shard")
    ),
}
FLAT = ("zeroshard ZeRO-1", "zeroshard ZeRO-2", "zeroshard ZeRO-2, overlap")
PEERS = tuple(name for name in CONTESTANTS if not name.startswith("zeroshard"))
