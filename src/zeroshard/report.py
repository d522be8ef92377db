"""`Report`: what `optimizer.report()` returns."""

import os
from dataclasses import dataclass
from pathlib import Path

from .reporting.picture import draw_report
from .reporting.text import format_report
from .reporting.values import ReportData


@dataclass(frozen=True)
class Report(ReportData):
    """Who owns what, what it takes on this rank, and what the last step took. Of one moment: it does not change.

    `print(report)` shows it as text, `as_dict()` has all of it for JSON, `picture(path)` draws it. What it says of
    other ranks is what the layout says: making it sends nothing.
    """

    def __str__(self) -> str:
        return format_report(self)

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw it into a file, and return its path. The ending says which kind, as `.svg`; without one it is a PNG.

        Needs matplotlib: `zeroshard[plot]`.
        """
        return draw_report(self, Path(path))
