"""Models to train. Each returns its loss, and lists the layers that can be sharded one by one."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
from examples.gpt import GPT, Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Workload(NamedTuple):
    """A model and its data. All ranks have equal weights, and each rank has its own batch."""

    name: str
    label: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Tensor]
    layers: Callable[[nn.Module], Iterable[nn.Module]]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batch(self, rank: int) -> Tensor:
        return self.make_batch(torch.Generator().manual_seed(1 + rank))


class LanguageModel(GPT):
    """A GPT that returns the mean next-token loss of token ids of shape (batch, time + 1)."""

    def forward(self, ids: Tensor) -> Tensor:
        return cross_entropy(super().forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class LargeEmbedding(nn.Module):
    """An embedding ten times as large as the layers after it."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.table(ids))
        return out.square().mean()


class Affine(nn.Module):
    """Many small parameters: a weight and a bias for each of `depth` element-wise maps."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(1 + 0.01 * torch.randn(width) for _ in range(depth))
        self.biases = nn.ParameterList(0.01 * torch.randn(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.addcmul(bias, x, weight)
        return x


class Chain(nn.Sequential):
    """A sequence of blocks. Returns the mean square of the output."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x.square().mean()


def _instances_of(cls: type[nn.Module]) -> Callable[[nn.Module], Iterable[nn.Module]]:
    return lambda model: [module for module in model.modules() if isinstance(module, cls)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "gpt",
            "GPT, 26.3 M in 100 tensors",
            lambda: LanguageModel(vocabulary=2048, context=128, width=512, heads=8, layers=8),
            lambda generator: torch.randint(2048, (1, 65), generator=generator),
            _instances_of(Block),
        ),
        Workload(
            "embedding",
            "one embedding of 20 M, and 2 M",
            lambda: LargeEmbedding(rows=40_000, width=500),
            lambda generator: torch.randint(40_000, (256,), generator=generator),
            lambda model: model.children(),
        ),
        Workload(
            "small",
            "2,000 tensors of 1,024",
            lambda: Chain(*(Affine(depth=50, width=1024) for _ in range(20))),
            lambda generator: torch.randn(4, 1024, generator=generator),
            lambda model: model.children(),
        ),
        Workload(
            "tiny",
            "a tiny model for trying the code",
            lambda: Chain(*(Affine(depth=2, width=64) for _ in range(2))),
            lambda generator: torch.randn(4, 64, generator=generator),
            lambda model: model.children(),
        ),
    )
}


@cache
def sizes(name: str) -> tuple[int, ...]:
    """Return the number of elements of each parameter of a workload."""
    with torch.device("meta"):
        return tuple(param.numel() for param in WORKLOADS[name].make().parameters())
