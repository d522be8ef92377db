"""Text for messages, reports and the command line: ranks, names, counts, bytes, seconds, tables."""

from collections.abc import Mapping, Sequence

_MAX_RANKS_SHOWN = 8
_MAX_NAMES_SHOWN = 8


def format_ranks(ranks: Sequence[int]) -> str:
    """Format the first few ranks for a message: "ranks 0, 1, 2"."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN])) + (", ..." if len(ranks) > _MAX_RANKS_SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def format_ranks_by_text(ranks_by_text: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())


def format_names(names: Sequence[str], max_shown: int = _MAX_NAMES_SHOWN) -> str:
    """Join names for a message, abbreviated if there are many: "a, b and 3 more"."""
    hidden = len(names) - max_shown
    return ", ".join(names[:max_shown]) + (f" and {hidden:,} more" if hidden > 0 else "")


def format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_error(error: BaseException) -> str:
    """Return class and message, as at the end of a traceback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_DECIMAL_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_BINARY_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def format_bytes(nbytes: float, *, binary: bool = False) -> str:
    """Format in decimal units, such as 31.4 GB, or `binary` ones, in which the size of memory chips is given."""
    for unit, size in _BINARY_UNITS if binary else _DECIMAL_UNITS:
        if nbytes >= size:
            value = nbytes / size
            return f"{value:,.0f} {unit}" if value >= 999.5 or value == round(value) else f"{value:.3g} {unit}"
    return f"{nbytes:,.0f} B"


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0" if not seconds else f"{seconds * 1e9:.3g} ns"


def format_table(rows: Sequence[Sequence[str]], alignment: str = "") -> list[str]:
    """Return lines with aligned columns. `alignment` has "<" or ">" for each column; without one, it is "<"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = alignment.ljust(len(widths), "<")

    def align(row: Sequence[str]) -> str:
        return "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()

    return list(map(align, rows))


def replace_unprintable(text: str) -> str:
    """Replace characters that a terminal may interpret: names may come from untrusted files."""
    return "".join(char if char.isprintable() else "?" for char in text)
