"""`zeroshard plan`: output, pictures and rejected arguments."""

from __future__ import annotations

import json
import struct
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zeroshard
from tests.support.tools import ADAMW, small_model, small_wish, status_of, write_module
from zeroshard.cli.plan import print_plan
from zeroshard.errors import ConfigError
from zeroshard.planner.pictures import breakdown_at_peak, format_min_ranks
from zeroshard.planner.plan import METHODS, Plan
from zeroshard.planner.request import (
    OptimizerChoice,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_options,
    parse_ranks,
    parse_seconds,
    resolve_optimizer_class,
)
from zeroshard.planner.shapes import load_model_shape

METHOD_NAMES = [method.name for method in METHODS]


def run_plan_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert status_of("plan", *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def run_rejected_plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert status_of("plan", *arguments) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def planned() -> Plan:
    return small_wish().make_plan(ADAMW, "bf16+fp32")


# ---- JSON


def test_json_equals_plan_as_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_plan_json(
        *(capsys, write_module(tmp_path), "--ranks", "2,4", "--memory", "1MB", "--activations", "10kB"),
        *("--options", "lr=1e-3,betas=(0.8,0.9)", "--bandwidth", "1GB/s", "--latency", "20us"),
    )
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(500, 64)
    module.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    module.norm = torch.nn.LayerNorm(64)
    expected = zeroshard.planner.plan(
        *(module, torch.optim.AdamW),
        ranks=(2, 4),
        memory=1e6,
        activations=1e4,
        network=zeroshard.planner.Network(1e9, 20e-6),
        lr=1e-3,
    ).as_dict()
    assert found.pop("model") == {"name": "make", "parameters": 40_320, "tensors": 5}
    expected.pop("model")
    assert found == expected
    assert [row["method"] for row in found["estimates"]] == METHOD_NAMES * 2
    assert set(found["min_ranks"]) == set(METHOD_NAMES)


def test_shard_group_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, slow, row = write_module(tmp_path), ("--bandwidth", "1GB/s"), ("--shard-group-size", "8")
    one, rows, fast = (
        run_plan_json(capsys, source, "--ranks", "8,64", *slow, *options)
        for options in ((), row, (*row, "--bandwidth-within", "100GB/s"))
    )
    assert (one["shard_group_size"], rows["shard_group_size"]) == (None, 8)
    for at in (2, 3):  # zeroshard on 8 ranks
        assert rows["estimates"][at] == one["estimates"][at]
        on_many = rows["estimates"][at + 5]
        assert on_many["state"] == one["estimates"][at]["state"] > one["estimates"][at + 5]["state"]
        assert on_many["sent"] > one["estimates"][at]["sent"]
        assert fast["estimates"][at + 5]["seconds"] < on_many["seconds"]
    assert all(rows["estimates"][at] == one["estimates"][at] for at in (0, 1, 4, 5, 6, 9)), "others have no rows"
    assert status_of("plan", source, "--ranks", "64", *row) == 0
    assert "zeroshard in shard groups of 8 ranks" in capsys.readouterr().out
    for wrong, told in (("7", "shard_group_size=7 does not divide 64 ranks"), ("0", "from 1 on, not 0")):
        assert status_of("plan", source, "--ranks", "64", "--shard-group-size", wrong) == 2
        assert told in capsys.readouterr().err


def test_zero_paper_example(capsys: pytest.CaptureFixture[str]) -> None:
    """7.5 billion parameters, Adam in mixed precision, 64 ranks: 120, 31.4 and 16.6 GB."""
    found = run_plan_json(capsys, "7.5B", "--optimizer", "Adam", "--precision", "bf16+fp32", "--ranks", "64")
    totals = {row["method"]: round(row["total"] / 1e9, 1) for row in found["estimates"]}
    assert (totals["DDP"], totals["zeroshard 1"], totals["zeroshard 2"]) == (120.0, 31.4, 16.6)


def test_options_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_module(tmp_path)
    base = {row["method"]: row for row in run_plan_json(capsys, source, "--ranks", "2")["estimates"]}
    options = ("--reduce", "bf16", "--peer-checkpoint", "--offload", "--bucket", "64kB", "--frozen", "embed*")
    found = {row["method"]: row for row in run_plan_json(capsys, source, "--ranks", "2", *options)["estimates"]}
    assert found["DDP"]["gradients"] == base["DDP"]["gradients"] - 4 * 32_000
    assert found["zeroshard 2"]["state"] == 0 < found["zeroshard 2"]["host"]
    assert found["zeroshard 2"]["peer_checkpoint_sent"] > 0 == base["zeroshard 2"]["peer_checkpoint_sent"]
    assert found["zeroshard 2"]["sent"] < found["DDP"]["sent"]
    small, large = (
        run_plan_json(capsys, source, "--ranks", "2", "--bucket", it)["estimates"][3] for it in ("20kB", "1MB")
    )
    assert small["messages"] > large["messages"]


def test_muon_with_adamw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_plan_json(capsys, write_module(tmp_path), "--optimizer", "muon+adamw", "--ranks", "1")
    assert found["optimizer"] == "Muon + AdamW"
    adamw, muon = 2 * 4 * (32_000 + 64 + 64), 4 * 2 * 64 * 64
    assert found["estimates"][0]["state"] == pytest.approx(adamw + muon, abs=64)


def test_muon_only_if_all_params_are_matrices() -> None:
    rules = OptimizerChoice("muon+adamw").resolve(load_model_shape("1M"))
    assert [rule.optimizer_class for rule in rules] == [torch.optim.Muon]


# ---- tables


def render_plan(plan: Plan, width: int) -> str:
    console = Console(width=width, file=StringIO(), color_system=None)
    print_plan(plan, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [100, 160])
def test_tables_are_not_truncated(planned: Plan, width: int) -> None:
    text = render_plan(planned, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    heads = (
        ("params", "grads", "masters")
        if width == 100
        else ("parameters", "gradients", "masters", "balance", "of 600 kB")
    )
    for word in (
        "small",
        "40,256 parameters",
        "AdamW",
        "2 ranks",
        "4 ranks",
        "total",
        "peak",
        "sent",
        "network",
        "fits",
        *heads,
        *METHOD_NAMES,
    ):
        assert word in text
    assert ("█" in text) is (width == 160)
    peaks = [f"{it.memory.peak / 1e6:.2f}" for it in planned]
    rows = [line for line in text.splitlines() if line.startswith("   ") and line.strip()]
    assert len(rows) == len(peaks)
    assert all(peak in row for peak, row in zip(peaks, rows, strict=True))
    assert "Not counted: memory" in text
    assert "1 kB of activations" in text


@pytest.mark.parametrize("width", [100, 160])
def test_tables_with_large_numbers_and_all_columns(capsys: pytest.CaptureFixture[str], width: int) -> None:
    wish = small_wish()
    large = zeroshard.planner.plan(
        *(small_model().cast(torch.bfloat16), torch.optim.AdamW),
        ranks=(1, 2048),
        memory=80e9,
        activations=4321e9,
        config=zeroshard.ZeroConfig(
            master_dtype=torch.float32, peer_checkpoint=zeroshard.PeerCheckpoint(), offload=zeroshard.CPUOffload()
        ),
        network=wish.network,
    )
    text = render_plan(large, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "host" in text
    assert (
        f"for each a rank sends {format_bytes(large.estimate_for('zeroshard 2', 2048).peer_checkpoint_bytes)} on "
        "2,048 ranks" in " ".join(text.split())
    )


def test_terminal_control_sequences_in_names_are_escaped() -> None:
    plan = small_wish("[red]\x1b[2J").make_plan(ADAMW, None)
    assert "[red]?[2J" in render_plan(plan, 100)


def test_min_ranks_sentence(planned: Plan) -> None:
    expected = {it.method: it.ranks for it in reversed(planned.estimates) if planned.fits(it)}
    sentence = format_min_ranks(planned)
    assert sentence is not None
    assert sentence.startswith("With 600 kB a rank, on 2 and 4 ranks: DDP ")
    for method in METHOD_NAMES:
        least = expected.get(method)
        assert f"{method} {'never' if least is None else 'always' if least == 2 else 'from 4 ranks'}" in sentence
    assert len({*expected.values()}) + (len(expected) < len(METHOD_NAMES)) > 1, "the memory should tell methods apart"
    assert format_min_ranks(small_wish(memory=None).make_plan(ADAMW, None)) is None


def test_breakdown_sums_to_peak(planned: Plan) -> None:
    for row in planned.as_dict()["estimates"]:
        parts = breakdown_at_peak(row, row["peak_phase"])
        assert sum(parts.values()) == row["peak"]
        assert min(parts.values()) >= 0


# ---- the picture


def test_picture_is_png_of_expected_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.png"
    assert status_of("plan", "1M", "--ranks", "2,4", "--memory", "1GB", "--picture", target) == 0
    start = target.read_bytes()[:24]
    assert start[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", start[16:]) == (1500, round((1.3 + 1.55 * 2) * 150))
    assert capsys.readouterr().err == f"Written: {target}\n"


def test_picture_without_suffix_is_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert status_of("plan", "1M", "--ranks", "2", "--picture", tmp_path / "plan") == 0
    assert capsys.readouterr().err == f"Written: {tmp_path / 'plan.png'}\n"
    assert [it.name for it in tmp_path.iterdir()] == ["plan.png"]


def test_unwritable_picture_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("1M", "--ranks", "1", "--picture")
    assert "could not be written" in run_rejected_plan(capsys, *arguments, tmp_path / "none" / "plan.png")
    assert "could not be written" in run_rejected_plan(capsys, *arguments, tmp_path / "plan.strange")


def test_picture_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'zeroshard[plot]'" in run_rejected_plan(capsys, "1M", "--ranks", "1", "--picture", "x.png")


# ---- rejected arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing-known",), "names no model"),
        (("gpt2", "--optimizer", "Adamm"), "'Adamm' is no class"),
        (("gpt2", "--optimizer", "Optimizer"), "expected a class of optimizers"),
        (("gpt2", "--optimizer", "json:loads"), "expected a class of optimizers"),
        (("gpt2", "--optimizer", "no_such_package:It"), "no_such_package"),
        (("gpt2", "--optimizer", "muon+adamw", "--options", "lr=1"), "are two"),
        (("gpt2", "--options", "lr"), "cannot be read"),
        (("gpt2", "--options", "lr=__import__('os')"), "cannot be read"),
        (("gpt2", "--options", "no_such_option=1"), "no_such_option"),
        (("1k", "--optimizer", "SparseAdam", "--ranks", "1"), "SparseAdam takes sparse gradients only"),
        (("1k", "--options", "lr=-1", "--ranks", "1"), "Invalid learning rate"),
        (("1k", "--optimizer", "LBFGS", "--ranks", "1"), "LBFGS cannot be sharded"),
        (("gpt2", "--precision", "fp7"), "expected one of fp32"),
        (("gpt2", "--reduce", "fp7"), "expected one of fp32"),
        (("gpt2", "--ranks", "0"), "from 1 to"),
        (("gpt2", "--memory", "80"), "expected a number and a unit"),
        (("gpt2", "--ranks", "a,b"), "'a'"),
        (("gpt2", "--memory", "80 apples"), "80GB or 80GiB"),
        (("gpt2", "--bandwidth", "0GB/s"), "more than nothing"),
        (("gpt2", "--latency", "10GB"), "10us or 1ms"),
        (("gpt2", "--frozen", "nothing*"), "no parameter of gpt2"),
        (("gpt2", "--bucket", "0"), "bucket_bytes"),
    ],
)
def test_invalid_arguments_are_reported_without_traceback(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    error = run_rejected_plan(capsys, *arguments)
    assert words in error
    assert "Traceback" not in error


def test_corrupt_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    assert status_of("plan", tmp_path / "bad.safetensors") == 1
    assert "is no file of safetensors" in capsys.readouterr().err


# ---- parsing of command-line values


def test_parse_and_format_quantities() -> None:
    assert (parse_bytes("--memory", "80GB"), parse_bytes("--memory", "80 GiB"), parse_bytes("--memory", "1.5kb")) == (
        80 * 10**9,
        80 * 2**30,
        1500,
    )
    for text in ("50GB/s", "50 GB", "400Gbit/s", "400Gbps", "400Gb/s", "400 gb/s", "400Gb"):
        assert parse_bandwidth("--bandwidth", text) == 50e9
    assert parse_seconds("--latency", "10us") == pytest.approx(1e-5)
    assert (format_bytes(80e9), format_bytes(31_412_000_000), format_bytes(12), format_bytes(1.5e15)) == (
        "80 GB",
        "31.4 GB",
        "12 B",
        "1,500 TB",
    )
    assert (format_seconds(0), format_seconds(0.0123), format_seconds(3e-6), format_seconds(12.0)) == (
        "0",
        "12.3 ms",
        "3 us",
        "12 s",
    )


def test_parse_ranks() -> None:
    assert parse_ranks("8, 64,8") == [8, 64]
    assert parse_ranks("1-4096") == [2**it for it in range(13)]
    assert parse_ranks("3-20,96") == [4, 8, 16, 96]
    for wrong in ("", "4-2", "1-", "-4", "99999999", "1.5", "9" * 30):
        with pytest.raises(ConfigError):
            parse_ranks(wrong)


def test_options_must_be_literals() -> None:
    assert parse_options("lr=1e-3,betas=(0.9, 0.95),nesterov=True") == {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "nesterov": True,
    }
    assert parse_options(None) == parse_options("") == {}
    for wrong in ("1", "lr=lr", "**{}", "lr=1)+f(x=2", "lr==1", "lr=print(1)", "lr=1,lr=2", "(" * 500):
        with pytest.raises(ConfigError):
            parse_options(wrong)


def test_resolve_optimizer_class() -> None:
    assert resolve_optimizer_class("SGD") is torch.optim.SGD
    assert resolve_optimizer_class("torch.optim.adamw:AdamW") is torch.optim.AdamW
    with pytest.raises(ConfigError, match="such as AdamW"):
        resolve_optimizer_class("adamw")


@pytest.mark.parametrize("place", ["mine_of_a_test", "mine_of_a_test.py"])
def test_optimizer_class_from_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "mine_of_a_test.py").write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    options = ("--optimizer", f"{place}:Mine", "--options", "momentum=0.9", "--ranks", "1")
    found = run_plan_json(capsys, write_module(tmp_path), *options)
    assert found["optimizer"] == "Mine"
    assert found["estimates"][0]["state"] == 4 * 40_320


# ---- the Python API


INVALID_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "80GB"}, ConfigError, "such as 80e9, not '80GB'"),
    ({"memory": -1}, ConfigError, "such as 80e9, not -1"),
    ({"memory": float("nan")}, ConfigError, "such as 80e9, not nan"),
    ({"activations": -1e9}, ConfigError, "plan\\(activations=...\\) takes"),
    ({"activations": True}, ConfigError, "not True"),
    ({"ranks": 0}, ConfigError, "numbers of 1 or more, not 0"),
    ({"ranks": "8"}, ConfigError, "not '8'"),
    ({"ranks": ()}, ConfigError, "not 'none'"),
    ({"ranks": None}, ConfigError, "not None"),
    ({"network": "fast"}, TypeError, "takes a Network, not a str"),
    ({"config": {}}, TypeError, "takes a ZeroConfig, not a dict"),
    ({"shard_group_size": "node"}, ConfigError, "not 'node'"),
]


@pytest.mark.parametrize(("given", "kind", "words"), INVALID_ARGUMENTS)
def test_plan_rejects_invalid_values(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        zeroshard.planner.plan(small_model(), torch.optim.AdamW, **given)


def test_ranks_as_single_number() -> None:
    alone, listed = (zeroshard.planner.plan(small_model(), torch.optim.AdamW, ranks=it) for it in (8, [8]))
    assert alone == listed


def test_fully_frozen_model_is_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_plan_json(capsys, "1M", "--frozen", "*", "--ranks", "8")
    assert {row["balance"] for row in found["estimates"]} == {1.0}
    assert {row["state"] for row in found["estimates"]} == {0}


def test_network_time_formula() -> None:
    """Each of 4 collectives takes log2(4,096) latencies of 10 us; 1 GB at 1 GB/s takes 1 s."""
    network = zeroshard.planner.Network(1e9, 1e-5)
    assert network.estimate_seconds(1e9, 4, 4096) == pytest.approx(1 + 4 * 12 * 1e-5)
    assert network.estimate_seconds(0, 1, 5) == pytest.approx(3e-5)
    seconds = [
        zeroshard.planner.plan(small_model(), torch.optim.AdamW, ranks=it).estimate_for("zeroshard 2", it)
        for it in (2, 64, 4096)
    ]
    assert [it.traffic.seconds for it in seconds] == sorted(it.traffic.seconds for it in seconds)
