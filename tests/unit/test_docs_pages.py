"""The docs as files: links lead somewhere, no public name is left out, tables and drawings are what they come from."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zeroshard
from tests.support.tools import ROOT, pages, without_code

SITE_LIMIT = 120
PEERS = {"torch ZeRO, bucket view", "fairscale OSS", "DeepSpeed 2", "FSDP2", "zeroshard ZeRO-2"}


def load(file: str) -> ModuleType:
    """A file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def links_of(page: str) -> list[tuple[str, str]]:
    """File and anchor of those that lead to no other site."""
    found = re.findall(r"\]\(([^)\s]*)\)", without_code(read(page)))
    return [(file, anchor) for file, _, anchor in (link.partition("#") for link in found) if ":" not in file]


def anchors_of(page: Path) -> set[str]:
    """Of headings, where people who show Markdown agree on them."""
    titles = [title.replace("`", "").strip().lower() for title in re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)]
    theirs = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
    ours = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}
    return theirs & ours


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files_and_headings(page: str) -> None:
    for file, anchor in links_of(page):
        target = ROOT / page if not file else (ROOT / page).parent / file
        assert target.exists(), f"{page} links to {file}, which is not there"
        assert not anchor or anchor in anchors_of(target), f"{page} links to {file}#{anchor}, which is no heading there"


def test_links_are_found() -> None:
    assert ("docs/concepts.md", "") in links_of("README.md")
    assert ("", "several-hosts") in links_of("docs/choosing.md")


def test_the_reference_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: zeroshard\.(\w+)$", read("docs/reference.md"), re.MULTILINE)
    assert sorted(shown) == sorted(zeroshard.__all__)


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 220


def test_the_readme_has_the_numbers_that_were_measured() -> None:
    """Of 2 and 4 ranks, in the order of the columns of the table they come from."""
    table = load("docs/tables.py").table
    measured = table('file="benchmarks/results/peers.md" under="Iteration relative to DDP"').splitlines()[2:]
    cells = {row[0]: row[1:] for row in ([it.strip() for it in line.strip("|").split("|")] for line in measured)}
    rows = re.findall(r"^\| (?:\*\*)?([^|*]*?)(?:\*\*)? ((?:\| [^|]* ){6})", read("README.md"), re.MULTILINE)
    shown = {name.replace("`zeroshard.shard`,", "zeroshard"): re.findall(r"\d\.\d\d", row) for name, row in rows}
    assert {name: shown[name] for name in PEERS} == {name: cells[name] for name in PEERS}


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/concepts.md", "docs/from-deepspeed.md"])
def test_pages_say_how_many_optimizers_were_tried(page: str) -> None:
    tried = len(re.findall(r"^\| `", read("docs/optimizers.md"), re.MULTILINE))
    assert set(re.findall(r"(\d+) (?:were tried|classes)", read(page))) == {str(tried)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda it: it.name)
def test_tables_are_those_of_the_files_they_come_from(page: Path) -> None:
    """Written anew by `python docs/tables.py`."""
    text = page.read_text(encoding="utf-8")
    assert load("docs/tables.py").filled(text) == text


def test_a_table_has_the_rows_and_columns_that_are_asked_for() -> None:
    table = load("docs/tables.py").table
    made = table('file="benchmarks/results/muon.md" under="All" columns="2-3" rows="2 | 4*"').splitlines()
    assert made[0].count("|") == made[1].count("|") == made[2].count("|") == 4
    assert len(made) == 2 + 8
    with pytest.raises(ValueError, match="no heading 'Nothing'"):
        table('file="benchmarks/results/muon.md" under="Nothing"')
    with pytest.raises(ValueError, match="no row"):
        table('file="benchmarks/results/muon.md" rows="nothing"')


def test_links_out_of_the_docs_lead_to_pages_of_the_site() -> None:
    with_links = load("docs/hooks.py").with_links
    text = "[a](../examples/resume.py) [b](../SECURITY.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    made = "[a](examples/resume.py.md) [b](security.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    code = "```text\n[a](../examples/resume.py)\n```\n"
    assert with_links(text + code + text, "docs/limits.md", "limits.md") == made + code + made
    assert with_links("[a](docs/faults.md)", "SECURITY.md", "security.md") == "[a](faults.md)"
    assert with_links("[a](resume.py)", "examples/README.md", "examples/index.md") == "[a](resume.py.md)"
    with pytest.raises(ValueError, match="no page of the site"):
        with_links("[a](../tests/conftest.py)", "docs/limits.md", "limits.md")


def test_the_drawings_are_those_of_the_script() -> None:
    drawn = load("docs/drawings/draw.py")
    for name, draw in drawn.DRAWINGS.items():
        assert read(f"docs/drawings/{name}.svg") == draw().svg(), f"{name}: run docs/drawings/draw.py"
    assert {file.stem for file in (ROOT / "docs/drawings").glob("*.svg")} == set(drawn.DRAWINGS)


@pytest.mark.timeout(SITE_LIMIT)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "<details" not in (tmp_path / "reference.html").read_text(encoding="utf-8"), "a docstring is misread"
    made = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?|png)"', made), "fetched from elsewhere"
    assert {"concepts.html", "examples", "benchmarks"} <= {entry.name for entry in tmp_path.iterdir()}
    assert json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
