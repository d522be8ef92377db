"""A tiny model trained in every mode of zeroshard. Results are recorded and compared after later changes.

All operations are exact or elementwise: values come from `random.Random`, matrix products are sums of elementwise
products. So results depend neither on BLAS nor on the number of cores nor on the alignment of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, lr_scheduler

from tests.programs.harness import offload_without_gpu
from tests.recorded.values import digest, flatten
from tests.support.optimizers import Keeper
from tests.support.oracles import rank_order_hook
from zeroshard import (
    CPUOffload,
    FlatShards,
    ParamRule,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    ddp_hooks,
    matrix_params,
    remaining_params,
    shard,
)

STEPS = 20
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
SMALL_BUCKETS = FlatShards(bucket_bytes=100)
"""Several buckets, and parameters that are split."""
DDP_BUCKET_MB = 0.0001
WORDS, WIDTH, INNER = 7, 5, 3


# ---- The model and its data


def make_values(seed: object, *shape: int) -> Tensor:
    """Return multiples of 1/256 between -1 and 1, the same in every version of torch."""
    rng = random.Random(str(seed))
    numel = torch.Size(shape).numel()
    return torch.tensor([int(512 * rng.random()) - 256 for _ in range(numel)]).view(shape) / 256


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight` without BLAS, whose summation order depends on the machine."""
    return (x[..., None] * weight).sum(-2)


class IrregularModel(nn.Module):
    """Odd sizes, a tied weight, transposed, 0-dim and float64 parameters, one without gradients, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.enter = nn.Parameter(torch.empty(WIDTH, INNER))
        self.bias = nn.Parameter(torch.empty(INNER))
        self.leave = nn.Parameter(torch.empty(WIDTH, INNER).t())
        self.scale = nn.Parameter(torch.empty(()))
        self.shift = nn.Parameter(torch.empty(WORDS, dtype=torch.float64))
        self.unused = nn.Parameter(torch.empty(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.centre: Tensor
        self.count: Tensor
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(make_values(name, *param.shape))

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.5)
            self.count.add_(1)
        inner = torch.tanh(multiply(x - self.centre, self.enter) + self.bias)
        return multiply(multiply(inner, self.leave) * self.scale + x, self.head.weight.t()) + self.shift.to(x.dtype)


def compute_loss(net: nn.Module, step: int, pass_number: int = 0, rank: int | None = None) -> Tensor:
    """Return a loss on data that differ between steps, passes and ranks."""
    seed = f"{step} {pass_number} {dist.get_rank() if rank is None else rank}"
    words = make_values(seed, 4).mul(256).long() % WORDS
    loss: Tensor = (net(words).float() - make_values(f"target {seed}", 4, WORDS)).square().mean()
    return loss


def train_without_zeroshard() -> list[Tensor]:
    """Train the model with plain optimizers for a few steps. The results tell machines apart."""
    results: list[Tensor] = []
    for dtype, optimizer_class in ((None, AdamW), (torch.bfloat16, AdamW), (None, Muon)):
        model = IrregularModel().to(dtype)
        is_muon = optimizer_class is Muon
        params = [param for param in model.parameters() if not is_muon or param.dim() == 2]
        optimizer: Any = optimizer_class(params, **(MUON if is_muon else ADAMW))
        for step in range(4):
            torch.autograd.backward(compute_loss(model, step, rank=0))
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results += list(model.parameters())
    return results


@cache
def environment() -> dict[str, str]:
    """Return what the bits of results depend on: torch, and the results of a few steps without zeroshard."""
    return {
        "torch": torch.__version__,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "plain training": digest(
            torch.cat([param.detach().double().reshape(-1) for param in train_without_zeroshard()])
        ),
    }


# ---- One training run


@dataclass
class Training:
    """A model, the module whose forward pass is called (DDP or the model), and the optimizer."""

    model: nn.Module
    net: nn.Module
    optimizer: Any
    no_sync: Callable[[], AbstractContextManager[Any]]
    steps_in_backward: bool = False

    def __post_init__(self) -> None:
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self, number: int) -> None:
        """Run one step. Some steps accumulate, inside `no_sync()` or over passes that communicate, and some clip."""
        if number % 5 == 1:
            with self.no_sync():
                torch.autograd.backward(compute_loss(self.net, number, 1))
        if number % 5 == 3 and not self.steps_in_backward:
            torch.autograd.backward(compute_loss(self.net, number, 2))
        torch.autograd.backward(compute_loss(self.net, number))
        if not self.steps_in_backward:
            if number % 4 == 2:
                self.optimizer.clip_grad_norm_(0.5)
            if number == 9:
                self.optimizer.clip_grad_value_(0.05)
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=number % 3 != 0)

    def train(self, steps: int = STEPS) -> None:
        for number in range(steps):
            self.step(number)

    def parts(self) -> dict[str, Any]:
        """Return the arguments of `checkpoint.save` and `checkpoint.load`."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def values(self) -> dict[str, Any]:
        """Return parameters, buffers, state and options on rank 0, parameters on other ranks. Call on all ranks."""
        state_dict = self.optimizer.full_state_dict()
        if state_dict is None:
            return flatten({name: param.detach() for name, param in self.model.named_parameters()}, "model")
        return flatten(dict(self.model.state_dict()), "model") | flatten(state_dict, "optimizer")

    def digests(self) -> dict[str, str]:
        """Return digests of all values and of the scheduler's state. Call on all ranks."""
        found = self.values() | flatten(self.scheduler.state_dict(), "scheduler")
        return {name: digest(value) for name, value in found.items()}


# ---- The modes


@dataclass(frozen=True)
class Mode:
    build: Callable[[nn.Module], Training]
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    dtype: torch.dtype | None = None
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    make_model: Callable[[], nn.Module] = IrregularModel
    tolerance: float = 1e-4
    """Relative to the largest value of a tensor; used if the environment is not the recorded one."""

    @contextmanager
    def training(self, prepare: Callable[[nn.Module], object] = lambda _: None) -> Iterator[Training]:
        """Set up the model and its optimizer. `prepare` is called with the model before it is sharded."""
        with self.context():
            model = self.make_model().to(self.dtype)
            prepare(model)
            yield self.build(model)


def with_shard(
    config: ZeroConfig,
    optimizer: Any = AdamW,
    params: Callable[[nn.Module], Any] = lambda _: None,
    *,
    shard_group_size: int | None = None,
    **options: Any,
) -> Callable[[nn.Module], Training]:
    def build(model: nn.Module) -> Training:
        zero = shard(
            model, optimizer, params=params(model), shard_group_size=shard_group_size, config=config, **options
        )
        return Training(model, model, zero, zero.no_sync)

    return build


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.named_parameters()
    return [{"params": rest}, {"params": [first], "lr": 0.02, "weight_decay": 0.0}]


def with_drop_in(
    connect: Callable[[DistributedDataParallel, ZeroRedundancyOptimizer], Any],
    config: ZeroConfig = ZeroConfig(allow_mixed_dtypes=True),  # noqa: B008 (frozen)
    **options: Any,
) -> Callable[[nn.Module], Training]:
    """Return a builder of the drop-in under DDP. `connect` returns DDP's communication hook."""

    def build(model: nn.Module) -> Training:
        ddp = DistributedDataParallel(model, bucket_cap_mb=DDP_BUCKET_MB, find_unused_parameters=True)
        zero = ZeroRedundancyOptimizer(two_groups(model), AdamW, config=config, **options, **ADAMW)
        ddp.register_comm_hook(None, connect(ddp, zero))
        return Training(model, ddp, zero, ddp.no_sync, options.get("overlap_with_ddp", False))

    return build


def average_hook(_: DistributedDataParallel, __: ZeroRedundancyOptimizer) -> Any:
    return rank_order_hook


def overlap_hook(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> Any:
    return ddp_hooks.hook_with_zero_step(rank_order_hook, ddp, zero)


def interleaved_overlap_hook(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> Any:
    return ddp_hooks.hook_with_zero_step_interleaved(rank_order_hook, ddp, zero, shard_buckets=True)


RULES = [ParamRule(matrix_params(exclude=("embed", "head")), Muon, **MUON), ParamRule(remaining_params, AdamW, **ADAMW)]
MODES: dict[str, Mode] = {
    "stage 2": Mode(with_shard(ZeroConfig(partition=SMALL_BUCKETS), **ADAMW)),
    "stage 1": Mode(with_shard(ZeroConfig(partition=SMALL_BUCKETS, stage=1), params=two_groups, **ADAMW)),
    "overlap_gather": Mode(with_shard(ZeroConfig(partition=SMALL_BUCKETS, overlap_param_gather=True), **ADAMW)),
    "hybrid": Mode(with_shard(ZeroConfig(partition=SMALL_BUCKETS), shard_group_size=2, **ADAMW), (4,)),
    "whole params": Mode(with_shard(ZeroConfig(partition=WholeParams()), **ADAMW)),
    "rules": Mode(with_shard(ZeroConfig(), RULES), tolerance=2e-2),  # Muon computes in bfloat16
    "master weights": Mode(
        with_shard(ZeroConfig(partition=SMALL_BUCKETS, master_dtype=torch.float32), **ADAMW),
        dtype=torch.bfloat16,
        tolerance=5e-2,
    ),
    "bfloat16 on the wire": Mode(
        with_shard(ZeroConfig(partition=SMALL_BUCKETS, reduce_dtype=torch.bfloat16), **ADAMW), tolerance=2e-2
    ),
    "offload": Mode(
        with_shard(ZeroConfig(partition=SMALL_BUCKETS, offload=CPUOffload()), **ADAMW), context=offload_without_gpu
    ),
    "drop-in": Mode(with_drop_in(average_hook)),
    "drop-in, bucket view": Mode(with_drop_in(average_hook, parameters_as_bucket_view=True)),
    "drop-in, flat": Mode(with_drop_in(average_hook, ZeroConfig(partition=SMALL_BUCKETS, allow_mixed_dtypes=True))),
    "ddp_hook": Mode(
        with_drop_in(lambda _, zero: zero.ddp_hook(), ZeroConfig(partition=SMALL_BUCKETS, allow_mixed_dtypes=True))
    ),
    "overlap hook": Mode(with_drop_in(overlap_hook, overlap_with_ddp=True)),
    "overlap hook, interleaved": Mode(with_drop_in(interleaved_overlap_hook, overlap_with_ddp=True)),
}


# ---- Modes whose checkpoints are recorded


class KeeperWithCodes(Keeper):
    """Nested state of all supported types, and 8-bit state with a scale."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            scale = state["buffer"].abs().max() / 127 + 1e-6
            state["coded"] = {"codes": (state["buffer"] / scale + 128).to(torch.uint8), "scale": scale}


class LargeModel(IrregularModel):
    """A model with a parameter that is large enough for torchao to quantize its state."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(make_values("large", 64, 64))

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + self.large[words, :WORDS]


def with_quantized_state(model: nn.Module) -> Training:
    return with_shard(ZeroConfig(), import_module("torchao.optim").AdamW8bit, lr=0.05, eps=1e-3)(model)


@contextmanager
def without_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


SAVED_AT = 6
"""The number of steps before a recorded checkpoint was saved."""
SAVED: dict[str, Mode] = {
    **{name: MODES[name] for name in ("stage 2", "stage 1", "hybrid", "rules", "master weights")},
    "nested state": Mode(with_shard(ZeroConfig(), KeeperWithCodes, lr=0.05)),
    "quantized state": Mode(with_quantized_state, context=without_compiler, make_model=LargeModel),
}
"""Modes whose checkpoints are saved with `zeroshard.checkpoint.save`."""
DROP_IN = "drop-in"
"""The mode whose state dict is saved with `torch.save`."""


def saved_by(name: str) -> int:
    """Return the number of ranks that saved the checkpoint."""
    return 2 if 2 in SAVED[name].world_sizes else 4


def extra(rank: int) -> dict[str, Any]:
    """Return the `extra` argument that this rank passes to `save`."""
    return {"rank": rank, "note": [1, None, 2.5]}


def loads_as(name: str, world_size: int) -> Mode:
    """Return the mode in which a checkpoint is loaded."""
    return SAVED[name] if world_size in SAVED[name].world_sizes else MODES["stage 2"]
