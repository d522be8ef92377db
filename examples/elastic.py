"""Train while ranks come and go: torchrun restarts the rest, and they go on from the last checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2:4 --nproc-per-node 1 --max-restarts 3 \\
    --rdzv-backend c10d --rdzv-endpoint host0:29400 --rdzv-id my-job examples/elastic.py

On one host: ... torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py

A rank that fails, or waits in vain for one that has died, raises. Nothing here catches that: the process ends, which is
what torchrun waits for.
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

BATCH = 24  # samples in a step, of all ranks together


def make_model(width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 1))


def part_of_batch(step: int, rank: int, world_size: int) -> Tensor:
    """What a rank takes of the samples of a step. These depend on nothing else, so that any run can be repeated."""
    samples = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    return samples.tensor_split(world_size)[rank]


def loss_of(model: nn.Module, inputs: Tensor, world_size: int) -> Tensor:
    """Averaged over ranks it is the mean over the batch, also where parts are not equally long."""
    errors: Tensor = model(inputs) - inputs.square().mean(1, keepdim=True)
    return errors.square().sum() * (world_size / BATCH)


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = make_model().to(device)
    optimizer = shard(model, torch.optim.AdamW, lr=1e-2)

    start, saving = 0, None
    if checkpoint.latest(options.folder) is not None:  # on all ranks, as many as there are now
        start = checkpoint.load(options.folder, model=model, optimizer=optimizer).step or 0
    tell("start", restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), step=start)
    for step in range(start + 1, options.steps + 1):
        loss = loss_of(model, part_of_batch(step, rank, world_size).to(device), world_size)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % options.every == 0 or step == options.steps:
            saving = checkpoint.async_save(
                options.folder, step=step, model=model, optimizer=optimizer, keep=options.keep
            )
    if saving is not None:
        saving.wait()
    tell("end", step=options.steps)


def tell(event: str, **facts: object) -> None:
    """A line for people and programs, in one piece whoever else prints."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "pid": os.getpid()}
    print(json.dumps({"event": event, **place, **facts}) + "\n", end="", flush=True)


@record  # torchrun then names the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description="Train while ranks come and go.")
    parser.add_argument("--steps", type=int, default=1000, help="the length of the whole training")
    parser.add_argument("--every", type=int, default=50, help="save after each so many steps")
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints stay")
    parser.add_argument("--folder", default="checkpoints", help="where checkpoints are: a place that all hosts see")
    parser.add_argument("--timeout", type=float, default=60, help="seconds until a rank that is silent counts as lost")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
