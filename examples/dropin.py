"""Train under DDP with one changed import: each rank keeps 1/N of AdamW's state.

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
    torch.manual_seed(dist.get_rank())  # different inputs on each rank
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.square().mean(1, keepdim=True))
        torch.autograd.backward(loss)  # DDP averages the gradients
        optimizer.step()  # each rank updates the parameters that it owns and broadcasts them
        optimizer.zero_grad()
        if step in (1, STEPS) and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    total = 2 * sum(param.numel() for param in model.parameters())
    state = optimizer.full_state_dict(to=0)  # on all ranks; rank 0 gets the state dict of a plain optimizer
    if state is not None:
        torch.optim.AdamW(model.parameters()).load_state_dict(state)
    print(f"rank {dist.get_rank()} holds {held:,} of {total:,} elements of state\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
