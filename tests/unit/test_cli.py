"""The command line: inspecting and converting checkpoints, its errors and its memory use."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.checkpoints import assert_same_state, by_name, net, plain, train
from tests.support.tools import convert, status_of
from zeroshard import __version__, checkpoint
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
    found, model = inspect_json(capsys, saved), net()
    assert found["path"] == str(saved / "step-000000002")
    assert (found["step"], found["world_size"], found["torch"]) == (2, 1, torch.__version__)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert {name: value["shape"] for name, value in found["model"].items()} == shapes
    assert list(found["model"]) == list(model.state_dict())
    assert {value["dtype"] for value in found["model"].values()} == {"float32"}
    assert found["state_keys"] == ["exp_avg", "exp_avg_sq", "step"]
    assert found["state"]["mix"]["exp_avg"] == {"shape": shapes["mix"], "dtype": "float32", "bytes": 96}
    assert found["state"].keys() == dict(model.named_parameters()).keys() - {"unused"}
    assert found["other"].keys() == {"ranks.0"}
    size = sum(file.stat().st_size for file in (saved / "step-000000002").glob("*.distcp"))
    assert found["ranks"] == {"0": {"files": 1, "bytes": size}}
    totals = found["totals"]
    elements = sum(value.numel() for value in model.state_dict().values())
    assert (totals["elements"], totals["model_bytes"], totals["file_bytes"]) == (elements, 4 * elements, size)
    trained = sum(param.numel() for name, param in model.named_parameters() if name != "unused")
    assert totals["state_bytes"] == 4 * (2 * trained + len(found["state"]))


def test_inspect_one_step(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_json(capsys, saved / "step-000000001")["step"] == 1


def test_inspect_foreign_dcp_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"weights": {"a": torch.ones(2, 3)}, "epoch": 4}, checkpoint_id=tmp_path / "it", no_dist=True)
    found = inspect_json(capsys, tmp_path / "it")
    assert (found["step"], found["world_size"], found["model"], found["state"]) == (None, 1, {}, {})
    assert found["other"]["weights.a"] == {"shape": [2, 3], "dtype": "float32", "bytes": 24}
    assert found["other"]["epoch"] == {"shape": None, "dtype": None, "bytes": 0}


def test_inspect_tables_are_complete(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("checkpoint", "inspect", saved) == 0
    out = capsys.readouterr().out
    for word in (
        "step 2",
        "saved by 1 rank",
        *net().state_dict(),
        "6 x 5",
        "scalar",
        "float32",
        "exp_avg",
        "ranks.0",
        "random states",
    ):
        assert word in out


def test_names_are_escaped_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"model": {"[red]\x1b[2J": torch.ones(2)}}, checkpoint_id=tmp_path / "it", no_dist=True)
    assert status_of("checkpoint", "inspect", tmp_path / "it") == 0
    out = capsys.readouterr().out
    assert "[red]?[2J" in out
    assert "\x1b" not in out


# ---- convert


def various_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    base = torch.randn(6, 4, 5, generator=draw)
    return {
        "plain": base,
        "permuted": base.permute(2, 0, 1),
        "gaps": base[::2, :, 1:4],
        "expanded": torch.randn(5, 1, generator=draw).expand(5, 7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "brain": base.bfloat16(),
        "half": base.half(),
        "eighth": base.to(torch.float8_e4m3fn),
        "double": base.double(),
        "long": base.mul(100).long(),
        "flags": base > 0,
        "bytes": base.mul(20).byte(),
        "complex": torch.view_as_complex(torch.randn(4, 3, 2, generator=draw)),
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_model(target: Path, kind: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the model with the usual tool for the format."""
    if kind == "torch":
        model: dict[str, torch.Tensor] = torch.load(target, weights_only=True)["model"]
        return model
    if kind == "safetensors":
        return {name.removeprefix("model."): value for name, value in load_file(target).items()}
    into = {"model": {name: torch.empty(value.shape, dtype=value.dtype) for name, value in like.items()}}
    dcp_load(into, checkpoint_id=target, no_dist=True)
    return into["model"]


@every_format
@pytest.mark.parametrize("most", [16, 100, cli_checkpoint.MAX_CHUNK_BYTES])
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "directory"])
def test_convert_any_tensor_in_chunks_of_any_size(
    tmp_path: Path, kind: str, most: int, from_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_checkpoint, "MAX_CHUNK_BYTES", most)
    model, source = various_tensors(), tmp_path / "source"
    if from_file:
        torch.save({"model": model}, source)
    else:
        dcp_save({"model": model}, checkpoint_id=source, no_dist=True)
    found = read_model(convert(source, tmp_path / "target", kind), kind, model)
    assert found.keys() == model.keys()
    for name, value in model.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert raw_bytes(found[name]) == raw_bytes(value), name


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("key", ["optim", "optimizer"])
def test_convert_file_of_unsharded_script(tmp_path: Path, named: bool, key: str) -> None:
    """With parameter names in the groups, or by position where that is unambiguous."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), key: optimizer.state_dict()}, tmp_path / "it.pt")
    convert(tmp_path / "it.pt", tmp_path / "it", "dcp")
    again = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    into = torch.optim.AdamW(again.parameters())
    checkpoint.load(tmp_path / "it", model=again, optimizer=into)
    assert into.param_groups[0]["lr"] == 0.1
    assert_same_state(by_name(into, into.state_dict(), again), by_name(optimizer, optimizer.state_dict(), model))
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_convert_tensor_options_and_state(tmp_path: Path) -> None:
    """Converting to a directory and back to a file keeps values and their order."""
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=torch.tensor(0.1), momentum=0.9)
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "note": ["a", 1]}, tmp_path / "1.pt")
    convert(tmp_path / "1.pt", tmp_path / "2", "dcp")
    found = torch.load(convert(tmp_path / "2", tmp_path / "3.pt", "torch"), weights_only=True)
    assert found["note"] == ["a", 1]
    expected = optimizer.state_dict()
    assert found["optim"]["param_groups"] == expected["param_groups"]
    assert torch.equal(found["optim"]["param_groups"][0]["lr"], torch.tensor(0.1))
    assert list(found["optim"]["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert torch.equal(found["optim"]["state"][number]["momentum_buffer"], state["momentum_buffer"])


# ---- errors


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
    assert error == f"Error: {tmp_path / 'there'} exists already. Remove it first, or give another name."
    assert (tmp_path / "there").read_text() == "mine"


def test_parent_directory_must_exist(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = expect_error(capsys, "checkpoint", "convert", saved, tmp_path / "no" / "where", "--to", "torch")
    assert "no is no directory: make it first" in error


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_source_is_not_a_checkpoint(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(tmp_path / "target"), "--to", "torch"] if command == "convert" else []
    (tmp_path / "empty").mkdir()
    assert "does not exist" in expect_error(capsys, "checkpoint", command, tmp_path / "nothing", *options)
    assert "has no checkpoint in it" in expect_error(capsys, "checkpoint", command, tmp_path / "empty", *options)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty"]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_truncated_checkpoint(saved: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (saved / "step-000000002").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    options = [str(tmp_path / "target"), "--to", "torch"] if command == "convert" else []
    assert f"{file} is truncated" in expect_error(capsys, "checkpoint", command, saved, *options)
    assert not (tmp_path / "target").exists()


def flip_byte(file: Path, place: int) -> None:
    """Change one byte."""
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1
    file.write_bytes(whole)


def offset_in_weight(file: Path) -> int:
    """Offset of a byte in the middle of a parameter, which torch does not check."""
    return file.read_bytes().index(trained_net(2).get_parameter("enter.weight").detach().numpy().tobytes()) + 50


def trained_net(steps: int) -> nn.Module:
    """The model that the fixture `saved` has at this step."""
    model = net()
    train(model, plain(model), steps, first=1)
    return model


def load_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(path, model=net())
    return str(refused.value)


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
    again = net(seed=1)
    assert checkpoint.load(tmp_path / "it", model=again).step == 2
    assert all(map(torch.equal, again.parameters(), trained_net(2).parameters()))
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
    whole = file.read_bytes()
    middle = whole.index(b"PK", len(whole) // 2)
    file.write_bytes(whole[:middle] + bytes(len(whole) - middle))
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


def test_files_of_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "text", tmp_path / "target", "--to", "dcp")
    assert "text cannot be read as a file of torch.save" in error
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "list.pt", tmp_path / "target", "--to", "dcp")
    assert "list.pt has neither a 'model' nor an 'optim'" in error
    tensors = tmp_path / "x.safetensors"
    tensors.write_bytes(b"")
    assert status_of("checkpoint", "convert", tensors, tmp_path / "y", "--to", "dcp") == 1
    assert "safetensors are written, but not read" in capsys.readouterr().err


def test_ambiguous_optimizer_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has a buffer, so positions alone do not identify the parameters."""
    model = net()
    optimizer = plain(model)
    train(model, optimizer, 1)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "it.pt")
    error = expect_error(capsys, "checkpoint", "convert", tmp_path / "it.pt", tmp_path / "it", "--to", "dcp")
    assert "does not say which parameters the optimizer's state belongs to" in error


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
    found = [torch.load(tmp_path / "torch", weights_only=True), load_file(tmp_path / "safetensors"), from_dcp]
    for weights in found:
        again = net(seed=5)
        again.load_state_dict(weights)
        assert all(torch.equal(it, expected.state_dict()[name]) for name, it in again.state_dict().items())


@every_format
def test_weights_only_keeps_names(tmp_path: Path, kind: str) -> None:
    """Including names that a checkpoint uses for its own parts."""
    weights = {name: torch.arange(3.0) + at for at, name in enumerate(("model", "optim", "scheduler", "ranks.0"))}
    torch.save({"model": weights, "scheduler": {"last_epoch": 3}}, tmp_path / "it.pt")
    convert(tmp_path / "it.pt", tmp_path / "target", kind, "--weights-only")
    found: Any = {name: torch.zeros(3) for name in weights}
    if kind == "dcp":
        dcp_load(found, checkpoint_id=tmp_path / "target")
    else:
        found = torch.load(tmp_path / "target") if kind == "torch" else load_file(tmp_path / "target")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_weights_only_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(tmp_path / "saved", step=1, optimizer=plain(net()))
    error = expect_error(
        capsys, "checkpoint", "convert", tmp_path / "saved", tmp_path / "it.pt", "--to", "torch", "--weights-only"
    )
    assert f"{tmp_path / 'saved'} has no weights: they are expected under 'model'" in error
    assert "there are ['optim', 'ranks']" in error
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
    done = run_python("-m", "zeroshard", "checkpoint", "inspect", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {tmp_path} has no checkpoint in it\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_says_how_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from zeroshard.__main__ import main; main()"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
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
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m zeroshard run script.py" in done.stdout
    assert "usage: zeroshard doctor" in done.stdout
    assert done.stdout.endswith(f"zeroshard {__version__}\n")


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
    done = run_python("-c", FULL_DISK, str(tmp_path / "it.pt"), str(tmp_path / "target"))
    assert (done.returncode, done.stdout.split()) == (0, ["1"] * 3), done.stderr
    lines = done.stderr.splitlines()
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
    """Convert 528 MiB in three tensors of 176 MiB, each format from the one before."""
    made = run_python("-c", SAVE_LARGE_CHECKPOINT, str(tmp_path))
    assert made.returncode == 0, made.stderr
    source = tmp_path / "saved"
    for kind in ("torch", "dcp", "safetensors"):
        target = tmp_path / f"as-{kind}"
        done = run_python("-c", MEASURE_PEAK_MEMORY, "checkpoint", "convert", str(source), str(target), "--to", kind)
        assert done.returncode == 0, done.stderr
        status, anonymous, resident = map(float, done.stdout.split())
        assert status == 0
        assert anonymous < 150, kind
        if kind != "dcp":  # there the source is mapped, and its pages count as resident while memory is plenty
            assert resident < 200, kind
        shutil.rmtree(source) if source.is_dir() else source.unlink()
        source = target
    assert source.stat().st_size > 528 * MIB
    names = ("model.weight", "optim.state.weight.exp_avg", "optim.state.weight.exp_avg_sq")
    with safe_open(source, framework="pt") as found:
        digests = [hashlib.sha256(found.get_tensor(name).numpy()).hexdigest() for name in names]
    assert digests == made.stdout.split()
    source.unlink()
