"""Optimizers to shard: torch's own, and what people install beside it. The page docs/optimizers.md lists them."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


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
