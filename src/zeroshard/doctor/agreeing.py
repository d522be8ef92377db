"""Do all ranks run the same, with the same settings? Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from ..units import name_ranks
from .facts import Facts
from .findings import ERROR, WARNING, Finding, Level

_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES",)
_CHANGE_RESULTS = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Ranks with different ones wait for each other for ever, or compute different numbers."""
_HARMLESS = ("python",)


def differences(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Named by ranks, with their values."""
    yield from _versions(facts)
    yield from _settings(facts)
    yield from _environment(facts)
    asked = _sides(facts, lambda it: it.backend or "none")
    if len(asked) > 1:
        yield Finding(
            ERROR, "--backend", _in_words(asked), "the same on all ranks", "start all hosts with the same command"
        )


def _versions(facts: Sequence[Facts]) -> Iterator[Finding]:
    for name in _names(it.versions for it in facts):
        sides = _sides(facts, partial(_version, name))
        if len(sides) > 1:
            level: Level = WARNING if name in _HARMLESS else ERROR
            yield Finding(
                level,
                f"version of {name}",
                _in_words(sides),
                "one version on all ranks",
                f"install the same {name} on all hosts, or start the same interpreter there",
            )


def _settings(facts: Sequence[Facts]) -> Iterator[Finding]:
    for name in _names(it.settings for it in facts):
        sides = _sides(facts, partial(_setting, name))
        if len(sides) > 1:
            yield Finding(
                ERROR,
                f"setting of torch: {name}",
                _in_words(sides),
                "the same on all ranks, since it changes numbers",
                "look for what sets it on some hosts only, such as sitecustomize or the environment",
            )


def _environment(facts: Sequence[Facts]) -> Iterator[Finding]:
    for name in _names(it.environment for it in facts):
        sides = _sides(facts, partial(_variable, name))
        if len(sides) > 1 and name not in _MAY_DIFFER:
            changes = name in _CHANGE_RESULTS
            yield Finding(
                ERROR if changes else WARNING,
                f"environment: {name}",
                _in_words(sides),
                "the same on all ranks" + (", else they hang or compute other numbers" if changes else ""),
                f"export {name} in the same way on all hosts, unless it is meant to differ",
            )


def _names(dicts: Iterable[Mapping[str, str]]) -> list[str]:
    return sorted({name for it in dicts for name in it})


def _sides(facts: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[int]]:
    """The ranks that have each value, those of the fewest first: they are the ones to look at."""
    found: dict[str, list[int]] = defaultdict(list)
    for it in facts:
        found[value(it)].append(it.rank)
    return dict(sorted(found.items(), key=lambda side: len(side[1])))


def _in_words(sides: dict[str, list[int]]) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in sides.items())


def _version(name: str, it: Facts) -> str:
    return it.versions.get(name, "none")


def _setting(name: str, it: Facts) -> str:
    return it.settings[name]


def _variable(name: str, it: Facts) -> str:
    return repr(it.environment[name]) if name in it.environment else "not set"
