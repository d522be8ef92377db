"""The docs as files: links resolve, every public name is listed, tables and drawings match their sources."""

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

SITE_TIMEOUT_S = 120
PEERS = {"torch ZeRO, bucket view", "fairscale OSS", "DeepSpeed 2", "FSDP2", "zeroshard ZeRO-2"}


def load_module(file: str) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def internal_links(page: str) -> list[tuple[str, str]]:
    """File and anchor of all links within the repository."""
    found = re.findall(r"\]\(([^)\s]*)\)", without_code(read(page)))
    return [(file, anchor) for file, _, anchor in (link.partition("#") for link in found) if ":" not in file]


def anchors(page: Path) -> set[str]:
    """Anchors of headings that GitHub and MkDocs agree on."""
    titles = [title.replace("`", "").strip().lower() for title in re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)]
    theirs = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
    ours = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}
    return theirs & ours


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page: str) -> None:
    for file, anchor in internal_links(page):
        target = ROOT / page if not file else (ROOT / page).parent / file
        assert target.exists(), f"{page} links to {file}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page} links to {file}#{anchor}, which is no heading there"


def test_links_are_found() -> None:
    assert ("docs/concepts.md", "") in internal_links("README.md")
    assert ("", "several-hosts") in internal_links("docs/choosing.md")


def test_reference_lists_every_public_name_once() -> None:
    shown = re.findall(r"^::: zeroshard\.(\w+)$", read("docs/reference.md"), re.MULTILINE)
    assert sorted(shown) == sorted(zeroshard.__all__)


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 220


def test_readme_shows_measured_numbers() -> None:
    """For 2 and 4 ranks, in the column order of the source table."""
    table = load_module("docs/tables.py").table
    measured = table('file="benchmarks/results/peers.md" under="Iteration relative to DDP"').splitlines()[2:]
    cells = {row[0]: row[1:] for row in ([it.strip() for it in line.strip("|").split("|")] for line in measured)}
    rows = re.findall(r"^\| (?:\*\*)?([^|*]*?)(?:\*\*)? ((?:\| [^|]* ){6})", read("README.md"), re.MULTILINE)
    shown = {name.replace("`zeroshard.shard`,", "zeroshard"): re.findall(r"\d\.\d\d", row) for name, row in rows}
    assert {name: shown[name] for name in PEERS} == {name: cells[name] for name in PEERS}


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/concepts.md", "docs/from-deepspeed.md"])
def test_number_of_tested_optimizers(page: str) -> None:
    tried = len(re.findall(r"^\| `", read("docs/optimizers.md"), re.MULTILINE))
    assert set(re.findall(r"(\d+) (?:were tried|classes)", read(page))) == {str(tried)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda it: it.name)
def test_tables_are_up_to_date(page: Path) -> None:
    """Update them with `python docs/tables.py`."""
    text = page.read_text(encoding="utf-8")
    assert load_module("docs/tables.py").filled(text) == text


def test_table_selects_rows_and_columns() -> None:
    table = load_module("docs/tables.py").table
    made = table('file="benchmarks/results/muon.md" under="All" columns="2-3" rows="2 | 4*"').splitlines()
    assert made[0].count("|") == made[1].count("|") == made[2].count("|") == 4
    assert len(made) == 2 + 8
    with pytest.raises(ValueError, match="no heading 'Nothing'"):
        table('file="benchmarks/results/muon.md" under="Nothing"')
    with pytest.raises(ValueError, match="no row"):
        table('file="benchmarks/results/muon.md" rows="nothing"')


def test_links_out_of_docs_are_rewritten_for_the_site() -> None:
    with_links = load_module("docs/hooks.py").with_links
    text = "[a](../examples/resume.py) [b](../SECURITY.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    made = "[a](examples/resume.py.md) [b](security.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    code = "```text\n[a](../examples/resume.py)\n```\n"
    assert with_links(text + code + text, "docs/limits.md", "limits.md") == made + code + made
    assert with_links("[a](docs/faults.md)", "SECURITY.md", "security.md") == "[a](faults.md)"
    assert with_links("[a](resume.py)", "examples/README.md", "examples/index.md") == "[a](resume.py.md)"
    with pytest.raises(ValueError, match="no page of the site"):
        with_links("[a](../tests/conftest.py)", "docs/limits.md", "limits.md")


def test_drawings_are_up_to_date() -> None:
    drawn = load_module("docs/drawings/draw.py")
    for name, draw in drawn.DRAWINGS.items():
        assert read(f"docs/drawings/{name}.svg") == draw().svg(), f"{name}: run docs/drawings/draw.py"
    assert {file.stem for file in (ROOT / "docs/drawings").glob("*.svg")} == set(drawn.DRAWINGS)


@pytest.mark.timeout(SITE_TIMEOUT_S)
def test_site_builds_without_warnings(tmp_path: Path) -> None:
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
