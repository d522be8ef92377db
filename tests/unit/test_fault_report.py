"""The fault page shows all records, and is not written if they do not support its claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fault_injection import Fault, Kind, Outcome, Place
from tests.support.fault_report import FEWEST, FOLDER, Count, Record, forget, keep_count, keep_outcomes, write_page


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "records"))
    return tmp_path / "records"


def make_outcome(mode: str = "shard", *errors: str, seconds: float = 0.5, restarted: bool = True) -> Outcome:
    return Outcome(Fault(Kind.KILLED, Place.GATHER, 0, 0), mode, errors or ("RankLostError",), seconds, restarted)


def render_page(folder: Path) -> str:
    target = folder.parent / "page.md"
    write_page(target)
    return target.read_text(encoding="utf-8")


def test_unobserved_faults_are_counted_separately(folder: Path) -> None:
    keep_outcomes([make_outcome()] * FEWEST)
    keep_count(Count("killed", "a", "done", 70, is_watched=False))
    keep_count(Count("killed", "b", "done", 5, known=1.25))
    keep_count(Count("flips", "c", "done", 900))
    page = render_page(folder)
    assert f"**{FEWEST + 75} faults: 0 silent" in page
    assert f"In {FEWEST + 5} of them" in page
    assert "detected by all others within 1.25 s" in page
    assert "| c | done | 900 |  | all |" in page


@pytest.mark.parametrize(
    ("count", "seconds", "known", "reason"),
    [
        (0, 0.5, 0.5, "no faults were recorded"),
        (FEWEST - 1, 0.5, None, f"only {FEWEST - 1} faults were observed"),
        (FEWEST, 2.0, None, r"detected after 2\.00 s"),
        (FEWEST, 0.5, 2.5, r"detected after 2\.50 s"),
    ],
)
def test_incomplete_results_are_rejected(
    folder: Path, count: int, seconds: float, known: float | None, reason: str
) -> None:
    keep_outcomes([make_outcome(seconds=seconds)] * count)
    keep_count(Count("killed", "a", "done", 1000, is_watched=False, known=known))
    with pytest.raises(SystemExit, match=reason):
        render_page(folder)
    assert not (folder.parent / "page.md").exists()


def test_outcomes_are_listed_by_mode(folder: Path) -> None:
    keep_outcomes(
        [make_outcome()] * FEWEST + [make_outcome("drop-in", "RuntimeError"), make_outcome("drop-in", restarted=False)]
    )
    row = "`RankLostError` (shard, drop-in 1 of 2), `RuntimeError` (drop-in 1 of 2) | 0.50 / 0.50 |"
    assert f"{row} continued (drop-in 1 of 2), restarted (shard, drop-in 1 of 2) | nothing |" in render_page(folder)


def test_host_records(folder: Path) -> None:
    keep_outcomes([make_outcome()] * FEWEST)
    Record("a slow link", "20 Mbit/s", "nothing").keep()
    page = render_page(folder)
    assert "| a slow link | 20 Mbit/s | nothing |  |  |" in page
    assert "permits no network namespaces" in page
    Record("a cut link", "cut", "RankLostError", 6.0, 7.0).keep()
    page = render_page(folder)
    assert "| a cut link | cut | RankLostError | 6.0 | 7.0 |" in page
    assert f"**{FEWEST + 1} faults" in page
    assert "permits no network namespaces" not in page


def test_forget_keeps_only_the_long_run(folder: Path) -> None:
    keep_outcomes([make_outcome()])
    keep_count(Count("killed", "a", "done", 1))
    Record("a cut link", "cut", "RankLostError", 6.0, 7.0).keep()
    (folder / "long_runs.json").write_text("[]")
    forget()
    assert [file.name for file in folder.iterdir()] == ["long_runs.json"]


def test_repeated_case_is_counted_once(folder: Path) -> None:
    keep_outcomes([make_outcome()] * FEWEST)
    for count in (3, 4):
        keep_count(Count("elastic", "a", "done", count))
    assert f"**{FEWEST + 4} faults" in render_page(folder)


def test_long_run_section_is_kept(folder: Path) -> None:
    keep_outcomes([make_outcome()] * FEWEST)
    section = "\n## A long run\n\n20,000 steps\n"
    (folder.parent / "page.md").write_text(f"# Faults\n\nold\n{section}", encoding="utf-8")
    page = render_page(folder)
    assert page.endswith(section)
    assert "old" not in page
