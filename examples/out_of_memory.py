"""Train a GPT of 43 M parameters under a memory limit: DDP does not fit, the drop-in and `shard` do.

torchrun --nproc-per-node 2 examples/out_of_memory.py --memory 0.75 [--mode ddp | drop-in | shard]
"""

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gpt import GPT  # type: ignore[import-not-found]
from start import join_group  # type: ignore[import-not-found]
from zeroshard import ZeroRedundancyOptimizer, shard

CONTEXT, BATCH, STEPS = 64, 2, 5


def limit_memory(gib: float, device: torch.device) -> None:
    """Limit what this process may allocate from now on. On the CPU this stands in for the memory of a GPU (Linux)."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)
    else:
        limit = read_status("VmData") + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def read_status(name: str) -> int:
    """Return a memory size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def prepare(model: nn.Module, mode: str) -> tuple[nn.Module, Optimizer]:
    """Return the model to train and its optimizer."""
    if mode == "shard":
        return model, shard(model, AdamW, lr=1e-3, fused=True)
    ddp = DistributedDataParallel(model)
    if mode == "drop-in":
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3, fused=True)
    return ddp, AdamW(ddp.parameters(), lr=1e-3, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT under a memory limit.")
    parser.add_argument("--mode", choices=("ddp", "drop-in", "shard"), default="shard")
    parser.add_argument("--memory", type=float, help="limit in GiB for parameters, gradients, state and activations")
    parser.add_argument("--report", action="store_true", help="print optimizer.report() on rank 0")
    options = parser.parse_args()
    device = join_group()
    if options.memory is not None:
        limit_memory(options.memory, device)
    torch.manual_seed(0)
    model, optimizer = prepare(GPT(256, CONTEXT, width=768, heads=12, layers=6).to(device), options.mode)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(256, (BATCH, CONTEXT + 1), device=device)
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{options.mode}, {dist.get_world_size()} ranks, {STEPS} steps: loss {loss.item():.4f}")
        if options.report and isinstance(optimizer, ZeroRedundancyOptimizer):
            print(optimizer.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
