"""Train a small character-level GPT on several ranks, with optimizer state and gradients sharded across them.

torchrun --nproc-per-node 2 examples/train_gpt.py [--mode unsharded | drop-in | shard] [--steps N]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gpt import GPT  # type: ignore[import-not-found]
from start import join_group  # type: ignore[import-not-found]
from zeroshard import ZeroRedundancyOptimizer, shard

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
CONTEXT = 64
BATCH = 8  # passages per step and rank
MODES = ("unsharded", "drop-in", "shard")


def prepare(model: nn.Module, mode: str) -> tuple[nn.Module, Optimizer]:
    """Return the model to train and its optimizer."""
    if mode == "shard":
        return model, shard(model, AdamW, lr=1e-3, fused=True)  # no DDP: each rank keeps 1/N of state and gradients
    wrapped = DistributedDataParallel(model)
    if mode == "drop-in":
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=1e-3, fused=True)
    return wrapped, AdamW(wrapped.parameters(), lr=1e-3, fused=True)


def train(device: torch.device, mode: str, steps: int) -> None:
    torch.manual_seed(0)  # the same initial weights on every rank
    text = TEXT.read_text(encoding="ascii")
    model, optimizer = prepare(GPT(len(set(text)), CONTEXT).to(device), mode)
    for step, (inputs, targets) in enumerate(batches(text, steps), 1):
        loss = cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(f"rank {dist.get_rank()}: last loss {loss.item():.3f}, optimizer state {state_mib(optimizer):.1f} MiB")


def batches(text: str, count: int, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random passages, different on each rank, and the same passages shifted by one character."""
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text])
    passages = ids.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        picked = passages[torch.randint(len(passages), (size,), generator=generator)]
        yield picked[:, :-1], picked[:, 1:]


def state_mib(optimizer: Optimizer) -> float:
    """Return the size of this rank's optimizer state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with a sharded optimizer.")
    parser.add_argument("--mode", choices=MODES, default="shard")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    # Hazard: a DDP model that outlives its process group can hang gloo's shutdown. Here it ends with `train`.
    train(join_group(), options.mode, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
