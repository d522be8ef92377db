"""Correctness on a GPU: two ranks share it over gloo, and must make what the unsharded optimizer makes, bit for bit."""

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
Found = dict[str, int]
"""Tensors that differ, by case."""


def parity(machine: Machine) -> list[Row]:
    """Every check in processes of its own, so that one failure does not hide the rest."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    rows: list[Row] = []
    for title, check in CHECKS.items():
        try:
            by_rank: list[Found] = run_ranks(2, check, machine, limit_s=120)
        except Exception as error:
            rows.append(failed_row(title, error))
            continue
        for case in by_rank[0]:
            differing = sum(found[case] for found in by_rank)
            rows.append(Row(f"{title}, {case}", f"{differing} tensors differ", "unsharded", differing, bar=0))
    return rows


def same_steps(machine: Machine) -> Found:
    found: Found = {}
    for name, view in _cases():
        sharded, plain = _params(machine), _params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        for step in range(5):
            _set_grads(step, sharded, plain)
            zero.step()
            reference.step()
        found[_label(name, view)] = _differing(sharded, plain)
    return found


def save_and_load(machine: Machine) -> Found:
    """Consolidated state equals the unsharded one; loaded into a new optimizer, training goes on as before."""
    found: Found = {}
    for name, view in _cases():
        sharded, plain = _params(machine), _params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        _step_all(range(3), {zero: sharded, reference: plain})
        saved = _full_state(zero)
        wrong = _differing(_tensors(saved), _tensors(reference.state_dict()))
        resumed = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        resumed.load_state_dict(saved)
        if name.startswith("fused"):
            wrong += sum(state["step"].device.type != machine.device for state in resumed.state.values())
        _step_all(range(3, 6), {resumed: sharded, reference: plain})
        found[_label(name, view)] = wrong + _differing(sharded, plain)
    return found


def overlapped(machine: Machine) -> Found:
    """Steps inside DDP's backward. By contract the first two passes make no update."""
    torch.use_deterministic_algorithms(True)
    found: Found = {}
    for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard_buckets in (False, True):
            ddp, reference = _ddp(machine), _ddp(machine)
            reference.register_comm_hook(None, allreduce_hook)
            optimizer = RECIPES["fused AdamW"].plain(list(reference.parameters()))
            recipe = RECIPES["fused AdamW"]
            zero = _overlapping(recipe, ddp)
            ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero, shard_buckets=shard_buckets))
            for step in range(6):
                _backward(machine, step, ddp, reference)
                if step >= 2:
                    optimizer.step()
                zero.zero_grad()
                optimizer.zero_grad()
            case = f"{hook.__name__}, shard_buckets={shard_buckets}"
            found[case] = _differing(list(ddp.parameters()), list(reference.parameters()))
    return found


def scaled(machine: Machine) -> Found:
    """`GradScaler`, with gradients that are not finite on one rank in one step: no rank makes that step."""
    found: Found = {}
    for name, view in _cases():
        sharded, plain = _params(machine), _params(machine)
        zero = RECIPES[name].sharded("zeroshard", sharded, bucket_view=view)
        reference = RECIPES[name].plain(plain)
        scaler = torch.amp.GradScaler(machine.device, init_scale=2.0**8)
        scaler.scale(torch.ones((), device=machine.device))
        for step in range(5):
            _set_grads(step, sharded, plain)
            _scale_grads(sharded, scaler.get_scale(), spoil=step == 2 and dist.get_rank() == 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that another rank's gradients made this one skip
                scaler.step(zero)
            scaler.update()
            if step != 2:
                reference.step()
        found[_label(name, view)] = _differing(sharded, plain)
    return found


CHECKS: dict[str, Callable[[Machine], Found]] = {
    "parity of 5 steps, 2 ranks": same_steps,
    "consolidate, load, go on, 2 ranks": save_and_load,
    "overlap with DDP, 2 ranks": overlapped,
    "GradScaler, inf on one rank": scaled,
}


def _cases() -> list[tuple[str, bool]]:
    return [(name, view) for name in NAMES for view in (False, True)]


def _label(name: str, view: bool) -> str:
    return name + (", bucket view" if view else "")


def _params(machine: Machine) -> list[torch.Tensor]:
    return make_params(SHAPES, device=machine.device)


def _set_grads(step: int, *models: Sequence[torch.Tensor]) -> None:
    """The same gradients for all models on all ranks, others in each step."""
    for params in models:
        generator = torch.Generator(params[0].device).manual_seed(step)
        for param in params:
            param.grad = torch.empty_like(param).normal_(generator=generator)


def _step_all(steps: range, trainings: dict[Any, list[torch.Tensor]]) -> None:
    for step in steps:
        for optimizer, params in trainings.items():
            _set_grads(step, params)
            optimizer.step()


def _scale_grads(params: Sequence[torch.Tensor], scale: float, *, spoil: bool) -> None:
    for param in params:
        assert param.grad is not None
        param.grad *= scale
    if spoil and params[0].grad is not None:
        params[0].grad.view(-1)[0] = torch.inf


def _full_state(zero: Any) -> dict[str, Any]:
    """The whole state on every rank."""
    mine = [zero.full_state_dict(to=rank) for rank in range(dist.get_world_size())]
    result: dict[str, Any] = mine[dist.get_rank()]
    return result


def _tensors(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value.cpu() for state in state_dict["state"].values() for value in state.values()]


def _differing(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _ddp(machine: Machine) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(96, 96), torch.nn.Tanh())]
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(machine.device), bucket_cap_mb=0.05)


def _overlapping(recipe: Any, ddp: DistributedDataParallel) -> Any:
    from zeroshard import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(ddp.parameters(), recipe.make, overlap_with_ddp=True, **recipe.options)


def _backward(machine: Machine, step: int, *models: DistributedDataParallel) -> None:
    """Each rank has inputs of its own."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(8, 96, generator=generator).to(machine.device)
    for model in models:
        model(inputs).square().sum().backward()
