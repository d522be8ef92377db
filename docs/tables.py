"""Tables of measurements in the docs are those of the files that they come from. Writes them anew:

python docs/tables.py
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TABLE = re.compile(r"^<!-- table (.*?) -->\n(?:\n(?:\|.*\n)+)?", re.MULTILINE)


def filled(markdown: str) -> str:
    """A page, with a table after each comment that asks for one."""
    return _TABLE.sub(lambda found: f"<!-- table {found[1]} -->\n\n{table(found[1])}\n", markdown)


def table(options: str) -> str:
    """The first table of a file, or of a part of it: some columns, some rows.

    file: its place in the repository. under: the heading before it. columns: from and to, counted without the first.
    rows: patterns of the first cell, with bars between them.
    """
    chosen = dict(re.findall(r'(\w+)="([^"]*)"', options))
    text = (ROOT / chosen["file"]).read_text(encoding="utf-8")
    if "under" in chosen:
        _, heading, text = text.partition(f"\n## {chosen['under']}\n")
        if not heading:
            raise ValueError(f"{chosen['file']} has no heading {chosen['under']!r}")
    first_table = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    assert first_table, f"{chosen['file']} has no table there"
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in first_table[0].splitlines()]
    first, last = map(int, chosen.get("columns", f"1-{len(rows[0])}").split("-"))
    wanted = [pattern.strip() for pattern in chosen.get("rows", "*").split(" | ")]
    kept = [row for row in rows[2:] if any(fnmatchcase(row[0], pattern) for pattern in wanted)]
    if not kept:
        raise ValueError(f"no row of {chosen['file']} is one of {wanted}")
    shown = [[row[0], *row[first : last + 1]] for row in [rows[0], *kept]]
    shown.insert(1, ["---"] * len(shown[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
