"""A description as tables."""

from collections.abc import Mapping

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..checkpoint.contents import RANKS, SCHEDULER
from .describe import Description, Share, Value

_MEANING = {RANKS: "random states of that rank, and its extra", SCHEDULER: "state of the scheduler"}


def show(description: Description, console: Console) -> None:
    console.print(_headline(description))
    if description.model or description.state:
        console.print(_parameters(description))
    if description.other:
        console.print(_others(description.other))
    console.print(_ranks(description.ranks))
    console.print(_totals(description))


def _headline(it: Description) -> Text:
    step = "step unknown" if it.step is None else f"step {it.step}"
    ranks = "1 rank" if it.world_size == 1 else f"{it.world_size} ranks"
    return _plain(f"{it.path}: {step}, saved by {ranks}" + (f" with torch {it.torch}" if it.torch else ""))


def _parameters(it: Description) -> Table:
    table = _table("model and optimizer", "name", "shape", "dtype", "size", "state", "size of state")
    for name in {**it.model, **it.state}:
        state = it.state.get(name, {})
        size = decimal(sum(value.bytes for value in state.values())) if state else ""
        table.add_row(_plain(name), *_cells(it.model.get(name)), _plain(", ".join(sorted(state))), size)
    return table


def _others(others: Mapping[str, Value]) -> Table:
    table = _table("other contents", "key", "shape", "dtype", "size", "what it is")
    for key, value in others.items():
        table.add_row(_plain(key), *_cells(value), _MEANING.get(key.partition(".")[0], ""))
    return table


def _ranks(ranks: Mapping[int, Share]) -> Table:
    table = _table("files", "rank", "files", "size")
    for rank, share in ranks.items():
        table.add_row(str(rank), str(share.files), decimal(share.bytes))
    return table


def _totals(it: Description) -> Text:
    totals, parts = it.totals, f"{it.totals.elements:,} elements"
    return Text(
        f"{parts}, model {decimal(totals.model_bytes)}, state {decimal(totals.state_bytes)}, other "
        f"{decimal(totals.other_bytes)}; files {decimal(totals.file_bytes)}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if "size" in column else "left")
    return table


def _cells(value: Value | None) -> tuple[str, str, str]:
    if value is None or value.shape is None:
        return "", "", ""
    return " x ".join(map(str, value.shape)) or "scalar", str(value.dtype), decimal(value.bytes)


def _plain(text: str) -> Text:
    """Without markup."""
    return Text(printable(text))


def printable(text: str) -> str:
    """Names come from files of others: nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
