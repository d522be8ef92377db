"""Master weights: half-precision parameters equal rounded float32 weights that a plain optimizer updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from tests.support import RankContext, ranks
from tests.support.oracles import TINY, WIDTH, assert_same, average, batch, gather_from_all_ranks, mlp, set_grads
from tests.support.tiers import sampled
from zeroshard import FlatShards, ZeroConfig, ZeroRedundancyOptimizer, shard

Options = dict[str, Any]
MASTER_WEIGHTS = torch.float32
CONFIGS = (
    ZeroConfig(partition=TINY, master_dtype=MASTER_WEIGHTS),
    ZeroConfig(partition=TINY, master_dtype=MASTER_WEIGHTS, stage=1),
    ZeroConfig(master_dtype=MASTER_WEIGHTS, overlap_param_gather=True),
)
INNER_OPTIMIZERS: list[tuple[type[optim.Optimizer], Options]] = [
    (optim.AdamW, {"lr": 1e-3, "foreach": True}),
    (optim.SGD, {"lr": 1e-3, "foreach": True}),
    (optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
]
"""Learning rates so small that most updates would be lost to rounding."""


def make_half_mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


class MasterWeightsOracle:
    """float32 weights that the plain optimizer updates with averaged gradients, and a model with rounded weights."""

    def __init__(self, model: nn.Module, factory: Callable[..., optim.Optimizer], options: Options) -> None:
        self.rounded_model = copy.deepcopy(model)
        self.masters = [nn.Parameter(param.detach().to(master_dtype_for(param.dtype))) for param in model.parameters()]
        self.plain = factory(self.masters, **copy.deepcopy(options))

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        torch.autograd.backward(loss(self.rounded_model))
        for param, master in zip(self.rounded_model.parameters(), self.masters, strict=True):
            assert param.grad is not None
            master.grad = average(gather_from_all_ranks(param.grad)).to(master.dtype)
            param.grad = None
        self.plain.step()
        with torch.no_grad():
            for param, master in zip(self.rounded_model.parameters(), self.masters, strict=True):
                param.copy_(master)


def master_dtype_for(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def loss_for_step(step: int) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        output: Tensor = model(batch(step).to(dtype)).float().square().mean()
        return output

    return loss


class Run:
    """A sharded model, and the oracle that it must equal after each step."""

    def __init__(self, model: nn.Module, config: ZeroConfig, inner: tuple[Any, Options], **group_options: Any) -> None:
        self.model = model
        self.zero = shard(model, inner[0], config=config, **group_options, **inner[1])
        self.oracle = MasterWeightsOracle(model, *inner)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.autograd.backward(loss_for_step(self.steps)(self.model))
            self.zero.step()
            self.zero.zero_grad()
            self.oracle.step(loss_for_step(self.steps))
            self.steps += 1
            assert_same(
                self.model.state_dict(), self.oracle.rounded_model.state_dict(), f"the model after step {self.steps}"
            )

    def check_state(self) -> None:
        """Check that the consolidated state equals that of the float32 optimizer, and contains the master weights."""
        found = self.zero.full_state_dict()
        if found is not None:
            masters = {index: state.pop("master_weights") for index, state in found["state"].items()}
            plain = {index: state for index, state in found["state"].items() if state}
            assert_same(plain, dict(self.oracle.plain.state_dict()["state"]))
            assert_same(masters, dict(enumerate(master.detach() for master in self.oracle.masters)))


@ranks(1, 2, 3, 4)
def test_update_is_rounded_once(ctx: RankContext) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.bfloat16)
    for config, inner, dtype in zip(CONFIGS, INNER_OPTIMIZERS, dtypes, strict=True):
        run = Run(make_half_mlp(dtype), config, inner)
        run.train(4)
        run.check_state()


@ranks(1, 2, 3)
def test_drop_in_with_master_weights(ctx: RankContext) -> None:
    for factory, options in INNER_OPTIMIZERS:
        model, reference = make_half_mlp(), make_half_mlp()
        zero = ZeroRedundancyOptimizer(
            model.parameters(), factory, config=ZeroConfig(partition=TINY, master_dtype=MASTER_WEIGHTS), **options
        )
        masters = [nn.Parameter(param.detach().float()) for param in reference.parameters()]
        plain = factory(masters, **options)
        for step in range(4):
            set_grads(model.parameters(), step)
            for param, master in zip(model.parameters(), masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
            zero.step()
            plain.step()
            assert_same(
                [param.detach() for param in model.parameters()], [master.detach().bfloat16() for master in masters]
            )


@ranks(2, 3)
def test_master_weights_are_sharded(ctx: RankContext) -> None:
    run = Run(nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)).bfloat16(), CONFIGS[2], INNER_OPTIMIZERS[0])
    run.train(1)
    owned = [param for group in run.zero.optim.param_groups for param in group["params"]]
    state = [value for param_state in run.zero.optim.state.values() for value in param_state.values() if value.dim()]
    assert {value.dtype for value in owned + state} == {torch.float32}
    total_numel = sum(param.numel() for param in run.model.parameters())
    assert sum(ctx.gather(sum(param.numel() for param in owned))) == total_numel
    assert max(ctx.gather(sum(value.numel() for value in state))) <= 2 * (total_numel / ctx.world_size + 1)


class MixedPrecisionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bf16_layer, self.float32_layer = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.float32_layer(self.bf16_layer(x.bfloat16()).float())
        return output


@ranks(1, 2, 3)
def test_only_low_precision_params_have_master_weights(ctx: RankContext) -> None:
    torch.manual_seed(0)
    run = Run(MixedPrecisionModel(), CONFIGS[0], INNER_OPTIMIZERS[0])
    run.train(3)
    found = run.zero.full_state_dict()
    if found is not None:
        assert [i for i, state in found["state"].items() if "master_weights" in state] == [0, 1]


# ---- State dicts and resuming


def resume_run(run: Run, saved: Any, inner: tuple[Any, Options], config: ZeroConfig, *, model_first: bool) -> Run:
    """A new run that resumes from the saved state of `run`, next to the oracle that was never interrupted."""
    torch.manual_seed(9)
    resumed = Run(mlp().to(torch.bfloat16), config, inner)
    if model_first:
        resumed.model.load_state_dict(run.model.state_dict())
    resumed.zero.load_state_dict(saved)
    if not model_first:
        resumed.model.load_state_dict(run.model.state_dict())
    resumed.oracle, resumed.steps = run.oracle, run.steps
    return resumed


@ranks(1, 2, 3, 4)
@sampled("model_first", [True, False])
def test_resumes_bitwise(ctx: RankContext, model_first: bool) -> None:
    for inner, config, other_config in zip(INNER_OPTIMIZERS[:2], CONFIGS, CONFIGS[1:], strict=False):
        run = Run(make_half_mlp(), config, inner)
        run.train(3)
        saved = ctx.gather(run.zero.full_state_dict())[0]
        resumed = resume_run(run, saved, inner, other_config, model_first=model_first)
        resumed.train(3)
        resumed.check_state()


@ranks(4)
def test_resumes_at_another_world_size(ctx: RankContext, tmp_path: Path) -> None:
    """From 4 ranks to 2. Gradients are equal on all ranks, so averages over 2 and 4 ranks are exact."""
    subgroup = dist.new_group([0, 1])

    def train(model: nn.Module, zero: Any, first: int) -> None:
        for step in range(first, first + 3):
            set_grads(model.parameters(), step)
            zero.step()
            zero.zero_grad()

    def make_run(**group_options: Any) -> tuple[nn.Module, Any]:
        model = make_half_mlp()
        return model, shard(model, optim.AdamW, foreach=True, config=CONFIGS[0], **group_options)

    model, zero = make_run()
    train(model, zero, 0)
    saved = zero.full_state_dict()
    if saved is not None:
        torch.save((model.state_dict(), saved), tmp_path / "saved")
    dist.barrier()
    train(model, zero, 3)
    if ctx.rank < 2:
        resumed_model, resumed_zero = make_run(process_group=subgroup)
        weights, state = torch.load(tmp_path / "saved", weights_only=True)
        resumed_zero.load_state_dict(state)
        resumed_model.load_state_dict(weights)
        train(resumed_model, resumed_zero, 3)
        assert_same(resumed_model.state_dict(), model.state_dict())


@ranks(1, 2, 3)
def test_param_edits_are_copied_to_master_weights(ctx: RankContext) -> None:
    """An edit sets the master weight to the new value; master weights of unchanged parameters keep full precision."""
    run = Run(make_half_mlp(), CONFIGS[0], INNER_OPTIMIZERS[0])
    run.train(3)
    new_values = [torch.full_like(param, 0.3) for param in run.model.parameters()]
    with torch.no_grad():
        for index in (0, 3):
            for target in (
                list(run.model.parameters()),
                list(run.oracle.rounded_model.parameters()),
                run.oracle.masters,
            ):
                target[index].copy_(new_values[index])
    run.train(3)
    run.check_state()


@ranks(1, 2, 3)
def test_loaded_model_is_copied_to_master_weights(ctx: RankContext) -> None:
    run = Run(make_half_mlp(), CONFIGS[2], INNER_OPTIMIZERS[0])
    run.train(2)
    torch.manual_seed(5)
    other = mlp().bfloat16()
    run.model.load_state_dict(other.state_dict())
    run.oracle.rounded_model.load_state_dict(other.state_dict())
    with torch.no_grad():
        for master, param in zip(run.oracle.masters, other.parameters(), strict=True):
            master.copy_(param)
    run.train(3)
    run.check_state()


@ranks(1, 2, 3)
def test_state_without_master_weights_starts_from_params(ctx: RankContext) -> None:
    """The loaded state is that of an optimizer without master weights."""
    run = Run(make_half_mlp(), CONFIGS[0], INNER_OPTIMIZERS[0])
    run.oracle.step(loss_for_step(0))
    run.oracle.step(loss_for_step(1))
    run.steps = 2
    run.model.load_state_dict(run.oracle.rounded_model.state_dict())
    run.zero.load_state_dict(copy.deepcopy(run.oracle.plain.state_dict()))
    with torch.no_grad():
        for master, param in zip(run.oracle.masters, run.model.parameters(), strict=True):
            master.copy_(param)
    run.train(3)


@ranks(1, 2)
def test_params_without_grads_keep_their_master_weights(ctx: RankContext) -> None:
    run = Run(make_half_mlp(), ZeroConfig(partition=FlatShards(), master_dtype=MASTER_WEIGHTS), INNER_OPTIMIZERS[0])
    run.train(2)
    frozen = [list(side.parameters())[2] for side in (run.model, run.oracle.rounded_model)]
    before = frozen[0].detach().clone()
    for step in range(2):
        set_grads(run.model.parameters(), step)
        for param, master in zip(run.model.parameters(), run.oracle.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        frozen[0].grad = run.oracle.masters[2].grad = None
        run.zero.step()
        run.zero.zero_grad()
        run.oracle.plain.step()
        assert_same(frozen[0].detach(), before)
    run.check_state()
