"""The page of `zeroshard plan --html` in a real browser: every control shows the numbers that `plan` computes.

Needs chromium and playwright. If one of them is missing, these tests are skipped, except in `make browser`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.tools import ADAMW, EVIL, SGD, small_request
from zeroshard.planner import pictures
from zeroshard.planner.plan import Plan

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if "ZEROSHARD_BROWSER" not in os.environ and BROWSER is None:
    pytest.skip("chromium is not installed: see CONTRIBUTING.md", allow_module_level=True)
if "ZEROSHARD_BROWSER" not in os.environ:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
playwright: Any = import_module("playwright.sync_api")

WORLD_SIZES = (1, 2, 4, 64, 1024)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "PAGE_WORLD_SIZES", WORLD_SIZES)
        patch.setattr(pictures, "COMMON_OPTIMIZERS", (ADAMW, SGD))
        pictures.write_page(small_request(EVIL), ADAMW, "bf16+fp32", path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """Open the page. JavaScript errors and requests for other URLs fail the test."""
    page, errors = browser.new_page(viewport={"width": 1240, "height": 900}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: None if request.url == file.as_uri() else errors.append(request.url))
    page.goto(file.as_uri())
    yield page
    page.close()
    assert not errors


def read_table(page: Any) -> dict[str, dict[str, str]]:
    """Return the values of the table by method and field."""
    found: dict[str, dict[str, str]] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#table tbody tr")].map((row) => [
            row.querySelector("th").textContent,
            Object.fromEntries([...row.querySelectorAll("td")].map((cell) => [cell.dataset.field, cell.textContent])),
        ]))"""
    )
    return found


def assert_page_shows(page: Any, plan: Plan, ranks: int) -> None:
    """Check the table in exact bytes, and the bars."""
    shown = read_table(page)
    assert list(shown) == [estimate.method for estimate in plan if estimate.ranks == ranks]
    for method, cells in shown.items():
        estimate = plan.estimate_for(method, ranks)
        for field in ("parameters", "gradients", "state", "total", "buffers", "activations", "peak"):
            assert cells[field] == f"{getattr(estimate.memory, field):,}", (method, field)
        assert cells["sent"] == f"{estimate.traffic.sent:,}"
        assert cells["balance"] == f"{estimate.state_imbalance:.2f}"
        assert cells["phase"] == estimate.memory.peak_phase
        assert cells["fits"] == ("yes" if plan.fits(estimate) else "no")
        titles = page.locator("#bars title").all_text_contents()
        assert f"{method}, parameters: {estimate.memory.parameters:,} bytes" in titles


def set_world_size(page: Any, world: int) -> None:
    page.locator("#world").fill(str(WORLD_SIZES.index(world)))


def test_page_starts_with_the_requested_plan(page: Any) -> None:
    assert page.locator("h1").text_content() == EVIL
    assert page.title() == f"{EVIL}: will it fit?"
    assert page.locator("#world-value").text_content() == "4 ranks"
    page.locator("#exact").check()
    assert_page_shows(page, small_request().make_plan(ADAMW, "bf16+fp32"), 4)


def test_every_control_shows_the_numbers_of_plan(page: Any) -> None:
    request = small_request()
    page.locator("#exact").check()
    for optimizer, label in ((SGD, "SGD (momentum=0.9)"), (ADAMW, "AdamW")):
        page.locator("#optimizer").select_option(label)
        for precision in ("fp32", "bf16-autocast", "bf16", "bf16+fp32"):
            page.locator(f'#precisions input[value="{precision}"]').check()
            plan = replace(request, ranks=WORLD_SIZES).make_plan(optimizer, precision)
            for world in (1, 64, 1024):
                set_world_size(page, world)
                assert_page_shows(page, plan, world)
            assert f"{label}, {precision}" in page.locator("#table-title").text_content()


def test_memory_limit_updates_verdict(page: Any) -> None:
    plan = replace(small_request(), ranks=WORLD_SIZES).make_plan(ADAMW, "bf16+fp32")
    for memory in (500_000, 700_000, 900_000):
        page.locator("#memory").fill(str(memory / 1e9))
        sentence = page.locator("#verdict").text_content()
        for method in {estimate.method for estimate in plan}:
            fitting = [
                estimate.ranks for estimate in plan if estimate.method == method and estimate.memory.peak <= memory
            ]
            word = "never" if not fitting else "always" if fitting[0] == 1 else f"from {fitting[0]:,} ranks"
            assert f"{method} {word}" in sentence
    page.locator("#memory-slider").fill("96")
    assert page.locator("#memory").input_value() == "96"
    assert "With 96 GB per rank: DDP always" in page.locator("#verdict").text_content()
    page.locator("#memory").fill("")
    assert "Enter the memory of a GPU" in page.locator("#verdict").text_content()


def test_activations_are_added_to_backward(page: Any) -> None:
    request = replace(small_request(), ranks=[4])
    page.locator("#exact").check()
    for activations in (0, 100_000, 3_000_000):
        page.locator("#activations").fill(str(activations / 1e9))
        plan = replace(request, activations=activations).make_plan(ADAMW, "bf16+fp32")
        if activations:
            assert_page_shows(page, plan, 4)
        bars = " ".join(page.locator("#bars title").all_text_contents())
        assert (f"DDP, activations: {activations:,} bytes" in bars) is (activations == 3_000_000)
    page.locator("#activations-slider").fill("12")
    assert page.locator("#activations").input_value() == "12"
    assert read_table(page)["DDP"]["activations"] == f"{12 * 10**9:,}"


def test_methods_can_be_hidden(page: Any) -> None:
    page.locator('#methods input[value="DDP"]').uncheck()
    assert "DDP" not in read_table(page)
    assert "DDP" not in " ".join(page.locator("svg text").all_text_contents())
    for name in ("torch ZeRO", "zeroshard 1", "zeroshard 2", "FSDP2"):
        page.locator(f'#methods input[value="{name}"]').uncheck()
    assert read_table(page) == {}
    page.locator('#methods input[value="FSDP2"]').check()
    assert list(read_table(page)) == ["FSDP2"]


def test_keyboard_navigation(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "world"
    page.keyboard.press("ArrowRight")
    assert page.locator("#world-value").text_content() == "64 ranks"
    page.keyboard.press("End")
    assert page.locator("#world-value").text_content() == "1,024 ranks"
    focused = set()
    for _ in range(14):
        page.keyboard.press("Tab")
        focused.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {
        "memory-slider",
        "memory",
        "activations-slider",
        "activations",
        "optimizer",
        "precisions",
        "methods",
        "exact",
    } <= focused


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1240, "light"), ("dark", 1240, "dark"), ("narrow", 400, "light")]
)
def test_page_fits_the_window(browser: Any, file: Path, name: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(17, 22, 28)") is (scheme == "dark")
    overflowing = page.evaluate(
        """() => [...document.querySelectorAll("svg")].filter((svg) => [...svg.querySelectorAll("text")].some((text) =>
            text.getBoundingClientRect().right > svg.getBoundingClientRect().right + 12)).map((svg) => svg.id)"""
    )
    assert overflowing == []
    if folder := os.environ.get("ZEROSHARD_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"plan-{name}.png", full_page=True)
    page.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_single_world_size_is_drawn(browser: Any, tmp_path: Path, frozen: bool) -> None:
    """Also for a fully frozen model, which has no traffic."""
    path, request = tmp_path / "plan.html", replace(small_request(), ranks=[96], shard_group_size=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "PAGE_WORLD_SIZES", WORLD_SIZES[:3])
        patch.setattr(pictures, "COMMON_OPTIMIZERS", ())
        pictures.write_page(replace(request, model=request.model.freeze(["*"] if frozen else [])), ADAMW, "fp32", path)
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    assert "NaN" not in page.content()
    assert page.locator("svg path").count() > 0
    page.close()
    assert not errors
