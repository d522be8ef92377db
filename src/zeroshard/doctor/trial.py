"""A few sharded steps of a tiny model, beside those of the unsharded optimizer on the data of all ranks."""

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm.process_group import Group
from ..shard import shard

TRIAL_STEPS = 4
_TRIAL_ROWS, _TRIAL_WIDTH = 4, 8
_TRIAL_OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}


@dataclass(frozen=True)
class TrialResult:
    """What a rank has seen.

    before, after: the loss over the data of all ranks.
    difference: the largest to the unsharded optimizer's parameters, which are of float64.
    digest: of all bits of all parameters.
    """

    before: float
    after: float
    difference: float
    digest: str


def run_trial(group: Group, device: torch.device) -> TrialResult:
    """On all ranks of the group."""
    data, model = _make_trial_data(group.size).to(device), _make_trial_model().to(device)
    plain_model, mine = copy.deepcopy(model), data.view(group.size, _TRIAL_ROWS, _TRIAL_WIDTH)[group.rank]
    sharded = shard(model, torch.optim.AdamW, process_group=group.process_group, **_TRIAL_OPTIONS)
    plain = torch.optim.AdamW(plain_model.parameters(), **_TRIAL_OPTIONS)
    before = _trial_loss(model, data).item()
    for _ in range(TRIAL_STEPS):
        _trial_step(model, sharded, mine)
        _trial_step(plain_model, plain, data)
    pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return TrialResult(before, _trial_loss(model, data).item(), difference, _digest_params(model))


def _make_trial_data(world_size: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(world_size * _TRIAL_ROWS, _TRIAL_WIDTH, dtype=torch.float64, generator=draw, device="cpu")


def _make_trial_model() -> nn.Module:
    """The same on all ranks; no random numbers are drawn that others count on."""
    empty: dict[str, Any] = {"dtype": torch.float64, "device": "meta"}
    model = nn.Sequential(nn.Linear(_TRIAL_WIDTH, 16, **empty), nn.Tanh(), nn.Linear(16, 1, **empty)).to_empty(
        device="cpu"
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64, generator=draw, device="cpu")).mul_(0.3)
    return model


def _trial_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))


def _trial_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    torch.autograd.backward(_trial_loss(model, inputs))
    optimizer.step()
    optimizer.zero_grad()


def _digest_params(model: nn.Module) -> str:
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()]).cpu()
    return hashlib.sha256(repr(flat.tolist()).encode()).hexdigest()[:16]
