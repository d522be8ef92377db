"""Support for tests of the tools: command line, planner, doctor and docs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from zeroshard.cli.app import main
from zeroshard.doctor.collect import (
    CollectiveTiming,
    GpuInfo,
    JobInfo,
    Link,
    RankInfo,
    RankMeasurements,
    RankSpeed,
    TrialResult,
)
from zeroshard.planner.estimate import Network
from zeroshard.planner.request import OptimizerChoice, PlanRequest, make_config
from zeroshard.planner.shapes import ModelShape, ParamShape

# ---- The command line, called in this process


def status_of(*arguments: str | Path) -> int:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def convert(source: Path, target: Path, to: str, *options: str) -> Path:
    """The target, which must come to be."""
    assert status_of("checkpoint", "convert", source, target, "--to", to, *options) == 0
    assert not [entry for entry in target.parent.iterdir() if "converting" in entry.name]
    return target


# ---- Small plans

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'{{data}}"
"""A name that a page must not obey."""


def small_model(name: str = "small") -> ModelShape:
    shapes = {"embed.weight": (500, 64), "layers.0.weight": (64, 64), "layers.1.weight": (64, 64), "norm.bias": (64,)}
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in shapes.items()), 24)


def small_wish(name: str = "small", memory: int | None = 600_000) -> PlanRequest:
    config = make_config(peer_checkpoint=False, offload=False, bucket=None, reduce=None)
    return PlanRequest(small_model(name), [2, 4], config, memory, 1000, Network(1e9, 1e-5))


ADAMW, SGD = OptimizerChoice("AdamW"), OptimizerChoice("SGD", {"momentum": 0.9})


def write_module(folder: Path) -> str:
    """A file with `small_model` as code; its source for the command line."""
    (folder / "small.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    model = nn.Module()\n"
        "    model.embed = nn.Embedding(500, 64)\n"
        "    model.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))\n"
        "    model.norm = nn.LayerNorm(64)\n"
        "    return model\n"
    )
    return f"{folder / 'small.py'}:make"


class Reader(HTMLParser):
    """What an HTML page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.tags:
            key = self.tags[-1][1].get("id") or self.open[-1]
            self.text[key] = self.text.get(key, "") + data


def embedded(page: str) -> dict[str, Any]:
    """The numbers in a page."""
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


# ---- Made-up jobs for the doctor

GIB = 2**30
VERBS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def some_facts(rank: int, ranks_a_host: int = 8, **changes: Any) -> RankInfo:
    """Of a healthy rank without a GPU."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"host{rank // ranks_a_host}",
        "local_rank": rank % ranks_a_host,
        "local_size": ranks_a_host,
        "backend": "",
        "versions": {"python": "3.12.1", "torch": "2.12.0", "zeroshard": "0.1.0"},
        "gpu": None,
        "gpu_trouble": "",
        "host_free": 50 * GIB,
        "host_total": 64 * GIB,
        "cores": tuple(range(4 * rank, 4 * rank + 4)),
        "threads": 4,
        "environment": {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": str(rank)},
        "settings": {"deterministic algorithms": "False"},
    }
    return RankInfo(**{**values, **changes})


def some_gpu(number: int, free: int = 79 * GIB) -> GpuInfo:
    return GpuInfo(number % 8, "a GPU", f"GPU-{number}", free, 80 * GIB)


def some_measured(rank: int, **changes: Any) -> RankMeasurements:
    values: dict[str, Any] = {
        "link": Link(0.0001, 0.0002, 1e9) if rank else None,
        "speed": RankSpeed(1e12, 2e10),
        "timings": tuple(CollectiveTiming(verb, "a way", 1e-4, 1e-2, 16 * 2**20, 0.75) for verb in VERBS),
        "agreement": 1e-4,
        "rates": None,
        "trial": TrialResult(1.5, 0.5, 1e-16, "abc"),
    }
    return RankMeasurements(**{**values, **changes})


def some_job(ranks: int = 4, backend: str = "gloo", **facts: Any) -> JobInfo:
    """A healthy one."""
    return JobInfo(
        backend, [some_facts(rank, **facts) for rank in range(ranks)], [some_measured(rank) for rank in range(ranks)]
    )


def with_facts(job: JobInfo, rank: int, **changes: Any) -> JobInfo:
    return replace(job, rank_infos=_changed(job.rank_infos, rank, changes))


def with_measured(job: JobInfo, rank: int, **changes: Any) -> JobInfo:
    return replace(job, measurements=_changed(job.measurements, rank, changes))


def _changed(values: Sequence[Any], rank: int, changes: dict[str, Any]) -> list[Any]:
    return [replace(it, **changes) if number == rank else it for number, it in enumerate(values)]


# ---- Pages of the docs, and the code blocks in them

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANEW, _PART, _NOT_RUN = "begin anew", "part of ", "not run: "


class Block(NamedTuple):
    """A block of code, and the comment just before it."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def code(self) -> str:
        """What it is as Python; of a diff, what it leads to."""
        if self.language != "diff":
            return self.text
        return "".join(line[1:] + "\n" for line in self.text.splitlines() if not line.startswith("-"))

    @property
    def begins_anew(self) -> bool:
        """Names of blocks before it are forgotten."""
        return self.mark == _ANEW

    @property
    def example(self) -> str | None:
        """The file in which it stands as it is, and which is run elsewhere."""
        return self.mark.removeprefix(_PART) if self.mark.startswith(_PART) else None

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return self.mark.removeprefix(_NOT_RUN) if self.mark.startswith(_NOT_RUN) else None

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "diff") and not self.example and not self.reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All that people read, from the root of the repository on."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), ROOT / "benchmarks/README.md"]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[2], found[3], found[1] or "")
        for found in _BLOCK.finditer(text)
    ]


def without_code(text: str) -> str:
    """What is prose: blocks of code, and code within lines, are left out."""
    return re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", text))


class Command(NamedTuple):
    """A line for a shell, with what it sets in the environment."""

    block: Block
    settings: dict[str, str]
    words: list[str]


def commands_of(block: Block) -> Iterator[Command]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        settings = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, value = words.pop(0).split("=", 1)
            settings[name] = value
        if words:
            yield Command(block, settings, words)
