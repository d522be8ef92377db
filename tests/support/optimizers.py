"""Optimizers to shard: odd ones written for tests, torch's own, and third-party packages with the page that lists them."""

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
    """Momentum, and beside it all kinds of containers and plain values."""

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


# ---- Updates by blocks


class Blocks(Optimizer):
    """Keeps a momentum, and divides it by its largest value in each block: of parameters that are large enough, and
    can be divided into blocks. The others are updated by their momentum as it is."""

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
    """SGD that exchanges the memory of its parameters, and of its momenta, in every step."""

    becomes: dict[str, Any] | None = None
    """What `.data` is made of by `to` before it is assigned, once."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        others, self.becomes = self.becomes or {}, None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    known = self.state[param].get("momentum_buffer", torch.zeros_like(param))
                    change = self.state[param]["momentum_buffer"] = known * group["momentum"] + param.grad
                    param.data = (param.data - group["lr"] * change).to(**others)
        return loss


class Sam(torch.optim.Optimizer):
    """Updates parameters by gradients of a place nearby, and goes back by an assignment, as published code does."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        closure = torch.enable_grad()(closure or _nothing)
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


def _nothing() -> None:
    """A closure that leaves gradients as they are."""


# ---- Optimizer classes that docs/optimizers.md lists


@dataclass(frozen=True)
class Case:
    """One class with its options, and what it needs."""

    package: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "Branches"
    """A class of this file."""
    eager: bool = False
    """It compiles its steps, which takes many seconds a shape."""
    is_refused: bool = False
    """It cannot be right when it is sharded."""
    by_dimensions: str = ""
    """An option of groups that is true for matrices and false for the rest."""

    @property
    def title(self) -> str:
        return f"{self.package}.{self.name}"

    def factory(self) -> Any:
        """Raises ImportError where it is not installed."""
        *path, name = self.name.split(".")
        return getattr(importlib.import_module(".".join([self.package, *path])), name)

    def arguments(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.options))

    def handed(self, model: nn.Module) -> list[Any]:
        """What of a model it is made of."""
        params = list(model.parameters())
        if not self.by_dimensions:
            return params
        kinds = {matrix: [param for param in params if (param.dim() > 1) is matrix] for matrix in (True, False)}
        return [{"params": kind, self.by_dimensions: matrix} for matrix, kind in kinds.items()]

    def make_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = globals()[self.model]()
        return made


class Branches(nn.Module):
    """Large parameters with and without a size that is a multiple of 256, and small ones."""

    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Sequential(nn.Linear(48, 256, self.bias), nn.Tanh(), nn.Linear(256, 18, self.bias))
        self.odd = nn.Sequential(nn.Linear(48, 211, self.bias), nn.Tanh(), nn.Linear(211, 18, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.even(x) + self.odd(x)
        return out

    def loss(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        out = self(torch.randn(8, 48, generator=draw))
        loss: Tensor = (out - torch.randn(8, 18, generator=draw)).square().mean()
        return loss


class Matrices(Branches):
    """No parameter of one dimension."""

    bias = False


class Rows(nn.Module):
    """Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 6, sparse=True)

    def loss(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        loss: Tensor = self.rows(torch.randint(20, (7,), generator=draw)).square().sum()
        return loss


def version_of(package: str) -> str | None:
    """None where it is not installed."""
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
    Case("torch", "optim.SparseAdam", {"lr": 0.01}, model="Rows", is_refused=True),
    Case("torch", "optim.LBFGS", {"lr": 0.1}, is_refused=True),
]
TORCHAO = [
    Case("torchao", f"optim.{name}", {"lr": 0.01, **more}, eager=True)
    for name, more in [
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


# ---- One optimizer on 1, 2 and 3 ranks beside itself unsharded

SIZES = (1, 2, 3)
STEPS = 3
MORE = 2
"""Steps after each load."""
BITWISE = "bitwise"
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """What became of it, as the page tells it."""

    partition: str
    training: str = NOTHING
    state: str = NOTHING


def try_out(ctx: RankContext, case: Case, folder: Path) -> Report:
    """Called on 3 ranks. Raises where it is neither right nor refused."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    stance: Any = torch.compiler.set_stance("force_eager") if case.eager else nullcontext()
    with stance, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runs = {size: Run(case, size, groups[size]) for size in reversed(SIZES) if ctx.rank < size}
        except ConfigError as error:
            return Report(f"refused: {_sentence(error)}")
        for run in runs.values():
            run.train(STEPS)
            run.evaluate()
        partition = _in_words(runs[3].zero)
        _require_cuts(runs[3].zero, partition)
        try:
            runs[3].zero.full_state_dict()
        except CheckpointError as error:
            return Report(partition, BITWISE, f"refused: {_unsafe(error)}")
        _through_a_dict(case, runs)
        _through_files(runs, groups[2] if ctx.rank < 2 else None, folder)
        return Report(partition, BITWISE, BITWISE)


def _sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0]


def _unsafe(error: Exception) -> str:
    found = re.search(r"an? \w+ cannot be sent safely", str(error))
    assert found, error
    return found.group()


def _in_words(zero: ShardedOptimizer) -> str:
    (partition,) = zero._builder.partitioning.partitioners
    if not isinstance(partition, FlatShards):
        return "whole parameters"
    grain = partition.granularity
    assert grain is not None, "the self-test has found one"
    if grain.is_elementwise:
        return "cut anywhere"
    return f"cut at multiples of {grain.align}, into pieces of {grain.min_numel} or more"


def _require_cuts(zero: ShardedOptimizer, partition: str) -> None:
    """What is cut is cut in fact, and what is not is not."""
    pieces = [len(zero.layout.param_shards(spec.index)) for spec in zero.layout.params]
    assert (max(pieces) > 1) == partition.startswith("cut"), (pieces, partition)


class Plain:
    """The optimizer unsharded, with the mean of the gradients of some ranks: the same on each rank."""

    def __init__(self, case: Case) -> None:
        self.model, self.steps = case.make_model(0), 0
        self.optimizer = case.factory()(case.handed(self.model), **case.arguments())
        _switch(self.optimizer, "train")

    def train(self, steps: int, ranks: int) -> None:
        for _ in range(steps):
            set_mean_grads(self.model, self.steps, ranks)
            self.optimizer.step()
            self.steps += 1

    def evaluate(self) -> None:
        _switch(self.optimizer, "eval")
        _switch(self.optimizer, "train")


class Run:
    """A model that is sharded over some ranks, beside the plain one."""

    def __init__(self, case: Case, size: int, group: dist.ProcessGroup) -> None:
        self._size, self._rank = size, dist.get_rank(group)
        self.plain, self.model = Plain(case), case.make_model(self._rank)
        self.zero = shard(
            self.model, case.factory(), params=case.handed(self.model), process_group=group, **case.arguments()
        )
        _switch(self.zero, "train")

    def train(self, steps: int) -> None:
        """After each step all parameters have the same bits."""
        for _ in range(steps):
            backward(self.model, self.plain.steps, self._rank)
            self.zero.step()
            self.zero.zero_grad()
            self.plain.train(1, self._size)
            self.compare()

    def evaluate(self) -> None:
        """Weights are those that the plain optimizer evaluates, and training goes on from where it was."""
        for mode in ("eval", "train"):
            _switch(self.plain.optimizer, mode)
            _switch(self.zero, mode)
            self.compare()

    def compare(self) -> None:
        assert_same(self.model.state_dict(), self.plain.model.state_dict(), f"the model after {self.plain.steps} steps")


def _switch(optimizer: Any, mode: str) -> None:
    """Of schedule-free optimizers, which have modes."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss: Any = model.loss
    loss(100 * step + rank).backward()


def set_mean_grads(model: nn.Module, step: int, ranks: int) -> None:
    """The mean over all ranks, added up in their order, as it is between them."""
    means: list[torch.Tensor] = []
    for rank in range(ranks):
        model.zero_grad()
        backward(model, step, rank)
        mine = [param.grad * (1 / ranks) for param in model.parameters() if param.grad is not None]
        means = [a + b for a, b in zip(means, mine, strict=True)] if means else mine
    for param, mean in zip(model.parameters(), means, strict=True):
        param.grad = mean


def _through_a_dict(case: Case, runs: dict[int, Run]) -> None:
    """From 2 ranks to 3, and from those to the plain optimizer."""
    runs[3].plain = _trained_by_two(case)
    mine = (runs[2].zero.full_state_dict(), runs[2].model.state_dict()) if 2 in runs else None
    saved, weights = broadcast_object(mine, 0)
    runs[3].model.load_state_dict(weights)
    runs[3].zero.load_state_dict(saved)
    runs[3].train(MORE)
    runs[3].plain.optimizer.load_state_dict(broadcast_object(runs[3].zero.full_state_dict(), 0))
    runs[3].train(1)


def _trained_by_two(case: Case) -> Plain:
    """As beside 2 ranks, also on the third."""
    plain = Plain(case)
    plain.train(STEPS, 2)
    plain.evaluate()
    return plain


def _through_files(runs: dict[int, Run], group: dist.ProcessGroup | None, folder: Path) -> None:
    """From 3 ranks to 2."""
    checkpoint.save(folder, step=1, model=runs[3].model, optimizer=runs[3].zero)
    if group is not None:
        checkpoint.load(folder, model=runs[2].model, optimizer=runs[2].zero, process_group=group)
        runs[2].plain = runs[3].plain
        runs[2].compare()
        runs[2].train(MORE)


# ---- The page docs/optimizers.md

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"

# ruff: noqa: E501 (a page)
HEAD = f"""# Optimizers

Written by `make table`, which runs `tests/distributed/test_optimizers.py`. Do not edit: that test fails where this page is not what it finds.

Each optimizer is made by `zeroshard.shard` on 1, 2 and 3 processes (gloo, CPU, float32) beside itself unsharded, which gets the mean
of all ranks' gradients. *Training*: all parameters have the same bits after each of {STEPS} steps and, where it has `train()` and `eval()`, after
each change of mode. *State*: `full_state_dict` takes it from 2 ranks to 3 and from there to the plain optimizer, and
`zeroshard.checkpoint` from 3 ranks to 2, with {MORE} further steps after each that have the same bits again.

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
    """What was found of the classes of one package."""
    rows = [_row(case, reports[case.title]) for case in cases_of(package)]
    return "\n".join([f"## {package} {version_of(package)}", "", COLUMNS, *rows]) + "\n"


def page(sections: Iterable[str]) -> str:
    return "\n".join([HEAD, *sections])


def sections_of(text: str) -> dict[str, str]:
    """Those of a page, by package."""
    found = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.split()[1]: part.rstrip("\n") + "\n" for part in found}


def version_in(section: str) -> str:
    return section.split()[2]


def _row(case: Case, report: Report) -> str:
    options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or NOTHING
    return f"| `{case.name}` | {options} | {report.partition} | {report.training} | {report.state} |"
