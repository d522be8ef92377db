"""Packaging: contents and metadata of the wheel and the sdist, and installing them."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import zeroshard
from tests.support.tiers import sampled

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling")


DATA_FILES = {"zeroshard/py.typed", "zeroshard/planner/page.html"}
"""Files of the package that are not Python."""


def run_python(*words: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in `cwd`, with `path` first on its module search path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [path, *sys.path[1:]] if path else sys.path[1:]))}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fresh wheel and sdist, as built by `make wheel`."""
    folder = tmp_path_factory.mktemp("dist")
    done = run_python("-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def facts(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (it for it in archive.namelist() if it.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only the wheel installed."""
    folder = tmp_path_factory.mktemp("installed")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = run_python(*words, "--target", folder, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only torch and its dependencies."""
    folder, left, found = tmp_path_factory.mktemp("torch"), ["torch"], set[str]()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            needed = (Requirement(it) for it in metadata.requires(name) or ())
            left += [it.name for it in needed if it.marker is None or it.marker.evaluate({"extra": ""})]
    tops = {file.parts[0] for name in found for file in metadata.files(name) or () if ".." not in file.parts}
    for top in tops:
        (folder / top).symlink_to(Path(torch.__file__).parents[1] / top)
    return folder


def test_runs_with_only_torch_installed(installed: Path, torch_alone: Path, tmp_path: Path) -> None:
    code = """if True:
        import torch, torch.distributed as dist, zeroshard
        from zeroshard import checkpoint, ddp_hooks
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 1)
        optimizer = zeroshard.shard(model, torch.optim.AdamW)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.report().as_dict()
        plan = zeroshard.planner.plan(model, torch.optim.AdamW, ranks=[2])
        print(plan.estimate_for("zeroshard 2", 2).memory.state > 0)
        dist.destroy_process_group()
    """
    path = os.pathsep.join(map(str, (installed, torch_alone)))
    words = [sys.executable, "-S", "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_wheel_contains_only_the_package(wheel: Path) -> None:
    names = list_archive(wheel)
    folder = f"zeroshard-{zeroshard.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"zeroshard", folder}
    sources = {it.relative_to(ROOT / "src").as_posix() for it in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.startswith("zeroshard/")} == sources | DATA_FILES
    assert f"{folder}/licenses/LICENSE" in names


@pytest.fixture(scope="module")
def sdist(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    (file,), folder = dist.glob("*.tar.gz"), tmp_path_factory.mktemp("sdist")
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@sampled("source", ["wheel", "sdist"])
@pytest.mark.timeout(300)
def test_install_in_empty_venv(wheel: Path, sdist: Path, torch_alone: Path, tmp_path: Path, source: str) -> None:
    """Only torch is available. The sdist is built into a wheel first, as pip does."""
    if source == "sdist":
        done = run_python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=sdist)
        assert done.returncode == 0, done.stderr
        (made,) = tmp_path.glob("*.whl")
        assert list_archive(made) == list_archive(wheel)
        wheel = made
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    words = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--disable-pip-version-check",
        "--no-deps",
        str(wheel),
    ]
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "torch_alone.pth").write_text(f"{torch_alone}\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, cwd=tmp_path, env=env, check=True)
    said = {
        word: subprocess.run(
            [python.with_name("zeroshard"), word], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        for word in ("--version", "--help")
    }
    assert said["--version"].stdout.split()[1] == zeroshard.__version__
    assert said["--help"].returncode == 1
    assert "pip install 'zeroshard[cli]'" in said["--help"].stderr


def list_archive(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_sdist_contains_everything_to_build_and_test(sdist: Path) -> None:
    names = {it.relative_to(sdist).as_posix() for it in sdist.rglob("*")}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "mkdocs.yml", "src/zeroshard/py.typed"}
    wanted |= {"docs/index.md", "docs/hooks.py", "examples/demo.py", "benchmarks/peers.py", "tests/conftest.py"}
    assert wanted <= names
    tops = {name.partition("/")[0] for name in names}
    assert not {it for it in tops if it.startswith(".venv")} | (tops & {"site", "dist", "checkpoints"})


def test_requires_only_torch_and_declares_extras(facts: Message) -> None:
    needs = facts.get_all("Requires-Dist") or []
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.11"]
    assert {"bench", "checkpoint", "cli", "dev", "docs", "fuzz", "optimizers", "plot"} <= set(
        facts.get_all("Provides-Extra") or []
    )


def test_wheel_metadata(facts: Message) -> None:
    assert (facts["Name"], facts["Version"]) == ("zeroshard", zeroshard.__version__)
    assert facts["License-Expression"] == "BSD-3-Clause"
    assert facts["Requires-Python"] == ">=3.10"
    assert str(facts.get_payload()).startswith("# zeroshard\n")


@pytest.mark.slow
def test_installed_package_works_and_command_names_missing_extra(installed: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys, torch, torch.distributed as dist, zeroshard
        from zeroshard import checkpoint
        from zeroshard.__main__ import main
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 1)
        optimizer = zeroshard.shard(model, torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        dist.destroy_process_group()
        print(zeroshard.__file__, zeroshard.__version__)
        sys.modules["typer"] = None
        sys.argv = ["zeroshard", "--help"]
        main()
    """
    done = run_python("-c", code, cwd=tmp_path, path=installed)
    assert done.stdout == f"{installed / 'zeroshard' / '__init__.py'} {zeroshard.__version__}\n"
    first, second = done.stderr.splitlines()
    assert first == "The command line needs typer, which is not installed: pip install 'zeroshard[cli]'"
    assert second.startswith("Without it there are: zeroshard run, zeroshard doctor")
    assert done.returncode == 1


def test_console_script_is_installed(installed: Path) -> None:
    (file,) = installed.glob("*.dist-info/entry_points.txt")
    assert "zeroshard = zeroshard.__main__:main" in file.read_text(encoding="utf-8")


def test_changelog_starts_with_current_version_or_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading, first = re.findall(r"^## \[(.*?)\].*\n+(.*)", text, re.MULTILINE)[0]
    assert heading == ("Unreleased" if "dev" in zeroshard.__version__ else zeroshard.__version__)
    assert first.startswith("### "), "it says what has changed"
