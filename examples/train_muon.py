"""Train a small GPT with Muon on its matrices and AdamW on the rest: one optimizer, one scheduler, one checkpoint.

torchrun --nproc-per-node 2 examples/train_muon.py [--steps N] [--width N] [--layers N] [--measured]
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from gpt import GPT  # type: ignore[import-not-found]
from start import join_group  # type: ignore[import-not-found]
from zeroshard import checkpoint

FOLDER = "checkpoints-muon"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with Muon and AdamW, or resume.")
    parser.add_argument("--steps", type=int, default=20, help="number of further steps")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--measured", action="store_true", help="assign matrices to ranks by measured step times")
    return parser.parse_args()


def make_optimizer(model: nn.Module, *, measured: bool) -> zeroshard.ShardedOptimizer:
    hidden = zeroshard.matrix_params(exclude=("tokens", "positions"))
    cost = zeroshard.rules.profile_step_cost(model, torch.optim.Muon, selector=hidden) if measured else None
    return zeroshard.shard(
        model,
        [
            zeroshard.ParamRule(
                hidden, torch.optim.Muon, partition=zeroshard.WholeParams(cost), lr=0.02, weight_decay=0.1
            ),
            zeroshard.ParamRule(zeroshard.remaining_params, torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        ],
    )


def batch(step: int, device: torch.device) -> torch.Tensor:
    """Return sequences of consecutive numbers, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(64, (16, 1), generator=generator)
    return ((starts + torch.arange(33)) % 64).to(device)


def main() -> None:
    options, device = parse_options(), join_group()
    torch.manual_seed(0)
    model = GPT(vocabulary=64, context=32, width=options.width, layers=options.layers).to(device)
    optimizer = make_optimizer(model, measured=options.measured)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))  # of both optimizer classes
    if checkpoint.latest(FOLDER):  # at any world size; call on all ranks
        checkpoint.load(FOLDER, model=model, optimizer=optimizer, scheduler=scheduler)
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    for step in range(scheduler.last_epoch, scheduler.last_epoch + options.steps):
        ids = batch(step, device)
        with autocast:
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)  # reduces each matrix to its owner, reduce-scatters the rest
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    checkpoint.save(FOLDER, step=scheduler.last_epoch, model=model, optimizer=optimizer, scheduler=scheduler)
    if dist.get_rank() == 0:
        balance = optimizer.balance
        print(f"step {scheduler.last_epoch}: loss {loss.item():.4f} on {optimizer.world_size} ranks")
        print(f"compute imbalance {balance.compute_imbalance:.3f}, memory imbalance {balance.memory_imbalance:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
