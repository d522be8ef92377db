"""Draw the board."""

import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..harness.resources import MIB
from ..harness.timing import Spread, ratio
from ..harness.workloads import WORKLOADS
from .peers_race import Case, Result
from .peers_rows import SETTINGS, Board, ideal_state
from .peers_trainers import BASELINE, PEERS

OUR_COLORS, PEER_COLORS = ("#0b6e4f", "#6fbf9f"), ("#4a5568", "#a0aec0")
"""For alternating world sizes."""


Value = Callable[[Case, str], Spread | None]
"""Returns the length of a contestant's bar in a case, with its quartiles."""


def draw(board: Board, folder: Path) -> None:
    """Write `peers_*.png`, if matplotlib is installed and there are races."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return
    if not board.races:
        return
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    _draw_times(board, lambda result: result.wall, "iteration relative to DDP + AdamW", folder / "peers_iteration.png")
    _draw_times(board, lambda result: result.cpu, "CPU time relative to DDP + AdamW", folder / "peers_cpu.png")
    _draw_resources(board, folder / "peers_resources.png")


def _draw_times(board: Board, times: Callable[[Result], list[float]], title: str, path: Path) -> None:
    """Draw a column for each model and a row for each setting."""

    def value(case: Case, name: str) -> Spread | None:
        results = board.races.get(case, {})
        if name not in results:
            return None
        return ratio(times(results[name]), times(results[BASELINE]))

    models, recipes = _unique(board, "workload"), _unique(board, "recipe")
    axes = _make_axes(len(recipes), len(models), title)
    for (row, recipe), (column, model) in product(enumerate(recipes), enumerate(models)):
        axis = axes[row][column]
        axis.set_title(f"{WORKLOADS[model].label}\n{SETTINGS[recipe]}", fontsize=9)
        _draw_bars(axis, board, [Case(model, world, recipe) for world in _unique(board, "world")], value)
        axis.axvline(1, color="black", linewidth=0.8)
    _save(axes, board, path)


def _draw_resources(board: Board, path: Path) -> None:
    def counter(count: Callable[[Case, Result], float]) -> Value:
        def value(case: Case, name: str) -> Spread | None:
            result = board.races.get(case, {}).get(name)
            return None if result is None else _exact(count(case, result))

        return value

    def peak(case: Case, name: str) -> Spread | None:
        peaks = board.peaks.get(case, {})
        return _exact(peaks[name].in_use / MIB) if name in peaks else None

    def wire(case: Case, result: Result) -> float:
        return result.wire / board.races[case][BASELINE].wire

    first, last = _unique(board, "workload")[0], _unique(board, "workload")[-1]
    largest = "embedding" if "embedding" in _unique(board, "workload") else first
    panels: list[tuple[str, str, Value]] = [
        ("bytes on the wire / DDP's", first, counter(wire)),
        ("state on the fullest rank / ideal", largest, counter(lambda case, result: result.state / ideal_state(case))),
        ("peak growth of memory in use, MiB", first, peak),
        ("collectives per iteration", last, counter(lambda _, result: result.calls)),
    ]
    axes = _make_axes(1, len(panels), "resources of an iteration")
    recipe = _unique(board, "recipe")[0]
    for axis, (title, model, value) in zip(axes[0], panels, strict=True):
        axis.set_title(f"{title}\n{WORKLOADS[model].label}", fontsize=9)
        _draw_bars(axis, board, [Case(model, world, recipe) for world in _unique(board, "world")], value)
    axes[0][-1].set_xscale("log")
    _save(axes, board, path)


def _draw_bars(axis: Any, board: Board, cases: Sequence[Case], value: Value) -> None:
    """Draw a group for each contestant, from the top down, with a bar for each case."""
    names = board.names()
    thickness = 0.8 / len(cases)
    for index, case in enumerate(cases):
        for row, name in enumerate(names):
            bar = value(case, name)
            if bar is None:
                continue
            color = (PEER_COLORS if name in PEERS else OUR_COLORS)[index % 2]
            error = [[bar.median - bar.low], [bar.high - bar.median]]
            height = row + (index - (len(cases) - 1) / 2) * thickness
            axis.barh(height, bar.median, thickness, xerr=error, color=color, error_kw={"linewidth": 0.8})
            axis.text(bar.high, height, f" {bar.median:.3g}", va="center", fontsize=6)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.12)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _make_axes(rows: int, columns: int, title: str) -> Any:
    from matplotlib import pyplot

    size = (4.2 * columns + 1.2, 3.6 * rows + 0.8)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharey=True)
    figure.suptitle(title, fontsize=11)
    return axes


def _save(axes: Any, board: Board, path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure = axes[0][0].figure
    worlds = _unique(board, "world")
    patches = [Patch(color=PEER_COLORS[index % 2], label=f"{world} ranks") for index, world in enumerate(worlds)]
    figure.legend(handles=patches, loc="lower left", ncols=len(patches), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _exact(value: float) -> Spread:
    return Spread(value, value, value)


def _unique(board: Board, field: str) -> list[Any]:
    return list(dict.fromkeys(getattr(case, field) for case in board.races))
