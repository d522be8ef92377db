"""Hundreds of parameter groups, as with layer-wise learning rates."""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ..harness.models import PEERS, RECIPES, Shape, make_params
from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Times, ms, race, ratio, slowest

COUNT = 300
SHAPES: list[Shape] = [(32, 32), (32,)]
"""Shapes of the parameters of a group."""
WORLD = 2
BUILD_BAR, STEP_BAR = 3.0, 1.2
METHODS = ("one by one", "at once")
"""Add each group with `add_param_group`, or all of them with `add_param_groups`."""
CONTESTANTS = {
    **{f"zeroshard, {method}": ("zeroshard", method) for method in METHODS},
    "torch": ("torch", "one by one"),
}


class Job(NamedTuple):
    """Both sharding classes on the same groups."""

    recipe: str
    bucket_view: bool

    @property
    def label(self) -> str:
        return f"{COUNT} groups, {WORLD} ranks, {self.recipe}" + (", bucket view" if self.bucket_view else "")


def many_groups(rounds: int) -> list[Row]:
    """Time adding groups one by one and at once, and steps afterwards. torch's class can only add one by one."""
    rows: list[Row] = []
    for view in (False, True):
        job = Job("AdamW", view)
        times = slowest(run_ranks(WORLD, _race_builds, job, rounds))
        for method in METHODS:
            ours = times[f"zeroshard, {method}"]
            cells = (ms(ours), f"{ms(times['torch'])} torch")
            rows.append(ratio_row(f"add groups {method}, {job.label}", *cells, ratio(ours, times["torch"]), BUILD_BAR))
    # SGD's own step is so short that half of it is copying options, in both classes.
    for (name, bar), view in product((("AdamW", STEP_BAR), ("SGD", None)), (False, True)):
        job = Job(name, view)
        times = slowest(run_ranks(WORLD, _race_steps, job, 6 * rounds))
        for method in METHODS:
            ours = times[f"zeroshard, {method}"]
            cells = (ms(ours), f"{ms(times['torch'])} torch")
            rows.append(ratio_row(f"step, added {method}, {job.label}", *cells, ratio(ours, times["torch"]), bar))
    return rows


def _race_builds(job: Job, rounds: int) -> Times:
    groups = _make_groups()
    return race({name: partial(_build, name, groups, job) for name in CONTESTANTS}, rounds, warmup=1)


def _race_steps(job: Job, rounds: int) -> Times:
    return race({name: _build(name, _make_groups(), job).step for name in CONTESTANTS}, rounds)


def _build(contestant: str, groups: list[dict[str, Any]], job: Job) -> Any:
    peer, method = CONTESTANTS[contestant]
    first, *others = (dict(group) for group in groups)
    recipe = RECIPES[job.recipe]
    optimizer = PEERS[peer]([first], recipe.make, parameters_as_bucket_view=job.bucket_view, **recipe.options)
    if method == "at once":
        optimizer.add_param_groups(others)
    else:
        for group in others:
            optimizer.add_param_group(group)
    return optimizer


def _make_groups() -> list[dict[str, Any]]:
    params, size = make_params(SHAPES * COUNT), len(SHAPES)
    return [{"params": params[size * i : size * (i + 1)], "lr": 1e-3 * (i + 1) / COUNT} for i in range(COUNT)]
