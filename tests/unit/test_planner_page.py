"""The page of `zeroshard plan --html`: self-contained, escapes names, and embeds the numbers of `plan`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tools import ADAMW, EVIL, SGD, Reader, embedded, small_request, status_of, write_module
from zeroshard.errors import ConfigError
from zeroshard.planner import pictures
from zeroshard.planner.pictures import MEMORY_COLOURS
from zeroshard.planner.request import OptimizerChoice

WORLD_SIZES = (2, 4, 64)


@pytest.fixture(scope="module")
def page() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "PAGE_WORLD_SIZES", WORLD_SIZES)
        patch.setattr(pictures, "PAGE_PRECISIONS", ("fp32",))
        return pictures.render_page(small_request(EVIL), SGD, "bf16+fp32")


def test_page_is_valid_and_self_contained(page: str) -> None:
    reader = Reader(page)
    assert reader.open == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", page.replace("</", ""))
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "action"} & attributes.keys()
    (policy,) = [
        attributes["content"] for tag, attributes in reader.tags if tag == "meta" and "http-equiv" in attributes
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert len(page) < 1_000_000


def test_names_are_escaped(page: str) -> None:
    assert page.count("<script") == 2
    assert "<img" not in page
    assert Reader(page).text["title"] == f"{EVIL}: will it fit?"
    assert embedded(page)["model"]["name"] == EVIL


def test_controls_have_labels(page: str) -> None:
    tags = Reader(page).tags
    labels = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    for tag, attributes in tags:
        if tag in ("select", "input") and attributes["id"] != "exact":
            assert attributes["id"] in labels or "aria-label" in attributes
    assert all({"role", "aria-label"} <= attributes.keys() for tag, attributes in tags if tag == "svg")


def test_embedded_numbers_equal_plan(page: str) -> None:
    data, request = embedded(page), small_request(EVIL)
    assert data["worlds"] == list(WORLD_SIZES)
    assert data["methods"] == ["DDP", "torch ZeRO", "zeroshard 1", "zeroshard 2", "FSDP2"]
    assert data["activations"] == request.activations
    assert data["optimizers"] == ["SGD (momentum=0.9)", "AdamW", "Muon + AdamW", "Adafactor"]
    assert data["precisions"] == ["bf16+fp32", "fp32"]
    assert data["colours"] == MEMORY_COLOURS
    for label, optimizer in (("SGD (momentum=0.9)", SGD), ("AdamW", ADAMW)):
        for precision in ("fp32", "bf16+fp32"):
            planned = replace(request, ranks=WORLD_SIZES, activations=0).make_plan(optimizer, precision)
            rows = [dict(zip(data["fields"], row, strict=True)) for row in data["rows"][label][precision]]
            assert len(rows) == len(planned.estimates) == len(WORLD_SIZES) * len(data["methods"])
            for row, estimate in zip(rows, planned, strict=True):
                assert {name: row[name] for name in pictures.PAGE_PEAKS} == estimate.memory.phase_peaks
                for name in pictures.PAGE_FIELDS:
                    assert row[name] == getattr(estimate.memory, name)
                assert row["sent"] == estimate.traffic.sent
                assert row["seconds"] == pytest.approx(estimate.traffic.seconds, rel=1e-5)
                assert row["balance"] == pytest.approx(estimate.state_imbalance, abs=1e-6)


@pytest.mark.parametrize(("group_size", "worlds"), [(None, [1, 2, 4, 64]), (3, [3, 6, 12]), (32, [32, 64]), (96, [96])])
def test_world_sizes_are_multiples_of_shard_group_size(
    monkeypatch: pytest.MonkeyPatch, group_size: int | None, worlds: list[int]
) -> None:
    monkeypatch.setattr(pictures, "PAGE_WORLD_SIZES", (1, 2, 4, 64))
    monkeypatch.setattr(pictures, "COMMON_OPTIMIZERS", ())
    request = replace(small_request(), ranks=worlds[-1:], shard_group_size=group_size)
    assert pictures.collect_page_data(request, ADAMW, "fp32")["worlds"] == worlds


def test_unsupported_optimizers_are_omitted_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PAGE_WORLD_SIZES", (2,))
    monkeypatch.setattr(pictures, "PAGE_PRECISIONS", ())
    monkeypatch.setattr(pictures, "COMMON_OPTIMIZERS", (ADAMW, OptimizerChoice("SparseAdam")))
    data = pictures.collect_page_data(small_request(), ADAMW, None)
    assert data["optimizers"] == ["AdamW"]
    assert data["precisions"][0] == "dtype of the model"
    with pytest.raises(ConfigError, match="SparseAdam"):
        pictures.collect_page_data(small_request(), OptimizerChoice("SparseAdam"), None)


def test_command_writes_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "PAGE_WORLD_SIZES", (1, 2))
    monkeypatch.setattr(pictures, "PAGE_PRECISIONS", ())
    monkeypatch.setattr(pictures, "COMMON_OPTIMIZERS", (ADAMW,))
    arguments = ("plan", write_module(tmp_path), "--ranks", "2,3", "--options", "lr=0.1", "--memory", "1MB", "--html")
    assert status_of(*arguments, tmp_path / "plan.html") == 0
    assert capsys.readouterr().err.endswith(f"Written: {tmp_path / 'plan.html'}\n")
    data = embedded((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert data["optimizers"] == ["AdamW (lr=0.1)", "AdamW"]
    assert (data["worlds"], data["memory"], data["start"]) == ([1, 2, 3], 10**6, 3)
    capsys.readouterr()
    assert status_of(*arguments, tmp_path / "none" / "plan.html") == 2
    assert "could not be written" in capsys.readouterr().err
