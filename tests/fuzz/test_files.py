"""Any bytes, read by any part that reads files: an error of ours or a value, and nothing else happens."""

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
from tests.support.fuzzing import mutated, rounds, spoil_directory, spoiled
from tests.support.monitoring import watched
from tests.support.tools import status_of
from zeroshard import checkpoint
from zeroshard.cli.app import TargetFormat

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = st.integers(0, 2**32 - 1)


def some(count: int) -> settings:
    return settings(max_examples=rounds(count), suppress_health_check=list(HealthCheck), deadline=None)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_spoiled_bytes(target: str) -> None:
    seeds = targets.seeds(target)

    @some(60)
    @given(SEEDS, st.sampled_from(range(len(seeds))))
    def holds(seed: int, place: int) -> None:
        with watched(*targets.FOLDERS):
            targets.TARGETS[target](spoiled(seeds[place], Random(seed)))

    holds()


@pytest.mark.parametrize("target", targets.TARGETS)
def test_any_bytes(target: str) -> None:
    @some(40)
    @given(st.binary(max_size=200))
    def holds(data: bytes) -> None:
        with watched(*targets.FOLDERS):
            targets.TARGETS[target](data)

    holds()


ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda it: st.lists(it) | st.dictionaries(st.text(), it),
)


@some(40)
@given(ANY, SEEDS)
def test_manifests_of_any_values(value: Any, seed: int) -> None:
    good = {"format": 1, "step": 1, "world_size": 2, "sums": {".metadata": 5}, "time": 0.5, "torch": "2"}
    good[Random(seed).choice(list(good))] = value
    targets.manifest(json.dumps(good).encode())


@some(60)
@given(
    st.sampled_from(["a", "b.c", "new", "__metadata__", ""]),
    st.sampled_from(["", "dtype", "shape", "data_offsets"]),
    ANY,
)
def test_headers_of_any_values(place: str, key: str, value: Any) -> None:
    with watched(*targets.FOLDERS):
        targets.headers(targets.spoiled_header(place, key, value))


@some(60)
@given(st.lists(st.integers(-(2**70), 2**70), max_size=80), st.lists(st.integers(-1, 2**70), min_size=2, max_size=2))
def test_headers_of_any_numbers(shape: list[int], span: list[int]) -> None:
    targets.headers(targets.spoiled_header("a", "shape", shape))
    targets.headers(targets.safetensors_of({"a": {"dtype": "U8", "shape": shape, "data_offsets": span}}))


# ---- the command line


def contents() -> dict[str, Any]:
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


def check_command(capfd: pytest.CaptureFixture[str], folder: Path, *arguments: Path | str) -> bool:
    """It ends with a status; if that says so, with a sentence, and leaves nothing behind."""
    before = {it.name for it in folder.iterdir()}
    with watched(folder):
        status = status_of(*arguments)
    out, err = capfd.readouterr()
    assert status in (0, 1), (status, err)
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    if status:
        assert "Error: " in err
        assert {it.name for it in folder.iterdir()} == before
    return not status


def test_spoiled_dicts_in_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = contents()
    for seed in range(rounds(25)):
        draw = Random(seed)
        try:
            torch.save(mutated(good, draw), tmp_path / "it.pt")
        except Exception:  # a dict that torch cannot save comes from no file
            continue
        to, target = draw.choice(list(TargetFormat)).value, tmp_path / f"target{seed}"
        if (
            check_command(capfd, tmp_path, "checkpoint", "convert", tmp_path / "it.pt", target, "--to", to)
            and to != TargetFormat.safetensors
        ):
            assert check_command(
                capfd, tmp_path, "checkpoint", "convert", target, tmp_path / f"back{seed}", "--to", "torch"
            ), seed


def test_spoiled_files_of_torch_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(contents(), tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    for seed in range(rounds(25)):
        (tmp_path / "it.pt").write_bytes(spoiled(good, Random(seed)))
        check_command(
            capfd, tmp_path, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / f"target{seed}", "--to", "torch"
        )


def test_spoiled_directories(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    for seed in range(rounds(25)):
        draw, directory = Random(seed), tmp_path / f"it{seed}"
        if draw.random() < 0.5:
            dcp_save({"model": model.state_dict(), "note": "x"}, checkpoint_id=directory, no_dist=True)
        else:
            directory = checkpoint.save(directory, step=1, model=model)
        spoil_directory(directory, draw)
        command: list[Path | str] = ["checkpoint", draw.choice(("inspect", "convert")), directory]
        if command[1] == "convert":
            command += [tmp_path / f"target{seed}", "--to", draw.choice(list(TargetFormat)).value]
        elif draw.random() < 0.5:
            command += ["--json"]
        check_command(capfd, tmp_path, *command)


@pytest.mark.parametrize("path", ["", ".", "/", "/dev/zero", "/dev/null", "a" * 300, "a/" * 3000, "--", "it/../.."])
def test_paths(tmp_path: Path, capfd: pytest.CaptureFixture[str], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "it.pt")
    for arguments in (
        ["checkpoint", "inspect", path],
        ["checkpoint", "convert", path, "x", "--to", "dcp"],
        ["checkpoint", "convert", "it.pt", path, "--to", "dcp"],
    ):
        with watched(tmp_path):
            assert status_of(*arguments) in (1, 2)
        assert "Traceback" not in capfd.readouterr().err
        assert [it.name for it in tmp_path.iterdir()] == ["it.pt"]


def test_bytes_of_a_stream_that_ends(tmp_path: Path) -> None:
    """Every length of a good file is refused, or is all of it."""
    good = io.BytesIO()
    torch.save({"a": torch.ones(3)}, good)
    for length in range(0, len(good.getvalue()), 7):
        targets.codec(good.getvalue()[:length])


# ---- other commands

WORDS = st.sampled_from(["", "0", "1", "-1", "1e400", "nan", "inf", "8,", "4-1", "1-2-3", "80GB", "5 parsecs", "10us"])
WORDS |= st.sampled_from(["9" * 400, "bf16", "fp32+", "lr=", "lr=1,lr=2", "=", "\x1b[2J", "/", "..", "400Gbit/s", "--"])
WORDS |= st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
PLAN = ["options", "precision", "ranks", "memory", "activations", "bandwidth", "latency", "shard-within", "bucket"]
PLAN += ["reduce", "bandwidth-within", "frozen"]
MODELS = st.sampled_from(["gpt2", "7B", "0", "-1B", "1e30", "x", "1.5", ""])


@some(60)
@given(MODELS, st.dictionaries(st.sampled_from(PLAN), WORDS, max_size=3))
def test_plans_of_any_words(model: str, options: dict[str, str]) -> None:
    given_ones = [word for name, value in options.items() for word in (f"--{name}", value)]
    check_words("plan", model, *given_ones, "--json")


@some(40)
@given(
    st.sampled_from(["doctor", "run"]), st.lists(WORDS | st.sampled_from(["--timeout", "--backend", "-m"]), max_size=3)
)
def test_other_commands_of_any_words(command: str, words: list[str]) -> None:
    """Wrong usage always: nothing is run, and no job joined."""
    check_words(command, *(["--no-such-option", *words] if command == "doctor" else ["--" + "".join(words), *words]))


def check_words(*arguments: str) -> None:
    """A status, and where it is not 0, a sentence."""
    said, told = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(told), watched():
        status = status_of(*arguments)
    assert status in (0, 1, 2), status
    assert "Traceback" not in told.getvalue()
    assert not status or len(told.getvalue()) > 10, arguments
