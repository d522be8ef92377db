"""`python -m zeroshard run`: scripts run as under plain python, except that torch's optimizer class is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from zeroshard import torch_patch

SCRIPT = """\
import sys, json, pickle, inspect, multiprocessing
import helper  # beside the script
import __main__


class Point:
    def __init__(self, x):
        self.x = x


def double(point):
    return Point(2 * point.x)


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        there = pool.map(double, [Point(3)])[0].x
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "spec": __spec__ is None,
        "builtins": type(__builtins__).__name__,
        "names": sorted(name for name in globals() if name.islower() and not name.startswith("__")),
        "main": sys.modules["__main__"].__dict__ is globals() and __main__.Point is Point,
        "pickled": pickle.loads(pickle.dumps(Point(4))).x,
        "there": there,
        "source": inspect.getsource(double).count("2 * point.x"),
        "helper": helper.NAME,
    }))
    if "torch" in sys.modules:
        from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs
        assert Theirs.__module__ == "zeroshard.optimizer"
    print("to stderr", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("NAME = 'helper'")
    return tmp_path


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_script_runs_as_under_plain_python(folder: Path) -> None:
    arguments = ["scripts/script.py", "7", "--json", "-m", "x"]
    plain, ours = run_python(folder, *arguments), run_python(folder, "-m", "zeroshard", "run", *arguments)
    expected, found = json.loads(plain.stdout), json.loads(ours.stdout)
    assert found == expected
    assert found["argv"] == arguments
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr) == (7, "to stderr\n")


@pytest.mark.slow
def test_module_runs_as_under_plain_python(folder: Path) -> None:
    code = SCRIPT.replace("import helper ", "from . import helper ").replace("__spec__ is None", "__spec__.name")
    (folder / "scripts" / "script.py").write_text(code)
    arguments = ["-m", "scripts.script", "0", "--x"]
    plain, ours = run_python(folder, *arguments), run_python(folder, "-m", "zeroshard", "run", *arguments)
    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    expected, found = json.loads(plain.stdout), json.loads(ours.stdout)
    del expected["builtins"], found["builtins"]  # runpy sets it to a dict
    assert found == expected
    assert found["spec"] == "scripts.script"


def test_script_exception_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("def f():\n    raise OSError('of the script')\nf()\n")
    monkeypatch.setattr(torch_patch, "replace_torch", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(OSError, match="of the script") as raised:
        torch_patch.run_command([str(script), "x"])
    frames = traceback.extract_tb(raised.tb)[-2:]
    assert [(frame.filename, frame.lineno, frame.name) for frame in frames] == [
        (str(script), 3, "<module>"),
        (str(script), 2, "f"),
    ]
    assert sys.argv == [str(script), "x"]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--json", "script.py"]], ids=" ".join)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_patch.run_command(arguments) == 2
    assert capsys.readouterr() == ("", torch_patch.RUN_USAGE)


@pytest.mark.parametrize("arguments", [["-h"], ["--help", "script.py"]], ids=" ".join)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_patch.run_command(arguments) == 0
    assert capsys.readouterr() == (torch_patch.RUN_USAGE, "")


def test_missing_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.py")
    assert torch_patch.run_command([missing]) == 2
    assert capsys.readouterr() == ("", f"{missing} cannot be run: No such file or directory\n")
    assert torch_patch.run_command([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} cannot be run: Is a directory: try {tmp_path / '__main__.py'}\n"
