"""Train a small character-level GPT on several ranks, with optimizer state and gradients sharded across them.

torchrun --nproc-per-node 2 examples/train_gpt.py [--way unsharded | drop-in | shard] [--steps N]
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gpt import GPT  # type: ignore[import-not-found]
from start import join_group  # type: ignore[import-not-found]
from zeroshard import ZeroRedundancyOptimizer, shard

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
CONTEXT = 64
BATCH = 8
STEPS = 60


WAYS = ("unsharded", "drop-in", "shard")


def prepare(model: nn.Module, way: str) -> tuple[nn.Module, Optimizer]:
    """Return the model to train and its optimizer."""
    if way == "shard":
        return model, shard(model, AdamW, lr=1e-3, fused=True)  # no DDP: 1/N of state and gradients on each rank
    wrapped = DistributedDataParallel(model)
    if way == "drop-in":
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=1e-3, fused=True)
    return wrapped, AdamW(wrapped.parameters(), lr=1e-3, fused=True)


@dataclass
class Run:
    """Results of a run on this rank; times are medians.

    It keeps the parameters but not the DDP model: one that outlives its process group can hang gloo's shutdown.
    """

    parameters: list[Tensor]
    loss: float
    state_mib: float
    step_ms: float
    iteration_ms: float


def train(device: torch.device, way: str, steps: int = STEPS) -> Run:
    torch.manual_seed(0)  # the same initial weights on every rank and in every run
    text = TEXT.read_text(encoding="ascii")
    model, optimizer = prepare(GPT(len(set(text)), CONTEXT).to(device), way)
    times = []
    for inputs, targets in track(batches(text, device, steps), way.rjust(9), steps, disable=dist.get_rank() != 0):
        start = now(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        ready = now(device)
        optimizer.step()
        end = now(device)
        times.append((end - ready, end - start))
    step_ms, iteration_ms = torch.tensor(times).mul(1e3).median(0).values.tolist()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return Run(parameters, loss.item(), state_mib(optimizer), step_ms, iteration_ms)


def batches(text: str, device: torch.device, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random passages, different on each rank, and the same passages shifted by one character."""
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text])
    passages = ids.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        picked = passages[torch.randint(len(passages), (BATCH,), generator=generator)].to(device)
        yield picked[:, :-1], picked[:, 1:]


def state_mib(optimizer: Optimizer) -> float:
    """Return the size of this rank's optimizer state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 2**20


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with a sharded optimizer.")
    parser.add_argument("--way", choices=WAYS, default="shard")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    run = train(join_group(), options.way, options.steps)
    print(f"rank {dist.get_rank()}: loss of its last batch {run.loss:.3f}, optimizer state {run.state_mib:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
