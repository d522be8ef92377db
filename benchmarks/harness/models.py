"""Parameters for optimizer benchmarks: shapes of real models with random values and random gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from examples.gpt import GPT
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, AdamW, Optimizer

from zeroshard import ZeroRedundancyOptimizer

Shape = tuple[int, ...]

PEERS: dict[str, Callable[..., Any]] = {"zeroshard": ZeroRedundancyOptimizer, "torch": TorchZero}


class Recipe(NamedTuple):
    """An optimizer class with its options."""

    name: str
    make: type[Optimizer]
    options: dict[str, Any]

    def plain(self, params: Sequence[torch.Tensor]) -> Optimizer:
        return self.make(params, **self.options)

    def sharded(self, peer: str, params: Sequence[torch.Tensor], *, bucket_view: bool = False) -> Any:
        return PEERS[peer](params, self.make, parameters_as_bucket_view=bucket_view, **self.options)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("SGD", SGD, {"lr": 1e-3}),
        Recipe("AdamW", AdamW, {"lr": 1e-3}),
        Recipe("fused AdamW", AdamW, {"lr": 1e-3, "fused": True}),
        Recipe("foreach AdamW", AdamW, {"lr": 1e-3, "foreach": True}),
    )
}


def gpt() -> GPT:
    """26.3 M elements in 100 tensors."""
    torch.manual_seed(0)
    return GPT(vocabulary=2048, context=128, width=512, heads=8, layers=8)


def gpt_shapes() -> list[Shape]:
    return _shapes(vocabulary=2048, context=128, width=512, heads=8, layers=8)


def large_gpt_shapes() -> list[Shape]:
    """1.316 G elements in 292 tensors."""
    return _shapes(vocabulary=50257, context=2048, width=2048, heads=16, layers=24)


def make_params(
    shapes: Sequence[Shape], *, device: str = "cpu", grads: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Make the same parameters in each call, with the given gradients or random ones."""
    generator = torch.Generator(device).manual_seed(0)
    params: list[torch.Tensor] = []
    for index, shape in enumerate(shapes):
        value = torch.empty(shape, device=device).normal_(generator=generator)
        param = torch.nn.Parameter(value)
        param.grad = grads[index] if grads else torch.empty_like(value).normal_(std=1e-2, generator=generator)
        params.append(param)
    return params


def _shapes(**sizes: int) -> list[Shape]:
    with torch.device("meta"):
        return [tuple(param.shape) for param in GPT(**sizes).parameters()]
