"""The steps of `examples/elastic.py` in one process: the plain optimizer, which takes them for any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from examples.elastic import loss_of, make_model, part_of_batch
from torch import Tensor, nn

from tests.support.pair import average
from zeroshard import checkpoint

Average = Callable[[list[Tensor]], Tensor]
"""Of gradients of all ranks, in their order."""


class Plain:
    """The model and the optimizer of the example, unsharded."""

    def __init__(self, width: int = 128) -> None:
        self.model = make_model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @classmethod
    def saved(cls, folder: Path, width: int = 128) -> Plain:
        """As the last checkpoint in `folder` has it."""
        plain = cls(width)
        for param in plain.model.parameters():
            nn.init.constant_(param, float("nan"))
        checkpoint.load(folder, model=plain.model, optimizer=plain.optimizer)
        return plain

    def train(self, steps: range, world_size: int, average: Average = average) -> None:
        with _one_thread():
            for step in steps:
                shares = [self._grads(step, rank, world_size) for rank in range(world_size)]
                for param, *parts in zip(self.model.parameters(), *shares, strict=True):
                    param.grad = average(parts)
                self.optimizer.step()

    def _grads(self, step: int, rank: int, world_size: int) -> Sequence[Tensor]:
        loss = loss_of(self.model, part_of_batch(step, rank, world_size), world_size)
        return torch.autograd.grad(loss, list(self.model.parameters()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """As ranks compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint(model: nn.Module) -> str:
    """Of every bit of its parameters."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
