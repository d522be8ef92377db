"""A script with DDP in which one import has changed: each rank keeps its part of AdamW's state.

torchrun --nproc-per-node 2 examples/dropin.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from start import join_group  # type: ignore[import-not-found]
from zeroshard import ZeroRedundancyOptimizer  # was: from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 30


def main() -> None:
    device = join_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 1)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-3)
    torch.manual_seed(dist.get_rank())  # other inputs on each rank
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.square().mean(1, keepdim=True))
        torch.autograd.backward(loss)  # DDP averages the gradients
        optimizer.step()  # each rank updates what it owns, and sends it to the others
        optimizer.zero_grad()
        if step in (1, STEPS) and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    whole = 2 * sum(param.numel() for param in model.parameters())
    state = optimizer.full_state_dict(to=0)  # on all ranks; the unsharded optimizer's own dict on rank 0
    if state is not None:
        torch.optim.AdamW(model.parameters()).load_state_dict(state)
    print(f"rank {dist.get_rank()} holds {held:,} of {whole:,} elements of state\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
