"""Elastic training: when ranks leave or join, torchrun restarts all processes, and they resume from a checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2:4 --nproc-per-node 1 --max-restarts 3 \\
    --rdzv-backend c10d --rdzv-endpoint host0:29400 --rdzv-id my-job examples/elastic.py

On one host: ... torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py

A rank that fails or loses a peer raises. Nothing here catches the error: the process exits, and torchrun restarts the
job.
"""

import argparse
import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from zeroshard import checkpoint, shard

BATCH = 24  # samples per step, over all ranks


def make_model(width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 1))


def part_of_batch(step: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's samples for a step. They depend on step and world size alone, so runs are repeatable."""
    samples = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    return samples.tensor_split(world_size)[rank]


def loss_of(model: nn.Module, inputs: Tensor, world_size: int) -> Tensor:
    """Return a loss whose average over ranks is the mean over the batch, even if ranks have unequal sample counts."""
    errors: Tensor = model(inputs) - inputs.square().mean(1, keepdim=True)
    return errors.square().sum() * (world_size / BATCH)


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = make_model().to(device)
    optimizer = shard(model, torch.optim.AdamW, lr=1e-2)

    start, pending_save = 0, None
    if checkpoint.latest(options.folder) is not None:  # at any world size; call on all ranks
        start = checkpoint.load(options.folder, model=model, optimizer=optimizer).step or 0
    log_event("start", restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), step=start)
    for step in range(start + 1, options.steps + 1):
        loss = loss_of(model, part_of_batch(step, rank, world_size).to(device), world_size)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % options.every == 0 or step == options.steps:
            pending_save = checkpoint.async_save(
                options.folder, step=step, model=model, optimizer=optimizer, keep=options.keep
            )
    if pending_save is not None:
        pending_save.wait()
    log_event("end", step=options.steps)


def log_event(event: str, **values: object) -> None:
    """Print one line of JSON. A single write keeps lines of several processes apart."""
    process = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "pid": os.getpid()}
    print(json.dumps({"event": event, **process, **values}) + "\n", end="", flush=True)


@record  # lets torchrun report the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description="Train while ranks leave and join.")
    parser.add_argument("--steps", type=int, default=1000, help="total number of steps")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--keep", type=int, default=3, help="number of checkpoints to keep")
    parser.add_argument("--folder", default="checkpoints-elastic", help="checkpoint directory, shared by all hosts")
    parser.add_argument("--timeout", type=float, default=60, help="seconds until an unresponsive rank counts as lost")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
