"""Kill one of three ranks. The others continue in their own processes, from peer checkpoints in memory.

python examples/recover.py
"""

import multiprocessing
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

import zeroshard
from zeroshard import PeerCheckpoint, ZeroConfig

RANKS, STEPS = 3, 40
LOST, LOST_AT = "1", 23
CONFIG = ZeroConfig(peer_checkpoint=PeerCheckpoint(every=5))
HOST = "127.0.0.1"


def join(store: Store, name: str, attempt: int) -> None:
    """Create a process group of the live processes, which the launcher lists in the store."""
    names = store.get(f"attempt {attempt}").decode().split()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"group {attempt}", store),
        rank=names.index(name),
        world_size=len(names),
        timeout=timedelta(seconds=60),
    )


def train(name: str, port: int) -> None:
    store = TCPStore(HOST, port, is_master=False)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    held, step, attempt = None, 0, 0
    while step < STEPS:
        join(store, name, attempt)
        try:
            optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-2, config=CONFIG)
            if attempt:
                # A new process passes None.
                step = zeroshard.peer_checkpoint.restore_from_peers(optimizer, held)
            held = optimizer.peer_snapshots  # outlives the optimizer and the process group
            while step < STEPS:
                if (name, step, attempt) == (LOST, LOST_AT, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = loss_of(model, step)
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        except zeroshard.RankLostError:
            print(f"process {name}: a rank was lost in step {step + 1}, held is step {held and held.step}", flush=True)
            attempt += 1
        dist.destroy_process_group()
    print(f"process {name}: step {step}, loss {loss.item():.4f}", flush=True)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a step. Inputs depend on the step, so a repeated step uses the same ones."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(64, 8, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))


def main() -> int:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    names = [str(number) for number in range(RANKS)]
    workers = {name: context.Process(target=train, args=(name, store.port)) for name in names}
    for worker in workers.values():
        worker.start()
    store.set("attempt 0", " ".join(names))
    workers[LOST].join()  # a real launcher waits for the `sentinel` of every process
    store.set("attempt 1", " ".join(name for name in names if name != LOST))
    for worker in workers.values():
        worker.join()
    return sum(worker.exitcode != 0 for name, worker in workers.items() if name != LOST)


if __name__ == "__main__":
    sys.exit(main())
