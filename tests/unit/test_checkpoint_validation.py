"""Damaged, foreign or malicious checkpoints and invalid arguments are rejected with a reason and change nothing.

These tests run in a process group with a single rank. `tests/distributed/test_checkpoint_failures.py` checks that all
ranks reject a checkpoint when one of them does.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from functools import partial
from itertools import product
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
    assert_rejected,
    dropin,
    edit_metadata,
    file_checksums,
    flat,
    net,
    on_rank_0,
    train,
    whole,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import ConfigError, ParamRule, checkpoint, matrix_params, remaining_params, shard
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
    edit_metadata(directory, lambda dcp_metadata: dcp_metadata.planner_data.pop("ranks.0"))


def write_noise(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(500))


def rename_data_file(name: str) -> Damage:
    def edit(dcp_metadata: Any) -> None:
        next(iter(dcp_metadata.storage_data.values())).relative_path = name

    return lambda directory: edit_metadata(directory, edit)


def clear_chunks(dcp_metadata: Any) -> None:
    for entry in dcp_metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            entry.chunks.clear()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no metadata": (lambda directory: (directory / ".metadata").unlink(), r"no \.metadata"),
    "truncated metadata": (lambda directory: truncate(directory / ".metadata"), r"\.metadata cannot be read"),
    "empty metadata": (lambda directory: (directory / ".metadata").write_bytes(b""), r"\.metadata cannot be read"),
    "noise as metadata": (lambda directory: write_noise(directory / ".metadata"), r"\.metadata cannot be read"),
    "no chunks": (
        lambda directory: edit_metadata(directory, clear_chunks),
        r"\.metadata is inconsistent.*in total, got 0",
    ),
    "other metadata": (remove_rank_from_metadata, r"\.metadata is damaged"),
    "no data": (lambda directory: (directory / DATA).unlink(), f"{DATA} is missing"),
    "truncated data": (lambda directory: truncate(directory / DATA), f"{DATA} is truncated"),
    "flipped bit": (lambda directory: flip_bit(directory / DATA), f"{DATA} is damaged"),
    "data of other checkpoint": (
        use_data_of_previous_checkpoint,
        f"{DATA} is damaged or belongs to another checkpoint",
    ),
    "truncated manifest": (lambda directory: truncate(directory / MANIFEST_FILE), f"{MANIFEST_FILE} cannot be read"),
    "invalid manifest": (
        lambda directory: (directory / MANIFEST_FILE).write_text('{"format": 1, "step": []}'),
        f"{MANIFEST_FILE} cannot be",
    ),
    "newer manifest": (lambda directory: (directory / MANIFEST_FILE).write_text('{"format": 2}'), "newer zeroshard"),
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
    apply_damage, match = DAMAGES[damage]
    on_rank_0(lambda: apply_damage(directory))
    other = TrainingRun(seed=5)
    for path in (tmp_path, directory):
        if damage == "no metadata" and path == directory:
            match = "contains no checkpoint"
        with assert_rejected(other, match, tmp_path):
            other.load(path)
    other.load(tmp_path / "step-000000001")


DAMAGES_WITHOUT_MANIFEST: dict[str, tuple[Damage, str]] = {
    "truncated data": (lambda directory: truncate(directory / DATA), f"{DATA} is truncated"),
    "noise": (
        lambda directory: (directory / DATA).write_bytes(bytes((directory / DATA).stat().st_size)),
        f"'.*' in .*{DATA} cannot be read",
    ),
    "no chunks": (lambda directory: edit_metadata(directory, clear_chunks), "elements in total, got 0"),
    "no planner data": (
        lambda directory: edit_metadata(directory, lambda dcp_metadata: dcp_metadata.planner_data.clear()),
        "has no optimizer|other model",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES_WITHOUT_MANIFEST)
def test_damaged_files_without_checksums(tmp_path: Path, damage: str) -> None:
    """Other tools write checkpoints without them. torch detects fewer problems and reports them less clearly."""
    directory = TrainingRun().save(tmp_path)
    on_rank_0((directory / MANIFEST_FILE).unlink)
    apply_damage, match = DAMAGES_WITHOUT_MANIFEST[damage]
    on_rank_0(lambda: apply_damage(directory))
    other = TrainingRun(seed=5)
    with assert_rejected(other, match, tmp_path):
        checkpoint.load(directory, **other.parts(scheduler=False))


# ---- malicious files


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    directory = run.save(tmp_path / "run")
    for evil in (Evil(marker), Metadata({}, planner_data=Evil(marker))):
        on_rank_0(partial((directory / ".metadata").write_bytes, pickle.dumps(evil)))
        with assert_rejected(run, "which checkpoint metadata does not contain", tmp_path):
            run.load(tmp_path / "run")
    assert not marker.exists()


@pytest.mark.parametrize("section", ["groups", "state", "model"])
def test_data_cannot_run_code(tmp_path: Path, section: str) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    run.save(tmp_path / "run")
    evil = Evil(marker)
    names = [name for name, _ in run.model.named_parameters()]
    group = {"params": names, "lr": evil if section == "groups" else 0.1}
    optim = {"state": {name: {"step": evil if section == "state" else 1.0} for name in names}, "param_groups": [group]}
    model: dict[str, Any] = dict(run.model.state_dict())
    if section == "model":
        model["unused"] = evil
    dcp_save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "evil")
    match = {
        "groups": r"'optim.param_groups.0.lr' has a type that could run code .*posix.system",
        "state": "another op",
    }
    with assert_rejected(run, match.get(section, "another model"), tmp_path):
        checkpoint.load(tmp_path / "evil", **run.parts(scheduler=False))
    assert not marker.exists()


def to_byte_tensor(value: Any, *, safely: bool = True) -> torch.Tensor:
    if safely:
        return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        *product(["evil", "noise"], ["ranks", "scheduler"]),
        ("wrong", "ranks"),  # a scheduler takes any dict
    ],
)
def test_packed_values_cannot_run_code(tmp_path: Path, kind: str, section: str) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    values = {
        "evil": to_byte_tensor({"random": Evil(marker), "extra": Evil(marker)}, safely=False),
        "noise": torch.arange(100, dtype=torch.uint8),
        "wrong": to_byte_tensor({"random": {"torch": torch.zeros(3), "python": []}, "extra": 1}),
    }
    good = to_byte_tensor(run.scheduler.state_dict())
    contents: dict[str, Any] = {"model": run.model.state_dict(), "scheduler": good}
    contents[section] = {"0": values[kind]} if section == "ranks" else values[kind]
    dcp_save(contents, checkpoint_id=tmp_path / "evil")
    text = Manifest(1, 1, file_checksums(tmp_path / "evil"), 0.0, "").to_json()
    on_rank_0(lambda: (tmp_path / "evil" / MANIFEST_FILE).write_text(text))
    reason = {"evil": "GLOBAL posix.system", "noise": "", "wrong": ""}[kind]
    with assert_rejected(run, f"'{section}.* cannot be read.*{reason}", tmp_path):
        checkpoint.load(tmp_path / "evil", model=run.model, scheduler=run.scheduler)
    assert not marker.exists()


# ---- checkpoints of other models and optimizers


def test_path_is_not_a_checkpoint(tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0((tmp_path / "empty").mkdir)
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    with assert_rejected(run, "nothing does not exist", tmp_path):
        run.load(tmp_path / "nothing")
    with assert_rejected(run, "contains no checkpoint", tmp_path):
        run.load(tmp_path / "empty")
    with assert_rejected(run, "expected a checkpoint directory, got the file .*file", tmp_path):
        run.load(tmp_path / "file")


class WiderNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(2, 4, 2)


class NetWithExtraParam(Net):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.further.sum()


@pytest.mark.parametrize("make_optimizer", [flat, whole, dropin, None])
def test_checkpoint_of_other_model(tmp_path: Path, make_optimizer: Any) -> None:
    run, extended, wider = (
        TrainingRun(make_optimizer=make_optimizer),
        TrainingRun(make_optimizer=make_optimizer, model=NetWithExtraParam()),
        TrainingRun(make_optimizer=make_optimizer, model=WiderNet()),
    )
    run.save(tmp_path / "short")
    extended.save(tmp_path / "long")
    with assert_rejected(run, "Only in the checkpoint: further", tmp_path):
        run.load(tmp_path / "long")
    with assert_rejected(extended, "Missing from the checkpoint: further", tmp_path):
        extended.load(tmp_path / "short")
    with assert_rejected(wider, r"'model.kernel.* in .* expected shape \(4.*got shape \(3", tmp_path):
        wider.load(tmp_path / "short")
    optimizer = set_param_names(wider)
    with assert_rejected(wider, r"kernel.* in .* expected shape \(4.*kernel.*got \(3", tmp_path):
        checkpoint.load(tmp_path / "short", optimizer=optimizer)


def set_param_names(run: TrainingRun) -> Any:
    """Store the model's parameter names in the optimizer, for loading without the model."""
    for group in run.optimizer.param_groups:
        group.setdefault("param_names", [name for name, _ in run.model.named_parameters()])
    return run.optimizer


@pytest.mark.parametrize("make_optimizer", [flat, whole, None])
def test_non_strict_load_keeps_missing_entries(tmp_path: Path, make_optimizer: Any) -> None:
    """Parameters that are missing in the checkpoint keep their value and state."""
    run, extended = (
        TrainingRun(make_optimizer=make_optimizer),
        TrainingRun(seed=3, make_optimizer=make_optimizer, model=NetWithExtraParam()),
    )
    run.save(tmp_path)
    before = extended.capture()
    loaded = extended.load(tmp_path, strict=False)
    after = extended.capture()
    assert loaded.step == 2
    assert torch.equal(after["model"]["further"], before["model"]["further"])
    assert torch.equal(after["model"]["mix"], run.model.state_dict()["mix"])
    if before["optimizer"] is not None:
        index = [name for name, _ in extended.model.named_parameters()].index("further")
        assert_same(after["optimizer"]["state"][index], before["optimizer"]["state"][index], "further")


def test_missing_parts(tmp_path: Path) -> None:
    run = TrainingRun()
    checkpoint.save(tmp_path, step=1, model=run.model)
    with assert_rejected(run, "contains no optimizer", tmp_path):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
    with assert_rejected(run, "contains no scheduler", tmp_path):
        checkpoint.load(tmp_path, model=run.model, scheduler=run.scheduler)
    other = TrainingRun(seed=4)
    before = other.capture()
    other.load(tmp_path, strict=False)
    assert_same(
        {**other.capture(), "model": 0, "random": 0},
        {**before, "model": 0, "random": 0},
        "objects that the checkpoint does not contain",
    )
    assert_same(other.model.state_dict(), run.model.state_dict(), "the model")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RAdam": torch.optim.RAdam,  # keeps the state keys of AdamW
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@sampled("saved", OPTIMIZERS)
def test_checkpoint_of_other_optimizer_class(tmp_path: Path, saved: str) -> None:
    model = net()
    optimizer = shard(model, OPTIMIZERS[saved])
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    for name, make_optimizer in OPTIMIZERS.items():
        for steps in (0, 2):
            for sharded in (True, False):
                run = TrainingRun(seed=2, steps=0)
                run.model = net(2)
                run.optimizer = shard(run.model, make_optimizer) if sharded else make_optimizer(run.model.parameters())
                train(run.model, run.optimizer, steps)
                if name == saved:
                    checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
                    train(run.model, run.optimizer, 1)
                elif {name, saved} != {"SGD", "momentum"}:  # the same class
                    both = "state of {} .* but this optimizer uses {}[.,]".format(
                        *(key.replace("momentum", "SGD") for key in (saved, name))
                    )
                    with assert_rejected(run, both, tmp_path):
                        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


def test_state_with_equal_keys_loads_into_another_class_without_strict(tmp_path: Path) -> None:
    run, other = TrainingRun(steps=0), TrainingRun(steps=0)
    run.optimizer, other.optimizer = shard(run.model, torch.optim.AdamW), shard(other.model, torch.optim.RAdam)
    train(run.model, run.optimizer, 1)
    checkpoint.save(tmp_path, step=1, optimizer=run.optimizer)
    with assert_rejected(other, "Use AdamW, or pass strict=False", tmp_path):
        checkpoint.load(tmp_path, optimizer=other.optimizer)
    checkpoint.load(tmp_path, optimizer=other.optimizer, strict=False)
    states = [optimizer.full_state_dict() or {} for optimizer in (other.optimizer, run.optimizer)]
    averages = [[values["exp_avg"] for values in state["state"].values()] for state in states]
    assert_same(averages[0], averages[1])


def make_sgd(params: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, **options)


def test_rule_with_a_factory_function_loads_its_own_checkpoint(tmp_path: Path) -> None:
    """Groups name the function, which is not the class that updates them."""
    run = TrainingRun(steps=0)
    rules = [
        ParamRule(matrix_params(), make_sgd, lr=0.1, momentum=0.9),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.1),
    ]
    run.optimizer = shard(run.model, rules)
    train(run.model, run.optimizer, 1)
    checkpoint.save(tmp_path, step=1, optimizer=run.optimizer)
    assert checkpoint.load(tmp_path, optimizer=run.optimizer).step == 1


def test_option_of_a_plain_optimizer_is_not_taken_for_its_class(tmp_path: Path) -> None:
    model = net()
    plain = torch.optim.SGD([{"params": list(model.parameters()), "optimizer": "muon"}], lr=0.1, momentum=0.9)
    train(model, plain, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=plain)
    assert checkpoint.load(tmp_path, model=model, optimizer=plain).step == 1


def test_invalid_arguments_of_save(tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    with assert_rejected(run, "step-000000002 already exists", tmp_path):
        run.save(tmp_path)
    for step in (-1, 1.5, "3", None, True):
        with assert_rejected(run, "expected step to be", tmp_path, error=ConfigError):
            run.save(tmp_path, step)  # type: ignore[arg-type]
    for keep in (0, -1, 1.5, "3", True):
        with assert_rejected(run, "expected keep to be", tmp_path, error=ConfigError):
            run.save(tmp_path, 3, keep=keep)
