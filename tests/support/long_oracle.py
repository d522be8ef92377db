"""A tiny model, and what a plain optimizer makes of it with the gradients of all ranks: all in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from tests.support.pair import average

WIDTH = 16
ADAMW: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.05}
LATER: dict[str, Any] = {"lr": 0.001, "weight_decay": 0.0}
"""Options of the group that is added."""
FREEZABLE = ("first.bias", "branch.weight", "scale")

Pass = Sequence["Share"]
"""What each rank does in one backward pass."""


class Share(NamedTuple):
    """One rank's part in a backward pass."""

    takes_part: bool
    uses_branch: bool


class Net(nn.Module):
    """Two dtypes, a branch that may be left out, a parameter that begins to train later, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2 * WIDTH, dtype=torch.float64))
        self.later = nn.Parameter(torch.zeros(2 * WIDTH), requires_grad=False)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, use_branch: bool = True) -> Tensor:
        if self.training:
            self.passes += 1
        hidden = torch.tanh(self.first(x))
        if use_branch:
            hidden = hidden + self.branch(hidden)
        out: Tensor = self.last((hidden.double() * self.scale).float() + self.later)
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, position: int, rank: int, *, use_branch: bool = True) -> Tensor:
    """On inputs of this position in the data, other ones for each rank."""
    draw = torch.Generator().manual_seed(1000 * position + rank)
    inputs, target = torch.randn(2, 4, WIDTH, generator=draw)
    loss: Tensor = (model(inputs, use_branch) - target).square().mean()
    return loss


def groups_of(model: Net, *, added: bool) -> list[dict[str, Any]]:
    """Two groups, and a third that may have been added, by names."""
    named = dict(model.named_parameters())
    later = named.pop("later")
    flat = {name: param for name, param in named.items() if param.dim() <= 1}
    rest = {name: param for name, param in named.items() if name not in flat}
    groups: list[dict[str, Any]] = [{"params": list(rest.items())}, {"params": list(flat.items()), "weight_decay": 0.0}]
    return [*groups, {"params": [("later", later)], **LATER}] if added else groups


def scheduler_of(optimizer: torch.optim.Optimizer) -> CosineAnnealingWarmRestarts:
    return CosineAnnealingWarmRestarts(optimizer, T_0=40)


class Oracle:
    """The model and the plain optimizer, which know what every rank does.

    Several passes of a step add up in one of three manners: their averages are "added"; each rank adds "onto" what it
    has, and that is averaged; each rank adds up its own, and they are averaged "once".
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self.model = ranks, net()
        self._saved: dict[int, Any] = {}
        self.begin(added=False)

    def begin(self, *, added: bool) -> None:
        """Without any state."""
        self.model.later.requires_grad_(added)
        self.optimizer = torch.optim.AdamW(groups_of(self.model, added=added), **ADAMW)
        self.scheduler = scheduler_of(self.optimizer)
        self.model.zero_grad()

    def add_group(self) -> None:
        self.model.later.requires_grad_(True)
        self.optimizer.add_param_group(groups_of(self.model, added=True)[-1])
        self.scheduler = scheduler_of(self.optimizer)

    def accumulate(self, position: int, passes: Sequence[tuple[Pass, bool]], sums: str) -> None:
        """Gradients of passes one after the other; those with True are kept local until the next one."""
        params = [param for param in self.model.parameters() if param.requires_grad]
        waiting = self._begun(params, sums)
        for number, (shares, is_local) in enumerate(passes):
            for rank, share in enumerate(shares):
                waiting[rank].add(self._grads(params, position + number, rank, share))
            if not is_local and (sums != "once" or number + 1 == len(passes)):
                self._meet(params, waiting, onto=sums == "onto")
                waiting = self._begun(params, sums)

    def _begun(self, params: list[nn.Parameter], sums: str) -> list[_Sum]:
        return [_Sum([param.grad if sums == "onto" else None for param in params]) for _ in range(self._ranks)]

    def _grads(self, params: list[nn.Parameter], position: int, rank: int, share: Share) -> Sequence[Tensor | None]:
        if not share.takes_part:
            return [None] * len(params)
        loss = loss_of(self.model, position, rank, use_branch=share.uses_branch)
        return torch.autograd.grad(loss, params, allow_unused=True)

    def _meet(self, params: list[nn.Parameter], parts: list[_Sum], *, onto: bool) -> None:
        for place, param in enumerate(params):
            mine = [part.grads[place] for part in parts]
            if any(grad is not None for grad in mine):
                mean = average([torch.zeros_like(param) if grad is None else grad for grad in mine])
                param.grad = mean if param.grad is None or onto else param.grad + mean

    def step(self, norm: Tensor | None, most: float) -> None:
        """`norm`: that of all gradients, which has been found; a sum in another order would differ in its last bit."""
        if norm is not None:
            params = [param for param in self.model.parameters() if param.grad is not None]
            expected = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
            torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-7)
            nn.utils.clip_grads_with_norm_(params, most, norm)
        self.optimizer.step()

    def save(self, step: int) -> None:
        """The last two stay."""
        self._saved[step] = copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict())
        )
        for old in sorted(self._saved)[:-2]:
            del self._saved[old]

    def load(self, step: int) -> None:
        model, optimizer, scheduler = copy.deepcopy(self._saved[step])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)

    def compare(self, model: nn.Module, where: str) -> None:
        for (name, ours), theirs in zip(model.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} {where}: differs by {(ours - theirs).abs().max().item()}"


class _Sum:
    """Gradients of one rank, added up in its passes."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = list(grads)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = [a if b is None else b if a is None else a + b for a, b in zip(self.grads, grads, strict=True)]
