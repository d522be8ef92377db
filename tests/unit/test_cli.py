"""The command line: inspecting and converting checkpoints, its errors and its memory use."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.checkpoints import assert_same_state, net, plain, state_by_name, train
from tests.support.tools import convert, status_of
from zeroshard import __version__, checkpoint
from zeroshard.checkpoint import reader
from zeroshard.checkpoint.progress import Progress
from zeroshard.cli import checkpoint as cli_checkpoint
from zeroshard.errors import CheckpointError

FORMATS = ("torch", "dcp", "safetensors")
every_format = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with two checkpoints of an unsharded optimizer."""
    model = net()
    optimizer = plain(model)
    for step in (1, 2):
        train(model, optimizer, 1, first=step)
        checkpoint.save(tmp_path / "saved", step=step, model=model, optimizer=optimizer)
    return tmp_path / "saved"


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert status_of("checkpoint", "inspect", *arguments, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


# ---- inspect


def test_inspect_latest(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, model = inspect_json(capsys, saved), net()
    assert summary["path"] == str(saved / "step-000000002")
    assert (summary["step"], summary["world_size"], summary["torch"]) == (2, 1, torch.__version__)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert {name: value["shape"] for name, value in summary["model"].items()} == shapes
    assert list(summary["model"]) == list(model.state_dict())
    assert {value["dtype"] for value in summary["model"].values()} == {"float32"}
    assert summary["state_keys"] == ["exp_avg", "exp_avg_sq", "step"]
    assert summary["state"]["mix"]["exp_avg"] == {"shape": shapes["mix"], "dtype": "float32", "bytes": 96}
    assert summary["state"].keys() == dict(model.named_parameters()).keys() - {"unused"}
    assert summary["other"].keys() == {"ranks.0"}
    size = sum(file.stat().st_size for file in (saved / "step-000000002").glob("*.distcp"))
    assert summary["ranks"] == {"0": {"files": 1, "bytes": size}}
    totals = summary["totals"]
    elements = sum(value.numel() for value in model.state_dict().values())
    assert (totals["elements"], totals["model_bytes"], totals["file_bytes"]) == (elements, 4 * elements, size)
    trained = sum(param.numel() for name, param in model.named_parameters() if name != "unused")
    assert totals["state_bytes"] == 4 * (2 * trained + len(summary["state"]))


def test_inspect_one_step(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_json(capsys, saved / "step-000000001")["step"] == 1


def test_inspect_foreign_dcp_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"weights": {"a": torch.ones(2, 3)}, "epoch": 4}, checkpoint_id=tmp_path / "it", no_dist=True)
    summary = inspect_json(capsys, tmp_path / "it")
    assert (summary["step"], summary["world_size"], summary["model"], summary["state"]) == (None, 1, {}, {})
    assert summary["other"]["weights.a"] == {"shape": [2, 3], "dtype": "float32", "bytes": 24}
    assert summary["other"]["epoch"] == {"shape": None, "dtype": None, "bytes": 0}


def test_inspect_tables_are_complete(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("checkpoint", "inspect", saved) == 0
    out = capsys.readouterr().out
    summary = [" ".join(line.split()) for line in out.splitlines()[:8]]
    assert summary[1:4] == [
        f"format DCP directory with checksums, torch {torch.__version__}",
        "step 2 (in folder: 1, 2)",
        "saved by 1 rank",
    ]
    assert summary[4].startswith("model Net: ")
    assert summary[5].startswith("optimizer AdamW: ")
    assert summary[5].endswith(", exp_avg, exp_avg_sq, step")
    for word in (
        *net().state_dict(),
        "6 x 5",
        "scalar",
        "float32",
        "exp_avg",
        "ranks.0",
        "random states",
    ):
        assert word in out


def test_inspect_counts_tied_weights_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    checkpoint.save(tmp_path, step=1, model=model)
    found = inspect_json(capsys, tmp_path)
    assert found["tied"] == {"1.weight": "0.weight"}
    assert (found["totals"]["elements"], found["totals"]["model_bytes"]) == (24, 96)
    assert list(found["model"]) == ["0.weight", "1.weight"]
    assert (found["model_class"], found["optimizer_classes"]) == ("Sequential", [])
    # A conversion keeps what the manifest says.
    convert(convert(tmp_path, tmp_path / "all.pt", "torch"), tmp_path / "back", "dcp")
    capsys.readouterr()
    assert inspect_json(capsys, tmp_path / "back")["tied"] == found["tied"]
    assert status_of("checkpoint", "inspect", tmp_path) == 0
    out = capsys.readouterr().out
    assert "1 tied weight counted once" in out
    assert "tied to 0.weight" in out


def test_names_are_escaped_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"model": {"[red]\x1b[2J": torch.ones(2)}}, checkpoint_id=tmp_path / "it", no_dist=True)
    assert status_of("checkpoint", "inspect", tmp_path / "it") == 0
    out = capsys.readouterr().out
    assert "[red]?[2J" in out
    assert "\x1b" not in out


def test_inspect_sorts_ranks_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "it", no_dist=True)
    for rank in (1, 2, 10, 11):
        (tmp_path / "it" / f"__{rank}_0.distcp").write_bytes(bytes(rank))
    assert list(inspect_json(capsys, tmp_path / "it")["ranks"]) == ["0", "1", "2", "10", "11"]
    assert status_of("checkpoint", "inspect", tmp_path / "it") == 0
    assert re.findall(r"^│ (\d+) +│", capsys.readouterr().out, re.MULTILINE) == ["0", "1", "2", "10", "11"]


# ---- convert


def various_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(6, 4, 5, generator=generator)
    return {
        "plain": base,
        "permuted": base.permute(2, 0, 1),
        "gaps": base[::2, :, 1:4],
        "expanded": torch.randn(5, 1, generator=generator).expand(5, 7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "brain": base.bfloat16(),
        "half": base.half(),
        "eighth": base.to(torch.float8_e4m3fn),
        "double": base.double(),
        "long": base.mul(100).long(),
        "flags": base > 0,
        "bytes": base.mul(20).byte(),
        "complex": torch.view_as_complex(torch.randn(4, 3, 2, generator=generator)),
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_model(target: Path, kind: str, reference: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the model with the usual tool for the format."""
    if kind == "torch":
        model: dict[str, torch.Tensor] = torch.load(target, weights_only=True)["model"]
        return model
    if kind == "safetensors":
        return {name.removeprefix("model."): value for name, value in load_file(target).items()}
    state_dict = {"model": {name: torch.empty(value.shape, dtype=value.dtype) for name, value in reference.items()}}
    dcp_load(state_dict, checkpoint_id=target, no_dist=True)
    return state_dict["model"]


@every_format
@pytest.mark.parametrize("chunk_bytes", [16, 100, reader.READ_CHUNK_BYTES])
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "directory"])
def test_convert_any_tensor_in_chunks_of_any_size(
    tmp_path: Path, kind: str, chunk_bytes: int, from_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(cli_checkpoint, "SPAN_BYTES", chunk_bytes)
    model, source = various_tensors(), tmp_path / "source"
    if from_file:
        torch.save({"model": model}, source)
    else:
        dcp_save({"model": model}, checkpoint_id=source, no_dist=True)
    converted = read_model(convert(source, tmp_path / "target", kind), kind, model)
    assert converted.keys() == model.keys()
    for name, value in model.items():
        assert (converted[name].shape, converted[name].dtype) == (value.shape, value.dtype), name
        assert raw_bytes(converted[name]) == raw_bytes(value), name


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("key", ["optim", "optimizer"])
def test_convert_file_of_unsharded_script(tmp_path: Path, named: bool, key: str) -> None:
    """With parameter names in the groups, or by position where that is unambiguous."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), key: optimizer.state_dict()}, tmp_path / "it.pt")
    convert(tmp_path / "it.pt", tmp_path / "it", "dcp")
    loaded_model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    loaded_optimizer = torch.optim.AdamW(loaded_model.parameters())
    checkpoint.load(tmp_path / "it", model=loaded_model, optimizer=loaded_optimizer)
    assert loaded_optimizer.param_groups[0]["lr"] == 0.1
    assert_same_state(
        state_by_name(loaded_optimizer, loaded_optimizer.state_dict(), loaded_model),
        state_by_name(optimizer, optimizer.state_dict(), model),
    )
    assert all(map(torch.equal, loaded_model.parameters(), model.parameters()))


def test_convert_tensor_options_and_state(tmp_path: Path) -> None:
    """Converting to a directory and back to a file keeps values and their order."""
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=torch.tensor(0.1), momentum=0.9)
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "note": ["a", 1]}, tmp_path / "1.pt")
    convert(tmp_path / "1.pt", tmp_path / "2", "dcp")
    converted = torch.load(convert(tmp_path / "2", tmp_path / "3.pt", "torch"), weights_only=True)
    assert converted["note"] == ["a", 1]
    expected = optimizer.state_dict()
    assert converted["optim"]["param_groups"] == expected["param_groups"]
    assert torch.equal(converted["optim"]["param_groups"][0]["lr"], torch.tensor(0.1))
    assert list(converted["optim"]["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert torch.equal(converted["optim"]["state"][number]["momentum_buffer"], state["momentum_buffer"])


def test_convert_tensors_in_types_other_than_containers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set, which is not searched for tensors, must neither shift nor drop the values after it."""
    values = [torch.full((4,), 7.0), {torch.full((3,), 5.0)}, torch.full((4,), 9.0)]
    torch.save({"model": {"a": torch.ones(2)}, "values": values}, tmp_path / "it.pt")
    converted: dict[str, Any] = {"values": None}
    dcp_load(converted, checkpoint_id=convert(tmp_path / "it.pt", tmp_path / "it", "dcp"), no_dist=True)
    first, (second,), third = converted["values"]
    assert [first.tolist(), second.tolist(), third.tolist()] == [[7.0] * 4, [5.0] * 3, [9.0] * 4]
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / "target.pt")
    assert "expected all tensors in dicts, lists and tuples, got 1 in other types" in error


def test_convert_optimizers_in_a_dict(tmp_path: Path) -> None:
    """An optimizer entry that is not one optimizer's state dict is converted like any other."""
    states = {
        name: {"state": {0: {"step": lr}}, "param_groups": [{"lr": lr, "params": [0]}]}
        for name, lr in (("g", 0.1), ("d", 0.2))
    }
    for key in ("optim", "optimizer"):
        torch.save({"model": {"a": torch.ones(2)}, key: states}, tmp_path / f"{key}.pt")
        convert(tmp_path / f"{key}.pt", tmp_path / key, "dcp")
        converted = torch.load(convert(tmp_path / key, tmp_path / f"{key}-2.pt", "torch"), weights_only=True)
        assert converted[key] == states


def test_large_tensor_of_a_file_is_copied_in_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_checkpoint, "SPAN_BYTES", 64)
    torch.save({"model": {"a": torch.arange(40.0)}}, tmp_path / "it.pt")
    done: list[int] = []
    progress = Progress("", lambda done_bytes, _: done.append(done_bytes), 0)
    cli_checkpoint.convert_checkpoint(tmp_path / "it.pt", tmp_path / "it", "dcp", progress, weights_only=True)
    assert done == [64, 128, 160]


def test_stored_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including those of a transposed tensor, of which each span would spread over all bytes."""
    monkeypatch.setattr(cli_checkpoint, "SPAN_BYTES", 4096)
    tensors = {"a": torch.randn(256, 96).t(), "b": torch.randn(96, 256)}
    dcp_save({"model": tensors}, checkpoint_id=tmp_path / "it", no_dist=True)
    sizes: list[int] = []

    def read_into(stream: BinaryIO, byte_offset: int, buffer: memoryview) -> None:
        sizes.append(len(buffer))
        original(stream, byte_offset, buffer)

    original = reader.read_into
    monkeypatch.setattr(reader, "read_into", read_into)
    target = convert(tmp_path / "it", tmp_path / "it.pt", "torch", "--weights-only")
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    converted = torch.load(target, weights_only=True)
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "kind"), [("it.safetensors", "safetensors"), ("it.pt", "torch"), ("it.pth", "torch"), ("it", "dcp")]
)
def test_format_follows_the_suffix_and_the_result_is_printed(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": {"a": torch.ones(3), "b": torch.ones(2)}}, tmp_path / "source.pt")
    target = tmp_path / name
    assert status_of("checkpoint", "convert", tmp_path / "source.pt", target) == 0
    nbytes = sum(file.stat().st_size for file in (target.iterdir() if target.is_dir() else [target]))
    assert capsys.readouterr().out == f"Wrote {target}: format {kind}, 2 tensors, {nbytes:,} bytes\n"
    assert read_model(target, kind, {"a": torch.ones(3), "b": torch.ones(2)})["b"].tolist() == [1, 1]


# ---- errors


def test_unknown_suffix_needs_a_format(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "all.ckpt")
    assert "expected .safetensors, .pt, .pth or no suffix (a DCP directory), got .ckpt. Pass --to." in error
    convert(saved, tmp_path / "all.ckpt", "torch")


def expect_error(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 1) -> str:
    assert status_of(*arguments) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return " ".join(error.split())


@every_format
def test_existing_target_is_not_overwritten(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "there", "--to", kind)
    assert error == f"Error: {tmp_path / 'there'} already exists. Remove it, or choose another name."
    assert (tmp_path / "there").read_text() == "mine"


def test_parent_directory_must_exist(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "no" / "where", "--to", "torch")
    assert "no is not a directory. Create it first." in error


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_source_is_not_a_checkpoint(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(tmp_path / "target"), "--to", "torch"] if command == "convert" else []
    (tmp_path / "empty").mkdir()
    assert "does not exist" in expect_error(capsys, "checkpoint", command, tmp_path / "nothing", *options)
    assert "contains no checkpoint" in expect_error(capsys, "checkpoint", command, tmp_path / "empty", *options)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty"]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_truncated_checkpoint(saved: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (saved / "step-000000002").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    options = [str(tmp_path / "target"), "--to", "torch"] if command == "convert" else []
    assert f"{file} is truncated" in expect_error(capsys, "checkpoint", command, saved, *options)
    assert not (tmp_path / "target").exists()


def flip_byte(file: Path, offset: int) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def offset_in_weight(file: Path) -> int:
    """Offset of a byte in the middle of a parameter, which torch does not check."""
    return file.read_bytes().index(trained_net(2).get_parameter("enter.weight").detach().numpy().tobytes()) + 50


def trained_net(steps: int) -> nn.Module:
    """The model that the fixture `saved` has at this step."""
    model = net()
    train(model, plain(model), steps, first=1)
    return model


def load_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(path, model=net())
    return str(raised.value)


@every_format
def test_damaged_checkpoint_is_not_converted(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (saved / "step-000000002").glob("*.distcp")
    flip_byte(file, offset_in_weight(file))
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "target", "--to", kind)
    assert f"{file} is damaged" in error
    assert error.removeprefix("Error: ") in load_error(saved)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("between", FORMATS[:2])
def test_converted_directory_has_checksums(saved: Path, tmp_path: Path, between: str) -> None:
    convert(convert(saved, tmp_path / "between", between), tmp_path / "it", "dcp")
    sums = json.loads((tmp_path / "it" / "zeroshard.json").read_text())["sums"]
    files = {name: (tmp_path / "it" / name).read_bytes() for name in ("__0_0.distcp", ".metadata")}
    assert sums == {name: zlib.crc32(content) for name, content in files.items()}
    loaded_model = net(seed=1)
    assert checkpoint.load(tmp_path / "it", model=loaded_model).step == 2
    assert all(map(torch.equal, loaded_model.parameters(), trained_net(2).parameters()))
    file = tmp_path / "it" / "__0_0.distcp"
    flip_byte(file, offset_in_weight(file))
    assert f"{file} is damaged" in load_error(tmp_path / "it")


def test_no_manifest_without_one_in_the_source(tmp_path: Path) -> None:
    dcp_save({"model": {"a": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "source", no_dist=True)
    target = convert(tmp_path / "source", tmp_path / "target", "dcp")
    assert sorted(entry.name for entry in target.iterdir()) == [".metadata", "__0_0.distcp"]


def test_read_error_does_not_blame_the_target(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = saved / "step-000000002" / "zeroshard.json"
    manifest.write_text(manifest.read_text().replace("__0_0.distcp", "__1_0.distcp"))
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "target", "--to", "torch")
    assert "__1_0.distcp" in error
    assert "target" not in error


@every_format
def test_failed_conversion_leaves_no_files(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes are right and there are no checksums, so the damage is found only while writing."""
    (file,) = (saved / "step-000000002").glob("*.distcp")
    (saved / "step-000000002" / "zeroshard.json").unlink()
    content = file.read_bytes()
    middle = content.index(b"PK", len(content) // 2)
    file.write_bytes(content[:middle] + bytes(len(content) - middle))
    expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "target", "--to", kind)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path.home() / "never"),)


def test_malicious_files_do_not_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / ".metadata").write_bytes(pickle.dumps(Malicious()))
    torch.save({"model": Malicious()}, tmp_path / "it.pt")
    assert "cannot be read" in expect_error(capsys, "checkpoint", "inspect", tmp_path / "it")
    for source in ("it", "it.pt"):
        assert "cannot be read" in expect_error(
            capsys, "checkpoint", "convert", tmp_path / source, tmp_path / "target", "--to", "torch"
        )
    assert not (tmp_path / "never").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("container", [dict, list])
def test_file_with_shared_containers_is_refused(
    tmp_path: Path, container: type, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of 3 kB with 2**40 values."""
    nested: Any = 0
    for _ in range(40):
        nested = {"a": nested, "b": nested} if container is dict else [nested, nested]
    torch.save({"model": {"a": torch.ones(2)}, "nested": nested}, tmp_path / "it.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / "target")
    assert "it.pt contains the same containers many times" in error


@every_format
def test_tensor_larger_than_its_file_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    huge = torch.zeros(1).expand(2**40)
    optimizer = {"state": {}, "param_groups": [{"lr": huge, "params": []}]}
    for name, saved in (("1", {"model": {"w": huge}}), ("2", {"optim": optimizer}), ("3", {"model": {}, "w": (huge,)})):
        torch.save(saved, tmp_path / name)
        error = expect_error(capsys, "checkpoint", "convert", tmp_path / name, tmp_path / "target", "--to", kind)
        assert "as many as are stored, got 1,099,511,627,776. Save tensor.contiguous() instead" in error
    dcp_save({"model": {}, "values": (huge,)}, checkpoint_id=tmp_path / "it", no_dist=True)
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it", tmp_path / "target", "--to", kind)
    assert "got 1,099,511,627,776" in error


def test_damaged_scheduler_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that `checkpoint.save()` did not write are kept as they are."""
    for name, content, status in (("other", b"other", 0), ("damaged", b"PK damaged", 1)):
        scheduler = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        torch.save({"model": {"a": torch.ones(2)}, "scheduler": scheduler}, tmp_path / name)
        assert status_of("checkpoint", "convert", tmp_path / name, tmp_path / f"{name}.pt") == status
    assert "'scheduler' is damaged: " in capsys.readouterr().err
    assert bytes(torch.load(tmp_path / "other.pt")["scheduler"].tolist()) == b"other"


def test_files_of_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "text", tmp_path / "target", "--to", "dcp")
    assert "text cannot be read as a torch.save file" in error
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "list.pt", tmp_path / "target", "--to", "dcp")
    assert "list.pt is not a checkpoint: expected a dict with 'model' or 'optim', got a list" in error
    tensors = tmp_path / "x.safetensors"
    tensors.write_bytes(b"")
    assert status_of("checkpoint", "convert", tensors, tmp_path / "y", "--to", "dcp") == 1
    assert "safetensors files can be written, but not read" in capsys.readouterr().err


def test_ambiguous_optimizer_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has a buffer, so positions alone do not identify the parameters."""
    model = net()
    optimizer = plain(model)
    train(model, optimizer, 1)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "it.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / "it", "--to", "dcp")
    assert "does not name the optimizer's parameters" in error


@pytest.mark.parametrize("part", [{"state": {}}, {"param_groups": [{"params": [0]}]}], ids=["state", "groups"])
def test_part_of_an_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: Any) -> None:
    """A checkpoint made of it could not be converted again."""
    torch.save({"model": {"a": torch.ones(2)}, "optim": part}, tmp_path / "it.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / "it", "--to", "dcp")
    assert "it.pt is malformed: expected 'state', a dict, and 'param_groups'" in error
    assert not (tmp_path / "it").exists()


def test_unknown_format(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "target", "--to", "onnx", status=2)
    assert all(word in error for word in ("--to", "onnx", *FORMATS))


# ---- weights only


def test_weights_only_matches_model_state_dict(saved: Path, tmp_path: Path) -> None:
    expected = net(seed=3)
    checkpoint.load(saved, model=expected)
    for kind in FORMATS:
        convert(saved, tmp_path / kind, kind, "--weights-only")
    from_dcp = net(seed=4).state_dict()
    dcp_load(from_dcp, checkpoint_id=tmp_path / "dcp")
    converted = [torch.load(tmp_path / "torch", weights_only=True), load_file(tmp_path / "safetensors"), from_dcp]
    for weights in converted:
        loaded_model = net(seed=5)
        loaded_model.load_state_dict(weights)
        assert all(torch.equal(value, expected.state_dict()[name]) for name, value in loaded_model.state_dict().items())


@every_format
def test_weights_only_keeps_names(tmp_path: Path, kind: str) -> None:
    """Including names that a checkpoint uses for its own entries."""
    weights = {name: torch.arange(3.0) + index for index, name in enumerate(("model", "optim", "scheduler", "ranks.0"))}
    torch.save({"model": weights, "scheduler": {"last_epoch": 3}}, tmp_path / "it.pt")
    convert(tmp_path / "it.pt", tmp_path / "target", kind, "--weights-only")
    converted: Any = {name: torch.zeros(3) for name in weights}
    if kind == "dcp":
        dcp_load(converted, checkpoint_id=tmp_path / "target")
    else:
        converted = torch.load(tmp_path / "target") if kind == "torch" else load_file(tmp_path / "target")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)


def test_weights_only_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(tmp_path / "saved", step=1, optimizer=plain(net()))
    error = expect_error(
        capsys, "checkpoint", "convert", tmp_path / "saved", tmp_path / "it.pt", "--to", "torch", "--weights-only"
    )
    assert f"{tmp_path / 'saved'} has no model weights: expected names under 'model'" in error
    assert "got ['optim', 'ranks']" in error
    assert not (tmp_path / "it.pt").exists()
    torch.save({"model": torch.ones(2), "optim": {}}, tmp_path / "odd.pt")
    dcp_save({"model": torch.ones(2)}, checkpoint_id=tmp_path / "odd", no_dist=True)
    for source in ("odd.pt", "odd"):
        for kind in FORMATS:
            expect_error(
                capsys, "checkpoint", "convert", tmp_path / source, tmp_path / "target", "--to", kind, "--weights-only"
            )
            assert not (tmp_path / "target").exists()


# ---- the program


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_run_as_module(tmp_path: Path) -> None:
    result = run_python("-m", "zeroshard", "checkpoint", "inspect", str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        result.stderr == f"Error: {tmp_path} contains no checkpoint. Pass a folder that checkpoint.save() wrote to.\n"
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_says_how_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from zeroshard.__main__ import main; main()"
    result = run_python("-c", code)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"The command line needs {missing}, which is not installed: pip install 'zeroshard[cli]'\n"
        "Without it there are: zeroshard run, zeroshard doctor (each with --help), zeroshard --version\n"
    )


def test_commands_that_work_without_the_extra() -> None:
    code = """if True:
        import sys
        from zeroshard.__main__ import main
        sys.modules["typer"] = sys.modules["rich"] = None
        for command in (("run", "--help"), ("doctor", "--help"), ("--version",)):
            sys.argv = ["zeroshard", *command]
            try:
                main()
            except SystemExit as ended:
                assert not ended.code
    """
    result = run_python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: python -m zeroshard run script.py" in result.stdout
    assert "usage: zeroshard doctor" in result.stdout
    assert result.stdout.endswith(f"zeroshard {__version__}\n")


def test_help_lists_commands_and_each_parses_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in ("checkpoint", "plan", "run", "doctor", "--version"))
    assert status_of("checkpoint", "--help") == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in ("inspect", "convert"))
    assert status_of("doctor", "--backend", "mpi") == 2
    assert "usage: zeroshard doctor" in capsys.readouterr().err
    assert status_of("run", "--help") == 0
    assert "-m zeroshard run -m package.module" in capsys.readouterr().out


FULL_DISK = """
import resource, sys
from zeroshard.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
for kind in ("torch", "dcp", "safetensors"):
    try:
        main(["checkpoint", "convert", sys.argv[1], sys.argv[2], "--to", kind])
    except SystemExit as ended:
        print(ended.code)
"""


def test_full_disk_leaves_no_files(tmp_path: Path) -> None:
    """A limit on the file size stands in for a full disk."""
    torch.save({"model": {"a": torch.ones(100, 100), "b": torch.ones(100, 100)}}, tmp_path / "it.pt")
    result = run_python("-c", FULL_DISK, str(tmp_path / "it.pt"), str(tmp_path / "target"))
    assert (result.returncode, result.stdout.split()) == (0, ["1"] * 3), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"Error: {tmp_path / 'target'} could not be written: ") for line in lines)
    assert [entry.name for entry in tmp_path.iterdir()] == ["it.pt"]


SAVE_LARGE_CHECKPOINT = """
import hashlib, sys, torch
from zeroshard import checkpoint
model = torch.nn.Linear(8192, 5632, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
model.weight.grad = torch.randn(5632, 8192)
optimizer.step()
model.weight.grad = None
checkpoint.save(sys.argv[1] + "/saved", step=1, model=model, optimizer=optimizer)
state = optimizer.state[model.weight]
for tensor in (model.weight.detach(), state["exp_avg"], state["exp_avg_sq"]):
    print(hashlib.sha256(tensor.numpy()).hexdigest())
"""
MEASURE_PEAK_MEMORY = """
import sys, threading, time
from zeroshard.cli.app import main

def now(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

peak, over = {"RssAnon": 0.0, "VmRSS": 0.0}, threading.Event()
def watch():
    while not over.wait(0.005):
        for field in peak:
            peak[field] = max(peak[field], now(field))

before = {field: now(field) for field in peak}
watcher = threading.Thread(target=watch)
watcher.start()
try:
    main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code or 0
over.set()
watcher.join()
print(status, peak["RssAnon"] - before["RssAnon"], peak["VmRSS"] - before["VmRSS"])
"""
MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.timeout(240)
def test_convert_peak_memory(tmp_path: Path) -> None:
    """Convert three tensors of 176 MiB each (528 MiB), each format from the previous one."""
    saved = run_python("-c", SAVE_LARGE_CHECKPOINT, str(tmp_path))
    assert saved.returncode == 0, saved.stderr
    source = tmp_path / "saved"
    for kind in ("torch", "dcp", "safetensors"):
        target = tmp_path / f"as-{kind}"
        result = run_python("-c", MEASURE_PEAK_MEMORY, "checkpoint", "convert", str(source), str(target), "--to", kind)
        assert result.returncode == 0, result.stderr
        status, anonymous, resident = map(float, result.stdout.splitlines()[-1].split())
        assert status == 0
        assert anonymous < 150, kind
        if kind != "dcp":  # the source is memory-mapped, and its pages count as resident while memory is plentiful
            assert resident < 200, kind
        shutil.rmtree(source) if source.is_dir() else source.unlink()
        source = target
    assert source.stat().st_size > 528 * MIB
    names = ("model.weight", "optim.state.weight.exp_avg", "optim.state.weight.exp_avg_sq")
    with safe_open(source, framework="pt") as tensors:
        digests = [hashlib.sha256(tensors.get_tensor(name).numpy()).hexdigest() for name in names]
    assert digests == saved.stdout.split()
    source.unlink()
