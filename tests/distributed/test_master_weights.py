"""Master weights: parameters of half precision are the rounded image of float32 ones that a plain optimizer updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from tests.support import RankContext, ranks
from tests.support.oracles import TINY, WIDTH, assert_same, average, batch, from_all_ranks, mlp, set_grads
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
"""Steps so small that most of them would vanish in the rounding."""


def make_half_mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


class MasterWeightsOracle:
    """A float32 model that the plain optimizer updates with averaged gradients, and its rounded image."""

    def __init__(self, model: nn.Module, factory: Callable[..., optim.Optimizer], options: Options) -> None:
        self.rounded_model = copy.deepcopy(model)
        self.masters = [nn.Parameter(p.detach().to(master_dtype_for(p.dtype))) for p in model.parameters()]
        self.plain = factory(self.masters, **copy.deepcopy(options))

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        torch.autograd.backward(loss(self.rounded_model))
        for param, master in zip(self.rounded_model.parameters(), self.masters, strict=True):
            assert param.grad is not None
            master.grad = average(from_all_ranks(param.grad)).to(master.dtype)
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
    """A sharded model, and what it must be equal to after each step."""

    def __init__(self, model: nn.Module, config: ZeroConfig, inner: tuple[Any, Options], **more: Any) -> None:
        self.model = model
        self.zero = shard(model, inner[0], config=config, **more, **inner[1])
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
        """The consolidated state is that of the float32 optimizer, and has the masters."""
        found = self.zero.full_state_dict()
        if found is not None:
            masters = {index: state.pop("master_weights") for index, state in found["state"].items()}
            plain = {index: state for index, state in found["state"].items() if state}
            assert_same(plain, dict(self.oracle.plain.state_dict()["state"]))
            assert_same(masters, dict(enumerate(master.detach() for master in self.oracle.masters)))


@ranks(1, 2, 3, 4)
def test_update_is_rounded_once(ctx: RankContext) -> None:
    kinds = (torch.bfloat16, torch.float16, torch.bfloat16)
    for config, inner, dtype in zip(CONFIGS, INNER_OPTIMIZERS, kinds, strict=True):
        run = Run(make_half_mlp(dtype), config, inner)
        run.train(4)
        run.check_state()


@ranks(1, 2, 3)
def test_drop_in_with_master_weights(ctx: RankContext) -> None:
    for factory, options in INNER_OPTIMIZERS:
        model, image = make_half_mlp(), make_half_mlp()
        zero = ZeroRedundancyOptimizer(
            model.parameters(), factory, config=ZeroConfig(partition=TINY, master_dtype=MASTER_WEIGHTS), **options
        )
        masters = [nn.Parameter(param.detach().float()) for param in image.parameters()]
        plain = factory(masters, **options)
        for step in range(4):
            set_grads(model.parameters(), step)
            for param, master in zip(model.parameters(), masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
            zero.step()
            plain.step()
            assert_same([p.detach() for p in model.parameters()], [m.detach().bfloat16() for m in masters])


@ranks(2, 3)
def test_master_weights_are_sharded(ctx: RankContext) -> None:
    run = Run(nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)).bfloat16(), CONFIGS[2], INNER_OPTIMIZERS[0])
    run.train(1)
    owned = [value for group in run.zero.optim.param_groups for value in group["params"]]
    state = [value for it in run.zero.optim.state.values() for value in it.values() if value.dim()]
    assert {value.dtype for value in owned + state} == {torch.float32}
    everything = sum(param.numel() for param in run.model.parameters())
    assert sum(ctx.gather(sum(value.numel() for value in owned))) == everything
    assert max(ctx.gather(sum(value.numel() for value in state))) <= 2 * (everything / ctx.world_size + 1)


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


# ---- saved and restored


def resume_run(run: Run, saved: Any, inner: tuple[Any, Options], config: ZeroConfig, *, model_first: bool) -> Run:
    """A new run that goes on where another was saved, beside the oracle that was never interrupted."""
    torch.manual_seed(9)
    again = Run(mlp().to(torch.bfloat16), config, inner)
    if model_first:
        again.model.load_state_dict(run.model.state_dict())
    again.zero.load_state_dict(saved)
    if not model_first:
        again.model.load_state_dict(run.model.state_dict())
    again.oracle, again.steps = run.oracle, run.steps
    return again


@ranks(1, 2, 3, 4)
@sampled("model_first", [True, False])
def test_resumes_bitwise(ctx: RankContext, model_first: bool) -> None:
    for inner, config, other in zip(INNER_OPTIMIZERS[:2], CONFIGS, CONFIGS[1:], strict=False):
        run = Run(make_half_mlp(), config, inner)
        run.train(3)
        saved = ctx.gather(run.zero.full_state_dict())[0]
        again = resume_run(run, saved, inner, other, model_first=model_first)
        again.train(3)
        again.check_state()


@ranks(4)
def test_resumes_at_another_world_size(ctx: RankContext, tmp_path: Path) -> None:
    """From 4 ranks to 2. Gradients are equal on all ranks, and halves and quarters of them are exact."""
    pair = dist.new_group([0, 1])

    def train(model: nn.Module, zero: Any, first: int) -> None:
        for step in range(first, first + 3):
            set_grads(model.parameters(), step)
            zero.step()
            zero.zero_grad()

    def make(**more: Any) -> tuple[nn.Module, Any]:
        model = make_half_mlp()
        return model, shard(model, optim.AdamW, foreach=True, config=CONFIGS[0], **more)

    model, zero = make()
    train(model, zero, 0)
    saved = zero.full_state_dict()
    if saved is not None:
        torch.save((model.state_dict(), saved), tmp_path / "saved")
    dist.barrier()
    train(model, zero, 3)
    if ctx.rank < 2:
        again, zero_again = make(process_group=pair)
        weights, state = torch.load(tmp_path / "saved", weights_only=True)
        zero_again.load_state_dict(state)
        again.load_state_dict(weights)
        train(again, zero_again, 3)
        assert_same(again.state_dict(), model.state_dict())


@ranks(1, 2, 3)
def test_param_edits_are_copied_to_master_weights(ctx: RankContext) -> None:
    """As if the master had been set to the new value; those that were not changed keep their digits."""
    run = Run(make_half_mlp(), CONFIGS[0], INNER_OPTIMIZERS[0])
    run.train(3)
    other = [torch.full_like(param, 0.3) for param in run.model.parameters()]
    with torch.no_grad():
        for place in (0, 3):
            for target in (
                list(run.model.parameters()),
                list(run.oracle.rounded_model.parameters()),
                run.oracle.masters,
            ):
                target[place].copy_(other[place])
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
    """That of an optimizer that had none."""
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
