"""Do all ranks run the same, with the same settings? Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from .._types import format_ranks
from .facts import RankInfo
from .findings import ERROR, WARNING, Finding, Level

_RANK_LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_RESULT_CHANGING_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Ranks with different ones wait for each other for ever, or compute different numbers."""
_HARMLESS_VERSIONS = ("python",)


def check_same_across_ranks(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    """Named by ranks, with their values."""
    yield from _check_versions(rank_infos)
    yield from _check_torch_settings(rank_infos)
    yield from _check_environment(rank_infos)
    asked = _ranks_by_value(rank_infos, lambda it: it.backend or "none")
    if len(asked) > 1:
        yield Finding(
            ERROR,
            "--backend",
            _format_ranks_by_value(asked),
            "the same on all ranks",
            "start all hosts with the same command",
        )


def _check_versions(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.versions for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_version, name))
        if len(sides) > 1:
            level: Level = WARNING if name in _HARMLESS_VERSIONS else ERROR
            yield Finding(
                level,
                f"version of {name}",
                _format_ranks_by_value(sides),
                "one version on all ranks",
                f"install the same {name} on all hosts, or start the same interpreter there",
            )


def _check_torch_settings(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.settings for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_torch_setting, name))
        if len(sides) > 1:
            yield Finding(
                ERROR,
                f"setting of torch: {name}",
                _format_ranks_by_value(sides),
                "the same on all ranks, since it changes numbers",
                "look for what sets it on some hosts only, such as sitecustomize or the environment",
            )


def _check_environment(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.environment for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_variable, name))
        if len(sides) > 1 and name not in _RANK_LOCAL_VARIABLES:
            changes = name in _RESULT_CHANGING_VARIABLES
            yield Finding(
                ERROR if changes else WARNING,
                f"environment: {name}",
                _format_ranks_by_value(sides),
                "the same on all ranks" + (", else they hang or compute other numbers" if changes else ""),
                f"export {name} in the same way on all hosts, unless it is meant to differ",
            )


def _all_keys(dicts: Iterable[Mapping[str, str]]) -> list[str]:
    return sorted({name for it in dicts for name in it})


def _ranks_by_value(rank_infos: Sequence[RankInfo], get_value: Callable[[RankInfo], str]) -> dict[str, list[int]]:
    """The ranks that have each value, those of the fewest first: they are the ones to look at."""
    found: dict[str, list[int]] = defaultdict(list)
    for it in rank_infos:
        found[get_value(it)].append(it.rank)
    return dict(sorted(found.items(), key=lambda side: len(side[1])))


def _format_ranks_by_value(ranks_by_value: dict[str, list[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())


def _get_version(name: str, rank_info: RankInfo) -> str:
    return rank_info.versions.get(name, "none")


def _get_torch_setting(name: str, rank_info: RankInfo) -> str:
    return rank_info.settings[name]


def _get_variable(name: str, rank_info: RankInfo) -> str:
    return repr(rank_info.environment[name]) if name in rank_info.environment else "not set"
