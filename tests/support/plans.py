"""Small plans, for tests of what is shown of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from zeroshard.cli.plan_options import Optimizer, Wish, config_of
from zeroshard.planning.shapes import ModelShape, ParamShape
from zeroshard.planning.usage import Network

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'{{data}}"
"""A name that a page must not obey."""


def small_model(name: str = "small") -> ModelShape:
    shapes = {"embed.weight": (500, 64), "layers.0.weight": (64, 64), "layers.1.weight": (64, 64), "norm.bias": (64,)}
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in shapes.items()), 24)


def small_wish(name: str = "small", memory: int | None = 600_000) -> Wish:
    config = config_of(second_copy=False, offload=False, bucket=None, reduce=None)
    return Wish(small_model(name), [2, 4], config, memory, 1000, Network(1e9, 1e-5))


ADAMW, SGD = Optimizer("AdamW"), Optimizer("SGD", {"momentum": 0.9})


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
