"""What `plan` says of a rank's memory against what the GPU has allocated at most."""

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
"""So few that activations do not count."""
BAR = 0.03
BAR_LARGE = 0.05
"""A plan allows for two buckets under way, and messages that arrive at once leave one there: where that is much."""
WORLDS = (1, 8, 64)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16 with masters": (torch.bfloat16, torch.float32),
}


class Found(NamedTuple):
    """Bytes at most."""

    making: int
    training: int


class Case(NamedTuple):
    method: str
    precision: str
    world: int
    special: str = ""
    """One of SPECIAL."""

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
        return ROW if self.special == ROWS else None

    @property
    def is_padded(self) -> bool:
        return self.special == "embeddings that are padded"


ROW = 8
ROWS = f"in rows of {ROW}"
SPECIAL = {
    ROWS: ("float32", "bfloat16", "bfloat16 with masters"),
    "CPUOffload()": ("float32", "bfloat16 with masters"),
    "reduce_dtype=bfloat16": ("float32",),
    "embeddings that are padded": ("float32", "bfloat16", "bfloat16 with masters"),
}
"""What is tried beside the rest, and with what precision: on rank 0 of 8, and of 64 in rows."""


def against_plan(machine: Machine, *, special: bool) -> list[Row]:
    """Rank 0 of so many; messages of those that do not exist cost nothing and take no memory."""
    rows: list[Row] = []
    for case in (it for it in cases() if bool(it.special) == special):
        try:
            (found,) = run_ranks(1, _measured, machine, case, backend="none", limit_s=120)
            rows += _rows(machine, case, found)
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
        Case("zeroshard 2", precision, 64 if it == ROWS else 8, it)
        for it, tried in SPECIAL.items()
        for precision in tried
    ]
    return [*ours, *special, *peers]


def _rows(machine: Machine, case: Case, found: Found) -> list[Row]:
    usage = _plan(machine, case).estimate_for(case.method, case.world).memory
    training = max(usage.phase_peaks["backward"], usage.phase_peaks["step"])
    strict = BAR_LARGE if case.is_padded or case.shard_group_size else BAR
    bar = strict if case.method.startswith("zeroshard") and machine.device == "cuda" else None
    rows = [_row(f"training: {case}", training, found.training, bar)]
    if case.method.startswith("zeroshard"):
        rows.append(_row(f"making the optimizer: {case}", usage.phase_peaks["making the optimizer"], found.making, bar))
    return rows


def _row(what: str, said: int, found: int, bar: float | None) -> Row:
    off = abs(said - found) / found if found else 0.0
    return Row(what, f"{said / GB:.3f} GB planned", f"{found / GB:.3f} GB allocated", off, bar=bar)


def _plan(machine: Machine, case: Case) -> Plan:
    with torch.device("meta"):
        model = _model(machine, case).to(PRECISIONS[case.precision][0])
    ranks, row = [case.world], case.shard_group_size
    return plan(model, AdamW, ranks=ranks, config=case.config, device=machine.device, shard_group_size=row, lr=1e-4)


def _model(machine: Machine, case: Case) -> nn.Sequential:
    """1.31 G elements; the head has a matrix of its own. With other sizes it is not divisible by 8."""
    width, layers, words = (2048, 22, 50257) if machine.device == "cuda" else (64, 2, 500)
    width, words = (width - 16, words - 2) if case.is_padded else (width, words)
    blocks = [Block(width, 16) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words, bias=False))


def _measured(machine: Machine, case: Case) -> Found:
    dtype, _ = PRECISIONS[case.precision]
    with fake_group(case.world):
        with torch.device(machine.device):
            model = _model(machine, case).to(dtype)
            ids = torch.randint(0, 500, (1, TOKENS))
        _reset(machine)
        trained, optimizer = TRAINERS[case.method](model, case)
        making = _peak(machine)
        for _ in range(3):
            _reset(machine)
            optimizer.zero_grad()
            trained(ids).float().square().mean().backward()
            optimizer.step()
        return Found(making, _peak(machine))


def _sharded(model: nn.Module, case: Case) -> tuple[nn.Module, Optimizer]:
    return model, shard(model, AdamW, lr=1e-4, config=case.config, shard_group_size=case.shard_group_size)


def _ddp(model: nn.Module, _: Case) -> tuple[nn.Module, Optimizer]:
    return _wrapped(model), AdamW(model.parameters(), lr=1e-4)


def _torch_zero(model: nn.Module, _: Case) -> tuple[nn.Module, Optimizer]:
    return _wrapped(model), TorchZero(model.parameters(), AdamW, lr=1e-4)


def _wrapped(model: nn.Module) -> DistributedDataParallel:
    """Its own reduction wants a result, which fake messages do not have."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, _arrived)
    return wrapped


def _arrived(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
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


def _reset(machine: Machine) -> None:
    if machine.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak(machine: Machine) -> int:
    return torch.cuda.max_memory_allocated() if machine.device == "cuda" else 0
