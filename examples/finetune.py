"""Fine-tune a new head first, then all layers. Frozen parameters have no optimizer state and are not communicated.

torchrun --nproc-per-node 2 examples/finetune.py
"""

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from start import join_group  # type: ignore[import-not-found]

STEPS = 30


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())


def train(model: nn.Module, optimizer: zeroshard.ShardedOptimizer, device: torch.device, seed: int) -> float:
    torch.manual_seed(1000 * seed + dist.get_rank())  # different inputs on each rank
    for _ in range(STEPS):
        inputs = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def report(phase: str, optimizer: zeroshard.ShardedOptimizer, loss: float) -> None:
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    if dist.get_rank() == 0:
        print(f"{phase}: loss {loss:.4f}, rank 0 holds {held:,} elements of state")


def main() -> None:
    device = join_group()
    body, head = pretrained(), nn.Linear(64, 1)
    model = nn.Sequential(body, head).to(device)
    body.requires_grad_(False)
    optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3)  # all parameters, including frozen ones
    before = [param.clone() for param in body.parameters()]
    report("head only", optimizer, train(model, optimizer, device, seed=1))
    assert all(torch.equal(old, new) for old, new in zip(before, body.parameters(), strict=True))
    body.requires_grad_(True)  # the same optimizer trains them from the next step on
    optimizer.param_groups[0]["lr"] = 3e-4
    report("all layers", optimizer, train(model, optimizer, device, seed=2))
    assert not any(torch.equal(old, new) for old, new in zip(before, body.parameters(), strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
