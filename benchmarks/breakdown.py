"""Show where the time of an iteration goes: forward, backward, and the phases of `step()`.

python benchmarks/breakdown.py [--quick] [--out DIR]
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import zeroshard  # noqa: E402
from benchmarks.harness.ranks import run_ranks  # noqa: E402
from benchmarks.harness.report import Appendix, Row, finish, markdown, measure  # noqa: E402
from benchmarks.harness.timing import turns  # noqa: E402
from benchmarks.harness.workloads import WORKLOADS, Workload  # noqa: E402
from zeroshard.profiling import Phase  # noqa: E402

TITLE = "Where the time of an iteration goes"
NOTE = (
    "A GPT of 26.3 M elements, fused AdamW, one thread per rank, gloo over loopback. Milliseconds on the host, medians "
    "of all iterations of all ranks; contestants take turns. Ranks start an iteration together. Threads send, "
    "so time on the wire shows as a wait only where nothing hides it. On two cores, threads that send also "
    "take CPU time from forward and backward."
)
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
ITERATIONS_PER_TURN = 3
COLUMNS: dict[str, Sequence[Phase]] = {
    "wait for gradients": (Phase.WAIT_GRADS, Phase.RECEIVE_GRADS, Phase.SYNC_GRADS),
    "pack and send gradients": (Phase.PACK_GRADS, Phase.SEND_GRADS),
    "consensus": (Phase.CONSENSUS,),
    "optimizer": (Phase.INNER_STEP, Phase.ASSIGN_GRADS),
    "send parameters": (Phase.SEND_PARAMS,),
    "wait for parameters": (Phase.WAIT_PARAMS,),
}
PARTS = ("forward", "backward", *COLUMNS, "other in step()")
COLORS = ("#4a5568", "#a0aec0", "#b7791f", "#ecc94b", "#9f7aea", "#0b6e4f", "#6fbf9f", "#e53e3e", "#d0d0d0")
Split = dict[str, float]
"""Seconds of each part of an iteration."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks and few rounds; write no results")
    parser.add_argument("--out", type=Path, help="directory for breakdown.md, breakdown.json and breakdown.png")
    options = parser.parse_args()
    if options.out is None and not options.quick:
        options.out = ROOT / "benchmarks" / "results"
    rounds, sizes = (5, (2,)) if options.quick else (10, (2, 4))
    tables: dict[int, dict[str, Split]] = {}
    sections = {f"{size} ranks": partial(_measure, tables, size, rounds) for size in sizes}
    rows = measure(sections, writes_results=options.out is not None)
    status = finish(
        rows,
        TITLE,
        NOTE,
        options.out and options.out / "breakdown",
        fail=False,
        more=Appendix(_format(tables), {"splits": {str(size): table for size, table in tables.items()}}),
    )
    if options.out is not None:
        _draw(tables, options.out / "breakdown.png")
    return status


def _measure(tables: dict[int, dict[str, Split]], world_size: int, rounds: int) -> list[Row]:
    by_rank = run_ranks(world_size, _split_iterations, "gpt", rounds)
    table = {name: _median([split for rank in by_rank for split in rank[name]]) for name in by_rank[0]}
    tables[world_size] = table
    what = f"iteration, GPT 26M, {world_size} ranks"
    return [Row(f"{what}, {name}", f"{1e3 * sum(split.values()):.0f} ms", "") for name, split in table.items()]


def _split_iterations(workload_name: str, rounds: int) -> dict[str, list[Split]]:
    workload = WORKLOADS[workload_name]
    batch = workload.batch(dist.get_rank())
    trainers = {name: build(workload) for name, build in BUILDERS.items()}
    splits: dict[str, list[Split]] = {name: [] for name in trainers}
    for turn, name in turns(list(trainers), rounds + 1):
        model, optimizer = trainers[name]
        for _ in range(ITERATIONS_PER_TURN):
            dist.barrier()
            split = _split_iteration(model, optimizer, batch)
            if turn > 0:
                splits[name].append(split)
    return splits


def _split_iteration(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> Split:
    times = [time.perf_counter()]
    loss = model(batch)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    optimizer.zero_grad()
    forward, backward, step = (after - before for before, after in pairwise(times))
    split = {"forward": forward, "backward": backward}
    if not isinstance(optimizer, zeroshard.ZeroRedundancyOptimizer):
        return {**split, "optimizer": step}
    phases = optimizer.report().times.phases
    for column, members in COLUMNS.items():
        timed = [phases[phase] for phase in members if phase in phases]
        split[column] = sum(phase.in_step_s + phase.outside_step_s for phase in timed)
        split["backward"] -= sum(phase.outside_step_s for phase in timed)
        step -= sum(phase.in_step_s for phase in timed)
    return {**split, "other in step()": step}


def _build_ddp(workload: Workload) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(workload.build())
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


def _build_torch_zero(workload: Workload) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(workload.build())
    return model, TorchZero(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIONS)


def _build_drop_in(workload: Workload) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(workload.build())
    return model, zeroshard.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS)


def _build_shard(workload: Workload) -> tuple[nn.Module, Any]:
    model = workload.build()
    return model, zeroshard.shard(model, torch.optim.AdamW, **OPTIONS)


BUILDERS: dict[str, Callable[[Workload], tuple[nn.Module, Any]]] = {
    "DDP + AdamW": _build_ddp,
    "torch ZeRO, bucket view": _build_torch_zero,
    "zeroshard drop-in": _build_drop_in,
    "zeroshard ZeRO-2": _build_shard,
}


def _median(splits: Sequence[Split]) -> Split:
    return {part: median(split[part] for split in splits) for part in splits[0]}


def _format(tables: dict[int, dict[str, Split]]) -> str:
    """Format one table for each world size, in milliseconds."""
    blocks = []
    for size, table in tables.items():
        lines = [["", *PARTS]]
        for name, split in table.items():
            lines.append([name, *(f"{1e3 * split[part]:.1f}" if part in split else "" for part in PARTS)])
        blocks.append(f"## {size} ranks, milliseconds\n\n{markdown(lines)}")
    return "\n\n".join(blocks)


def _draw(tables: dict[int, dict[str, Split]], path: Path) -> None:
    """Draw a stacked bar for each contestant and world size, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(6.2 * len(tables), 3.2), squeeze=False)
    for axis, (size, table) in zip(axes[0], tables.items(), strict=True):
        starts = [0.0] * len(table)
        for part, color in zip(PARTS, COLORS, strict=False):
            widths = [1e3 * split.get(part, 0.0) for split in table.values()]
            axis.barh(list(table), widths, left=starts, color=color, label=part)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_title(f"GPT, 26 M, {size} ranks: ms per iteration", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
