"""DDP around a sharded model: both would average gradients, so a forward pass through DDP raises on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.oracles import TORCH, WIDTH, DdpParityRun, batch, make_seeded, mlp, some_configs
from zeroshard import ConfigError, ZeroConfig, shard

AVERAGED_TWICE = r"both average the gradients of \d+ parameters, for example .*\.weight\. Call the model itself"


def compute_loss(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(batch(0)).square().mean()


@some_configs
@ranks(1, 2, 3)
def test_ddp_wrapper_added_later_is_rejected_and_model_still_trains(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    parity.train(1)
    wrapped = DistributedDataParallel(parity.model)
    with pytest.raises(ConfigError, match=AVERAGED_TWICE):
        compute_loss(wrapped)
    with torch.no_grad():
        assert torch.equal(compute_loss(wrapped), compute_loss(parity.model))
    parity.train(2)


@ranks(2)
def test_ddp_wrapper_made_before_is_rejected(ctx: RankContext) -> None:
    model = mlp()
    wrapped = DistributedDataParallel(model)
    zero = shard(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match=AVERAGED_TWICE):
        compute_loss(wrapped)
    del zero
    gc.collect()  # the optimizer is gone, so only DDP averages
    assert compute_loss(wrapped).requires_grad


@ranks(2)
def test_compiled_model_is_rejected_under_ddp_and_keeps_full_graph(ctx: RankContext) -> None:
    model = mlp()
    zero = shard(model, torch.optim.SGD, lr=0.1)
    inside = DistributedDataParallel(torch.compile(model, backend="eager"))
    around = torch.compile(DistributedDataParallel(model), backend="eager")
    for wrapped in (inside, around):
        with pytest.raises(ConfigError, match=AVERAGED_TWICE):
            compute_loss(wrapped)
    full_graph = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compute_loss(full_graph), compute_loss(model))
    del zero  # it had to stay alive until here


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 does not check again whether DDP is active")
@ranks(2)
def test_compiled_model_run_before_ddp_is_rejected(ctx: RankContext) -> None:
    model = mlp()
    zero = shard(model, torch.optim.SGD, lr=0.1)
    compiled = torch.compile(model, backend="eager")
    expected = compute_loss(compiled)
    with pytest.raises(ConfigError, match=AVERAGED_TWICE):
        compute_loss(DistributedDataParallel(compiled))
    assert torch.equal(compute_loss(compiled), expected)
    del zero  # it had to stay alive until here


@ranks(2)
def test_submodules_averaged_by_only_one_side_train(ctx: RankContext) -> None:
    """The head, which DDP ignores, and the trunk, which is not sharded, are each averaged once."""
    modules = nn.ModuleDict({"trunk": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 1)})
    model = make_seeded(lambda: nn.Sequential(modules["trunk"], modules["head"]), ctx.rank)
    names = [f"1.{name}" for name, _ in modules["head"].named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(model)
    zero = shard(modules["head"], torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(modules["trunk"].parameters(), lr=0.1)
    before = compute_loss(model).item()
    for _ in range(2):
        torch.autograd.backward(compute_loss(wrapped))
        for optimizer in (zero, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert compute_loss(model).item() < before
