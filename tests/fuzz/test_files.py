"""Every file reader, given arbitrary bytes, raises one of our errors or returns a value, without side effects."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.fuzz import targets
from tests.support.checkpoints import net, plain, train
from tests.support.fuzzing import corrupt_bytes, corrupt_directory, mutate, rounds
from tests.support.monitoring import forbid_side_effects
from tests.support.tools import status_of
from zeroshard import checkpoint
from zeroshard.cli.app import TargetFormat

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = st.integers(0, 2**32 - 1)


def limit_examples(count: int) -> settings:
    return settings(max_examples=rounds(count), suppress_health_check=list(HealthCheck), deadline=None)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_corrupted_bytes(target: str) -> None:
    seeds = targets.seeds(target)

    @limit_examples(60)
    @given(SEEDS, st.sampled_from(range(len(seeds))))
    def check_target(seed: int, index: int) -> None:
        with forbid_side_effects(*targets.DIRECTORIES):
            targets.TARGETS[target](corrupt_bytes(seeds[index], Random(seed)))

    check_target()


@pytest.mark.parametrize("target", targets.TARGETS)
def test_arbitrary_bytes(target: str) -> None:
    @limit_examples(40)
    @given(st.binary(max_size=200))
    def check_target(data: bytes) -> None:
        with forbid_side_effects(*targets.DIRECTORIES):
            targets.TARGETS[target](data)

    check_target()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@limit_examples(40)
@given(JSON_VALUES, SEEDS)
def test_manifest_with_arbitrary_values(value: Any, seed: int) -> None:
    good = {"format": 1, "step": 1, "world_size": 2, "sums": {".metadata": 5}, "time": 0.5, "torch": "2"}
    good[Random(seed).choice(list(good))] = value
    targets.manifest(json.dumps(good).encode())


@limit_examples(60)
@given(
    st.sampled_from(["a", "b.c", "new", "__metadata__", ""]),
    st.sampled_from(["", "dtype", "shape", "data_offsets"]),
    JSON_VALUES,
)
def test_safetensors_header_with_arbitrary_values(name: str, key: str, value: Any) -> None:
    with forbid_side_effects(*targets.DIRECTORIES):
        targets.safetensors(targets.corrupted_header(name, key, value))


@limit_examples(60)
@given(st.lists(st.integers(-(2**70), 2**70), max_size=80), st.lists(st.integers(-1, 2**70), min_size=2, max_size=2))
def test_safetensors_header_with_arbitrary_numbers(shape: list[int], span: list[int]) -> None:
    targets.safetensors(targets.corrupted_header("a", "shape", shape))
    targets.safetensors(targets.safetensors_file({"a": {"dtype": "U8", "shape": shape, "data_offsets": span}}))


# ---- the command line


def make_contents() -> dict[str, Any]:
    model = net()
    optimizer = plain(model)
    train(model, optimizer, 1)
    saved: dict[str, Any] = {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "more": [1, {"x": torch.ones(2)}],
    }
    saved["optim"]["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
    saved |= {"scheduler": {"a": 1}, "zeroshard": {"step": 1, "world_size": 1, "time": 0.0, "torch": "x"}}
    return saved


def check_command(capfd: pytest.CaptureFixture[str], directory: Path, *arguments: Path | str) -> bool:
    """Return whether the command succeeded. A failing command must print an error and leave nothing behind."""
    before = {path.name for path in directory.iterdir()}
    with forbid_side_effects(directory):
        status = status_of(*arguments)
    out, err = capfd.readouterr()
    assert status in (0, 1), (status, err)
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    if status:
        assert "Error: " in err
        assert {path.name for path in directory.iterdir()} == before
    return not status


def test_convert_corrupted_state_dicts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = make_contents()
    for seed in range(rounds(25)):
        rng = Random(seed)
        try:
            torch.save(mutate(good, rng), tmp_path / "input.pt")
        except Exception:  # a dict that torch cannot save never comes from a file
            continue
        to, target = rng.choice(list(TargetFormat)).value, tmp_path / f"target{seed}"
        if (
            check_command(capfd, tmp_path, "checkpoint", "convert", tmp_path / "input.pt", target, "--to", to)
            and to != TargetFormat.safetensors
        ):
            assert check_command(
                capfd, tmp_path, "checkpoint", "convert", target, tmp_path / f"back{seed}", "--to", "torch"
            ), seed


def test_convert_corrupted_torch_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(make_contents(), tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    for seed in range(rounds(25)):
        (tmp_path / "input.pt").write_bytes(corrupt_bytes(good, Random(seed)))
        check_command(
            capfd, tmp_path, "checkpoint", "convert", tmp_path / "input.pt", tmp_path / f"target{seed}", "--to", "torch"
        )


def test_corrupted_checkpoint_directories(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    for seed in range(rounds(25)):
        rng, directory = Random(seed), tmp_path / f"input{seed}"
        if rng.random() < 0.5:
            dcp_save({"model": model.state_dict(), "note": "x"}, checkpoint_id=directory, no_dist=True)
        else:
            directory = checkpoint.save(directory, step=1, model=model)
        corrupt_directory(directory, rng)
        command: list[Path | str] = ["checkpoint", rng.choice(("inspect", "convert")), directory]
        if command[1] == "convert":
            command += [tmp_path / f"target{seed}", "--to", rng.choice(list(TargetFormat)).value]
        elif rng.random() < 0.5:
            command += ["--json"]
        check_command(capfd, tmp_path, *command)


@pytest.mark.parametrize("path", ["", ".", "/", "/dev/zero", "/dev/null", "a" * 300, "a/" * 3000, "--", "new/../.."])
def test_unusual_paths(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "input.pt")
    for arguments in (
        ["checkpoint", "inspect", path],
        ["checkpoint", "convert", path, "x", "--to", "dcp"],
        ["checkpoint", "convert", "input.pt", path, "--to", "dcp"],
    ):
        with forbid_side_effects(tmp_path):
            assert status_of(*arguments) in (1, 2)
        assert "Traceback" not in capfd.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == ["input.pt"]


def test_truncated_files(tmp_path: Path) -> None:
    """Every prefix of a valid file is rejected or is complete."""
    good = io.BytesIO()
    torch.save({"a": torch.ones(3)}, good)
    for length in range(0, len(good.getvalue()), 7):
        targets.serialization(good.getvalue()[:length])


# ---- other commands

ARGUMENTS = st.sampled_from(
    ["", "0", "1", "-1", "1e400", "nan", "inf", "8,", "4-1", "1-2-3", "80GB", "5 parsecs", "10us"]
)
ARGUMENTS |= st.sampled_from(
    ["9" * 400, "bf16", "fp32+", "lr=", "lr=1,lr=2", "=", "\x1b[2J", "/", "..", "400Gbit/s", "--"]
)
ARGUMENTS |= st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
PLAN_OPTIONS = [
    "options",
    "precision",
    "ranks",
    "memory",
    "activations",
    "bandwidth",
    "latency",
    "shard-group-size",
    "bucket",
]
PLAN_OPTIONS += ["reduce", "bandwidth-within", "frozen"]
MODEL_NAMES = st.sampled_from(["gpt2", "7B", "0", "-1B", "1e30", "x", "1.5", ""])


@limit_examples(60)
@given(MODEL_NAMES, st.dictionaries(st.sampled_from(PLAN_OPTIONS), ARGUMENTS, max_size=3))
def test_plan_with_arbitrary_options(model: str, options: dict[str, str]) -> None:
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    check_exit_status("plan", model, *arguments, "--json")


@limit_examples(40)
@given(
    st.sampled_from(["doctor", "run"]),
    st.lists(ARGUMENTS | st.sampled_from(["--timeout", "--backend", "-m"]), max_size=3),
)
def test_other_commands_with_arbitrary_arguments(command: str, words: list[str]) -> None:
    """Always wrong usage: no script runs and no process group is joined."""
    check_exit_status(
        command, *(["--no-such-option", *words] if command == "doctor" else ["--" + "".join(words), *words])
    )


def check_exit_status(*arguments: str) -> None:
    """Check the exit status, and that a nonzero one comes with an error message."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), forbid_side_effects():
        status = status_of(*arguments)
    assert status in (0, 1, 2), status
    assert "Traceback" not in stderr.getvalue()
    assert not status or len(stderr.getvalue()) > 10, arguments
