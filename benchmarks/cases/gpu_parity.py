"""Correctness on a GPU: two ranks share it over gloo. Results must be bit-identical to the unsharded optimizer's."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

from ..harness.models import RECIPES, Shape, make_params
from ..harness.ranks import run_ranks
from ..harness.report import Row, failed_row
from .gpu_speed import Machine

SHAPES: list[Shape] = [(700, 400), (33,), (5, 7, 3), (1024, 600), (1,), (), (64, 64)] * 2
NAMES = ("fused AdamW", "foreach AdamW")
Differences = dict[str, int]
"""Number of tensors that differ, by case."""


def parity(machine: Machine) -> list[Row]:
    """Run each check in its own processes, so one failure does not hide the others."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    rows: list[Row] = []
    for title, check in CHECKS.items():
        try:
            by_rank: list[Differences] = run_ranks(2, check, machine, limit_s=120)
        except Exception as error:
            rows.append(failed_row(title, error))
            continue
        for case in by_rank[0]:
            count = sum(differences[case] for differences in by_rank)
            rows.append(Row(f"{title}, {case}", f"{count} tensors differ", "unsharded", count, bar=0))
    return rows


def check_steps(machine: Machine) -> Differences:
    differences: Differences = {}
    for name, view in _cases():
        sharded, plain = _make_params(machine), _make_params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        for step in range(5):
            _set_grads(step, sharded, plain)
            zero.step()
            reference.step()
        differences[_label(name, view)] = _count_different(sharded, plain)
    return differences


def check_save_and_load(machine: Machine) -> Differences:
    """Compare the consolidated state with the unsharded one. Load it into a new optimizer and compare more steps."""
    differences: Differences = {}
    for name, view in _cases():
        sharded, plain = _make_params(machine), _make_params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        _step_all(range(3), {zero: sharded, reference: plain})
        saved = _full_state(zero)
        count = _count_different(_tensors(saved), _tensors(reference.state_dict()))
        resumed = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        resumed.load_state_dict(saved)
        if name.startswith("fused"):
            count += sum(state["step"].device.type != machine.device for state in resumed.state.values())
        _step_all(range(3, 6), {resumed: sharded, reference: plain})
        differences[_label(name, view)] = count + _count_different(sharded, plain)
    return differences


def check_overlap(machine: Machine) -> Differences:
    """Compare steps inside DDP's backward. By contract the first two passes do not update."""
    torch.use_deterministic_algorithms(True)
    differences: Differences = {}
    for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard_buckets in (False, True):
            ddp, reference = _make_ddp(machine), _make_ddp(machine)
            reference.register_comm_hook(None, allreduce_hook)
            optimizer = RECIPES["fused AdamW"].plain(list(reference.parameters()))
            recipe = RECIPES["fused AdamW"]
            zero = _make_overlapped_optimizer(recipe, ddp)
            ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero, shard_buckets=shard_buckets))
            for step in range(6):
                _backward(machine, step, ddp, reference)
                if step >= 2:
                    optimizer.step()
                zero.zero_grad()
                optimizer.zero_grad()
            case = f"{hook.__name__}, shard_buckets={shard_buckets}"
            differences[case] = _count_different(list(ddp.parameters()), list(reference.parameters()))
    return differences


def check_grad_scaler(machine: Machine) -> Differences:
    """Use a `GradScaler`. In one step, gradients of one rank are not finite: all ranks skip that step."""
    differences: Differences = {}
    for name, view in _cases():
        sharded, plain = _make_params(machine), _make_params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        scaler = torch.amp.GradScaler(machine.device, init_scale=2.0**8)
        scaler.scale(torch.ones((), device=machine.device))
        for step in range(5):
            _set_grads(step, sharded, plain)
            _scale_grads(sharded, scaler.get_scale(), make_inf=step == 2 and dist.get_rank() == 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rank warns if it skips because of another rank's gradients
                scaler.step(zero)
            scaler.update()
            if step != 2:
                reference.step()
        differences[_label(name, view)] = _count_different(sharded, plain)
    return differences


CHECKS: dict[str, Callable[[Machine], Differences]] = {
    "parity of 5 steps, 2 ranks": check_steps,
    "consolidate, load, continue, 2 ranks": check_save_and_load,
    "overlap with DDP, 2 ranks": check_overlap,
    "GradScaler, inf on one rank": check_grad_scaler,
}


def _cases() -> list[tuple[str, bool]]:
    return [(name, view) for name in NAMES for view in (False, True)]


def _label(name: str, view: bool) -> str:
    return name + (", bucket view" if view else "")


def _make_params(machine: Machine) -> list[torch.Tensor]:
    return make_params(SHAPES, device=machine.device)


def _set_grads(step: int, *models: Sequence[torch.Tensor]) -> None:
    """Set gradients that are the same for all models on all ranks, and different in each step."""
    for params in models:
        generator = torch.Generator(params[0].device).manual_seed(step)
        for param in params:
            param.grad = torch.empty_like(param).normal_(generator=generator)


def _step_all(steps: range, trainings: dict[Any, list[torch.Tensor]]) -> None:
    for step in steps:
        for optimizer, params in trainings.items():
            _set_grads(step, params)
            optimizer.step()


def _scale_grads(params: Sequence[torch.Tensor], scale: float, *, make_inf: bool) -> None:
    for param in params:
        assert param.grad is not None
        param.grad *= scale
    if make_inf and params[0].grad is not None:
        params[0].grad.view(-1)[0] = torch.inf


def _full_state(zero: Any) -> dict[str, Any]:
    """Return the full state dict on every rank."""
    state_dicts = [zero.full_state_dict(to=rank) for rank in range(dist.get_world_size())]
    result: dict[str, Any] = state_dicts[dist.get_rank()]
    return result


def _tensors(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value.cpu() for state in state_dict["state"].values() for value in state.values()]


def _count_different(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _make_ddp(machine: Machine) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(96, 96), torch.nn.Tanh())]
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(machine.device), bucket_cap_mb=0.05)


def _make_overlapped_optimizer(recipe: Any, ddp: DistributedDataParallel) -> Any:
    from zeroshard import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(ddp.parameters(), recipe.make, overlap_with_ddp=True, **recipe.options)


def _backward(machine: Machine, step: int, *models: DistributedDataParallel) -> None:
    """Run a backward pass of each model on this rank's inputs."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(8, 96, generator=generator).to(machine.device)
    for model in models:
        model(inputs).square().sum().backward()
