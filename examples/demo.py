"""Train the same GPT unsharded, with the drop-in and with `shard`, and compare. Starts its own ranks.

python examples/demo.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from start import join_group  # type: ignore[import-not-found]
from train_gpt import WAYS, Run, train  # type: ignore[import-not-found]


def launch() -> int:
    """Run this file under torchrun: a rank per GPU, or two ranks on the CPU."""
    ranks = torch.cuda.device_count() or 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "--nproc-per-node", str(ranks), __file__]
    settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the latter for exact repeats
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


def compare() -> int:
    """Train with each method and print a table. Return exit status 0 if the parameters agree."""
    torch.use_deterministic_algorithms(True)
    device = join_group()
    runs = {way: train(device, way) for way in WAYS}
    table = results(list(runs.values()), device)
    differences = [largest(parameter_difference(runs["unsharded"], run), device) for run in runs.values()]
    table.add_row("difference of parameters", *(f"{difference:g}" for difference in differences))
    if dist.get_rank() == 0:
        Console().print("", table, sep="\n")
    # With more than two ranks, DDP and `shard` sum gradients in different orders.
    exact = differences if dist.get_world_size() <= 2 else differences[:2]
    dist.destroy_process_group()
    return int(any(exact))


def results(runs: list[Run], device: torch.device) -> Table:
    """Return a table of all runs; each cell is the value of the worst rank."""
    ranks = dist.get_world_size()
    size = sum(parameter.numel() for parameter in runs[0].parameters) / 1e6
    title = f"GPT, {size:.1f} M parameters, AdamW, {ranks} x {device.type}"
    table = Table(title=title, caption="worst rank; times are medians")
    table.add_column()
    for way in WAYS:
        table.add_column(way, justify="right")
    rows = {
        "optimizer state per rank": [f"{largest(run.state_mib, device):.2f} MiB" for run in runs],
        "optimizer.step()": [f"{largest(run.step_ms, device):.1f} ms" for run in runs],
        "iteration": [f"{largest(run.iteration_ms, device):.1f} ms" for run in runs],
        "loss at the end": [f"{largest(run.loss, device):.6f}" for run in runs],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def parameter_difference(a: Run, b: Run) -> float:
    pairs = zip(a.parameters, b.parameters, strict=True)
    return torch.stack([(p - q).abs().max() for p, q in pairs]).max().item()


def largest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks. Call on all ranks."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()


if __name__ == "__main__":
    sys.exit(compare() if dist.is_torchelastic_launched() else launch())
