"""Files of the docs: links resolve, every public name is listed, tables and drawings match their sources."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.tools import ROOT, pages, without_code
from zeroshard.planner import plan
from zeroshard.planner.shapes import load_model_shape

SITE_TIMEOUT_S = 120


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
    github = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
    mkdocs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}
    return github & mkdocs


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page: str) -> None:
    for file, anchor in internal_links(page):
        target = ROOT / page if not file else (ROOT / page).parent / file
        assert target.exists(), f"{page} links to {file}, which does not exist"
        assert not anchor or anchor in anchors(target), (
            f"{page} links to {file}#{anchor}, which is not a heading of that page"
        )


def test_links_are_found() -> None:
    assert ("docs/concepts.md", "") in internal_links("README.md")
    assert ("", "several-hosts") in internal_links("docs/choosing.md")


def test_reference_lists_every_public_name_once() -> None:
    shown = re.findall(r"^::: zeroshard\.(\w+)$", read("docs/reference.md"), re.MULTILINE)
    assert sorted(shown) == sorted(zeroshard.__all__)


def names_at_a_glance() -> dict[str, str]:
    """Return the names in both tables of the reference, without arguments, and whether all ranks must call them."""
    tables = read("docs/reference.md").partition("## All names at a glance")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| `")]
    assert {len(row) for row in rows} == {3}
    shown = [(name, row[2]) for row in rows for name in re.findall(r"`([\w.]+)(?:\(.*?\))?`", row[0])]
    assert len(shown) == len(dict(shown)), "a name is listed twice"
    return dict(shown)


def public_members(cls: type) -> set[str]:
    """Return the members of an optimizer that the reference documents."""
    section = read("docs/reference.md").partition(f"::: zeroshard.{cls.__name__}\n")[2].partition("\n:::")[0]
    return set(re.findall(r"\w+", section.partition(" members:")[2].partition("\n##")[0]))


def resolve(name: str) -> Any:
    """Return the object of a name at a glance, which is a member of an optimizer or a path in the package."""
    for cls in (zeroshard.ShardedOptimizer, zeroshard.ZeroRedundancyOptimizer):
        if hasattr(cls, name):
            return getattr(zeroshard.ZeroRedundancyOptimizer, name, getattr(cls, name))
    if name == "param_groups":  # an attribute of instances
        return None
    module, _, attribute = f"zeroshard.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_names_at_a_glance_are_complete() -> None:
    shown = set(names_at_a_glance())
    modules = {name.partition(".")[0] for name in shown if "." in name}
    assert set(zeroshard.__all__) <= shown | modules
    members = public_members(zeroshard.ShardedOptimizer) | public_members(zeroshard.ZeroRedundancyOptimizer)
    assert {"no_sync", "step", "process_group"} <= members <= shown


@pytest.mark.parametrize(("name", "all_ranks"), names_at_a_glance().items())
def test_names_at_a_glance_say_which_ranks_must_call(name: str, all_ranks: str) -> None:
    found = resolve(name)
    assert all_ranks in {"yes", "no", "-"}
    if "Call on all ranks" in (getattr(found, "__doc__", None) or ""):
        assert all_ranks == "yes"
    if isinstance(found, type) and issubclass(found, Exception):
        assert all_ranks == "-"


NOT_CALLED = {"GradScaler", "ShardedOptimizer", "checkpoint.LoadResult", "checkpoint.SaveHandle", "remaining_params"}
"""Names without a signature of their own: takes torch's arguments, is returned by a call, or is passed on."""
MORE_SIGNATURES = ("planner.Network", "ddp_hooks.hook_with_zero_step", "ddp_hooks.hook_with_zero_step_interleaved")


def format_signature(name: str) -> str:
    """Return name, arguments and defaults, without types."""
    signature = inspect.signature(resolve(name))
    params = [param.replace(annotation=param.empty) for key, param in signature.parameters.items() if key != "self"]
    line = f"{name}{signature.replace(parameters=params, return_annotation=signature.empty)}"
    return "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ", break_on_hyphens=False))


def has_signature(name: str) -> bool:
    found = resolve(name)
    is_error = isinstance(found, type) and issubclass(found, Exception)
    return callable(found) and not is_error and name not in NOT_CALLED


def test_signatures_are_up_to_date() -> None:
    """If this fails, put the expected signatures into the code blocks."""
    glance = [name for name in names_at_a_glance() if has_signature(name)]
    is_member = {name: not name[0].isupper() and hasattr(zeroshard.ShardedOptimizer, name) for name in glance}
    functions = [*(name for name in glance if not is_member[name]), *MORE_SIGNATURES]
    methods = [name for name in glance if is_member[name]]
    section = read("docs/reference.md").partition("\n## Signatures\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^```text\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    assert shown == ["\n".join(map(format_signature, names)) for names in (functions, methods)]


def test_first_part_of_readme_is_short() -> None:
    first_part = read("README.md").partition("\n## Documentation\n")[0]
    assert len(first_part.splitlines()) <= 70
    bullets = [without_links(line) for line in re.findall(r"^- (?!\*\*)(.*)$", first_part, re.MULTILINE)]
    assert len(bullets) == 5
    assert [bullet for bullet in bullets if len(bullet.split()) > 10] == []


def without_links(text: str) -> str:
    return re.sub(r"\]\([^)]*\)|\[", "", text)


def readme_table(first_column: str) -> dict[str, list[str]]:
    """Return the rows of the README's table whose second column is `first_column`, by name."""
    table = re.search(rf"^\| *\| {first_column}\W.*\n\|[-|]*\n((?:\|.*\n)+)", read("README.md"), re.MULTILINE)
    assert table
    rows = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    return {name: cells for name, *cells in rows}


def test_readme_shows_measured_numbers() -> None:
    """4 ranks, fused AdamW."""
    table = load_module("docs/tables.py").table
    peers = 'file="benchmarks/results/peers.md" under='
    times = rows_of(table(peers + '"Iteration relative to DDP" columns="1-6"'))
    memory = rows_of(table(peers + """"GPT, 26.3 M in 100 tensors; 4 ranks; fused=True" columns="11-11\""""))
    shown = readme_table("GPT, 26 M")
    assert len(shown) == 6
    for name, cells in shown.items():
        assert cells == [*(f"{float(time):.1f}" for time in times[name][1::2]), *memory[name]], name


def rows_of(markdown: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def test_readme_shows_planned_memory() -> None:
    assert "`zeroshard plan llama-3-8b --precision bf16+fp32 --ranks 8,64`" in read("README.md")
    model = load_model_shape("llama-3-8b").cast(torch.bfloat16)
    config = zeroshard.ZeroConfig(master_dtype=torch.float32)
    estimates = plan(model, torch.optim.AdamW, ranks=(8, 64), config=config).estimates
    memory: dict[str, list[str]] = {}
    for estimate in sorted(estimates, key=lambda estimate: estimate.ranks):
        cells = memory.setdefault(estimate.method, [])
        cells += [f"{estimate.memory.total / 1e9:.0f}", f"{estimate.memory.peak / 1e9:.0f}"]
    assert [cells[:4] for cells in readme_table("8 ranks").values()] == list(memory.values())


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/concepts.md", "docs/from-deepspeed.md"])
def test_number_of_tested_optimizers(page: str) -> None:
    num_tested = len(re.findall(r"^\| `", read("docs/optimizers.md"), re.MULTILINE))
    assert set(re.findall(r"(\d+) (?:were tried|classes)", read(page))) == {str(num_tested)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    """Update them with `python docs/tables.py`."""
    text = page.read_text(encoding="utf-8")
    assert load_module("docs/tables.py").filled(text) == text


def test_table_selects_rows_and_columns() -> None:
    table = load_module("docs/tables.py").table
    lines = table('file="benchmarks/results/muon.md" under="All" columns="2-3" rows="2 | 4*"').splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == 4
    assert len(lines) == 2 + 8
    chosen = 'file="benchmarks/results/muon.md" under="All" columns="2-3" rows="2"'
    renamed = table(f'{chosen} header=" | a | b" bold="min"')
    assert renamed.startswith("|  | a | b |\n")
    times = [line.split(" | ")[-1].strip(" |") for line in table(chosen).splitlines()[2:]]
    assert re.findall(r"\*\*([\d.]+)\*\* \|$", renamed, re.MULTILINE) == [min(times)]
    with pytest.raises(ValueError, match="2 names for 3 columns"):
        table(f'{chosen} header=" | a"')
    with pytest.raises(ValueError, match="no heading 'Nothing'"):
        table('file="benchmarks/results/muon.md" under="Nothing"')
    with pytest.raises(ValueError, match="no row"):
        table('file="benchmarks/results/muon.md" rows="nothing"')


def test_plan_table_names_the_smallest_card_that_fits() -> None:
    plan_table = load_module("docs/tables.py").plan_table
    model, config = load_model_shape("1B").cast(torch.bfloat16), zeroshard.ZeroConfig(master_dtype=torch.float32)
    rows = rows_of(plan_table('models="1B" gpus="8" show="memory"'))
    cards = rows_of(plan_table('models="1B" gpus="8" show="card" cards="40 4 24" usable="0.8"'))
    assert cards == {"1B": ["8", "40", "24", "24", "4"]}
    for card in (4, 24, 40):
        found = plan(model, torch.optim.AdamW, ranks=8, config=config, memory=0.8e9 * card)
        for number, method in enumerate(("DDP", "zeroshard 1", "zeroshard 2", "FSDP2")):
            assert found.fits(found.estimate_for(method, 8)) == (card >= int(cards["1B"][number + 1])), (card, method)
            memory = found.estimate_for(method, 8).memory
            shown = [float(cell) for cell in rows["1B"][1 + 2 * number : 3 + 2 * number]]
            assert shown == pytest.approx([memory.total / 1e9, memory.peak / 1e9], abs=0.5)


def test_which_one_page_shows_all_models() -> None:
    tables = re.findall(r"^<!-- plan (.*) -->\n\n((?:\|.*\n)+)", read("docs/which-one.md"), re.MULTILINE)
    assert [re.findall(r'show="(\w+)"', options) for options, _ in tables] == [["card"], ["memory"]]
    for _, table in tables:
        assert list(rows_of(table)) == ["1B", "3B", "llama-3-8b", "llama-3-70b"]
        assert len(table.splitlines()) == 2 + 4 * 3


def test_links_out_of_docs_are_rewritten_for_the_site() -> None:
    with_links = load_module("docs/hooks.py").with_links
    links = "[a](../examples/resume.py) [b](../SECURITY.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    expected = "[a](examples/resume.py.md) [b](security.md#what-is-trusted) [c](faults.md) [d](https://e.org)\n"
    code = "```text\n[a](../examples/resume.py)\n```\n"
    assert with_links(links + code + links, "docs/limits.md", "limits.md") == expected + code + expected
    assert with_links("[a](docs/faults.md)", "SECURITY.md", "security.md") == "[a](faults.md)"
    assert with_links("[a](resume.py)", "examples/README.md", "examples/index.md") == "[a](resume.py.md)"
    with pytest.raises(ValueError, match="no page of the site"):
        with_links("[a](../tests/conftest.py)", "docs/limits.md", "limits.md")


def test_drawings_are_up_to_date() -> None:
    drawings = load_module("docs/drawings/draw.py")
    for name, draw in drawings.DRAWINGS.items():
        assert read(f"docs/drawings/{name}.svg") == draw().svg(), f"{name}: run docs/drawings/draw.py"
    assert {file.stem for file in (ROOT / "docs/drawings").glob("*.svg")} == set(drawings.DRAWINGS)


@pytest.mark.timeout(SITE_TIMEOUT_S)
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    assert "<details" not in (tmp_path / "reference.html").read_text(encoding="utf-8"), (
        "a docstring was parsed incorrectly"
    )
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?|png)"', index), (
        "the site loads files from other hosts"
    )
    assert {"concepts.html", "examples", "benchmarks"} <= {entry.name for entry in tmp_path.iterdir()}
    assert json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
