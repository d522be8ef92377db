"""Train a bfloat16 model with fp32 master weights, sharded across ranks, and the same model without them.

torchrun --nproc-per-node 2 examples/bf16_masters.py
"""

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from start import join_group  # type: ignore[import-not-found]
from zeroshard import ZeroConfig

STEPS = 60
# Gradients are sent in bfloat16 and summed in float32. Parameters are rounded once, after the update.
MASTERS = ZeroConfig(master_dtype=torch.float32, reduce_dtype=torch.bfloat16)


def train(config: ZeroConfig, device: torch.device) -> float:
    """Train a model and return the fraction of its elements that changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device, torch.bfloat16)
    before = [param.detach().clone() for param in model.parameters()]
    # Such small updates are lost to rounding unless they accumulate in higher precision.
    optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-5, weight_decay=0.0, config=config)
    torch.manual_seed(dist.get_rank())  # different inputs on each rank
    for _ in range(STEPS):
        inputs = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
        torch.autograd.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    changed = [old != new for old, new in zip(before, model.parameters(), strict=True)]
    return sum(int(mask.sum()) for mask in changed) / sum(mask.numel() for mask in changed)


def main() -> None:
    device = join_group()
    masters, plain = train(MASTERS, device), train(ZeroConfig(), device)
    if dist.get_rank() == 0:
        print(f"elements that changed: {masters:.0%} with master weights, {plain:.0%} without")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
