"""Time `step()`."""

from typing import NamedTuple

import torch.distributed as dist

from ..harness.models import PEERS, RECIPES, Shape, gpt_shapes, make_params
from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, minus, ms, race, ratio, slowest

SMALL: list[Shape] = [(1024,)] * 2000
TINY: list[Shape] = [(32,)] * 10_000
NAMES = ("SGD", "fused AdamW", "AdamW")


class Job(NamedTuple):
    """Contestants on the same parameters.

    They are both sharding classes, the `plain` optimizer on all parameters, and `share`: the plain optimizer on one
    rank's parameters only.
    """

    recipe: str
    shapes: list[Shape]
    contestants: tuple[str, ...]
    bucket_view: bool = False

    @property
    def label(self) -> str:
        return self.recipe + (", bucket view" if self.bucket_view else "")


def many_small(rounds: int, *, more_ranks: bool) -> list[Row]:
    """Step 2,000 small parameters: one message per rank instead of one per parameter."""
    pair = ("zeroshard", "torch")
    jobs = {2: [Job(name, SMALL, pair, view) for view in (False, True) for name in NAMES]}
    if more_ranks:
        jobs[4] = [Job(name, SMALL, pair) for name in NAMES]
    rows: list[Row] = []
    for world, world_jobs in jobs.items():
        for job, times in zip(world_jobs, _measure(world, world_jobs, rounds), strict=True):
            # On the CPU the default AdamW loops over parameters. That takes most of the time in both classes.
            has_bar = world == 2 and not job.bucket_view and job.recipe != "AdamW"
            rows.append(
                _row(f"step, 2,000 small, {world} ranks, {job.label}", times, "torch", 0.15 if has_bar else None)
            )
    return rows


def alone(rounds: int) -> list[Row]:
    """Step at world size 1, compared with the plain optimizer."""
    rows: list[Row] = []
    for size, shapes in {"GPT 26M": gpt_shapes(), "2,000 small": SMALL}.items():
        jobs = [Job(name, shapes, ("zeroshard", "plain")) for name in NAMES]
        jobs.append(Job("fused AdamW", shapes, ("zeroshard", "plain"), bucket_view=True))
        for job, times in zip(jobs, _measure(1, jobs, rounds), strict=True):
            rows.append(_row(f"step, {size}, 1 rank, {job.label}", times, "plain", 1.1))
    return rows


def beyond_inner(rounds: int) -> list[Row]:
    """Measure the time of a step beyond the inner optimizer's own step, with 10,000 parameters."""
    jobs = [Job("SGD", TINY, ("zeroshard", "torch", "share"), view) for view in (False, True)]
    rows: list[Row] = []
    for job, times in zip(jobs, _measure(2, jobs, rounds), strict=True):
        ours, theirs = (minus(times[peer], times["share"]) for peer in PEERS)
        what = f"step beyond the inner's {ms(times['share'])}, 10,000 tiny, 2 ranks, {job.label}"
        cells = (ms(ours), f"{ms(theirs)} torch")
        # With bucket view torch's class adds almost nothing, so a ratio would be meaningless.
        rows.append(Row(what, *cells) if job.bucket_view else ratio_row(what, *cells, ratio(ours, theirs), bar=0.1))
    return rows


def _row(what: str, times: Times, peer: str, bar: float | None) -> Row:
    ours, theirs = times["zeroshard"], times[peer]
    return ratio_row(what, ms(ours), f"{ms(theirs)} {peer}", ratio(ours, theirs), bar)


def _measure(world: int, jobs: list[Job], rounds: int) -> list[Times]:
    by_rank = run_ranks(world, _race_all, jobs, rounds)
    return [slowest(job_times) for job_times in zip(*by_rank, strict=True)]


def _race_all(jobs: list[Job], rounds: int) -> list[Times]:
    return [race({name: _make_contestant(job, name) for name in job.contestants}, rounds) for job in jobs]


def _make_contestant(job: Job, name: str) -> Run:
    recipe = RECIPES[job.recipe]
    if name in PEERS:
        return recipe.sharded(name, make_params(job.shapes), bucket_view=job.bucket_view).step  # type: ignore[no-any-return]
    shapes = job.shapes if name == "plain" else job.shapes[dist.get_rank() :: dist.get_world_size()]
    return recipe.plain(make_params(shapes)).step
