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


def run_python(*arguments: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in `cwd`, with `path` first on its module search path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [path, *sys.path[1:]] if path else sys.path[1:]))}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fresh wheel and sdist, as built by `make wheel`."""
    folder = tmp_path_factory.mktemp("dist")
    result = run_python("-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only the wheel installed."""
    folder = tmp_path_factory.mktemp("installed")
    arguments = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    result = run_python(*arguments, "--target", folder, wheel, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only torch and its dependencies."""
    folder, pending, names = tmp_path_factory.mktemp("torch"), ["torch"], set[str]()
    while pending:
        name = pending.pop()
        if name not in names:
            names.add(name)
            requirements = (Requirement(line) for line in metadata.requires(name) or ())
            pending += [
                requirement.name
                for requirement in requirements
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ]
    top_level = {file.parts[0] for name in names for file in metadata.files(name) or () if ".." not in file.parts}
    for entry in top_level:
        (folder / entry).symlink_to(Path(torch.__file__).parents[1] / entry)
    return folder


def test_runs_with_only_torch_installed(installed: Path, torch_alone: Path, tmp_path: Path) -> None:
    code = """if True:
        import torch, torch.distributed as dist, zeroshard
        from zeroshard import ddp_hooks
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 1)
        optimizer = zeroshard.shard(model, torch.optim.AdamW)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.report().as_dict()
        plan = zeroshard.planner.plan(model, torch.optim.AdamW, ranks=[2])
        print(plan.estimate_for("zeroshard 2", 2).memory.state > 0)
        dist.destroy_process_group()
        try:
            from zeroshard import checkpoint
        except ImportError as error:
            print(error)
    """
    path = os.pathsep.join(map(str, (installed, torch_alone)))
    command = [sys.executable, "-S", "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    missing = "zeroshard.checkpoint needs numpy, which torch.distributed.checkpoint uses. Install it: pip install numpy"
    assert result.stdout.splitlines()[-2:] == ["True", missing], result.stderr


def test_wheel_contains_only_the_package(wheel: Path) -> None:
    names = list_archive(wheel)
    folder = f"zeroshard-{zeroshard.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"zeroshard", folder}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
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
        result = run_python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=sdist)
        assert result.returncode == 0, result.stderr
        (built,) = tmp_path.glob("*.whl")
        assert list_archive(built) == list_archive(wheel)
        wheel = built
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    command = [
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
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    results = {
        option: subprocess.run(
            [python.with_name("zeroshard"), option], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        for option in ("--version", "--help")
    }
    assert results["--version"].stdout.split()[1] == zeroshard.__version__
    assert results["--help"].returncode == 1
    assert "pip install 'zeroshard[cli]'" in results["--help"].stderr


def list_archive(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_sdist_contains_everything_to_build_and_test(sdist: Path) -> None:
    names = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*")}
    required = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "mkdocs.yml", "src/zeroshard/py.typed"}
    required |= {"docs/index.md", "docs/hooks.py", "examples/demo.py", "benchmarks/peers.py", "tests/conftest.py"}
    assert required <= names
    top_level = {name.partition("/")[0] for name in names}
    assert not {name for name in top_level if name.startswith(".venv")} | (top_level & {"site", "dist", "checkpoints"})


def test_requires_only_torch_and_declares_extras(wheel_metadata: Message) -> None:
    requirements = wheel_metadata.get_all("Requires-Dist") or []
    assert [requirement for requirement in requirements if "extra ==" not in requirement] == ["torch>=2.11"]
    assert {"all", "bench", "checkpoint", "cli", "dev", "docs", "fuzz", "optimizers", "plot"} <= set(
        wheel_metadata.get_all("Provides-Extra") or []
    )


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = [file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").glob("*.yml")]
    assert (
        {"test", "test-all", "docs", "wheel"}
        <= {target for text in workflows for target in re.findall(r"run: make ([\w-]+)", text)}
        <= targets
    )


def test_wheel_metadata(wheel_metadata: Message) -> None:
    assert (wheel_metadata["Name"], wheel_metadata["Version"]) == ("zeroshard", zeroshard.__version__)
    assert wheel_metadata["License-Expression"] == "BSD-3-Clause"
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    assert str(wheel_metadata.get_payload()).startswith("# zeroshard\n")


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
    result = run_python("-c", code, cwd=tmp_path, path=installed)
    assert result.stdout == f"{installed / 'zeroshard' / '__init__.py'} {zeroshard.__version__}\n"
    first, second = result.stderr.splitlines()
    assert first == "The command line needs typer, which is not installed: pip install 'zeroshard[cli]'"
    assert second.startswith("Without it there are: zeroshard run, zeroshard doctor")
    assert result.returncode == 1


def test_console_script_is_installed(installed: Path) -> None:
    (file,) = installed.glob("*.dist-info/entry_points.txt")
    assert "zeroshard = zeroshard.__main__:main" in file.read_text(encoding="utf-8")


def test_changelog_starts_with_current_version_or_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading, first = re.findall(r"^## \[(.*?)\].*\n+(.*)", text, re.MULTILINE)[0]
    assert heading == ("Unreleased" if "dev" in zeroshard.__version__ else zeroshard.__version__)
    assert first.startswith("### "), "the changes have no heading"
