"""Damaged, foreign or malicious checkpoints and invalid arguments are rejected with a reason and change nothing.

These tests run in a process group of one. `tests/distributed/test_checkpoint_failures.py` checks that all ranks reject
a checkpoint when one of them does.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.checkpoints import (
    Evil,
    Net,
    TrainingRun,
    dropin,
    edit_metadata,
    files_below,
    flat,
    net,
    on_rank_0,
    refused,
    train,
    whole,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import ConfigError, checkpoint, shard
from zeroshard.checkpoint.directory import MANIFEST_FILE, Manifest
from zeroshard.state.serialization import dumps

pytestmark = pytest.mark.usefixtures("single_rank")

Damage = Callable[[Path], object]
DATA = "__0_0.distcp"


# ---- damaged files


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bit(file: Path) -> None:
    """Flip one bit in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def use_data_of_previous_checkpoint(directory: Path) -> None:
    """Replace the data file by the previous checkpoint's, which has the same name and size."""
    before = directory.parent / "step-000000001" / DATA
    assert before.stat().st_size == (directory / DATA).stat().st_size
    (directory / DATA).write_bytes(before.read_bytes())


def remove_rank_from_metadata(directory: Path) -> None:
    edit_metadata(directory, lambda it: it.planner_data.pop("ranks.0"))


def write_noise(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(500))


def rename_data_file(name: str) -> Damage:
    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    return lambda directory: edit_metadata(directory, edit)


def clear_chunks(metadata: Any) -> None:
    for it in metadata.state_dict_metadata.values():
        if hasattr(it, "chunks"):
            it.chunks.clear()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no metadata": (lambda it: (it / ".metadata").unlink(), r"no \.metadata"),
    "truncated metadata": (lambda it: truncate(it / ".metadata"), r"\.metadata cannot be read"),
    "empty metadata": (lambda it: (it / ".metadata").write_bytes(b""), r"\.metadata cannot be read"),
    "noise as metadata": (lambda it: write_noise(it / ".metadata"), r"\.metadata cannot be read"),
    "no chunks": (lambda it: edit_metadata(it, clear_chunks), r"\.metadata contradicts itself.*parts with 0 of them"),
    "other metadata": (remove_rank_from_metadata, r"\.metadata is damaged"),
    "no data": (lambda it: (it / DATA).unlink(), f"{DATA} is missing"),
    "truncated data": (lambda it: truncate(it / DATA), f"{DATA} is truncated"),
    "flipped bit": (lambda it: flip_bit(it / DATA), f"{DATA} is damaged"),
    "data of other checkpoint": (use_data_of_previous_checkpoint, f"{DATA} is damaged, or of another checkpoint"),
    "truncated manifest": (lambda it: truncate(it / MANIFEST_FILE), f"{MANIFEST_FILE} cannot be read"),
    "invalid manifest": (
        lambda it: (it / MANIFEST_FILE).write_text('{"format": 1, "step": []}'),
        f"{MANIFEST_FILE} cannot be",
    ),
    "newer manifest": (lambda it: (it / MANIFEST_FILE).write_text('{"format": 2}'), "newer version"),
    "parent path": (rename_data_file("../x"), "outside its directory: '../x'"),
    "absolute path": (rename_data_file("/etc/passwd"), "outside its directory: '/etc/passwd'"),
    "parent directory": (rename_data_file(".."), "outside its directory"),
    "path is not a string": (rename_data_file(7), "outside its directory"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    train(run.model, run.optimizer, 1)
    directory = run.save(tmp_path, 2)
    spoil, match = DAMAGES[damage]
    on_rank_0(lambda: spoil(directory))
    other = TrainingRun(seed=5)
    for path in (tmp_path, directory):
        if damage == "no metadata" and path == directory:
            match = "no checkpoint in it"
        with refused(other, match, tmp_path):
            other.load(path)
    other.load(tmp_path / "step-000000001")


DAMAGES_WITHOUT_MANIFEST: dict[str, tuple[Damage, str]] = {
    "truncated data": (lambda it: truncate(it / DATA), f"{DATA} is truncated"),
    "noise": (
        lambda it: (it / DATA).write_bytes(bytes((it / DATA).stat().st_size)),
        f"'.*' in .*{DATA} cannot be read",
    ),
    "no chunks": (lambda it: edit_metadata(it, clear_chunks), "elements, but parts with 0 of them"),
    "no planner data": (lambda it: edit_metadata(it, lambda m: m.planner_data.clear()), "has no optimizer|other model"),
}


@pytest.mark.parametrize("damage", DAMAGES_WITHOUT_MANIFEST)
def test_damaged_files_without_checksums(tmp_path: Path, damage: str) -> None:
    """As other tools write them: torch detects fewer problems and reports them less clearly."""
    directory = TrainingRun().save(tmp_path)
    on_rank_0((directory / MANIFEST_FILE).unlink)
    spoil, match = DAMAGES_WITHOUT_MANIFEST[damage]
    on_rank_0(lambda: spoil(directory))
    other = TrainingRun(seed=5)
    with refused(other, match, tmp_path):
        checkpoint.load(directory, **other.parts(scheduler=False))


# ---- malicious files


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    directory = run.save(tmp_path / "run")
    for evil in (Evil(marker), Metadata({}, planner_data=Evil(marker))):
        on_rank_0(partial((directory / ".metadata").write_bytes, pickle.dumps(evil)))
        with refused(run, "no part of a checkpoint's metadata", tmp_path):
            run.load(tmp_path / "run")
    assert not marker.exists()


@pytest.mark.parametrize("place", ["groups", "state", "model"])
def test_data_cannot_run_code(tmp_path: Path, place: str) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    run.save(tmp_path / "run")
    evil = Evil(marker)
    names = [name for name, _ in run.model.named_parameters()]
    group = {"params": names, "lr": evil if place == "groups" else 0.1}
    optim = {"state": {name: {"step": evil if place == "state" else 1.0} for name in names}, "param_groups": [group]}
    model: dict[str, Any] = dict(run.model.state_dict())
    if place == "model":
        model["unused"] = evil
    dcp_save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "evil")
    match = {"groups": r"'optim.param_groups.0.lr' holds a type .* run code \(.*posix.system", "state": "another optim"}
    with refused(run, match.get(place, "another model"), tmp_path):
        checkpoint.load(tmp_path / "evil", **run.parts(scheduler=False))
    assert not marker.exists()


def to_byte_tensor(value: Any, *, safely: bool = True) -> torch.Tensor:
    if safely:
        return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


@pytest.mark.parametrize("place", ["ranks", "scheduler"])
@pytest.mark.parametrize("kind", ["evil", "noise", "wrong"])
def test_packed_values_cannot_run_code(tmp_path: Path, place: str, kind: str) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    values = {
        "evil": to_byte_tensor({"random": Evil(marker), "extra": Evil(marker)}, safely=False),
        "noise": torch.arange(100, dtype=torch.uint8),
        "wrong": to_byte_tensor({"random": {"torch": torch.zeros(3), "python": []}, "extra": 1}),
    }
    good = to_byte_tensor(run.scheduler.state_dict())
    contents: dict[str, Any] = {"model": run.model.state_dict(), "scheduler": good}
    contents[place] = {"0": values[kind]} if place == "ranks" else values[kind]
    dcp_save(contents, checkpoint_id=tmp_path / "evil")
    text = Manifest(1, 1, files_below(tmp_path / "evil"), 0.0, "").to_json()
    on_rank_0(lambda: (tmp_path / "evil" / MANIFEST_FILE).write_text(text))
    if kind == "wrong" and place == "scheduler":
        return  # a scheduler takes any dict
    reason = {"evil": "GLOBAL posix.system", "noise": "", "wrong": ""}[kind]
    with refused(run, f"'{place}.* cannot be read.*{reason}", tmp_path):
        checkpoint.load(tmp_path / "evil", model=run.model, scheduler=run.scheduler)
    assert not marker.exists()


# ---- checkpoints of other models and optimizers


def test_path_is_not_a_checkpoint(tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0((tmp_path / "empty").mkdir)
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    with refused(run, "nothing does not exist", tmp_path):
        run.load(tmp_path / "nothing")
    with refused(run, "no checkpoint in it", tmp_path):
        run.load(tmp_path / "empty")
    with refused(run, "file is a file", tmp_path):
        run.load(tmp_path / "file")


class WiderNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(2, 4, 2)


class NetWithExtraParam(Net):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("way", [flat, whole, dropin, None])
def test_checkpoint_of_other_model(tmp_path: Path, way: Any) -> None:
    run, extended, wider = (
        TrainingRun(way=way),
        TrainingRun(way=way, model=NetWithExtraParam()),
        TrainingRun(way=way, model=WiderNet()),
    )
    run.save(tmp_path / "short")
    extended.save(tmp_path / "long")
    with refused(run, "Only there: further", tmp_path):
        run.load(tmp_path / "long")
    with refused(extended, "Missing there: further", tmp_path):
        extended.load(tmp_path / "short")
    with refused(wider, r"'model.kernel.* in .* has shape \(3.*\(4", tmp_path):
        wider.load(tmp_path / "short")
    alone = set_param_names(wider)
    with refused(wider, r"kernel.* in .* has shape \(3.*kernel.* has \(4", tmp_path):
        checkpoint.load(tmp_path / "short", optimizer=alone)


def set_param_names(run: TrainingRun) -> Any:
    """Give the optimizer the model's parameter names, which it then has without the model too."""
    for group in run.optimizer.param_groups:
        group.setdefault("param_names", [name for name, _ in run.model.named_parameters()])
    return run.optimizer


@pytest.mark.parametrize("way", [flat, whole, None])
def test_non_strict_load_keeps_missing_entries(tmp_path: Path, way: Any) -> None:
    """Parameters that are missing in the checkpoint keep their value and state."""
    run, extended = TrainingRun(way=way), TrainingRun(seed=3, way=way, model=NetWithExtraParam())
    run.save(tmp_path)
    before = extended.look()
    loaded = extended.load(tmp_path, strict=False)
    after = extended.look()
    assert loaded.step == 2
    assert torch.equal(after["model"]["further"], before["model"]["further"])
    assert torch.equal(after["model"]["mix"], run.model.state_dict()["mix"])
    if before["optimizer"] is not None:
        last = len(list(extended.model.parameters())) - 1
        order = [name for name, _ in extended.model.named_parameters()].index("further")
        assert 0 <= order <= last
        assert_same(after["optimizer"]["state"].get(order), before["optimizer"]["state"].get(order), "further")


def test_missing_parts(tmp_path: Path) -> None:
    run = TrainingRun()
    checkpoint.save(tmp_path, step=1, model=run.model)
    with refused(run, "no optimizer in it", tmp_path):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
    with refused(run, "no scheduler in it", tmp_path):
        checkpoint.load(tmp_path, model=run.model, scheduler=run.scheduler)
    other = TrainingRun(seed=4)
    before = other.look()
    other.load(tmp_path, strict=False)
    assert_same({**other.look(), "model": 0, "random": 0}, {**before, "model": 0, "random": 0}, "what is not there")
    assert_same(other.model.state_dict(), run.model.state_dict(), "the model")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@sampled("saved", OPTIMIZERS)
def test_checkpoint_of_other_optimizer_class(tmp_path: Path, saved: str) -> None:
    model = net()
    ours = shard(model, OPTIMIZERS[saved])
    train(model, ours, 2)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=ours)
    for kind, made in OPTIMIZERS.items():
        for steps in (0, 2):
            for sharded in (True, False):
                run = TrainingRun(seed=2, steps=0)
                run.model = net(2)
                run.optimizer = shard(run.model, made) if sharded else made(run.model.parameters())
                train(run.model, run.optimizer, steps)
                if kind == saved:
                    checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
                    train(run.model, run.optimizer, 1)
                elif {kind, saved} != {"SGD", "momentum"}:  # the same class
                    with refused(run, "is of another optimizer class", tmp_path):
                        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


def test_invalid_arguments_of_save(tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    with refused(run, "step-000000002 exists already", tmp_path):
        run.save(tmp_path)
    for step in (-1, 1.5, "3", None, True):
        with refused(run, "step must be", tmp_path, error=ConfigError):
            run.save(tmp_path, step)  # type: ignore[arg-type]
    for keep in (0, -1, 1.5, "3", True):
        with refused(run, "keep must be", tmp_path, error=ConfigError):
            run.save(tmp_path, 3, keep=keep)
