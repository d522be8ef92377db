"""Shrink a failing program: delete and lower the choices from which it was drawn, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from tests.programs.program import Program
from tests.programs.strategies import Draws, draw_program

Fails = Callable[[Program], bool]


def shrink(choices: Sequence[int], ranks: int, fails: Fails, seconds: float = 90.0) -> Program:
    """Return the smallest failing program found within `seconds`. `choices` must give a program that fails."""
    best, deadline, tried = _replay(choices, ranks), time.monotonic() + seconds, set()
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _candidates(best[0]):
            found = _replay(candidate, ranks)
            if time.monotonic() > deadline:
                return best[1]
            if _size(found) < _size(best) and found[1] not in tried:
                tried.add(found[1])
                if fails(found[1]):
                    best, is_smaller = found, True
                    break
    return best[1]


Replayed = tuple[Draws, Program]


def _replay(choices: Sequence[int], ranks: int) -> Replayed:
    draws = Draws(choices)
    return draws, draw_program(draws, ranks)


def _size(replayed: Replayed) -> tuple[int, int, list[int]]:
    draws, program = replayed
    return len(program.loop) + len(program.blocks), sum(map(bool, draws.made)), draws.made


def _candidates(draws: Draws) -> Iterator[list[int]]:
    """Yield shorter or lower choices, larger changes first."""
    made = draws.made
    for start, stop in sorted(draws.spans, key=lambda span: span[0] - span[1]):
        yield made[:start] + made[stop:]
    for width in (8, 4, 2, 1):
        for start in range(0, len(made), max(1, width // 2)):
            yield made[:start] + made[start + width :]
            if any(made[start : start + width]):
                yield made[:start] + [0] * len(made[start : start + width]) + made[start + width :]
    for index, value in enumerate(made):
        for lower in range(1, value):
            yield [*made[:index], lower, *made[index + 1 :]]
