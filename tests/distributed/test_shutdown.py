"""A process ends in order, whatever is still on its way."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import RankContext, ranks
from tests.support.launch import torchrun
from tests.support.tiers import sampled
from zeroshard import shard

NUM_EXITS = int(os.environ.get("ZEROSHARD_EXITS", "1"))
"""How many times processes end in each test; more than once on a machine that is kept busy."""
EXIT_SCRIPT = """
import atexit, sys, threading

def at_end():
    print("threads", [it.name for it in threading.enumerate() if it.name.startswith("zeroshard")], flush=True)

atexit.register(at_end)  # runs after what zeroshard registers later

import torch
import torch.distributed as dist
import zeroshard

dist.init_process_group("gloo")
size = 1000 if "copy" in sys.argv else 64
model = torch.nn.Linear(size, 64)
config = zeroshard.ZeroConfig(peer_checkpoint=zeroshard.PeerCheckpoint(every=1) if "copy" in sys.argv else None)
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config)
if dist.get_rank() == 0 or "step" in sys.argv:
    model(torch.ones(4, size)).sum().backward()  # rank 0 alone sends, and receives nothing
if "step" in sys.argv:
    optimizer.step()
if "save" in sys.argv:
    zeroshard.checkpoint.async_save("saved", step=1, model=model, optimizer=optimizer)
if "leave" in sys.argv:
    dist.destroy_process_group()
"""
EXIT_CASES = [["leave"], [], ["step"], ["step", "leave"], ["step", "copy"], ["step", "save"]]


@pytest.mark.timeout(180 * NUM_EXITS)
@sampled("what", EXIT_CASES, ids=" ".join)
def test_no_threads_are_left_at_exit(tmp_path: Path, what: list[str]) -> None:
    """With gradients, a copy or a save under way or without, from a group that was left or not: no thread is left."""
    with keep_cpus_busy(2 if NUM_EXITS > 1 else 0):
        for number in range(NUM_EXITS):
            folder = tmp_path / str(number)
            folder.mkdir()
            script = folder / "script.py"
            script.write_text(EXIT_SCRIPT)
            assert torchrun(script, 2, folder, *what).splitlines().count("threads []") == 2
            if "save" in what:
                assert [it.name for it in (folder / "saved").glob("step-*")] == ["step-000000001"]


UNUSED_GRADS_SCRIPT = """
import atexit, gc, pathlib, sys, threading, time

def at_end():
    print("threads", [it.name for it in threading.enumerate() if it.name.startswith("zeroshard")], flush=True)
    if rank == 0:
        ended.touch()

atexit.register(at_end)  # runs after what zeroshard registers later
sys.stderr = sys.stdout  # for log records that nobody handles

import torch
import torch.distributed as dist
import zeroshard

dist.init_process_group("gloo")
rank, ended = dist.get_rank(), pathlib.Path("ended")
model = torch.nn.Linear(64, 64)
config = zeroshard.ZeroConfig(overlap_param_gather="overlap" in sys.argv)
within = 2 if "hybrid" in sys.argv else None
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config, shard_group_size=within)
for number in range(10 if "alone" not in sys.argv or rank == 0 else 8):
    model(torch.ones(4, 64)).sum().backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
if "clear" in sys.argv:
    optimizer.zero_grad()
if "garbage" in sys.argv:
    del model, optimizer
    gc.collect()
if "meet" in sys.argv:
    dist.barrier()
if "stay" not in sys.argv:
    dist.destroy_process_group()
if "outlive" in sys.argv and rank > 0:
    while not ended.exists():
        time.sleep(0.1)
"""
DROPPED_MESSAGE = "dropped {} gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
UNUSED_GRADS_CASES = [
    *("leave meet", "leave meet garbage", "leave meet clear", "leave meet overlap", "leave meet hybrid"),
    *("leave alone", "leave alone garbage", "leave alone hybrid", "leave alone outlive hybrid"),
    *("stay meet", "stay meet garbage", "stay alone", "stay alone hybrid", "stay alone outlive"),
]


def run_unused_grads_script(directory: Path, options: str) -> list[str]:
    """Ten backward passes, a step after each fourth. What the ranks print at their end, in their order."""
    script = directory / "script.py"
    script.write_text(UNUSED_GRADS_SCRIPT)
    return torchrun(script, 4 if "hybrid" in options else 2, directory, *options.split()).splitlines()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "what", ["leave alone outlive", *(pytest.param(it, marks=pytest.mark.slow) for it in UNUSED_GRADS_CASES)]
)
def test_unused_gradients_are_reported_at_exit(tmp_path: Path, what: str) -> None:
    """The processes end well, also where others live on, and say what they drop."""
    expected = []
    for rank in range(4 if "hybrid" in what else 2):
        drops = "clear" not in what and ("alone" not in what or rank == 0)
        expected += [f"rank {rank}: {DROPPED_MESSAGE.format(2)}"] * drops + ["threads []"]
    assert run_unused_grads_script(tmp_path, what) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_unused_gradients_at_exit_under_cpu_load(tmp_path: Path) -> None:
    """How many are sent before another rank has ended depends on the machine."""
    possible = {"threads []", *(f"rank {rank}: {DROPPED_MESSAGE.format(count)}" for rank in (0, 1) for count in (1, 2))}
    with keep_cpus_busy(2):
        for _ in range(max(20, NUM_EXITS)):
            printed = run_unused_grads_script(tmp_path, "leave")
            assert printed.count("threads []") == 2
            assert possible.issuperset(printed)


@contextmanager
def keep_cpus_busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@ranks(2, 3)
def test_threads_end_when_the_process_group_is_destroyed(ctx: RankContext) -> None:
    """In a process that goes on, and whose other process groups stay as they are."""
    group = dist.new_group(list(range(ctx.world_size)))
    model = torch.nn.Linear(64, 64)
    optimizer = shard(model, torch.optim.SGD, lr=0.1, process_group=group)
    if ctx.rank == 0:
        model(torch.ones(4, 64)).sum().backward()  # the others send nothing
    receivers = [it for it in threading.enumerate() if it.name == "zeroshard-receiver"]
    assert len(receivers) == (ctx.rank == 0)
    ctx.gather(None)
    dist.destroy_process_group(group)
    for thread in receivers:
        thread.join()
    assert ctx.gather(optimizer.rank) == list(range(ctx.world_size))
