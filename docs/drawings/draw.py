"""Draw the pictures of docs/concepts.md. Run it after a change: a test compares the files with this script.

python docs/drawings/draw.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK, SOFT, LINE, PAPER, EMPTY = "#1f2933", "#52606d", "#9aa5b1", "#ffffff", "#f1f4f7"


class Canvas:
    """A drawing on a white sheet, readable on light and on dark pages."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts = [f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>']

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = EMPTY,
        *,
        line: str = LINE,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        position = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
        self._parts.append(f'<rect {position} fill="{fill}" stroke="{line}"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{text}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = SOFT, *, both: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5"'
            f' marker-end="url(#tip)"{start}/>'
        )

    def svg(self) -> str:
        width, height = self._size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        )
        font = ' font-family="system-ui, sans-serif">'
        return "\n".join([head + font, tip, *self._parts, "</svg>", ""])


def ownership() -> Canvas:
    """Which rank keeps which data, for four methods."""
    canvas = Canvas(860, 290)
    methods = (("DDP", ()), ("ZeRO-1", ("state",)), ("ZeRO-2", ("gradients", "state")))
    methods += (("FSDP2", ("parameters", "gradients", "state")),)
    bytes_per_param = ("16", "8 + 8/N", "4 + 12/N", "16/N")
    for column, ((method, sharded), size) in enumerate(zip(methods, bytes_per_param, strict=True)):
        left = 110 + 190 * column
        canvas.text(left + 78, 30, method, size=16, anchor="middle", bold=True)
        for row, kind in enumerate(("parameters", "gradients", "state")):
            _draw_ranks(canvas, left, 52 + 66 * row, is_sharded=kind in sharded)
        canvas.text(left + 78, 272, f"{size} bytes", anchor="middle", fill=SOFT)
    for row, kind in enumerate(("parameters", "gradients", "state")):
        canvas.text(14, 80 + 66 * row, kind, bold=True)
    canvas.text(14, 272, "per parameter", fill=SOFT)
    return canvas


def _draw_ranks(canvas: Canvas, left: float, top: float, *, is_sharded: bool) -> None:
    """Draw which of four shards each of four ranks keeps, one rank below the other."""
    for rank, colour in enumerate(RANKS):
        for shard in range(4):
            is_kept = shard == rank or not is_sharded
            canvas.box(left + 39 * shard, top + 13 * rank, 37, 11, colour if is_kept else EMPTY)


def buckets() -> Canvas:
    """Parameters in the slots of buckets, and the shards of buckets."""
    canvas = Canvas(860, 300)
    canvas.text(14, 30, "parameters, from the last one of the model to the first", bold=True)
    slots = (
        (0, 0, 250, "head.weight"),
        (0, 250, 60, "bias"),
        (0, 318, 82, "mlp"),
        (1, 0, 180, "qkv"),
        (1, 190, 190, "embed"),
    )
    for bucket, start, size, name in slots:
        left = 20 + 430 * bucket + start
        canvas.box(left, 44, size - 3, 30, "#e4e7eb")
        canvas.text(left + size / 2, 64, name, anchor="middle", size=12)
        canvas.arrow(left + size / 2, 78, left + size / 2, 104)
    for bucket in range(2):
        left = 20 + 430 * bucket
        canvas.text(left, 126, f"bucket {bucket}", bold=True)
        for rank, colour in enumerate(RANKS):
            canvas.box(left + 100 * rank, 136, 100, 30, colour)
            canvas.text(left + 100 * rank + 50, 186, f"rank {rank}", anchor="middle", fill=colour, size=12)
    for bucket, start, size, _ in slots:
        left = 20 + 430 * bucket + start
        canvas.box(left, 132, size - 3, 38, "none", line=INK)
    canvas.text(
        20,
        214,
        "coloured: shards, equal on all ranks · framed: slots of parameters · where they overlap: parameter shards",
        fill=SOFT,
    )
    canvas.text(20, 246, "rank 2 owns", bold=True)
    for number, (width, name) in enumerate(((50, "head"), (50, "bias"), (100, "embed"))):
        left = 130 + (0, 52, 104)[number]
        canvas.box(left, 230, width, 24, RANKS[2])
        canvas.text(left + width / 2, 246, name, anchor="middle", fill=PAPER, size=12)
    canvas.text(350, 246, "parameter shards: its inner optimizer updates them and keeps their state", fill=SOFT)
    canvas.text(20, 280, "bucket 0 is full first in a backward pass and is sent while backward continues", fill=SOFT)
    return canvas


def step() -> Canvas:
    """The timeline of one iteration."""
    canvas = Canvas(860, 300)
    canvas.text(14, 88, "compute", bold=True)
    canvas.text(14, 148, "network", bold=True)
    blocks = ((110, 110, "forward", "#7b8794"), (224, 200, "backward", "#52606d"), (490, 90, "update 1/N", RANKS[0]))
    for left, width, name, colour in (*blocks, (730, 116, "next forward", "#7b8794")):
        canvas.box(left, 66, width, 36, colour)
        canvas.text(left + width / 2, 89, name, anchor="middle", fill=PAPER)
    for number in range(4):
        canvas.box(280 + 44 * number, 126, 40, 36, RANKS[number])
        canvas.text(300 + 44 * number, 149, f"b{number}", anchor="middle", fill=PAPER)
    canvas.box(460, 126, 26, 36, "#e4e7eb")
    canvas.box(584, 126, 140, 36, RANKS[1])
    canvas.text(654, 149, "all-gather", anchor="middle", fill=PAPER)
    canvas.text(366, 184, "reduce-scatter of buckets", fill=SOFT, anchor="middle", size=12)
    canvas.text(473, 206, "consensus", fill=SOFT, anchor="middle", size=12)
    canvas.arrow(473, 194, 473, 166)
    canvas.box(456, 44, 272, 134, "none", line=INK, dashed=True)
    canvas.text(592, 34, "optimizer.step()", anchor="middle", bold=True)
    canvas.text(14, 250, "overlap_param_gather", bold=True)
    canvas.box(456, 224, 130, 46, "none", line=INK, dashed=True)
    canvas.box(490, 230, 90, 34, RANKS[0])
    canvas.text(535, 251, "update 1/N", anchor="middle", fill=PAPER)
    canvas.box(590, 230, 150, 15, "#7b8794")
    canvas.text(665, 242, "next forward", anchor="middle", fill=PAPER, size=11)
    canvas.box(590, 249, 110, 15, RANKS[1])
    canvas.text(645, 261, "all-gather", anchor="middle", fill=PAPER, size=11)
    canvas.text(590, 286, "each layer waits for its own parameters", fill=SOFT, size=12)
    return canvas


def shard_groups() -> Canvas:
    """State sharded within each host and replicated across hosts."""
    canvas = Canvas(860, 260)
    for host in range(2):
        top = 24 + 116 * host
        canvas.box(110, top, 560, 78, EMPTY)
        canvas.text(14, top + 44, f"host {host}", bold=True)
        for shard, colour in enumerate(RANKS):
            left = 130 + 134 * shard
            canvas.box(left, top + 12, 118, 54, colour)
            canvas.text(left + 59, top + 35, f"rank {4 * host + shard}", anchor="middle", fill=PAPER, bold=True)
            canvas.text(left + 59, top + 54, f"state {shard + 1}/4", anchor="middle", fill=PAPER, size=12)
    for shard in range(4):
        canvas.arrow(189 + 134 * shard, 105, 189 + 134 * shard, 137, both=True)
    canvas.text(684, 56, "within a shard group:", fill=SOFT)
    canvas.text(684, 74, "gradients and parameters", fill=SOFT)
    canvas.text(684, 118, "across replicas:", fill=SOFT)
    canvas.text(684, 136, "sums of gradients only", fill=SOFT)
    return canvas


def peer_checkpoint() -> Canvas:
    """Each shard on two hosts."""
    canvas = Canvas(860, 250)
    for host in range(2):
        left = 20 + 420 * host
        canvas.box(left, 20, 390, 168, EMPTY)
        canvas.text(left + 195, 44, f"host {host}", anchor="middle", bold=True)
        for local_rank in range(2):
            rank = 2 * host + local_rank
            peer = (rank + 2) % 4
            _draw_rank(canvas, left + 20 + 184 * local_rank, rank, peer)
    canvas.text(
        430,
        222,
        "if host 1 is lost, host 0 has all shards: 0 and 1 of its own, and snapshots of shards 2 and 3",
        anchor="middle",
        fill=SOFT,
    )
    return canvas


def _draw_rank(canvas: Canvas, left: float, rank: int, peer: int) -> None:
    canvas.text(left + 84, 70, f"rank {rank}", anchor="middle", bold=True)
    canvas.box(left, 82, 168, 40, RANKS[rank])
    canvas.text(left + 84, 107, f"shard {rank}: its own", anchor="middle", fill=PAPER)
    canvas.box(left, 130, 168, 40, PAPER, line=RANKS[peer], dashed=True)
    canvas.text(left + 84, 155, f"shard {peer}: snapshot of rank {peer}", anchor="middle", fill=INK, size=12)


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "ownership": ownership,
    "buckets": buckets,
    "step": step,
    "shard-groups": shard_groups,
    "peer-checkpoint": peer_checkpoint,
}


def main(names: Sequence[str] = tuple(DRAWINGS)) -> None:
    for name in names:
        (FOLDER / f"{name}.svg").write_text(DRAWINGS[name]().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
