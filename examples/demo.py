"""Train the same GPT with DDP, with the drop-in and with `shard`, and compare memory, times and results of each rank.

python examples/demo.py

Needs only torch and zeroshard. Starts its own ranks: one per GPU if there are several, otherwise two on the CPU.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gpt import GPT  # type: ignore[import-not-found]
from train_gpt import CONTEXT, TEXT, batches, state_mib  # type: ignore[import-not-found]
from zeroshard import FlatShards, ZeroConfig, ZeroRedundancyOptimizer, shard

MODES = ("DDP", "drop-in", "stage 1", "stage 2")
STEPS, BATCH, WIDTH = 8, 2, 512
BUCKET_MIB = 4  # the default is 25, which would be half of this model
HOST, MIB = "127.0.0.1", 2**20

EXPLANATION = f"""
DDP: AdamW under DistributedDataParallel with gradient_as_bucket_view=True.
drop-in: ZeroRedundancyOptimizer instead of AdamW under the same DDP.
stage 1, stage 2: shard() without DDP, ZeRO-1 and ZeRO-2.
All use buckets of {BUCKET_MIB} MiB, because the model is small. Memory and times are those
of the worst rank, times are medians.
"""
PEAK_ON_CPU = """\
Peak memory is how far the resident memory of the process grew from before the
model was built: all tensors, activations and communication buffers.
"""
PEAK_ON_GPU = """\
Peak memory is that of all tensors on the GPU, activations included.
"""
WHAT_TO_COMPARE = """
DDP communicates only in backward: its all-reduce is a reduce-scatter plus an
all-gather. shard() reduce-scatters in backward and all-gathers in step(), and
the drop-in broadcasts in step(). So compare iterations rather than step().
"""


class Job(NamedTuple):
    """What the ranks of one mode need to know."""

    mode: str
    ranks: int
    device_type: str
    port: int
    reference: Path
    """File with the parameters of the DDP run."""


class Result(NamedTuple):
    """Measurements of one rank, or the largest of all ranks."""

    state_mib: float
    grads_mib: float
    peak_mib: float
    step_ms: float
    iteration_ms: float
    first_loss: float
    last_loss: float
    difference: float
    """Largest difference of any parameter from the DDP run."""


def main() -> int:
    """Train in each mode and print a table. Return exit status 0 if the parameters agree."""
    device_type, ranks = ("cuda", torch.cuda.device_count()) if torch.cuda.device_count() > 1 else ("cpu", 2)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for repeatable results on GPUs
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # return freed memory to the system, so that peaks are those of use
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            print(f"training with {mode} ...", flush=True)
            result = launch(mode, ranks, device_type, folder)
            if result is None:
                print(f"training with {mode} failed", file=sys.stderr)
                return 1
            results[mode] = result
    print_table(results, ranks, device_type)
    # With more than two ranks, DDP and `shard` sum gradients in different orders.
    exact = MODES if ranks <= 2 else MODES[:2]
    return int(any(results[mode].difference for mode in exact))


def print_table(results: dict[str, Result], ranks: int, device_type: str) -> None:
    params = sum(param.numel() for param in make_model(torch.device("meta"), WIDTH).parameters())
    print(f"\nGPT with {params / 1e6:.1f} M parameters ({4 * params / MIB:.1f} MiB), {ranks} ranks on {device_type}\n")
    rows = {
        "optimizer state, MiB": [f"{result.state_mib:.1f}" for result in results.values()],
        "gradients, MiB": [f"{result.grads_mib:.1f}" for result in results.values()],
        "peak memory, MiB": [f"{result.peak_mib:.1f}" for result in results.values()],
        "step(), ms": [f"{result.step_ms:.1f}" for result in results.values()],
        "iteration, ms": [f"{result.iteration_ms:.1f}" for result in results.values()],
        "loss of the first step": [f"{result.first_loss:.6f}" for result in results.values()],
        "loss of the last step": [f"{result.last_loss:.6f}" for result in results.values()],
        "parameters differ by": [f"{result.difference:g}" for result in results.values()],
    }
    print(f"{'per rank':24}" + "".join(f"{mode:>14}" for mode in results))
    for name, cells in rows.items():
        print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells))
    print(EXPLANATION + (PEAK_ON_CPU if device_type == "cpu" else PEAK_ON_GPU) + WHAT_TO_COMPARE, end="")


def launch(mode: str, ranks: int, device_type: str, folder: str) -> Result | None:
    """Train in new processes: memory that another mode has freed would distort the peak."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    job = Job(mode, ranks, device_type, store.port, Path(folder, "ddp.pt"))
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, job, results)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return None if any(worker.exitcode for worker in workers) else results.get()


def work(rank: int, job: Job, results: Any) -> None:
    """Train as one rank. Rank 0 sends the largest values of all ranks to the parent process."""
    device = torch.device("cuda", rank) if job.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(job.mode, TCPStore(HOST, job.port, is_master=False)),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(minutes=5),
    )
    # Hazard: a DDP model that outlives its process group can hang gloo's shutdown. This one ends with `train`.
    values = torch.tensor(train(job, device), dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    if rank == 0:
        results.put(Result(*values.tolist()))
    dist.destroy_process_group()


Iteration = tuple[Tensor, float, float]
"""The loss, and the seconds of `step()` and of the whole iteration."""


def train(job: Job, device: torch.device) -> Result:
    """Train and measure."""
    train_steps(job.mode, make_model(device, width=64), device)  # libraries and connections take memory, too
    memory_before = peak_bytes(device)
    model = make_model(device, WIDTH)
    optimizer, iterations = train_steps(job.mode, model, device)
    peak = peak_bytes(device) - memory_before

    step_s, iteration_s = torch.tensor([seconds for _, *seconds in iterations]).median(0).values.tolist()
    losses = torch.stack([loss for loss, _, _ in iterations])
    dist.all_reduce(losses)
    first_loss, *_, last_loss = (losses / job.ranks).tolist()
    return Result(
        state_mib=state_mib(optimizer),
        grads_mib=grad_bytes(model, optimizer) / MIB,
        peak_mib=peak / MIB,
        step_ms=1e3 * step_s,
        iteration_ms=1e3 * iteration_s,
        first_loss=first_loss,
        last_loss=last_loss,
        difference=compare(list(model.parameters()), job),
    )


def make_model(device: torch.device, width: int) -> nn.Module:
    torch.manual_seed(0)  # the same initial weights on every rank
    with device:
        model: nn.Module = GPT(len(set(TEXT.read_text(encoding="ascii"))), CONTEXT, width)
    return model


def train_steps(mode: str, model: nn.Module, device: torch.device) -> tuple[Optimizer, list[Iteration]]:
    """Return the optimizer, and the losses and times of its steps."""
    trained, optimizer = prepare(mode, model)
    data = batches(TEXT.read_text(encoding="ascii"), STEPS, BATCH)
    return optimizer, [iterate(trained, optimizer, batch, device) for batch in data]


def prepare(mode: str, model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Return the model to train and its optimizer."""
    if mode.startswith("stage"):
        partition = FlatShards(bucket_bytes=BUCKET_MIB * MIB)
        config = ZeroConfig(stage=1 if mode == "stage 1" else 2, partition=partition)
        return model, shard(model, AdamW, lr=1e-3, fused=True, config=config)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)
    if mode == "drop-in":
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3, fused=True)
    return ddp, AdamW(ddp.parameters(), lr=1e-3, fused=True)


def iterate(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor], device: torch.device) -> Iteration:
    """Train one step."""
    inputs, targets = (ids.to(device) for ids in batch)
    start = now(device)
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    before_step = now(device)
    optimizer.step()
    end = now(device)
    return loss.detach(), end - before_step, end - start


def compare(params: list[Tensor], job: Job) -> float:
    """Save the parameters of the DDP run, or return the largest difference from them. Replicas are equal: on rank 0."""
    values = [param.detach().cpu() for param in params]
    if dist.get_rank() > 0:
        return 0.0
    if job.mode == "DDP":
        torch.save(values, job.reference)
        return 0.0
    expected: list[Tensor] = torch.load(job.reference, weights_only=True)
    return max((a - b).abs().max().item() for a, b in zip(values, expected, strict=True))


def grad_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the size of all gradients that this rank keeps after a step."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        memory = optimizer.report().memory
        return sum(use.nbytes for use in memory if use.category == "gradients")
    return sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of this process's tensors on a GPU, otherwise of its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
