"""Compare the working tree with an earlier revision of zeroshard, both in the same processes.

python benchmarks/revisions.py REVISION [--quick] [--only SECTION] [--out DIR]
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness.ranks import run_ranks  # noqa: E402
from benchmarks.harness.report import Row, finish, measure, ratio_row  # noqa: E402
from benchmarks.harness.timing import Run, Times, ms, race, ratio, slowest  # noqa: E402
from benchmarks.harness.workloads import WORKLOADS, Workload  # noqa: E402

NOTE = (
    "Both revisions and DDP with the plain optimizer take turns in the same processes. Times are those of the slowest "
    "rank. The ratio is the median of the rounds' own ratios, with quartiles."
)
BEFORE = "zeroshard_before"
"""The earlier revision is imported under this name, which works because the package imports itself relatively."""
PACKAGES = {"before": BEFORE, "after": "zeroshard"}
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
NUM_CONSTRUCTED_PARAMS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what git calls the earlier revision")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=["iteration", "step", "construct", "state"], help="run one section")
    parser.add_argument("--out", type=Path, help="write revisions.md and revisions.json to this directory")
    arguments = parser.parse_args()
    rounds = 7 if arguments.quick else 31
    with tempfile.TemporaryDirectory() as folder:
        commit = extract_package(arguments.revision, Path(folder))
        sections = {
            "iteration": partial(measure_iterations, folder, rounds),
            "step": partial(measure_steps, folder, rounds),
            "construct": partial(measure_construction, folder, rounds),
            "state": partial(measure_state, folder, rounds),
        }
        rows = measure(
            {name: run for name, run in sections.items() if arguments.only in (None, name)},
            writes_results=arguments.out is not None,
        )
    title = f"Compared with {commit}"
    return finish(rows, title, NOTE, arguments.out and arguments.out / "revisions", fail=False)


def extract_package(revision: str, folder: Path) -> str:
    """Extract the package of `revision` as `zeroshard_before`, and return the abbreviated commit."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", revision], check=True, capture_output=True, text=True)
    archive = subprocess.run([*git, "archive", revision, "src/zeroshard"], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    (folder / "src" / "zeroshard").rename(folder / BEFORE)
    return commit.stdout.strip()


def measure_iterations(folder: str, rounds: int) -> list[Row]:
    """Iterations of the GPT, at 2 and 4 ranks."""
    rows = []
    for world_size in (2, 4):
        times = slowest(run_ranks(world_size, _race_iterations, folder, "gpt", rounds))
        for name in ("shard", "drop-in"):
            rows.append(_compare(f"iteration, GPT 26M, {world_size} ranks, {name}", times, name))
            for revision in PACKAGES:
                ours, ddp = times[f"{revision} {name}"], times["DDP"]
                what = f"iteration, GPT 26M, {world_size} ranks, {name} {revision} / DDP"
                rows.append(ratio_row(what, ms(ours), f"{ms(ddp)} DDP", ratio(ours, ddp)))
    return rows


def measure_steps(folder: str, rounds: int) -> list[Row]:
    """`step()` alone, with 2,000 small tensors."""
    times = slowest(run_ranks(2, _race_steps, folder, "small", rounds))
    return [_compare(f"step, 2,000 tensors, 2 ranks, {name}", times, name) for name in ("shard", "drop-in")]


def measure_construction(folder: str, rounds: int) -> list[Row]:
    """Construction with 10,000 parameters."""
    times = slowest(run_ranks(2, _race_construction, folder, rounds // 2))
    what = f"construct, {NUM_CONSTRUCTED_PARAMS:,} parameters, 2 ranks"
    return [_compare(f"{what}, {name}", times, name) for name in ("shard", "drop-in")]


def measure_state(folder: str, rounds: int) -> list[Row]:
    """Consolidating, saving and loading the GPT's AdamW state."""
    with tempfile.TemporaryDirectory() as checkpoints:
        times = slowest(run_ranks(2, _race_state, folder, checkpoints, rounds // 2))
    return [_compare(f"{name}, GPT 26M, 2 ranks, shard", times, name) for name in ("full_state_dict", "save", "load")]


def _compare(what: str, times: Times, name: str) -> Row:
    before, after = times[f"before {name}"], times[f"after {name}"]
    return ratio_row(f"{what}: after / before", ms(after), f"{ms(before)} before", ratio(after, before))


def _import_packages(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    return {revision: import_module(name) for revision, name in PACKAGES.items()}


def _build_shard(package: Any, model: nn.Module) -> tuple[nn.Module, Any]:
    return model, package.shard(model, torch.optim.AdamW, **OPTIONS)


def _build_drop_in(package: Any, model: nn.Module) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(model)
    return ddp, package.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **OPTIONS)


BUILDERS: dict[str, Callable[[Any, nn.Module], tuple[nn.Module, Any]]] = {
    "shard": _build_shard,
    "drop-in": _build_drop_in,
}


def _build_contestants(folder: str, workload: Workload) -> dict[str, tuple[nn.Module, Any]]:
    packages = _import_packages(folder)
    contestants = {
        f"{revision} {name}": build(package, workload.build())
        for name, build in BUILDERS.items()
        for revision, package in packages.items()
    }
    ddp = DistributedDataParallel(workload.build())
    return {**contestants, "DDP": (ddp, torch.optim.AdamW(ddp.parameters(), **OPTIONS))}


def _race_iterations(folder: str, workload_name: str, rounds: int) -> Times:
    workload = WORKLOADS[workload_name]
    batch = workload.batch(torch.distributed.get_rank())

    def iterate(model: nn.Module, optimizer: Any) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    contestants = _build_contestants(folder, workload)
    return race({name: partial(iterate, *built) for name, built in contestants.items()}, rounds, warmup=3)


def _race_steps(folder: str, workload_name: str, rounds: int) -> Times:
    """Time `step()` of gradients that one backward pass has left."""
    workload = WORKLOADS[workload_name]
    batch = workload.batch(torch.distributed.get_rank())
    steps: dict[str, Run] = {}
    for name, (model, optimizer) in _build_contestants(folder, workload).items():
        model(batch).backward()
        steps[name] = optimizer.step
    return race(steps, rounds, warmup=3)


def _race_construction(folder: str, rounds: int) -> Times:
    packages = _import_packages(folder)
    model = nn.ParameterList(torch.zeros(32) for _ in range(NUM_CONSTRUCTED_PARAMS))
    for param in model.parameters():
        param.grad = torch.ones_like(param)  # or DDP would complain

    def construct_shard(package: Any) -> None:
        package.shard(model, torch.optim.AdamW, **OPTIONS)

    def construct_drop_in(package: Any) -> None:
        package.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS)

    constructors = {"shard": construct_shard, "drop-in": construct_drop_in}
    return race(
        {
            f"{revision} {name}": partial(construct, package)
            for name, construct in constructors.items()
            for revision, package in packages.items()
        },
        rounds,
    )


def _race_state(folder: str, checkpoints: str, rounds: int) -> Times:
    packages = _import_packages(folder)
    workload = WORKLOADS["gpt"]
    batch = workload.batch(torch.distributed.get_rank())
    contestants: dict[str, Run] = {}
    for revision, package in packages.items():
        model, optimizer = _build_shard(package, workload.build())
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint = import_module(f"{package.__name__}.checkpoint")
        path, saved = f"{checkpoints}/{revision}", {"model": model, "optimizer": optimizer}
        _save_next(checkpoint, path, saved)  # the contestants' order changes from round to round: a load may be first
        contestants[f"{revision} full_state_dict"] = optimizer.full_state_dict
        contestants[f"{revision} save"] = partial(_save_next, checkpoint, path, saved)
        contestants[f"{revision} load"] = partial(checkpoint.load, path, progress=False, **saved)
    return race(contestants, rounds, warmup=1)


def _save_next(checkpoint: Any, path: str, saved: dict[str, Any]) -> None:
    latest = checkpoint.latest(path)
    step = 0 if latest is None else int(latest.name.rpartition("-")[2])
    checkpoint.save(path, step=step + 1, keep=1, progress=False, **saved)


if __name__ == "__main__":
    sys.exit(main())
