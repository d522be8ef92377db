"""A process exits cleanly, whatever is still in flight."""

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
"""How often each test starts processes and lets them exit. If more than once, the CPUs are kept busy."""
EXIT_SCRIPT = """
import atexit, sys, threading

def print_threads():
    print("threads", [t.name for t in threading.enumerate() if t.name.startswith("zeroshard")], flush=True)

atexit.register(print_threads)  # runs after the functions that zeroshard registers later

import torch
import torch.distributed as dist
import zeroshard

dist.init_process_group("gloo")
size = 1000 if "snapshot" in sys.argv else 64
model = torch.nn.Linear(size, 64)
config = zeroshard.ZeroConfig(peer_checkpoint=zeroshard.PeerCheckpoint(every=1) if "snapshot" in sys.argv else None)
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config)
if dist.get_rank() == 0 or "step" in sys.argv:
    model(torch.ones(4, size)).sum().backward()  # only rank 0 sends, and it receives nothing
if "step" in sys.argv:
    optimizer.step()
if "save" in sys.argv:
    zeroshard.checkpoint.async_save("saved", step=1, model=model, optimizer=optimizer)
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""
EXIT_CASES = [["destroy"], [], ["step"], ["step", "destroy"], ["step", "snapshot"], ["step", "save"]]


@pytest.mark.timeout(180 * NUM_EXITS)
@sampled("options", EXIT_CASES, ids=" ".join)
def test_no_threads_are_left_at_exit(tmp_path: Path, options: list[str]) -> None:
    """With and without gradients, a snapshot or a save in flight, and with and without a destroyed group."""
    with keep_cpus_busy(2 if NUM_EXITS > 1 else 0):
        for number in range(NUM_EXITS):
            directory = tmp_path / str(number)
            directory.mkdir()
            script = directory / "script.py"
            script.write_text(EXIT_SCRIPT)
            assert torchrun(script, 2, directory, *options).splitlines().count("threads []") == 2
            if "save" in options:
                assert [path.name for path in (directory / "saved").glob("step-*")] == ["step-000000001"]


UNUSED_GRADS_SCRIPT = """
import atexit, gc, pathlib, sys, threading, time

def print_threads():
    print("threads", [t.name for t in threading.enumerate() if t.name.startswith("zeroshard")], flush=True)
    if rank == 0:
        rank0_ended.touch()

atexit.register(print_threads)  # runs after the functions that zeroshard registers later
sys.stderr = sys.stdout  # logging prints records without a handler to stderr

import torch
import torch.distributed as dist
import zeroshard

dist.init_process_group("gloo")
rank, rank0_ended = dist.get_rank(), pathlib.Path("rank0-ended")
model = torch.nn.Linear(64, 64)
config = zeroshard.ZeroConfig(overlap_param_gather="overlap" in sys.argv)
group_size = 2 if "hybrid" in sys.argv else None
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config, shard_group_size=group_size)
for number in range(10 if "only-rank-0" not in sys.argv or rank == 0 else 8):
    model(torch.ones(4, 64)).sum().backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
if "clear" in sys.argv:
    optimizer.zero_grad()
if "garbage" in sys.argv:
    del model, optimizer
    gc.collect()
if "barrier" in sys.argv:
    dist.barrier()
if "destroy" in sys.argv:
    dist.destroy_process_group()
if "outlive" in sys.argv and rank > 0:
    while not rank0_ended.exists():
        time.sleep(0.1)
"""
DROPPED_MESSAGE = "dropped {} gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
UNUSED_GRADS_CASES = [
    *("destroy barrier", "destroy barrier garbage", "destroy barrier clear", "destroy barrier overlap"),
    *("destroy barrier hybrid", "destroy only-rank-0", "destroy only-rank-0 garbage", "destroy only-rank-0 hybrid"),
    *("destroy only-rank-0 outlive hybrid", "barrier", "barrier garbage"),
    *("only-rank-0", "only-rank-0 hybrid", "only-rank-0 outlive"),
]


def run_unused_grads_script(directory: Path, options: str) -> list[str]:
    """Run ten backward passes with a step after every fourth. Return what the ranks print at exit, in rank order."""
    script = directory / "script.py"
    script.write_text(UNUSED_GRADS_SCRIPT)
    return torchrun(script, 4 if "hybrid" in options else 2, directory, *options.split()).splitlines()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "options",
    [
        "destroy only-rank-0 outlive",
        *(pytest.param(options, marks=pytest.mark.slow) for options in UNUSED_GRADS_CASES),
    ],
)
def test_unused_gradients_are_reported_at_exit(tmp_path: Path, options: str) -> None:
    """Processes exit cleanly, also while others keep running, and report the buckets that they drop."""
    expected = []
    for rank in range(4 if "hybrid" in options else 2):
        has_dropped = "clear" not in options and ("only-rank-0" not in options or rank == 0)
        expected += [f"rank {rank}: {DROPPED_MESSAGE.format(2)}"] * has_dropped + ["threads []"]
    assert run_unused_grads_script(tmp_path, options) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_unused_gradients_at_exit_under_cpu_load(tmp_path: Path) -> None:
    """How many buckets are sent before another rank exits depends on the machine."""
    possible = {"threads []", *(f"rank {rank}: {DROPPED_MESSAGE.format(count)}" for rank in (0, 1) for count in (1, 2))}
    with keep_cpus_busy(2):
        for _ in range(max(20, NUM_EXITS)):
            printed = run_unused_grads_script(tmp_path, "destroy")
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
    """The process continues, and its other process groups keep working."""
    group = dist.new_group(list(range(ctx.world_size)))
    model = torch.nn.Linear(64, 64)
    optimizer = shard(model, torch.optim.SGD, lr=0.1, process_group=group)
    if ctx.rank == 0:
        model(torch.ones(4, 64)).sum().backward()  # the others send nothing
    receivers = [thread for thread in threading.enumerate() if thread.name == "zeroshard-receiver"]
    assert len(receivers) == (ctx.rank == 0)
    ctx.gather(None)
    dist.destroy_process_group(group)
    for thread in receivers:
        thread.join()
    assert ctx.gather(optimizer.rank) == list(range(ctx.world_size))
