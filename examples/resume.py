"""Train a small GPT. Stop it at any step, and run it again on any number of ranks to resume.

torchrun --nproc-per-node 4 examples/resume.py --stop-at 40
torchrun --nproc-per-node 2 examples/resume.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from gpt import GPT  # type: ignore[import-not-found]
from start import join_group  # type: ignore[import-not-found]
from train_gpt import CONTEXT, TEXT  # type: ignore[import-not-found]
from zeroshard import checkpoint, shard

BATCH = 12  # passages per step, over all ranks: the world size must divide it


class Passages:
    """Random passages of a text. The batch of a step depends on the step alone, not on the world size."""

    def __init__(self) -> None:
        text = TEXT.read_text(encoding="ascii")
        self.vocabulary = sorted(set(text))
        ids = torch.tensor([self.vocabulary.index(character) for character in text])
        self._passages = ids.unfold(0, CONTEXT + 1, 1)

    def batch(self, step: int) -> Tensor:
        """Return this rank's passages for a step."""
        picked = torch.randint(len(self._passages), (BATCH,), generator=torch.Generator().manual_seed(step))
        return self._passages[picked[dist.get_rank() :: dist.get_world_size()]]


def train(options: argparse.Namespace) -> None:
    device = join_group()
    if BATCH % dist.get_world_size():
        raise SystemExit(f"{dist.get_world_size()} ranks cannot share {BATCH} passages evenly")
    torch.manual_seed(0)
    passages = Passages()
    model = GPT(len(passages.vocabulary), CONTEXT, width=128).to(device)
    optimizer = shard(model, torch.optim.AdamW, lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    start, pending_save = 0, None
    if checkpoint.latest(options.folder) is not None:  # on all ranks, at any world size
        start = checkpoint.load(options.folder, **parts).step or 0
    stop = min(options.steps, options.stop_at or options.steps)
    if start >= stop and dist.get_rank() == 0:
        print(f"already trained for {start} steps: delete {options.folder} to start over")
    for step in range(start + 1, stop + 1):
        ids = passages.batch(step).to(device)
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        report(step, loss.detach())
        if step % options.every == 0 or step == stop:
            pending_save = checkpoint.async_save(options.folder, step=step, **parts)
    if pending_save is not None:
        pending_save.wait()
    dist.destroy_process_group()


def report(step: int, loss: Tensor) -> None:
    """Print the loss of the global batch, with enough digits to compare runs."""
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}, {dist.get_world_size()} ranks: loss {loss.item() / dist.get_world_size():.9f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT, or resume.")
    parser.add_argument("--steps", type=int, default=120, help="total number of steps")
    parser.add_argument("--stop-at", type=int, help="stop after this step")
    parser.add_argument("--every", type=int, default=25, help="steps between two checkpoints")
    parser.add_argument("--folder", default="checkpoints-resume", help="checkpoint directory")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
