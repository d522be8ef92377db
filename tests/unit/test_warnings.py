"""Warnings point at the user's line, no matter how deep in the package they are raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from zeroshard import (
    CPUOffload,
    NonFiniteGrads,
    ParamRule,
    PeerCheckpoint,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)


def step_with_nan() -> None:
    model = nn.Linear(2, 2)
    optimizer = shard(model, SGD, lr=0.1, config=ZeroConfig(nonfinite=NonFiniteGrads("skip")))
    (model(torch.ones(1, 2)).sum() * torch.nan).backward()
    optimizer.step()  # here


def step_plain_optimizer() -> None:
    """The warning is raised in a hook that torch calls."""
    model = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    plain.step()  # here
    zero.step()


def exclude_unknown_name() -> None:
    rules = [ParamRule(matrix_params(exclude=("head",)), SGD), ParamRule(remaining_params, SGD)]
    shard(nn.Linear(2, 2), rules)  # here


def offload_on_cpu() -> None:
    shard(nn.Linear(2, 2), SGD, config=ZeroConfig(offload=CPUOffload()))  # here


def peer_checkpoint_on_single_rank() -> None:
    shard(nn.Linear(2, 2), SGD, config=ZeroConfig(peer_checkpoint=PeerCheckpoint()))  # here


def read_stale_state_dict() -> None:
    model = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    zero.consolidate_state_dict()
    model(torch.ones(1, 2)).sum().backward()
    zero.step()
    zero.state_dict()  # here


def load_different_names() -> None:
    zero, other = (
        ZeroRedundancyOptimizer([(name, nn.Parameter(torch.ones(2)))], SGD, lr=0.1) for name in ("one", "two")
    )
    saved = other.full_state_dict()
    assert saved is not None
    zero.load_state_dict(saved)  # here


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (step_with_nan, "not finite"),
        (step_plain_optimizer, "plain SGD has updated"),
        (exclude_unknown_name, "'head'"),
        (offload_on_cpu, "CPUOffload"),
        (peer_checkpoint_on_single_rank, "PeerCheckpoint"),
        (read_stale_state_dict, "step ago"),
        (load_different_names, "matching parameters by position"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_warning_points_at_users_line(single_rank: None, call: Callable[[], None], text: str) -> None:
    with pytest.warns(Warning, match=text) as caught:
        call()
    (warning,) = (record for record in caught if text in str(record.message))
    assert warning.filename == __file__
    assert Path(__file__).read_text().splitlines()[warning.lineno - 1].endswith("# here")
