"""Optimizers that assign to `param.data` train the model, although an assignment detaches their tensor from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.test_closures import step_with_closure
from tests.distributed.test_master_weights import MasterWeightsOracle, loss_for_step, make_half_mlp
from tests.distributed.test_offload import force_offload
from tests.support import RankContext, ranks
from tests.support.optimizers import Assigning, Sam
from tests.support.oracles import TINY, ZERO2, DdpParityRun, assert_same, clone_values, mlp, set_grads, some_configs
from tests.support.tiers import sampled
from zeroshard import (
    BindingError,
    CPUOffload,
    ParamRule,
    RankFailedError,
    WholeParams,
    ZeroConfig,
    matrix_params,
    remaining_params,
    shard,
)

WHOLE_PARAMS = ZeroConfig(partition=WholeParams())
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@some_configs
@ranks(1, 2, 3, 4)
def test_param_data_assignment_matches_plain_optimizer(ctx: RankContext, config: ZeroConfig) -> None:
    DdpParityRun(config, optimizer_class=Assigning, **MOMENTUM).train(3)
    DdpParityRun(config, optimizer_class=Sam, lr=0.1).run(3, step_with_closure)


@ranks(1, 2, 3, 4)
def test_whole_params_match_plain_optimizer(ctx: RankContext) -> None:
    DdpParityRun(WHOLE_PARAMS, optimizer_class=Assigning, **MOMENTUM).train(3)
    DdpParityRun(WHOLE_PARAMS, optimizer_class=Sam, lr=0.1).run(3, step_with_closure)


@ranks(1, 2, 3)
def test_multiple_optimizer_classes(ctx: RankContext) -> None:
    rules = [ParamRule(matrix_params(), Assigning, **MOMENTUM), ParamRule(remaining_params, torch.optim.SGD, lr=0.1)]
    plain, ours = (make_seeded_mlp() for _ in range(2))
    zero = shard(ours, rules, config=ZERO2)
    params_by_kind = [
        [param for param in plain.parameters() if (param.dim() > 1) is is_matrix] for is_matrix in (True, False)
    ]
    optimizers = [Assigning(params_by_kind[0], **MOMENTUM), torch.optim.SGD(params_by_kind[1], lr=0.1)]
    for step in range(3):
        set_grads(plain.parameters(), step)
        set_grads(ours.parameters(), step)
        zero.step()
        for optimizer in optimizers:
            optimizer.step()
        zero.zero_grad()
    torch.testing.assert_close(clone_values(ours), clone_values(plain))


def make_seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


@ranks(1, 2, 3, 4)
def test_intermittently_missing_gradients(ctx: RankContext) -> None:
    """Flat parameters are split where gradients are missing."""
    ours, plain = (make_seeded_mlp() for _ in range(2))
    zero, optimizer = shard(ours, Assigning, **MOMENTUM), Assigning(plain.parameters(), **MOMENTUM)
    for step in range(4):
        for model, model_optimizer in ((ours, zero), (plain, optimizer)):
            set_grads(model.parameters(), step)
            list(model.parameters())[step].grad = None
            model_optimizer.step()
            model_optimizer.zero_grad()
    torch.testing.assert_close(clone_values(ours), clone_values(plain))


@sampled("partition", [TINY, WholeParams()], ids=["flat", "whole"])
@ranks(1, 2, 3, 4)
def test_master_weights_and_their_saved_state(ctx: RankContext, partition: Any) -> None:
    model, config = make_half_mlp(), ZeroConfig(partition=partition, master_dtype=torch.float32)
    zero, oracle = shard(model, Assigning, config=config, **MOMENTUM), MasterWeightsOracle(model, Assigning, MOMENTUM)
    for step in range(3):
        loss = loss_for_step(step)
        torch.autograd.backward(loss(model))
        zero.step()
        zero.zero_grad()
        oracle.step(loss)
    torch.testing.assert_close(clone_values(model), clone_values(oracle.rounded_model))
    saved = zero.full_state_dict()
    if saved is not None:
        found = [saved["state"][index]["master_weights"] for index in range(len(oracle.masters))]
        torch.testing.assert_close(found, [master.detach() for master in oracle.masters])


@sampled("masters", [None, torch.float32], ids=["plain", "masters"])
@ranks(1, 2)
def test_cpu_offload_matches_no_offload(ctx: RankContext, masters: torch.dtype | None) -> None:
    with force_offload("cpu"):
        runs = []
        for offload in (None, CPUOffload()):
            model = make_half_mlp()
            zero = shard(
                model, Assigning, config=ZeroConfig(partition=TINY, master_dtype=masters, offload=offload), **MOMENTUM
            )
            for step in range(3):
                torch.autograd.backward(loss_for_step(step)(model))
                zero.step()
                zero.zero_grad()
            runs.append((model.state_dict(), zero.full_state_dict()))
        assert_same(runs[1], runs[0])


class ModeSwitching(Assigning):
    """Assigns shifted parameters in `eval()`, and shifts them back in `train()`."""

    fails = False

    def eval(self) -> None:
        self._add_to_params(1.0)

    def train(self) -> None:
        self._add_to_params(-1.0)

    @torch.no_grad()
    def _add_to_params(self, offset: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data + offset
                if self.fails:
                    raise ArithmeticError("a mode")


@ranks(1, 2, 3)
def test_eval_and_train_roll_back_when_one_rank_fails(ctx: RankContext) -> None:
    model = make_seeded_mlp().double()
    before = clone_values(model)
    zero = shard(model, ModeSwitching, config=ZERO2)
    zero.eval()
    assert_same(clone_values(model), [value + 1.0 for value in before])
    zero.inner_optimizers[0].fails = ctx.rank == 0  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError if ctx.rank == 0 else RankFailedError, match="a mode"):
        zero.train()
    assert_same(clone_values(model), [value + 1.0 for value in before])
    zero.inner_optimizers[0].fails = False  # type: ignore[attr-defined]
    zero.train()
    torch.testing.assert_close(clone_values(model), before)


@sampled("partition", [TINY, WholeParams()], ids=["flat", "whole"])
@ranks(1, 2, 3, timeout=60)
def test_assigned_wrong_dtype_is_rejected_on_all_ranks(ctx: RankContext, partition: Any) -> None:
    """Only one rank assigns a wrong dtype; all other updates are applied."""
    parity = DdpParityRun(ZeroConfig(partition=partition), optimizer_class=Assigning, lr=0.1)
    parity.train(1)
    vars(parity.zero.inner_optimizers[0])["becomes"] = {"dtype": torch.float64} if ctx.rank == 0 else None
    with pytest.raises(BindingError if ctx.rank == 0 else RankFailedError, match=r"assigned.*float64.*float32.*keep"):
        parity.sides[0].iterate(1)
    parity.zero.check_consistency()
    with torch.no_grad():
        for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
            ours.copy_(theirs)
    parity.zero.zero_grad()
    parity.train(2)
