"""A little problem that is the same on every rank, and what it takes to compare two solutions bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard import ZeroRedundancyOptimizer

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version, for what older ones do not do."""


def small_model(seed: int = 0, width: int = 7) -> nn.Sequential:
    """Six parameters of several sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 4), nn.Linear(4, 2))


def set_grads(params: Iterable[torch.Tensor], step: int) -> None:
    """Gradients that depend on the step and the place of the parameter, and on nothing else."""
    for place, param in enumerate(params):
        wave = torch.arange(param.numel(), dtype=torch.float64).mul_(0.7).add_(3 * step + place).sin_()
        values = torch.complex(wave, wave.flip(0)) if param.is_complex() else wave
        param.grad = torch.empty_like(param).copy_(values.view(param.shape))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, one of them empty, in another order than the model's."""
    first, *rest = model.parameters()
    return [{"params": rest, "lr": 0.3}, {"params": []}, {"params": [first], "weight_decay": 0.1}]


class Twins:
    """A sharded optimizer and the plain one, on equal models that get equal gradients.

    `handed` says what of the model is handed to the optimizers; `zero_only` are options of the sharded one.
    """

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        model: Callable[[], nn.Module] = small_model,
        handed: Callable[[nn.Module], Any] = nn.Module.parameters,
        zero_only: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.model, self.plain_model = model(), model()
        self.zero = ZeroRedundancyOptimizer(handed(self.model), factory, **zero_only, **copy.deepcopy(options))
        self.plain = factory(handed(self.plain_model), **options)
        self.steps = 0

    @property
    def sides(self) -> list[tuple[Any, Any]]:
        """Both models, each with its optimizer."""
        return [(self.model, self.zero), (self.plain_model, self.plain)]

    def train(self, steps: int, grads: Callable[[Iterable[torch.Tensor], int], None] = set_grads) -> None:
        """Steps of both, after each of which they must be equal. Frozen parameters get no new gradients."""
        for _ in range(steps):
            for model, optimizer in self.sides:
                grads([param for param in model.parameters() if param.requires_grad], self.steps)
                optimizer.step()
            self.steps += 1
            self.check()

    def check(self) -> None:
        """All parameters are equal, and all options of the groups."""
        assert_same(self.model.state_dict(), self.plain_model.state_dict(), "the model")
        ours, theirs = ([_options(group) for group in opt.param_groups] for opt in (self.zero, self.plain))
        assert_same(ours, theirs, "param_groups")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Parameters have the same values afterwards, each in memory of its own."""
    before = [param.detach().clone() for param in model.parameters()]
    yield
    params = list(model.parameters())
    assert_same([param.detach() for param in params], before)
    assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)


def assert_same(found: Any, expected: Any, where: str = "it") -> None:
    """Nested values are equal: in types, keys, order, shapes, strides, dtypes and every bit of every tensor."""
    assert type(found) is type(expected), f"{where} is a {type(found)} instead of a {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert _kind(found) == _kind(expected), f"{where}: {_kind(found)} instead of {_kind(expected)}"
        assert torch.equal(found.to_dense(), expected.to_dense()), f"{where}: {found} instead of {expected}"
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where} has the keys {list(found)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(found) == len(expected), f"{where} has {len(found)} items instead of {len(expected)}"
        for place, (item, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same(item, wanted, f"{where}[{place}]")
    else:
        assert found == expected, f"{where} is {found!r} instead of {expected!r}"


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape), strides
