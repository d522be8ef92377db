"""A description as tables."""

from collections.abc import Mapping

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..checkpoint.contents import RANKS, SCHEDULER
from .describe import CheckpointDescription, EntrySummary, RankFiles

_KEY_MEANINGS = {RANKS: "random states of that rank, and its extra", SCHEDULER: "state of the scheduler"}


def print_description(description: CheckpointDescription, console: Console) -> None:
    console.print(_description_headline(description))
    if description.model or description.state:
        console.print(_param_table(description))
    if description.other:
        console.print(_other_entries_table(description.other))
    console.print(_rank_files_table(description.ranks))
    console.print(_totals_text(description))


def _description_headline(description: CheckpointDescription) -> Text:
    step = "step unknown" if description.step is None else f"step {description.step}"
    ranks = "1 rank" if description.world_size == 1 else f"{description.world_size} ranks"
    return _to_text(
        f"{description.path}: {step}, saved by {ranks}"
        + (f" with torch {description.torch}" if description.torch else "")
    )


def _param_table(description: CheckpointDescription) -> Table:
    table = _new_table("model and optimizer", "name", "shape", "dtype", "size", "state", "size of state")
    for name in {**description.model, **description.state}:
        state = description.state.get(name, {})
        size = decimal(sum(value.bytes for value in state.values())) if state else ""
        table.add_row(
            _to_text(name), *_entry_cells(description.model.get(name)), _to_text(", ".join(sorted(state))), size
        )
    return table


def _other_entries_table(entries: Mapping[str, EntrySummary]) -> Table:
    table = _new_table("other contents", "key", "shape", "dtype", "size", "what it is")
    for key, value in entries.items():
        table.add_row(_to_text(key), *_entry_cells(value), _KEY_MEANINGS.get(key.partition(".")[0], ""))
    return table


def _rank_files_table(ranks: Mapping[int, RankFiles]) -> Table:
    table = _new_table("files", "rank", "files", "size")
    for rank, share in ranks.items():
        table.add_row(str(rank), str(share.files), decimal(share.bytes))
    return table


def _totals_text(description: CheckpointDescription) -> Text:
    totals, parts = description.totals, f"{description.totals.elements:,} elements"
    return Text(
        f"{parts}, model {decimal(totals.model_bytes)}, state {decimal(totals.state_bytes)}, other "
        f"{decimal(totals.other_bytes)}; files {decimal(totals.file_bytes)}"
    )


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if "size" in column else "left")
    return table


def _entry_cells(entry: EntrySummary | None) -> tuple[str, str, str]:
    if entry is None or entry.shape is None:
        return "", "", ""
    return " x ".join(map(str, entry.shape)) or "scalar", str(entry.dtype), decimal(entry.bytes)


def _to_text(text: str) -> Text:
    """Without markup."""
    return Text(replace_unprintable(text))


def replace_unprintable(text: str) -> str:
    """Names come from files of others: nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
