"""Compare the planner's estimate of a rank's memory with the peak that the GPU allocates."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from examples.gpt import Block
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from zeroshard import CPUOffload, ZeroConfig, shard
from zeroshard.planner import Plan, plan

from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, failed_row
from .gpu_speed import Machine

GB = 1e9
TOKENS = 32
"""Few enough that activations do not count."""
BAR = 0.03
BAR_LARGE = 0.05
"""For cases in which the size of buckets matters. A plan allows for two buckets in flight, but fake messages arrive
immediately, so only one is."""
WORLDS = (1, 8, 64)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16 with masters": (torch.bfloat16, torch.float32),
}


class Peaks(NamedTuple):
    """Peak bytes while the optimizer is built, and in training."""

    construction: int
    training: int


class Case(NamedTuple):
    method: str
    precision: str
    world: int
    special: str = ""
    """One of SPECIAL, or none."""

    def __str__(self) -> str:
        return f"{self.method}, {self.precision}, rank 0 of {self.world}{self.special and f', {self.special}'}"

    @property
    def config(self) -> ZeroConfig:
        return ZeroConfig(
            stage=1 if self.method == "zeroshard 1" else 2,
            master_dtype=PRECISIONS[self.precision][1],
            offload=CPUOffload() if self.special == "CPUOffload()" else None,
            reduce_dtype=torch.bfloat16 if self.special == "reduce_dtype=bfloat16" else None,
        )

    @property
    def shard_group_size(self) -> int | None:
        return SHARD_GROUP_SIZE if self.special == SHARD_GROUPS else None

    @property
    def is_padded(self) -> bool:
        return self.special == "padded embeddings"


SHARD_GROUP_SIZE = 8
SHARD_GROUPS = f"shard groups of {SHARD_GROUP_SIZE}"
SPECIAL = {
    SHARD_GROUPS: ("float32", "bfloat16", "bfloat16 with masters"),
    "CPUOffload()": ("float32", "bfloat16 with masters"),
    "reduce_dtype=bfloat16": ("float32",),
    "padded embeddings": ("float32", "bfloat16", "bfloat16 with masters"),
}
"""Special options and their precisions. They run as rank 0 of 8, with shard groups as rank 0 of 64."""


def compare_with_plan(machine: Machine, *, special: bool) -> list[Row]:
    """Measure rank 0. The other ranks do not exist: their messages cost no time and no memory."""
    rows: list[Row] = []
    for case in (case for case in cases() if bool(case.special) == special):
        try:
            (peaks,) = run_ranks(1, _measure, machine, case, backend="none", limit_s=120)
            rows += _rows(machine, case, peaks)
        except Exception as error:
            rows.append(failed_row(str(case), error))
    return rows


def cases() -> list[Case]:
    ours = [Case(f"zeroshard {n}", precision, world) for n in (1, 2) for precision in PRECISIONS for world in WORLDS]
    peers = [
        Case(method, precision, world)
        for method in TRAINERS
        if not method.startswith("zeroshard")
        for precision in ("float32", "bfloat16")
        for world in WORLDS
    ]
    special = [
        Case("zeroshard 2", precision, 64 if name == SHARD_GROUPS else 8, name)
        for name, precisions in SPECIAL.items()
        for precision in precisions
    ]
    return [*ours, *special, *peers]


def _rows(machine: Machine, case: Case, peaks: Peaks) -> list[Row]:
    planned = _plan(machine, case).estimate_for(case.method, case.world).memory.phase_peaks
    training = max(planned["backward"], planned["step"])
    ours_bar = BAR_LARGE if case.is_padded or case.shard_group_size else BAR
    bar = ours_bar if case.method.startswith("zeroshard") and machine.device == "cuda" else None
    rows = [_row(f"training: {case}", training, peaks.training, bar)]
    if case.method.startswith("zeroshard"):
        construction = planned["construction"]
        rows.append(_row(f"making the optimizer: {case}", construction, peaks.construction, bar))
    return rows


def _row(what: str, planned: int, allocated: int, bar: float | None) -> Row:
    error = abs(planned - allocated) / allocated if allocated else 0.0
    return Row(what, f"{planned / GB:.3f} GB planned", f"{allocated / GB:.3f} GB allocated", error, bar=bar)


def _plan(machine: Machine, case: Case) -> Plan:
    with torch.device("meta"):
        model = _make_model(machine, case).to(PRECISIONS[case.precision][0])
    ranks, size = [case.world], case.shard_group_size
    return plan(model, AdamW, ranks=ranks, config=case.config, device=machine.device, shard_group_size=size, lr=1e-4)


def _make_model(machine: Machine, case: Case) -> nn.Sequential:
    """Make a GPT of 1.31 G elements whose head is not tied. Padded cases have sizes that 8 does not divide."""
    width, layers, words = (2048, 22, 50257) if machine.device == "cuda" else (64, 2, 500)
    width, words = (width - 16, words - 2) if case.is_padded else (width, words)
    blocks = [Block(width, 16) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words, bias=False))


def _measure(machine: Machine, case: Case) -> Peaks:
    dtype, _ = PRECISIONS[case.precision]
    with fake_group(case.world):
        with torch.device(machine.device):
            model = _make_model(machine, case).to(dtype)
            ids = torch.randint(0, 500, (1, TOKENS))
        _reset_peak(machine)
        net, optimizer = TRAINERS[case.method](model, case)
        construction = _read_peak(machine)
        for _ in range(3):
            _reset_peak(machine)
            optimizer.zero_grad()
            net(ids).float().square().mean().backward()
            optimizer.step()
        return Peaks(construction, _read_peak(machine))


def _sharded(model: nn.Module, case: Case) -> tuple[nn.Module, Optimizer]:
    return model, shard(model, AdamW, lr=1e-4, config=case.config, shard_group_size=case.shard_group_size)


def _ddp(model: nn.Module, _: Case) -> tuple[nn.Module, Optimizer]:
    return _wrap_in_ddp(model), AdamW(model.parameters(), lr=1e-4)


def _torch_zero(model: nn.Module, _: Case) -> tuple[nn.Module, Optimizer]:
    return _wrap_in_ddp(model), TorchZero(model.parameters(), AdamW, lr=1e-4)


def _wrap_in_ddp(model: nn.Module) -> DistributedDataParallel:
    """Wrap the model. DDP's own reduction needs a result, which fake messages do not have."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, _return_bucket)
    return wrapped


def _return_bucket(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _fsdp2(model: nn.Module, case: Case) -> tuple[nn.Module, Optimizer]:
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[case.precision][0])
    for layer in model.children():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, AdamW(model.parameters(), lr=1e-4)


TRAINERS: dict[str, Callable[[nn.Sequential, Case], tuple[nn.Module, Optimizer]]] = {
    "zeroshard 1": _sharded,
    "zeroshard 2": _sharded,
    "DDP": _ddp,
    "torch ZeRO": _torch_zero,
    "FSDP2": _fsdp2,
}


def _reset_peak(machine: Machine) -> None:
    if machine.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _read_peak(machine: Machine) -> int:
    return torch.cuda.max_memory_allocated() if machine.device == "cuda" else 0
