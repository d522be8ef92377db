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
from zeroshard.doctor.collect import COLLECTIVES, ROUNDS, GpuInfo, JobInfo, RankInfo, RankMeasurements, TrialResult
from zeroshard.planner.estimate import Network
from zeroshard.planner.request import OptimizerChoice, PlanRequest, make_config
from zeroshard.planner.shapes import ModelShape, ParamShape

# ---- The command line, called in this process


def status_of(*arguments: str | Path) -> int:
    """Run a command and return its exit status."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def convert(source: Path, target: Path, to: str, *options: str) -> Path:
    """Convert a checkpoint, check that it succeeds, and return the target."""
    assert status_of("checkpoint", "convert", source, target, "--to", to, *options) == 0
    assert not [entry for entry in target.parent.iterdir() if "converting" in entry.name]
    return target


# ---- Small plans

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'{{data}}"
"""A model name with HTML that a page must escape."""


def small_model_shape(name: str = "small") -> ModelShape:
    shapes = {"embed.weight": (500, 64), "layers.0.weight": (64, 64), "layers.1.weight": (64, 64), "norm.bias": (64,)}
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in shapes.items()), 24)


def small_request(name: str = "small", memory: int | None = 600_000) -> PlanRequest:
    config = make_config(peer_checkpoint=False, offload=False, bucket=None, reduce=None)
    return PlanRequest(small_model_shape(name), [2, 4], config, memory, 1000, Network(1e9, 1e-5))


ADAMW, SGD = OptimizerChoice("AdamW"), OptimizerChoice("SGD", {"momentum": 0.9})


def write_module(folder: Path) -> str:
    """Write a module that builds `small_model_shape`. Return its name for the command line."""
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
    """Collects tags and text of an HTML page."""

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
    """Return the data that is embedded in a page."""
    script = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert script is not None
    data: dict[str, Any] = json.loads(script[1])
    return data


# ---- Made-up jobs for the doctor

GIB = 2**30


def make_rank_info(rank: int, ranks_per_host: int = 8, **changes: Any) -> RankInfo:
    """Return the info of a healthy rank without a GPU."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"host{rank // ranks_per_host}",
        "local_rank": rank % ranks_per_host,
        "local_size": ranks_per_host,
        "backend": "",
        "versions": {"python": "3.12.1", "torch": "2.12.0", "zeroshard": "0.1.0"},
        "gpu": None,
        "gpu_error": "",
        "host_free": 50 * GIB,
        "host_total": 64 * GIB,
        "cores": tuple(range(4 * rank, 4 * rank + 4)),
        "threads": 4,
        "environment": {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": str(rank)},
        "settings": {"deterministic algorithms": "False"},
    }
    return RankInfo(**{**values, **changes})


def make_gpu_info(number: int, free: int = 79 * GIB) -> GpuInfo:
    return GpuInfo(number % 8, "a GPU", f"GPU-{number}", free, 80 * GIB)


def make_samples(rank: int, **values: float | Sequence[float]) -> dict[str, Sequence[float]]:
    """Return the samples of a healthy rank, with other values for some names: one for all rounds, or a sequence."""
    usual = {"matmul": 1e12, "memcpy": 2e10, "consensus": 1e-4}
    usual |= {"ping": 4e-4, "clock_offset": 1e-4, "link": 1e9} if rank else {}
    usual |= dict.fromkeys(COLLECTIVES, 0.01) | {f"{name}_latency": 1e-4 for name in COLLECTIVES}
    samples: dict[str, float | Sequence[float]] = {**usual, **values}
    return {
        name.replace("_", " "): [value] * ROUNDS if isinstance(value, float) else value
        for name, value in samples.items()
    }


def make_measurements(rank: int, **values: float | Sequence[float]) -> RankMeasurements:
    trial = TrialResult(1.5, 0.5, 1e-16)
    return RankMeasurements("GlooTransport", 16 * 2**20, make_samples(rank, **values), trial)


def make_job(ranks: int = 4, backend: str = "gloo", **rank_info: Any) -> JobInfo:
    """Return a healthy job."""
    return JobInfo(
        backend,
        [make_rank_info(rank, **rank_info) for rank in range(ranks)],
        [make_measurements(rank) for rank in range(ranks)],
    )


def with_rank_info(job: JobInfo, rank: int, **changes: Any) -> JobInfo:
    return replace(job, ranks=_replace_at(job.ranks, rank, changes))


def with_samples(job: JobInfo, rank: int, **values: float | Sequence[float]) -> JobInfo:
    """Return the job with other samples on one rank."""
    return replace(job, measurements=_replace_at(job.measurements, rank, {"samples": make_samples(rank, **values)}))


def with_trial(job: JobInfo, rank: int, trial: TrialResult) -> JobInfo:
    return replace(job, measurements=_replace_at(job.measurements, rank, {"trial": trial}))


def _replace_at(values: Sequence[Any], rank: int, changes: dict[str, Any]) -> list[Any]:
    return [replace(value, **changes) if number == rank else value for number, value in enumerate(values)]


# ---- Pages of the docs, and the code blocks in them

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEW_NAMESPACE, _PART, _NOT_RUN = "new namespace", "part of ", "not run: "
_SCRIPT, _SCRIPT_AFTER = "script", "script, only after: "


class Block(NamedTuple):
    """A block of code, and the comment just before it."""

    page: str
    line: int
    language: str
    text: str
    comment: str

    @property
    def code(self) -> str:
        """The Python code; for a diff, the code after it was applied."""
        if self.language != "diff":
            return self.text
        return "".join(line[1:] + "\n" for line in self.text.splitlines() if not line.startswith("-"))

    @property
    def has_new_namespace(self) -> bool:
        """Whether it runs in a new namespace, without the names of earlier blocks."""
        return self.comment == _NEW_NAMESPACE

    @property
    def example(self) -> str | None:
        """The example file that contains this block verbatim. Another test runs that file."""
        return self.comment.removeprefix(_PART) if self.comment.startswith(_PART) else None

    @property
    def reason(self) -> str | None:
        """Why it, or the old side of a diff, is not run."""
        prefix = next((prefix for prefix in (_NOT_RUN, _SCRIPT_AFTER) if self.comment.startswith(prefix)), None)
        return None if prefix is None else self.comment.removeprefix(prefix)

    @property
    def is_script(self) -> bool:
        """Whether it is a diff of a whole script. Both sides run under torchrun."""
        return self.comment == _SCRIPT or self.comment.startswith(_SCRIPT_AFTER)

    @property
    def old_code(self) -> str:
        """The Python code before a diff is applied."""
        return "".join(line[1:] + "\n" for line in self.text.splitlines() if not line.startswith("+"))

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "diff") and not self.example and not self.reason and not self.is_script

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Paths of all documentation pages, relative to the repository root."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), ROOT / "benchmarks/README.md"]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start(2)) + 1, match[2], match[3], match[1] or "")
        for match in _BLOCK.finditer(text)
    ]


def without_code(text: str) -> str:
    """Return the text without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", text))


class Command(NamedTuple):
    """A shell command and the environment variables that it sets."""

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
