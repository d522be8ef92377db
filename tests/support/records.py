"""What was injected, and what became of it: rows for a page, kept where `ZEROSHARD_RECORDS` says."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "ZEROSHARD_RECORDS"
_ENDING = ".record.json"


@dataclass(frozen=True)
class Record:
    """`known`, `ended`: seconds from what was done until all ranks that live had raised an error, and had ended; None
    where nothing was to be known."""

    case: str
    injected: str
    seen: str
    known: float | None = None
    ended: float | None = None

    def keep(self) -> None:
        """One file a case, so that each can be renewed alone."""
        folder = os.environ.get(FOLDER)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = "".join(letter if letter.isalnum() else "-" for letter in self.case)
            (Path(folder) / f"{name}{_ENDING}").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def rows(folder: Path) -> list[Record]:
    """All that were kept, by case."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*{_ENDING}"))
    return sorted((Record(**it) for it in found), key=lambda record: record.case)
