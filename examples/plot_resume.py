"""Plot the loss of a run that is stopped twice and resumed at other world sizes, and of an uninterrupted run.

python examples/plot_resume.py [--steps N] [--out FILE]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).with_name("resume.py")
RANKS = (4, 2, 3)
COLORS = {4: "#0b6e4f", 2: "#c05621", 3: "#2b6cb0"}


class Point(NamedTuple):
    step: int
    ranks: int
    loss: float


def run(ranks: int, folder: Path, *options: object) -> list[Point]:
    """Train on `ranks` ranks, from the latest checkpoint in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), "--folder", str(folder), *map(str, options)]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"step (\d+), (\d+) ranks: loss (\S+)", done.stdout)
    return [Point(int(step), int(ranks), float(loss)) for step, ranks, loss in found]


def train(steps: int) -> tuple[list[Point], list[Point]]:
    """Return the points of the stopped run and of the uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        stopped: list[Point] = []
        for number, ranks in enumerate(RANKS, 1):
            stop = steps * number // len(RANKS)
            stopped += run(ranks, Path(folder, "stopped"), "--steps", steps, "--stop-at", stop)
        return stopped, run(RANKS[0], Path(folder, "uninterrupted"), "--steps", steps)


def draw(stopped: list[Point], uninterrupted: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5.2), height_ratios=(3, 1.2), layout="constrained"
    )
    _curves(above, stopped)
    above.plot(
        [point.step for point in uninterrupted],
        [point.loss for point in uninterrupted],
        linestyle="--",
        color="black",
        linewidth=1,
        label=f"never stopped, {RANKS[0]} ranks",
    )
    above.set_ylabel("loss")
    above.legend(frameon=False)
    above.set_title("Stopped twice, resumed each time at another world size", fontsize=11)
    _differences(below, stopped, uninterrupted)
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
        for before, after in pairwise(stopped):
            if before.ranks != after.ranks:
                panel.axvline(before.step + 0.5, color="#a0aec0", linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _curves(panel: Any, points: list[Point]) -> None:
    for ranks in RANKS:
        mine = [point for point in points if point.ranks == ranks]
        steps, losses = [point.step for point in mine], [point.loss for point in mine]
        panel.plot(steps, losses, color=COLORS[ranks], linewidth=3.5, alpha=0.55, label=f"{ranks} ranks")


def _differences(panel: Any, stopped: list[Point], uninterrupted: list[Point]) -> None:
    for ranks in RANKS:
        pairs = [(a, b) for a, b in zip(stopped, uninterrupted, strict=True) if a.ranks == ranks]
        panel.plot([a.step for a, _ in pairs], [a.loss - b.loss for a, b in pairs], color=COLORS[ranks])
    panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    panel.set_ylabel("difference")
    panel.set_xlabel("step")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the loss of a run that is stopped twice and resumed.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("resume.png"))
    options = parser.parse_args()
    stopped, uninterrupted = train(options.steps)
    draw(stopped, uninterrupted, options.out)
    largest = max(abs(a.loss - b.loss) for a, b in zip(stopped, uninterrupted, strict=True))
    print(f"{options.out}: losses differ by at most {largest:.2g}")


if __name__ == "__main__":
    main()
