"""Draws the pictures of docs/concepts.md. Run it to write them anew; a test compares them.

python docs/drawings/draw.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK, SOFT, LINE, PAPER, EMPTY = "#1f2933", "#52606d", "#9aa5b1", "#ffffff", "#f1f4f7"


class Canvas:
    """A sheet of paper, so that it can be read on light and on dark pages."""

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
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
        self._parts.append(f'<rect {place} fill="{fill}" stroke="{line}"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{words}</text>'
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
    """Who keeps what, in four ways."""
    canvas = Canvas(860, 290)
    ways = (("DDP", ()), ("ZeRO-1", ("state",)), ("ZeRO-2", ("gradients", "state")))
    ways += (("FSDP2", ("parameters", "gradients", "state")),)
    bytes_each = ("16", "8 + 8/N", "4 + 12/N", "16/N")
    for column, ((way, divided), size) in enumerate(zip(ways, bytes_each, strict=True)):
        left = 110 + 190 * column
        canvas.text(left + 78, 30, way, size=16, anchor="middle", bold=True)
        for row, kind in enumerate(("parameters", "gradients", "state")):
            _kept_by_all(canvas, left, 52 + 66 * row, is_divided=kind in divided)
        canvas.text(left + 78, 272, f"{size} bytes", anchor="middle", fill=SOFT)
    for row, kind in enumerate(("parameters", "gradients", "state")):
        canvas.text(14, 80 + 66 * row, kind, bold=True)
    canvas.text(14, 272, "for a parameter", fill=SOFT)
    return canvas


def _kept_by_all(canvas: Canvas, left: float, top: float, *, is_divided: bool) -> None:
    """What four ranks, one below the other, keep of something in four parts."""
    for rank, colour in enumerate(RANKS):
        for part in range(4):
            kept = part == rank or not is_divided
            canvas.box(left + 39 * part, top + 13 * rank, 37, 11, colour if kept else EMPTY)


def buckets() -> Canvas:
    """Parameters in rooms, and buckets in slices."""
    canvas = Canvas(860, 300)
    canvas.text(14, 30, "parameters, from the last of the model to the first", bold=True)
    rooms = (
        (0, 0, 250, "head.weight"),
        (0, 250, 60, "bias"),
        (0, 318, 82, "mlp"),
        (1, 0, 180, "qkv"),
        (1, 190, 190, "embed"),
    )
    for bucket, start, size, name in rooms:
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
    for bucket, start, size, _ in rooms:
        left = 20 + 430 * bucket + start
        canvas.box(left, 132, size - 3, 38, "none", line=INK)
    canvas.text(
        20,
        214,
        "coloured: slices, equal on all ranks · framed: rooms, aligned · a piece is where the two overlap",
        fill=SOFT,
    )
    canvas.text(20, 246, "rank 2 owns", bold=True)
    for number, (width, name) in enumerate(((50, "head"), (50, "bias"), (100, "embed"))):
        left = 130 + (0, 52, 104)[number]
        canvas.box(left, 230, width, 24, RANKS[2])
        canvas.text(left + width / 2, 246, name, anchor="middle", fill=PAPER, size=12)
    canvas.text(350, 246, "pieces: what its inner optimizer updates, and has state for", fill=SOFT)
    canvas.text(
        20, 280, "bucket 0 is full first in a backward pass, and is sent while the rest is still computed", fill=SOFT
    )
    return canvas


def step() -> Canvas:
    """What happens when, in one iteration."""
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
    canvas.text(654, 149, "slices to all", anchor="middle", fill=PAPER)
    canvas.text(366, 184, "buckets to their owners", fill=SOFT, anchor="middle", size=12)
    canvas.text(473, 206, "agree", fill=SOFT, anchor="middle", size=12)
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
    canvas.text(645, 261, "slices to all", anchor="middle", fill=PAPER, size=11)
    canvas.text(590, 286, "each layer waits for its own parameters", fill=SOFT, size=12)
    return canvas


def rows() -> Canvas:
    """State divided within hosts, and held by both."""
    canvas = Canvas(860, 260)
    for host in range(2):
        top = 24 + 116 * host
        canvas.box(110, top, 560, 78, EMPTY)
        canvas.text(14, top + 44, f"host {host}", bold=True)
        for place, colour in enumerate(RANKS):
            left = 130 + 134 * place
            canvas.box(left, top + 12, 118, 54, colour)
            canvas.text(left + 59, top + 35, f"rank {4 * host + place}", anchor="middle", fill=PAPER, bold=True)
            canvas.text(left + 59, top + 54, f"state {place + 1}/4", anchor="middle", fill=PAPER, size=12)
    for place in range(4):
        canvas.arrow(189 + 134 * place, 105, 189 + 134 * place, 137, both=True)
    canvas.text(684, 56, "within a row: slices of", fill=SOFT)
    canvas.text(684, 74, "gradients and parameters", fill=SOFT)
    canvas.text(684, 118, "between rows: sums", fill=SOFT)
    canvas.text(684, 136, "of gradients alone", fill=SOFT)
    return canvas


def second_copy() -> Canvas:
    """Each share on two hosts."""
    canvas = Canvas(860, 250)
    for host in range(2):
        left = 20 + 420 * host
        canvas.box(left, 20, 390, 168, EMPTY)
        canvas.text(left + 195, 44, f"host {host}", anchor="middle", bold=True)
        for place in range(2):
            rank = 2 * host + place
            partner = (rank + 2) % 4
            _holder(canvas, left + 20 + 184 * place, rank, partner)
    canvas.text(
        430,
        222,
        "host 1 is lost: shares 0 and 1 are with their owners, shares 2 and 3 with their partners on host 0",
        anchor="middle",
        fill=SOFT,
    )
    return canvas


def _holder(canvas: Canvas, left: float, rank: int, partner: int) -> None:
    canvas.text(left + 84, 70, f"rank {rank}", anchor="middle", bold=True)
    canvas.box(left, 82, 168, 40, RANKS[rank])
    canvas.text(left + 84, 107, f"share {rank}: its own", anchor="middle", fill=PAPER)
    canvas.box(left, 130, 168, 40, PAPER, line=RANKS[partner], dashed=True)
    canvas.text(left + 84, 155, f"share {partner}: kept for rank {partner}", anchor="middle", fill=INK, size=12)


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "ownership": ownership,
    "buckets": buckets,
    "step": step,
    "rows": rows,
    "second-copy": second_copy,
}


def main(names: Sequence[str] = tuple(DRAWINGS)) -> None:
    for name in names:
        (FOLDER / f"{name}.svg").write_text(DRAWINGS[name]().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
