"""`zeroshard plan`: output, pictures and rejected arguments."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zeroshard
from tests.support.tools import ADAMW, small_model_shape, small_request, status_of, write_module
from zeroshard._formatting import format_bytes, format_seconds
from zeroshard.cli.plan import print_plan
from zeroshard.errors import ConfigError
from zeroshard.planner.plan import Plan
from zeroshard.planner.request import (
    OptimizerChoice,
    parse_bandwidth,
    parse_bytes,
    parse_options,
    parse_ranks,
    parse_seconds,
    resolve_optimizer_class,
)
from zeroshard.planner.shapes import ModelShape, load_model_shape

METHOD_NAMES = ["DDP", "torch ZeRO", "zeroshard 1", "zeroshard 2", "FSDP2"]


def run_plan_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert status_of("plan", *arguments, "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def run_rejected_plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert status_of("plan", *arguments) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def planned() -> Plan:
    return small_request().make_plan(ADAMW, "bf16+fp32")


# ---- JSON


def test_json_equals_plan_as_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_plan_json(
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
    assert data.pop("model") == {"name": "make", "parameters": 40_320, "tensors": 5}
    expected.pop("model")
    assert data == expected
    assert [row["method"] for row in data["estimates"]] == METHOD_NAMES * 2
    assert set(data["min_ranks"]) == set(METHOD_NAMES)


def test_shard_group_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, slow, group_option = write_module(tmp_path), ("--bandwidth", "1GB/s"), ("--shard-group-size", "8")
    ungrouped, grouped, fast = (
        run_plan_json(capsys, source, "--ranks", "8,64", *slow, *options)
        for options in ((), group_option, (*group_option, "--bandwidth-within", "100GB/s"))
    )
    assert (ungrouped["shard_group_size"], grouped["shard_group_size"]) == (None, 8)
    for index in (2, 3):  # zeroshard on 8 ranks
        assert grouped["estimates"][index] == ungrouped["estimates"][index]
        on_64 = grouped["estimates"][index + 5]
        assert on_64["state"] == ungrouped["estimates"][index]["state"] > ungrouped["estimates"][index + 5]["state"]
        assert on_64["sent"] > ungrouped["estimates"][index]["sent"]
        assert fast["estimates"][index + 5]["seconds"] < on_64["seconds"]
    assert all(grouped["estimates"][index] == ungrouped["estimates"][index] for index in (0, 1, 4, 5, 6, 9)), (
        "other methods have no shard groups"
    )
    assert status_of("plan", source, "--ranks", "64", *group_option) == 0
    assert "zeroshard in shard groups of 8 ranks" in capsys.readouterr().out
    for invalid, message in (
        ("7", "shard_group_size=7 does not divide 64 ranks"),
        ("0", "a positive number of ranks, got 0"),
    ):
        assert status_of("plan", source, "--ranks", "64", "--shard-group-size", invalid) == 2
        assert message in capsys.readouterr().err


def test_zero_paper_example(capsys: pytest.CaptureFixture[str]) -> None:
    """7.5 billion parameters, Adam in mixed precision, 64 ranks: 120, 31.4 and 16.6 GB."""
    data = run_plan_json(capsys, "7.5B", "--optimizer", "Adam", "--precision", "bf16+fp32", "--ranks", "64")
    totals = {row["method"]: round(row["total"] / 1e9, 1) for row in data["estimates"]}
    assert (totals["DDP"], totals["zeroshard 1"], totals["zeroshard 2"]) == (120.0, 31.4, 16.6)


def test_options_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_module(tmp_path)
    base = {row["method"]: row for row in run_plan_json(capsys, source, "--ranks", "2")["estimates"]}
    options = ("--reduce", "bf16", "--peer-checkpoint", "--offload", "--bucket", "64kB", "--frozen", "embed*")
    data = {row["method"]: row for row in run_plan_json(capsys, source, "--ranks", "2", *options)["estimates"]}
    assert data["DDP"]["gradients"] == base["DDP"]["gradients"] - 4 * 32_000
    assert data["zeroshard 2"]["state"] == 0 < data["zeroshard 2"]["host"]
    assert data["zeroshard 2"]["peer_checkpoint_sent"] > 0 == base["zeroshard 2"]["peer_checkpoint_sent"]
    assert data["zeroshard 2"]["sent"] < data["DDP"]["sent"]
    small, large = (
        run_plan_json(capsys, source, "--ranks", "2", "--bucket", bucket)["estimates"][3] for bucket in ("20kB", "1MB")
    )
    assert small["messages"] > large["messages"]


def test_muon_with_adamw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_plan_json(capsys, write_module(tmp_path), "--optimizer", "muon+adamw", "--ranks", "1")
    assert data["optimizer"] == "Muon + AdamW"
    adamw, muon = 2 * 4 * (32_000 + 64 + 64), 4 * 2 * 64 * 64
    assert data["estimates"][0]["state"] == pytest.approx(adamw + muon, abs=64)


def test_muon_only_if_all_params_are_matrices() -> None:
    rules = OptimizerChoice("muon+adamw").resolve(load_model_shape("1M"))
    assert [rule.optimizer_class for rule in rules] == [torch.optim.Muon]


# ---- tables


def render_plan(plan: Plan, width: int) -> str:
    console = Console(width=width, file=StringIO(), color_system=None)
    print_plan(plan, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


HEADINGS: tuple[str, ...] = (
    "method",
    "params",
    "grads",
    "state",
    "masters",
    "total",
    "buffers",
    "activ.",
    "peak",
    "in",
    "balance",
)
HEADINGS += ("sent", "network", "fits")


def table_rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the words of each row by number of ranks and method. A row may be divided into several tables."""
    rows: dict[tuple[str, str], list[str]] = {}
    ranks = ""
    for line in text.splitlines():
        if re.fullmatch(r"[\d,]+ ranks?", line):
            ranks = line.split()[0]
        for method in METHOD_NAMES:
            if line.startswith(f"  {method} "):
                rows.setdefault((ranks, method), []).extend(line.removeprefix(f"  {method} ").split())
    return rows


@pytest.mark.parametrize("width", [40, 80, 160])
def test_tables_have_all_numbers_at_any_width(planned: Plan, width: int) -> None:
    text = render_plan(planned, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert [word for word in HEADINGS if word not in text.split()] == []
    assert ("█" in text) is (width == 160)
    rows = table_rows(text)
    assert len(rows) == len(planned.estimates)
    for estimate in planned:
        memory, words = estimate.memory, rows[f"{estimate.ranks:,}", estimate.method]
        for nbytes in (memory.parameters, memory.gradients, memory.state, memory.total, memory.buffers, memory.peak):
            assert f"{nbytes / 1e6:.2f}" in words
        assert f"{estimate.state_imbalance:.2f}" in words
        assert {memory.peak_phase, "yes" if planned.fits(estimate) else "no"} <= {*words}
        for quantity in (format_bytes(estimate.traffic.sent), format_seconds(estimate.traffic.seconds)):
            assert quantity in " ".join(words)
    sentences = " ".join(text.split())
    assert "Not included: fragmentation" in sentences
    assert "1 kB of activations" in sentences


@pytest.mark.parametrize("width", [80, 160])
def test_tables_with_large_numbers_and_all_columns(width: int) -> None:
    request = small_request()
    large = zeroshard.planner.plan(
        *(small_model_shape().cast(torch.bfloat16), torch.optim.AdamW),
        ranks=(1, 2048),
        memory=80e9,
        activations=4321e9,
        config=zeroshard.ZeroConfig(
            master_dtype=torch.float32, peer_checkpoint=zeroshard.PeerCheckpoint(), offload=zeroshard.CPUOffload()
        ),
        network=request.network,
    )
    text = render_plan(large, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert [word for word in (*HEADINGS, "host") if word not in text.split()] == []
    assert "4,321.0" in table_rows(text)["2,048", "DDP"]
    sent = format_bytes(large.estimate_for("zeroshard 2", 2048).peer_checkpoint_bytes)
    assert f"A peer checkpoint sends {sent} on 2,048 ranks" in " ".join(text.split())


def test_terminal_control_sequences_in_names_are_escaped() -> None:
    plan = small_request("[red]\x1b[2J").make_plan(ADAMW, None)
    assert "[red]?[2J" in render_plan(plan, 100)


def test_min_ranks_sentence(planned: Plan) -> None:
    fitting = {estimate.method: estimate.ranks for estimate in reversed(planned.estimates) if planned.fits(estimate)}
    sentence = planned.explain()[0]
    assert sentence.startswith("With 600 kB per rank, on 2, 4 ranks: DDP ")
    words = {None: "never", 2: "always", 4: "from 4 ranks"}
    for method in METHOD_NAMES:
        assert f"{method} {words[fitting.get(method)]}" in sentence
    assert len({*fitting.values()}) + (len(fitting) < len(METHOD_NAMES)) > 1, "the limit must distinguish the methods"
    without_memory = small_request(memory=None).make_plan(ADAMW, None).explain()
    assert not [sentence for sentence in without_memory if sentence.startswith("With ")]


def test_breakdown_sums_to_peak(planned: Plan) -> None:
    for estimate in planned:
        parts = estimate.memory.breakdown
        assert sum(parts.values()) == estimate.memory.peak
        assert min(parts.values()) >= 0


def test_autocast_counts_what_backward_saves() -> None:
    """Autocast casts each matrix once, and backward needs the casts. Biases are cast, too, but not saved."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
    saved: dict[int, torch.Tensor] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 64, requires_grad=True)).sum()
        casts = [tensor for tensor in saved.values() if tensor.numel() in (64 * 256, 256 * 32)]
    assert {tensor.dtype for tensor in casts} == {torch.bfloat16}
    loss.backward()
    request = replace(small_request(), model=ModelShape.from_module(model), activations=0)
    plain, autocast = (request.make_plan(ADAMW, precision) for precision in ("fp32", "bf16-autocast"))
    assert autocast.precision == "float32 with bfloat16 autocast"
    for before, after in zip(plain, autocast, strict=True):
        assert after.memory.activations == sum(tensor.nbytes for tensor in casts) > 0
        assert after.memory.phase_peaks["backward"] - before.memory.phase_peaks["backward"] == after.memory.activations
        assert replace(after.memory, activations=0) == before.memory


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
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


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
    ("arguments", "message"),
    [
        (("nothing-known",), "unknown model"),
        (("gpt2", "--optimizer", "Adamm"), "got 'Adamm'"),
        (("gpt2", "--optimizer", "Optimizer"), "expected an optimizer class"),
        (("gpt2", "--optimizer", "json:loads"), "expected an optimizer class"),
        (("gpt2", "--optimizer", "no_such_package:It"), "no_such_package"),
        (("gpt2", "--optimizer", "muon+adamw", "--options", "lr=1"), "stands for two"),
        (("gpt2", "--options", "lr"), "expected name=value"),
        (("gpt2", "--options", "lr=__import__('os')"), "expected name=value"),
        (("gpt2", "--options", "no_such_option=1"), "no_such_option"),
        (("1k", "--optimizer", "SparseAdam", "--ranks", "1"), "SparseAdam accepts only sparse gradients"),
        (("1k", "--options", "lr=-1", "--ranks", "1"), "Invalid learning rate"),
        (("1k", "--optimizer", "LBFGS", "--ranks", "1"), "LBFGS cannot be sharded"),
        (("gpt2", "--precision", "fp7"), "expected one of fp32"),
        (("gpt2", "--reduce", "fp7"), "expected one of fp32"),
        (("gpt2", "--ranks", "0"), "from 1 to"),
        (("gpt2", "--memory", "80"), "expected a number and a unit"),
        (("gpt2", "--ranks", "a,b"), "'a'"),
        (("gpt2", "--memory", "80 apples"), "80GB or 80GiB"),
        (("gpt2", "--bandwidth", "0GB/s"), "must be above 0"),
        (("gpt2", "--latency", "10GB"), "10us or 1ms"),
        (("gpt2", "--frozen", "nothing*"), "gpt2 has no parameter"),
        (("gpt2", "--bucket", "0"), "bucket_bytes"),
    ],
)
def test_invalid_arguments_are_reported_without_traceback(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    error = run_rejected_plan(capsys, *arguments)
    assert message in error
    assert "Traceback" not in error


def test_corrupt_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    assert status_of("plan", tmp_path / "bad.safetensors") == 1
    assert "is not a safetensors file" in capsys.readouterr().err


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


def test_parse_ranks() -> None:
    assert parse_ranks("8, 64,8") == [8, 64]
    assert parse_ranks("1-4096") == [2**exponent for exponent in range(13)]
    assert parse_ranks("3-20,96") == [4, 8, 16, 96]
    for invalid in ("", "4-2", "1-", "-4", "99999999", "1.5", "9" * 30):
        with pytest.raises(ConfigError):
            parse_ranks(invalid)


def test_options_must_be_literals() -> None:
    assert parse_options("lr=1e-3,betas=(0.9, 0.95),nesterov=True") == {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "nesterov": True,
    }
    assert parse_options(None) == parse_options("") == {}
    for invalid in ("1", "lr=lr", "**{}", "lr=1)+f(x=2", "lr==1", "lr=print(1)", "lr=1,lr=2", "(" * 500):
        with pytest.raises(ConfigError):
            parse_options(invalid)


def test_resolve_optimizer_class() -> None:
    assert resolve_optimizer_class("SGD") is torch.optim.SGD
    assert resolve_optimizer_class("torch.optim.adamw:AdamW") is torch.optim.AdamW
    with pytest.raises(ConfigError, match="such as AdamW"):
        resolve_optimizer_class("adamw")


@pytest.mark.parametrize("module", ["mine_of_a_test", "mine_of_a_test.py"])
def test_optimizer_class_from_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    (tmp_path / "mine_of_a_test.py").write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    options = ("--optimizer", f"{module}:Mine", "--options", "momentum=0.9", "--ranks", "1")
    data = run_plan_json(capsys, write_module(tmp_path), *options)
    assert data["optimizer"] == "Mine"
    assert data["estimates"][0]["state"] == 4 * 40_320


# ---- the Python API


INVALID_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "80GB"}, ConfigError, "such as 80e9, got '80GB'"),
    ({"memory": -1}, ConfigError, "such as 80e9, got -1"),
    ({"memory": float("nan")}, ConfigError, "such as 80e9, got nan"),
    ({"activations": -1e9}, ConfigError, "expected plan\\(activations=...\\)"),
    ({"activations": True}, ConfigError, "got True"),
    ({"ranks": 0}, ConfigError, "positive numbers of ranks, got 0"),
    ({"ranks": "8"}, ConfigError, "got '8'"),
    ({"ranks": ()}, ConfigError, r"got \(\)"),
    ({"ranks": None}, ConfigError, "got None"),
    ({"network": "fast"}, TypeError, "a Network, got a str"),
    ({"autocast": "bf16"}, TypeError, "a dtype, got a str"),
    ({"config": {}}, TypeError, "a ZeroConfig, got a dict"),
    ({"shard_group_size": "node"}, ConfigError, "got 'node'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), INVALID_ARGUMENTS)
def test_plan_rejects_invalid_values(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zeroshard.planner.plan(small_model_shape(), torch.optim.AdamW, **arguments)


def test_ranks_as_single_number() -> None:
    single, listed = (zeroshard.planner.plan(small_model_shape(), torch.optim.AdamW, ranks=ranks) for ranks in (8, [8]))
    assert single == listed


def test_fully_frozen_model_is_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_plan_json(capsys, "1M", "--frozen", "*", "--ranks", "8")
    assert {row["balance"] for row in data["estimates"]} == {1.0}
    assert {row["state"] for row in data["estimates"]} == {0}


def test_network_time_formula() -> None:
    """Each of 4 collectives takes log2(4,096) latencies of 10 us; 1 GB at 1 GB/s takes 1 s."""
    network = zeroshard.planner.Network(1e9, 1e-5)
    assert network.estimate_seconds(1e9, 4, 4096) == pytest.approx(1 + 4 * 12 * 1e-5)
    assert network.estimate_seconds(0, 1, 5) == pytest.approx(3e-5)
    estimates = [
        zeroshard.planner.plan(small_model_shape(), torch.optim.AdamW, ranks=ranks).estimate_for("zeroshard 2", ranks)
        for ranks in (2, 64, 4096)
    ]
    assert [estimate.traffic.seconds for estimate in estimates] == sorted(
        estimate.traffic.seconds for estimate in estimates
    )
