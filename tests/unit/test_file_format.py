"""Names on disk and in state dicts, as literals: checkpoints must stay loadable across versions, in both directions.

The tests write a checkpoint and read it without the package.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import ExponentialLR

from tests.recorded.values import checkpoint_file
from zeroshard import (
    ParamRule,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    matrix_params,
    remaining_params,
    shard,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.up(x))
        return out


@contextmanager
def single_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of everything that can be saved."""
    path = tmp_path_factory.mktemp("run")
    for leftover in (".writing-1", ".leaving-1"):
        (path / leftover).mkdir()
    with single_rank_group():
        model = Net().to(torch.bfloat16)
        rules = [ParamRule(matrix_params(), Muon), ParamRule(remaining_params, AdamW)]
        optimizer = shard(model, rules, config=ZeroConfig(master_dtype=torch.float32))
        scheduler = ExponentialLR(optimizer, 0.5)
        torch.autograd.backward(model(torch.ones(2, 3, dtype=torch.bfloat16)).float().square().mean())
        optimizer.step()
        random.seed(5)
        torch.manual_seed(5)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for step in (7, 12):
            checkpoint.save(path, step=step, extra={"note": 1}, **objects)
    return path


@pytest.fixture(scope="module")
def directory(folder: Path) -> Path:
    return folder / "step-000000012"


def read_entries(directory: Path) -> dict[str, Any]:
    """All values of a checkpoint by key, as torch reads them."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    entries: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        load(entries, checkpoint_id=directory)
    return entries


def unpack(packed: torch.Tensor) -> Any:
    assert packed.dtype == torch.uint8
    return torch.load(io.BytesIO(bytes(packed.tolist())), weights_only=True)


def test_files_on_disk(folder: Path, directory: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", "step-000000007", "step-000000012"]
    assert (folder / "latest").read_text() == "step-000000012\nstep-000000007\n"
    assert sorted(path.name for path in directory.iterdir()) == [".metadata", "__0_0.distcp", "zeroshard.json"]
    assert b"zeroshard" not in (directory / ".metadata").read_bytes()  # it refers to no class of this package


def test_manifest(directory: Path) -> None:
    manifest = json.loads((directory / "zeroshard.json").read_text())
    assert list(manifest) == [
        *("format", "step", "world_size", "sums", "time", "torch"),
        *("model", "optimizers", "tied"),
    ]
    assert (manifest["format"], manifest["step"], manifest["world_size"]) == (1, 12, 1)
    assert manifest["torch"] == torch.__version__
    assert (manifest["model"], manifest["optimizers"], manifest["tied"]) == ("Net", ["Muon", "AdamW"], {})
    assert isinstance(manifest["time"], float)
    sums = {name: zlib.crc32((directory / name).read_bytes()) for name in (".metadata", "__0_0.distcp")}
    assert manifest["sums"] == sums


ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq", "master_weights")
ENTRIES = [
    *("model.up.weight", "model.norm.weight", "model.norm.bias"),
    *("model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"),
    *("optim.state.up.weight.momentum_buffer", "optim.state.up.weight.master_weights"),
    *(f"optim.state.norm.{name}.{key}" for name in ("weight", "bias") for key in ADAM_KEYS),
    *("scheduler", "ranks.0"),
]
GROUP_KEYS = ("lr", "weight_decay", "optimizer", "initial_lr", "params")


def test_checkpoint_entries(directory: Path) -> None:
    entries = read_entries(directory)
    assert sorted(key for key in entries if not key.startswith("optim.param_groups.")) == sorted(ENTRIES)
    paths = pickle.loads((directory / ".metadata").read_bytes()).planner_data
    assert paths["model.up.weight"] == ("model", "up.weight")
    assert paths["optim.state.up.weight.master_weights"] == ("optim", "state", "up.weight", "master_weights")
    assert paths["optim.param_groups.1.lr"] == ("optim", "param_groups", 1, "lr")
    assert paths["scheduler"] == ("scheduler",)
    assert paths["ranks.0"] == ("ranks", "0")
    assert {key: value.dtype for key, value in entries.items() if key.endswith("master_weights")} == {
        f"optim.state.{name}.master_weights": torch.float32 for name in ("up.weight", "norm.weight", "norm.bias")
    }
    groups = [{key: entries[f"optim.param_groups.{number}.{key}"] for key in GROUP_KEYS} for number in (0, 1)]
    muon = {"lr": 1e-3, "weight_decay": 0.1, "optimizer": "Muon", "initial_lr": 1e-3, "params": ["up.weight"]}
    assert groups[0] == muon
    assert groups[1]["optimizer"] == "AdamW"
    assert groups[1]["params"] == ["norm.weight", "norm.bias"]


def test_packed_values(directory: Path) -> None:
    entries = read_entries(directory)
    assert unpack(entries["scheduler"])["gamma"] == 0.5
    rank_entry = unpack(entries["ranks.0"])
    assert list(rank_entry) == ["random", "extra"]
    assert rank_entry["extra"] == {"note": 1}
    assert list(rank_entry["random"]) == ["torch", "python"]
    assert torch.equal(rank_entry["random"]["torch"], torch.Generator().manual_seed(5).get_state())
    version, numbers, gauss = random.Random(5).getstate()
    assert rank_entry["random"]["python"] == [version, numbers, gauss]


def test_recorded_checkpoints_have_the_same_names(tmp_path: Path) -> None:
    """A checkpoint of several ranks has a file and an entry for each rank."""
    shutil.unpack_archive(checkpoint_file("hybrid", "zip"), tmp_path)
    directory = tmp_path / "step-000000006"
    files = [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "zeroshard.json"]
    assert sorted(path.name for path in directory.iterdir()) == files
    ranks = sorted(key for key in read_entries(directory) if key.startswith("ranks"))
    assert ranks == ["ranks.0", "ranks.1", "ranks.2", "ranks.3"]
    manifest = json.loads((directory / "zeroshard.json").read_text())
    assert list(manifest) == ["format", "step", "world_size", "sums", "time", "torch"]
    assert manifest["format"] == 1


def test_state_dict_keys(single_rank: None) -> None:
    """The group key `optimizer`, master weights and names, with and without rules."""
    model = Net().to(torch.bfloat16)
    rules = [ParamRule(matrix_params(), Muon), ParamRule(remaining_params, AdamW)]
    sharded = shard(model, rules, config=ZeroConfig(master_dtype=torch.float32))
    torch.autograd.backward(model(torch.ones(2, 3, dtype=torch.bfloat16)).float().square().mean())
    sharded.step()
    state_dict = sharded.full_state_dict()
    assert state_dict is not None
    assert list(state_dict) == ["state", "param_groups"]
    assert [sorted(state) for state in state_dict["state"].values()] == [
        ["master_weights", "momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "master_weights", "step"],
        ["exp_avg", "exp_avg_sq", "master_weights", "step"],
    ]
    assert [(group["optimizer"], group["params"], group["param_names"]) for group in state_dict["param_groups"]] == [
        ("Muon", [0], ["up.weight"]),
        ("AdamW", [1, 2], ["norm.weight", "norm.bias"]),
    ]
    zero = ZeroRedundancyOptimizer(Net().parameters(), AdamW)
    zero.consolidate_state_dict()
    plain = zero.state_dict()
    assert list(plain) == ["state", "param_groups"]
    assert plain["param_groups"][0]["params"] == [0, 1, 2]
    assert not {"optimizer", "param_names"} & plain["param_groups"][0].keys()
