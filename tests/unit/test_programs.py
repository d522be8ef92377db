"""Random programs as data: drawing from a seed, JSON, scripts and shrinking."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from tests.programs import report
from tests.programs.driver import Tally
from tests.programs.program import MODES, Program
from tests.programs.runner import SAME, Verdict
from tests.programs.script import write_script
from tests.programs.shrink import shrink
from tests.programs.strategies import Draws, draw_program, random_program


def test_json_round_trip() -> None:
    for seed in range(100):
        program = random_program(seed, 3)
        assert Program.from_json(program.to_json()) == program


def test_seed_determines_the_script() -> None:
    for seed in range(20):
        text = write_script(random_program(seed, 2))
        assert text == write_script(random_program(seed, 2))
        compile(text, "program.py", "exec")


def test_every_mode_is_drawn() -> None:
    found = Counter(part for seed in range(400) for part in random_program(seed, 2).parts())
    assert {mode for mode in MODES if any(mode in part for part in found)} == set(MODES)
    assert min(count for part, count in found.items() if part.startswith("mode: ")) >= 10


def test_failing_program_is_shrunk() -> None:
    """In this test, every program with a closure and tied weights fails."""

    def fails(program: Program) -> bool:
        return {"loop: closure", "model: tied weights"} <= set(program.parts())

    for seed in range(2000):
        draws = Draws(random=Random(seed))
        if fails(draw_program(draws, 2)):
            small = shrink(draws.made, 2, fails)
            assert fails(small)
            assert [block.kind for block in small.blocks] == ["MLP", "Tied"]
            assert len(small.loop) <= 5
            return
    raise AssertionError("no such program was drawn")


def test_page_counts_programs(tmp_path: Path) -> None:
    tally = Tally(2)
    for seed in range(10):
        tally.add(random_program(seed, 2), Verdict(SAME))
    records = tmp_path / "records.jsonl"
    report.append_record(records, {"tallies": [vars(tally)], "failures": []})
    report.append_record(records, {"tallies": [vars(tally)], "failures": []})
    report.write_page(records, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "**20 random training programs at 2 ranks: 0 differences, hangs or aborts.**" in page
    assert "| same bits | 20 |" in page
