"""The board as pictures."""

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

OURS, THEIRS = ("#0b6e4f", "#6fbf9f"), ("#4a5568", "#a0aec0")
"""Each for few ranks and for more of them."""


Figure = Callable[[Case, str], Spread | None]
"""How long a contestant's bar is in a case, with its quartiles."""


def draw(board: Board, folder: Path) -> None:
    """`peers_*.png`, if matplotlib is there and anything was measured."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return
    if not board.races:
        return
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    _times(board, lambda result: result.wall, "iteration relative to DDP + AdamW", folder / "peers_iteration.png")
    _times(board, lambda result: result.cpu, "CPU time relative to DDP + AdamW", folder / "peers_cpu.png")
    _resources(board, folder / "peers_resources.png")


def _times(board: Board, times: Callable[[Result], list[float]], title: str, path: Path) -> None:
    """A column for each model, a line for each setting."""

    def figure(case: Case, name: str) -> Spread | None:
        results = board.races.get(case, {})
        if name not in results:
            return None
        return ratio(times(results[name]), times(results[BASELINE]))

    models, recipes = _unique(board, "workload"), _unique(board, "recipe")
    axes = _panels(len(recipes), len(models), title)
    for (line, recipe), (column, model) in product(enumerate(recipes), enumerate(models)):
        panel = axes[line][column]
        panel.set_title(f"{WORKLOADS[model].label}\n{SETTINGS[recipe]}", fontsize=9)
        _bars(panel, board, [Case(model, world, recipe) for world in _unique(board, "world")], figure)
        panel.axvline(1, color="black", linewidth=0.8)
    _save(axes, board, path)


def _resources(board: Board, path: Path) -> None:
    def counter(value: Callable[[Case, Result], float]) -> Figure:
        def figure(case: Case, name: str) -> Spread | None:
            result = board.races.get(case, {}).get(name)
            return None if result is None else _exact(value(case, result))

        return figure

    def peak(case: Case, name: str) -> Spread | None:
        peaks = board.peaks.get(case, {})
        return _exact(peaks[name].in_use / MIB) if name in peaks else None

    first, last = _unique(board, "workload")[0], _unique(board, "workload")[-1]
    huge = "embedding" if "embedding" in _unique(board, "workload") else first
    panels: list[tuple[str, str, Figure]] = [
        ("bytes on the wire / DDP's", first, counter(lambda case, it: it.wire / board.races[case][BASELINE].wire)),
        ("state on the fullest rank / ideal", huge, counter(lambda case, it: it.state / ideal_state(case))),
        ("peak growth of memory in use, MiB", first, peak),
        ("collectives an iteration", last, counter(lambda _, it: it.calls)),
    ]
    axes = _panels(1, len(panels), "what an iteration takes")
    recipe = _unique(board, "recipe")[0]
    for panel, (title, model, figure) in zip(axes[0], panels, strict=True):
        panel.set_title(f"{title}\n{WORKLOADS[model].label}", fontsize=9)
        _bars(panel, board, [Case(model, world, recipe) for world in _unique(board, "world")], figure)
    axes[0][-1].set_xscale("log")
    _save(axes, board, path)


def _bars(panel: Any, board: Board, cases: Sequence[Case], figure: Figure) -> None:
    """A group for each contestant, from the top down, with a bar for each case."""
    names = board.names()
    thickness = 0.8 / len(cases)
    for place, case in enumerate(cases):
        for line, name in enumerate(names):
            bar = figure(case, name)
            if bar is None:
                continue
            color = (THEIRS if name in PEERS else OURS)[place % 2]
            reach = [[bar.median - bar.low], [bar.high - bar.median]]
            height = line + (place - (len(cases) - 1) / 2) * thickness
            panel.barh(height, bar.median, thickness, xerr=reach, color=color, error_kw={"linewidth": 0.8})
            panel.text(bar.high, height, f" {bar.median:.3g}", va="center", fontsize=6)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.margins(x=0.12)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _panels(lines: int, columns: int, title: str) -> Any:
    from matplotlib import pyplot

    size = (4.2 * columns + 1.2, 3.6 * lines + 0.8)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    figure.suptitle(title, fontsize=11)
    return axes


def _save(axes: Any, board: Board, path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure = axes[0][0].figure
    worlds = _unique(board, "world")
    shades = [Patch(color=THEIRS[place % 2], label=f"{world} ranks") for place, world in enumerate(worlds)]
    figure.legend(handles=shades, loc="lower left", ncols=len(shades), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _exact(value: float) -> Spread:
    return Spread(value, value, value)


def _unique(board: Board, field: str) -> list[Any]:
    return list(dict.fromkeys(getattr(case, field) for case in board.races))
