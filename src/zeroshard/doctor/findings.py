"""What there is to say of a job."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NOTE: Literal["note"] = "note"
WARNING: Literal["warning"] = "warning"
ERROR: Literal["error"] = "error"
Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that is worth a look. An error makes the job unhealthy; the others do not."""

    level: Level
    what: str
    found: str
    expected: str
    do: str


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.level != ERROR for finding in findings)
