"""Scripts written for torch's class run with zeroshard's class, and give the same results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.optim import zero_redundancy_optimizer

import zeroshard
from tests.support import RankContext, ranks
from tests.support.oracles import assert_same

TORCH_ZERO_SCRIPT = """
import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PASSES = 6


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0003)


def backward(ddp, number):
    generator = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
    ddp(torch.randn(4, 6, generator=generator)).square().mean().backward()


def train_sharded():
    ddp = make_model()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    assert isinstance(optimizer, torch.distributed.optim.ZeroRedundancyOptimizer)
    for number in range(PASSES):
        backward(ddp, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if torch.distributed.get_rank() == 0 else None
    return type(optimizer), ddp.module.state_dict(), state


def train_overlapped(make_hook):
    ddp = make_model()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.05)
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, optimizer))
    for number in range(PASSES):
        backward(ddp, number)
        optimizer.zero_grad()
    return type(optimizer), ddp.module.state_dict()


def train_with_hooks():
    return [train_overlapped(make_hook) for make_hook in (hook_with_zero_step, hook_with_zero_step_interleaved)]


def train_unsharded():
    ddp = make_model()
    ddp.register_comm_hook(None, allreduce_hook)  # DDP's own average rounds differently
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    for number in range(PASSES):
        backward(ddp, number)
        if number >= 2:  # DDP rebuilds its buckets in the first two passes
            optimizer.step()
        optimizer.zero_grad()
    return ddp.module.state_dict()
"""


def run_script_function(name: str) -> Any:
    """Import the script now, and return the result of one of its functions."""
    script = ModuleType("foreign")
    exec(compile(TORCH_ZERO_SCRIPT, "foreign.py", "exec"), vars(script))
    return vars(script)[name]()


@ranks(1, 2, 3, 4)
def test_unmodified_torch_zero_script_gives_the_same_results(ctx: RankContext) -> None:
    """The oracle is torch's class, without `replace_torch`."""
    torch_class: Any = zero_redundancy_optimizer.ZeroRedundancyOptimizer
    optimizer_class, model, state = run_script_function("train_sharded")
    with zeroshard.replace_torch():
        replaced = run_script_function("train_sharded")
    restored = run_script_function("train_sharded")
    assert (replaced[0], optimizer_class, restored[0]) == (zeroshard.ZeroRedundancyOptimizer, torch_class, torch_class)
    for result in (replaced, restored):
        assert_same(result[1], model, "the model")
        assert_same(result[2], state, "the state")


@ranks(1, 2, 3, 4)
def test_replaced_ddp_hooks_match_unsharded_optimizer(ctx: RankContext) -> None:
    """torch's own hooks reject gloo, so the unsharded optimizer is the oracle."""
    expected = run_script_function("train_unsharded")
    with zeroshard.replace_torch():
        results = run_script_function("train_with_hooks")
    for optimizer_class, model in results:
        assert optimizer_class is zeroshard.ZeroRedundancyOptimizer
        assert_same(model, expected, "the model")
    with pytest.raises(RuntimeError, match="Gloo"):
        run_script_function("train_with_hooks")


@ranks(2)
def test_torch_optimizer_built_before_replace_torch_keeps_working(ctx: RankContext) -> None:
    torch_class: Any = zero_redundancy_optimizer.ZeroRedundancyOptimizer
    params = [torch.nn.Parameter(torch.full((3,), 1.0 + number)) for number in range(2)]
    optimizer = torch_class(params, torch.optim.SGD, lr=0.5, momentum=0.9)
    with zeroshard.replace_torch():
        for param in params:
            param.grad = torch.ones(3)
        optimizer.step()
        optimizer.consolidate_state_dict()
        assert ctx.rank or list(optimizer.state_dict()["state"]) == [0, 1]
        with pytest.raises(TypeError, match=r"Construct optimizers after replace_torch\(\)"):
            optimizer.join_hook()
    optimizer.join_hook()
    assert [param.tolist() for param in params] == [[0.5] * 3, [1.5] * 3]
