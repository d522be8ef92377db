"""Optimizers to shard: unusual ones for tests, torch's own, and third-party ones with the page that lists them."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.oracles import assert_same
from tests.support.pool import RankContext
from zeroshard import (
    CheckpointError,
    ConfigError,
    FlatShards,
    ShardedOptimizer,
    broadcast_object,
    checkpoint,
    shard,
)

# ---- State of every kind


class Keeper(Optimizer):
    """SGD with momentum whose state also holds all kinds of containers and plain values."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["buffer"] = param.grad + state.get("buffer", 0)
                    state.update(_containers(param, self.calls))
                    param.sub_(state["buffer"], alpha=group["lr"])


def _containers(param: torch.Tensor, calls: int) -> dict[str, Any]:
    return {
        "list": [param.square(), calls, None, ["deep", param.sum()]],
        "tuple": (param.abs(), "text"),
        "ordered": OrderedDict(z=1, a=param.exp()),
        "nested": {"deep": {"deeper": param.sum(), 3: "three"}},
        "text": f"call {calls}",
        "raw": bytes([0, calls]),
        "flag": True,
        "none": None,
        "number": 0.1 * calls,
        "complex": 1j * calls,
        "dtype": torch.bfloat16,
        "size": torch.Size([calls, 2]),
        "set": {1, calls},
        "empty": [(), {}, "", torch.empty(0, 2)],
        "integers": torch.arange(calls),
        "flags": torch.tensor([True, False]),
        "half": param.half(),
    }


# ---- Blockwise updates


class Blocks(Optimizer):
    """SGD with momentum, which is divided by its largest absolute value in each block.

    Parameters that are small, or that cannot be divided into blocks, are updated by the momentum itself.
    """

    def __init__(self, params: Any, lr: float = 0.1, block: int = 256, least: int = 512) -> None:
        super().__init__(params, {"lr": lr, "block": block, "least": least})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, param.grad, group["block"], group["least"]), alpha=group["lr"])

    def direction(self, param: Tensor, grad: Tensor, block: int, least: int) -> Tensor:
        momentum: Tensor = self.state[param].setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad)
        if param.numel() < least or param.numel() % block:
            return momentum.clone()
        blocks = momentum.reshape(-1, block)
        return (blocks / (blocks.abs().amax(1, keepdim=True) + 1e-3)).reshape(param.shape)


# ---- Updates that assign `param.data`

Closure = Callable[[], Any]


class Assigning(torch.optim.Optimizer):
    """SGD that replaces the storage of its parameters and momenta in every step."""

    becomes: dict[str, Any] | None = None
    """Arguments of `.to()` for the new `.data` in the next step only."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        conversion, self.becomes = self.becomes or {}, None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].get("momentum_buffer", torch.zeros_like(param))
                    update = self.state[param]["momentum_buffer"] = momentum * group["momentum"] + param.grad
                    param.data = (param.data - group["lr"] * update).to(**conversion)
        return loss


class Sam(torch.optim.Optimizer):
    """SAM: updates with gradients at a nearby point. Restores the parameters by assignment, as published code does."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        closure = torch.enable_grad()(closure or _keep_grads)
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old_p"] = param.data.clone()
                    param.add_(param.grad.sign(), alpha=group["rho"])
        loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = self.state[param]["old_p"]
                    param.add_(param.grad, alpha=-group["lr"])
        return loss


def _keep_grads() -> None:
    """Leave gradients unchanged. Used as a closure."""


# ---- Optimizer classes that docs/optimizers.md lists


@dataclass(frozen=True)
class Case:
    """An optimizer class, its options and how to test it."""

    package: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "Branches"
    """A class of this file."""
    eager: bool = False
    """Run without the compiler: the class compiles its steps, which takes many seconds per shape."""
    is_refused: bool = False
    """Whether it is rejected, because it would be wrong when sharded."""
    by_dimensions: str = ""
    """A group option that is true for matrices and false for other parameters."""

    @property
    def title(self) -> str:
        return f"{self.package}.{self.name}"

    def load_class(self) -> Any:
        """Import the optimizer class. Raise ImportError if it is not installed."""
        *path, name = self.name.split(".")
        return getattr(importlib.import_module(".".join([self.package, *path])), name)

    def copy_options(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.options))

    def params_for(self, model: nn.Module) -> list[Any]:
        """Return the parameters or groups of a model."""
        params = list(model.parameters())
        if not self.by_dimensions:
            return params
        groups = {
            is_matrix: [param for param in params if (param.dim() > 1) is is_matrix] for is_matrix in (True, False)
        }
        return [{"params": group, self.by_dimensions: is_matrix} for is_matrix, group in groups.items()]

    def make_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = globals()[self.model]()
        return model


class Branches(nn.Module):
    """Small parameters, and large ones whose size is or is not a multiple of 256."""

    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Sequential(nn.Linear(48, 256, self.bias), nn.Tanh(), nn.Linear(256, 18, self.bias))
        self.odd = nn.Sequential(nn.Linear(48, 211, self.bias), nn.Tanh(), nn.Linear(211, 18, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.even(x) + self.odd(x)
        return out

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        out = self(torch.randn(8, 48, generator=generator))
        loss: Tensor = (out - torch.randn(8, 18, generator=generator)).square().mean()
        return loss


class Matrices(Branches):
    """Has only matrices."""

    bias = False


class SparseEmbedding(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        loss: Tensor = self.embedding(torch.randint(20, (7,), generator=generator)).square().sum()
        return loss


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


TORCH = [
    Case("torch", "optim.SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    Case("torch", "optim.Adam", {"lr": 0.01, "amsgrad": True}),
    Case("torch", "optim.AdamW", {"lr": 0.01}),
    Case("torch", "optim.NAdam", {"lr": 0.01}),
    Case("torch", "optim.RAdam", {"lr": 0.01}),
    Case("torch", "optim.Adamax", {"lr": 0.01}),
    Case("torch", "optim.Adagrad", {"lr": 0.01}),
    Case("torch", "optim.Adadelta", {"lr": 0.5}),
    Case("torch", "optim.RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    Case("torch", "optim.Rprop", {"lr": 0.01}),
    Case("torch", "optim.ASGD", {"lr": 0.01, "t0": 1.0}),
    Case("torch", "optim.Adafactor", {"lr": 0.01}),
    Case("torch", "optim.Muon", {"lr": 0.01}, model="Matrices"),
    Case("torch", "optim.SparseAdam", {"lr": 0.01}, model="SparseEmbedding", is_refused=True),
    Case("torch", "optim.LBFGS", {"lr": 0.1}, is_refused=True),
]
TORCHAO = [
    Case("torchao", f"optim.{name}", {"lr": 0.01, **options}, eager=True)
    for name, options in [
        ("AdamW8bit", {"weight_decay": 0.1}),
        ("Adam8bit", {}),
        ("AdamW4bit", {}),
        ("AdamWFp8", {}),
    ]
]
BITSANDBYTES = [Case("bitsandbytes", f"optim.{name}", {"lr": 0.01}) for name in ("AdamW8bit", "Lion8bit", "AdamW")]
SCHEDULEFREE = [
    Case("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "warmup_steps": 2}),
    Case("schedulefree", "SGDScheduleFree", {"lr": 0.1}),
    Case("schedulefree", "RAdamScheduleFree", {"lr": 0.01}),
]
PRODIGY = [Case("prodigyopt", "Prodigy", is_refused=True)]
COLLECTION = [
    *(
        Case("pytorch_optimizer", name, {"lr": lr})
        for name, lr in [
            *[
                ("Lion", 0.001),
                ("Tiger", 0.001),
                ("AdaBelief", 0.01),
                ("Adan", 0.01),
                ("ADOPT", 0.01),
                ("AdEMAMix", 0.01),
            ],
            *[
                ("ScheduleFreeAdamW", 0.01),
                ("ScheduleFreeSGD", 0.1),
                ("StableAdamW", 0.01),
                ("Lamb", 0.01),
                ("LARS", 0.1),
            ],
            *[("AdaFactor", 0.01), ("CAME", 0.01), ("SM3", 0.1), ("Shampoo", 0.01), ("ScalableShampoo", 0.01)],
        ]
    ),
    Case("pytorch_optimizer", "SOAP", {"lr": 0.01, "precondition_frequency": 2}),
    Case("pytorch_optimizer", "Muon", {"lr": 0.01}, by_dimensions="use_muon"),
    Case("pytorch_optimizer", "Ranger21", {"lr": 0.01, "num_iterations": 20}, is_refused=True),
    Case("pytorch_optimizer", "SophiaH", {"lr": 0.01}, is_refused=True),
    Case("pytorch_optimizer", "Prodigy", is_refused=True),
]
CASES = [*TORCH, *TORCHAO, *BITSANDBYTES, *SCHEDULEFREE, *PRODIGY, *COLLECTION]


# ---- Compare an optimizer that is sharded over 1, 2 and 3 ranks with the unsharded one

WORLD_SIZES = (1, 2, 3)
STEPS = 3
STEPS_AFTER_LOAD = 2
BITWISE = "bitwise"
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """The result of a case: its cells on the page."""

    partition: str
    training: str = NOTHING
    state: str = NOTHING


def compare_with_unsharded(ctx: RankContext, case: Case, folder: Path) -> Report:
    """Test a case on 3 ranks. Raise if the optimizer is accepted but its results are not bit-identical."""
    groups = {size: dist.new_group(list(range(size))) for size in WORLD_SIZES}
    stance: Any = torch.compiler.set_stance("force_eager") if case.eager else nullcontext()
    with stance, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runs = {size: ShardedRun(case, size, groups[size]) for size in reversed(WORLD_SIZES) if ctx.rank < size}
        except ConfigError as error:
            return Report(f"refused: {_first_sentence(error)}")
        for run in runs.values():
            run.train(STEPS)
            run.switch_modes()
        partition = _describe_partition(runs[3].zero)
        _check_partition(runs[3].zero, partition)
        try:
            runs[3].zero.full_state_dict()
        except CheckpointError as error:
            return Report(partition, BITWISE, f"refused: {_rejected_type(error)}")
        _check_state_dict(case, runs)
        _check_checkpoint(runs, groups[2] if ctx.rank < 2 else None, folder)
        return Report(partition, BITWISE, BITWISE)


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0]


def _rejected_type(error: Exception) -> str:
    match = re.search(r"an? \w+ cannot be sent safely", str(error))
    assert match, error
    return match.group()


def _describe_partition(zero: ShardedOptimizer) -> str:
    (partition,) = zero._builder.partitioning.partitioners
    if not isinstance(partition, FlatShards):
        return "whole parameters"
    granularity = partition.granularity
    assert granularity is not None, "the probe must find a granularity"
    if granularity.is_elementwise:
        return "cut anywhere"
    return f"cut at multiples of {granularity.align}, into pieces of {granularity.min_numel} or more"


def _check_partition(zero: ShardedOptimizer, partition: str) -> None:
    """Check that the layout splits parameters if the description says so, and only then."""
    num_shards = [len(zero.layout.param_shards(spec.index)) for spec in zero.layout.params]
    assert (max(num_shards) > 1) == partition.startswith("cut"), (num_shards, partition)


class UnshardedRun:
    """The unsharded optimizer, trained with the mean gradients of some ranks. It is the same on each rank."""

    def __init__(self, case: Case) -> None:
        self.model, self.steps = case.make_model(0), 0
        self.optimizer = case.load_class()(case.params_for(self.model), **case.copy_options())
        _set_mode(self.optimizer, "train")

    def train(self, steps: int, ranks: int) -> None:
        for _ in range(steps):
            set_mean_grads(self.model, self.steps, ranks)
            self.optimizer.step()
            self.steps += 1

    def switch_modes(self) -> None:
        _set_mode(self.optimizer, "eval")
        _set_mode(self.optimizer, "train")


class ShardedRun:
    """A model whose optimizer is sharded over some ranks, and the unsharded run to compare it with."""

    def __init__(self, case: Case, size: int, group: dist.ProcessGroup) -> None:
        self._size, self._rank = size, dist.get_rank(group)
        self.plain, self.model = UnshardedRun(case), case.make_model(self._rank)
        params, options = case.params_for(self.model), case.copy_options()
        self.zero = shard(self.model, case.load_class(), params=params, process_group=group, **options)
        _set_mode(self.zero, "train")

    def train(self, steps: int) -> None:
        """Train both. Check after each step that all parameters are bit-identical."""
        for _ in range(steps):
            backward(self.model, self.plain.steps, self._rank)
            self.zero.step()
            self.zero.zero_grad()
            self.plain.train(1, self._size)
            self.compare()

    def switch_modes(self) -> None:
        """Switch both to evaluation and back to training. Compare the parameters in both modes."""
        for mode in ("eval", "train"):
            _set_mode(self.plain.optimizer, mode)
            _set_mode(self.zero, mode)
            self.compare()

    def compare(self) -> None:
        assert_same(self.model.state_dict(), self.plain.model.state_dict(), f"the model after {self.plain.steps} steps")


def _set_mode(optimizer: Any, mode: str) -> None:
    """Set the mode of a schedule-free optimizer. Others have no modes."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss: Any = model.loss
    loss(100 * step + rank).backward()


def set_mean_grads(model: nn.Module, step: int, ranks: int) -> None:
    """Set gradients to the mean over all ranks, summed in rank order."""
    means: list[torch.Tensor] = []
    for rank in range(ranks):
        model.zero_grad()
        backward(model, step, rank)
        grads = [param.grad * (1 / ranks) for param in model.parameters() if param.grad is not None]
        means = [a + b for a, b in zip(means, grads, strict=True)] if means else grads
    for param, mean in zip(model.parameters(), means, strict=True):
        param.grad = mean


def _check_state_dict(case: Case, runs: dict[int, ShardedRun]) -> None:
    """Load state dicts from 2 ranks on 3 ranks, and from there into the unsharded optimizer."""
    runs[3].plain = _train_for_two_ranks(case)
    state = (runs[2].zero.full_state_dict(), runs[2].model.state_dict()) if 2 in runs else None
    optimizer_state, weights = broadcast_object(state, 0)
    runs[3].model.load_state_dict(weights)
    runs[3].zero.load_state_dict(optimizer_state)
    runs[3].train(STEPS_AFTER_LOAD)
    runs[3].plain.optimizer.load_state_dict(broadcast_object(runs[3].zero.full_state_dict(), 0))
    runs[3].train(1)


def _train_for_two_ranks(case: Case) -> UnshardedRun:
    """Return the unsharded run of 2 ranks, which the third rank does not have."""
    plain = UnshardedRun(case)
    plain.train(STEPS, 2)
    plain.switch_modes()
    return plain


def _check_checkpoint(runs: dict[int, ShardedRun], group: dist.ProcessGroup | None, folder: Path) -> None:
    """Save on 3 ranks and load on 2."""
    checkpoint.save(folder, step=1, model=runs[3].model, optimizer=runs[3].zero)
    if group is not None:
        checkpoint.load(folder, model=runs[2].model, optimizer=runs[2].zero, process_group=group)
        runs[2].plain = runs[3].plain
        runs[2].compare()
        runs[2].train(STEPS_AFTER_LOAD)


# ---- The page docs/optimizers.md

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"

# ruff: noqa: E501 (a page)
HEAD = f"""# Optimizers

Written by `make table`, which runs `tests/distributed/test_optimizers.py`. Do not edit: that test fails where this page is not what it finds.

Each optimizer is made by `zeroshard.shard` on 1, 2 and 3 processes (gloo, CPU, float32) beside itself unsharded, which gets the mean
of all ranks' gradients. *Training*: all parameters have the same bits after each of {STEPS} steps and, where it has `train()` and `eval()`, after
each change of mode. *State*: `full_state_dict` takes it from 2 ranks to 3 and from there to the plain optimizer, and
`zeroshard.checkpoint` from 3 ranks to 2, with {STEPS_AFTER_LOAD} further steps after each that have the same bits again.

How it is *cut* is found by stepping the class on small tensors when it is made; see
[decision 3](decisions/0003-probe-optimizer-classes.md) and [decision 14](decisions/0014-shard-granularity.md). So a class that is not listed
here is treated in the same way. What draws random numbers is right, and yet not what it would be unsharded: each rank draws its own.
Steps that are compiled (torchao) are taken without the compiler here, which needs minutes. bitsandbytes is no part of `zeroshard[dev]`, for its size: it is tried where it is installed.
"""
COLUMNS = "| optimizer | options | how it is cut | training | state |\n|---|---|---|---|---|"


def packages() -> list[str]:
    return list(dict.fromkeys(case.package for case in CASES))


def cases_of(package: str) -> list[Case]:
    return [case for case in CASES if case.package == package]


def section(package: str, reports: Mapping[str, Report]) -> str:
    """Return the section of the page about one package."""
    rows = [_row(case, reports[case.title]) for case in cases_of(package)]
    return "\n".join([f"## {package} {version_of(package)}", "", COLUMNS, *rows]) + "\n"


def page(sections: Iterable[str]) -> str:
    return "\n".join([HEAD, *sections])


def sections_of(text: str) -> dict[str, str]:
    """Split a page into its sections, by package."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {section.split()[1]: section.rstrip("\n") + "\n" for section in sections}


def version_in(section: str) -> str:
    """Return the version of the package that a section is about."""
    return section.split()[2]


def _row(case: Case, report: Report) -> str:
    options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or NOTHING
    return f"| `{case.name}` | {options} | {report.partition} | {report.training} | {report.state} |"
