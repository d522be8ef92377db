"""Train the same GPT twice, unsharded and sharded, and compare; starts its own ranks.

python examples/demo.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from train_gpt import Run, join_group, train  # type: ignore[import-not-found]


def launch() -> int:
    """Run this file under torchrun: a rank per GPU, or two ranks on the CPU."""
    ranks = torch.cuda.device_count() or 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "--nproc-per-node", str(ranks), __file__]
    settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the latter for exact repeats
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


def compare() -> int:
    """Train both ways on this rank and report; the exit status says whether the weights agree."""
    torch.use_deterministic_algorithms(True)
    device = join_group()
    unsharded, sharded = train(device, sharded=False), train(device, sharded=True)
    table = results(unsharded, sharded, device)
    difference = largest(parameter_difference(unsharded, sharded), device)
    if dist.get_rank() == 0:
        text = f"Largest difference between the two runs' parameters on any rank: {difference:g}"
        Console().print("", table, text, sep="\n")
    dist.destroy_process_group()
    return int(difference != 0)


def results(unsharded: Run, sharded: Run, device: torch.device) -> Table:
    """The table of both runs, with the number of the worst rank in each cell."""
    runs, ranks = (unsharded, sharded), dist.get_world_size()
    size = sum(parameter.numel() for parameter in sharded.parameters) / 1e6
    title = f"GPT, {size:.1f} M parameters, AdamW, {ranks} x {device.type}"
    table = Table(title=title, caption="worst rank; times are medians")
    table.add_column()
    table.add_column("unsharded", justify="right")
    table.add_column("sharded", justify="right")
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
    """The largest of the ranks' values, on every rank."""
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


if __name__ == "__main__":
    sys.exit(compare() if dist.is_torchelastic_launched() else launch())
