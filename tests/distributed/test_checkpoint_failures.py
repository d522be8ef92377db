"""Damaged files, full disks, ranks that fail or disagree: all ranks raise, and nothing changes."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    Evil,
    Net,
    TrainingRun,
    assert_rejected,
    dropin,
    file_checksums,
    flat,
    net,
    on_rank_0,
    one_bucket,
    train,
    whole,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ConfigError, RankMismatchError, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint.directory import MANIFEST_FILE, Manifest
from zeroshard.checkpoint.saver import get_rng_states
from zeroshard.state.serialization import dumps

# ---- damaged and hostile files: what counts as damage is tested in tests/unit/test_checkpoint_validation.py


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@ranks(2, 3)
def test_corrupt_file_is_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Damage in the metadata, which rank 0 reads, and in the data of the last rank."""
    run, last = TrainingRun(), f"__{ctx.world_size - 1}_0.distcp"
    damages = [
        (".metadata", truncate, r"\.metadata cannot be read"),
        (last, flip_one_bit, f"{last} is damaged"),
    ]
    for step, (name, damage, reason) in enumerate(damages, 1):
        directory = run.save(tmp_path, step)
        on_rank_0(partial(damage, directory / name))
        other = TrainingRun(seed=5)
        with assert_rejected(other, reason, tmp_path):
            other.load(tmp_path)


@ranks(2, 3)
def test_malicious_files_run_no_code_on_any_rank(ctx: RankContext, tmp_path: Path) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    directory = run.save(tmp_path / "run")
    on_rank_0(partial((directory / ".metadata").write_bytes, pickle.dumps(Evil(marker))))
    with assert_rejected(run, "which checkpoint metadata does not contain", tmp_path):
        run.load(tmp_path / "run")
    names = [name for name, _ in run.model.named_parameters()]
    state = {name: {"step": 1.0} for name in names}
    optim = {"state": state, "param_groups": [{"params": names, "lr": Evil(marker)}]}
    dcp_save({"model": run.model.state_dict(), "optim": optim}, checkpoint_id=tmp_path / "evil")
    with assert_rejected(run, r"'optim.param_groups.0.lr' has a type that could run code", tmp_path):
        checkpoint.load(tmp_path / "evil", **run.parts(scheduler=False))
    assert not marker.exists()


@ranks(2, 3)
def test_corrupt_per_rank_entry_is_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Damage in the entry of the last rank, which rank 0 does not need for itself."""
    run = TrainingRun()
    good = torch.frombuffer(bytearray(dumps({"random": get_rng_states(), "extra": 1})), dtype=torch.uint8)
    values = {str(rank): good for rank in range(ctx.world_size)}
    last = str(ctx.world_size - 1)
    for number, bad in enumerate([torch.arange(100, dtype=torch.uint8), good[:-3]]):
        path = tmp_path / str(number)
        dcp_save({"model": run.model.state_dict(), "ranks": {**values, last: bad}}, checkpoint_id=path)
        text = Manifest(1, ctx.world_size, file_checksums(path), 0.0, "").to_json()
        on_rank_0(partial((path / MANIFEST_FILE).write_text, text))
        with assert_rejected(run, f"'ranks.{last}' .*cannot be read", tmp_path):
            checkpoint.load(path, model=run.model)


# ---- checkpoints of another model


class NetWithExtraParam(Net):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.further.sum()


@ranks(2, 3)
@sampled("make_optimizer", [flat, whole, dropin, None])
def test_checkpoint_of_another_model_is_rejected_on_all_ranks(
    ctx: RankContext, tmp_path: Path, make_optimizer: Any
) -> None:
    run, larger = (
        TrainingRun(make_optimizer=make_optimizer),
        TrainingRun(make_optimizer=make_optimizer, model=NetWithExtraParam()),
    )
    larger.save(tmp_path)
    with assert_rejected(run, "Only in the checkpoint: further", tmp_path):
        run.load(tmp_path)


@ranks(2, 3)
@sampled("make_optimizer", [flat, whole, None])
def test_non_strict_load_restores_common_params(ctx: RankContext, tmp_path: Path, make_optimizer: Any) -> None:
    """With strict=False, parameters that the checkpoint lacks keep their value and state."""
    run, larger = (
        TrainingRun(make_optimizer=make_optimizer),
        TrainingRun(seed=3, make_optimizer=make_optimizer, model=NetWithExtraParam()),
    )
    run.save(tmp_path)
    before = larger.capture()
    larger.load(tmp_path, strict=False)
    after = larger.capture()
    assert torch.equal(after["model"]["further"], before["model"]["further"])
    assert torch.equal(after["model"]["mix"], run.model.state_dict()["mix"])
    if before["optimizer"] is not None:
        index = [name for name, _ in larger.model.named_parameters()].index("further")
        assert_same(after["optimizer"]["state"][index], before["optimizer"]["state"][index], "further")


@ranks(2, 3)
def test_non_strict_load_keeps_parts_missing_from_the_checkpoint(ctx: RankContext, tmp_path: Path) -> None:
    run, other = TrainingRun(), TrainingRun(seed=4)
    checkpoint.save(tmp_path, step=1, model=run.model)
    with assert_rejected(other, "contains no optimizer", tmp_path):
        other.load(tmp_path)
    before = other.capture()
    other.load(tmp_path, strict=False)
    assert_same(
        {**other.capture(), "model": 0, "random": 0},
        {**before, "model": 0, "random": 0},
        "parts missing from the checkpoint",
    )
    assert_same(other.model.state_dict(), run.model.state_dict(), "the model")


@ranks(2)
@sampled("cls", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad])
def test_state_moves_between_sharded_and_plain_optimizers(ctx: RankContext, tmp_path: Path, cls: Any) -> None:
    model = net()
    ours = shard(model, cls, lr=0.1)
    train(model, ours, 2)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=ours)
    train(model, ours, 1, first=2)
    for is_sharded in (True, False):
        new_model = net(2)
        new_optimizer = shard(new_model, cls, lr=0.1) if is_sharded else cls(new_model.parameters(), lr=0.1)
        checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
        train(new_model, new_optimizer, 1, first=2)
        assert_same(new_model.state_dict(), model.state_dict(), "the model after another step")


def make_grouped(
    model: nn.Module, *, swap: bool = False, mixed: bool = False, lr: float = 0.1
) -> ZeroRedundancyOptimizer:
    named = list(model.named_parameters())
    first, second = named[:3], named[3:]
    if mixed:
        first, second = named[:4], named[4:]
    groups = [{"params": first, "lr": lr}, {"params": second, "lr": 0.2, "weight_decay": 0.5}]
    return shard(model, torch.optim.AdamW, params=groups[::-1] if swap else groups)


@ranks(1, 2)
def test_param_groups_are_matched_by_param_names(ctx: RankContext, tmp_path: Path) -> None:
    """Groups may be in any order; parameters that had different options cannot be in one group."""
    model = net()
    optimizer = make_grouped(model)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    new_model = net(4)
    new_optimizer = make_grouped(new_model, swap=True, lr=0.7)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert [group["lr"] for group in new_optimizer.param_groups] == [0.2, 0.1]
    train(model, optimizer, 2)
    train(new_model, new_optimizer, 2)
    assert all(map(torch.equal, model.parameters(), new_model.parameters()))
    run = TrainingRun(seed=5)
    run.model = net(5)
    run.optimizer = make_grouped(run.model, mixed=True)
    with assert_rejected(run, "in one parameter group, but .*different options.*lr=0.1", tmp_path):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


@ranks(1, 2)
def test_added_param_groups_and_frozen_params(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    model = NetWithExtraParam()
    named_params = [(name, param) for name, param in model.named_parameters() if name != "further"]
    run.model, run.optimizer = model, shard(model, torch.optim.AdamW, params=named_params, **ADAMW)
    run.optimizer.add_param_group({"params": [model.further], "lr": 0.3})
    with assert_rejected(run, "Missing from the checkpoint: further", tmp_path):
        checkpoint.load(tmp_path, model=model, optimizer=run.optimizer)
    checkpoint.load(tmp_path, model=model, optimizer=run.optimizer, strict=False)
    assert [group["lr"] for group in run.optimizer.param_groups][1] == 0.3
    frozen = net(8)
    frozen.mix.requires_grad_(False)
    optimizer = flat(frozen)
    checkpoint.load(tmp_path, model=frozen, optimizer=optimizer)
    checkpoint.save(tmp_path, step=3, model=frozen, optimizer=optimizer)
    checkpoint.load(tmp_path, model=frozen, optimizer=optimizer)


@ranks(1, 2)
@pytest.mark.parametrize("wrapper", ["ddp", "compile", "unnamed"])
def test_wrapped_models_use_the_same_param_names(ctx: RankContext, tmp_path: Path, wrapper: str) -> None:
    wrappers: dict[str, Callable[..., Any]] = {
        "ddp": DistributedDataParallel,
        "compile": torch.compile,
        "unnamed": lambda model: model,
    }
    run = TrainingRun()
    run.save(tmp_path / "plain")
    model = wrappers[wrapper](net(3))
    params = model.parameters() if wrapper == "unnamed" else model.named_parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, **ADAMW)
    checkpoint.load(tmp_path / "plain", model=model, optimizer=optimizer)
    assert all(map(torch.equal, model.parameters(), run.model.parameters()))
    checkpoint.save(tmp_path / "wrapped", step=1, model=model, optimizer=optimizer)
    new_run = TrainingRun(seed=6)
    checkpoint.load(tmp_path / "wrapped", **new_run.parts(scheduler=False))
    assert_same(new_run.capture()["optimizer"], run.capture()["optimizer"], "the state")
    assert all(map(torch.equal, new_run.model.parameters(), run.model.parameters()))


# ---- loads that fail late


class NetFailingToLoad(Net):
    """Fails to load on the last rank, after everything else was loaded."""

    should_fail = False

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, _: Any) -> None:
        if self.should_fail and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("I will not")


@ranks(1, 2, 3)
@sampled("make_optimizer", [flat, whole, None])
def test_failing_model_load_rolls_back(ctx: RankContext, tmp_path: Path, make_optimizer: Any) -> None:
    torch.manual_seed(0)
    run, other = (
        TrainingRun(make_optimizer=make_optimizer, model=NetFailingToLoad()),
        TrainingRun(make_optimizer=make_optimizer, model=NetFailingToLoad(), steps=3),
    )
    run.save(tmp_path)
    other.load(tmp_path)
    train(other.model, other.optimizer, 2)
    other.model.should_fail = True  # type: ignore[assignment]
    with assert_rejected(other, "I will not", tmp_path):
        other.load(tmp_path)
    other.model.should_fail = False  # type: ignore[assignment]
    other.load(tmp_path)
    assert_same({**other.capture(), "random": 0}, {**run.capture(), "random": 0}, "what was loaded")


@ranks(1, 2)
@pytest.mark.parametrize("make_optimizer", [flat, None])
def test_failing_scheduler_or_optimizer_load_rolls_back(ctx: RankContext, tmp_path: Path, make_optimizer: Any) -> None:
    run = TrainingRun(make_optimizer=make_optimizer)
    other = TrainingRun(seed=4, make_optimizer=make_optimizer, steps=3)
    run.save(tmp_path)
    is_last = ctx.rank == ctx.world_size - 1

    def fail(*_: Any) -> None:
        if is_last:
            raise RuntimeError("I will not")

    handle = other.optimizer.register_load_state_dict_pre_hook(fail)
    with assert_rejected(other, "I will not", tmp_path):
        other.load(tmp_path)
    handle.remove()
    load_scheduler = CosineAnnealingLR.load_state_dict

    def load_and_fail(scheduler: CosineAnnealingLR, state: Any) -> None:
        load_scheduler(scheduler, state)
        if is_last and state["last_epoch"] == 2:  # that of the checkpoint: the rollback loads 3
            raise RuntimeError("I will not")

    with pytest.MonkeyPatch.context() as patch, assert_rejected(other, "I will not", tmp_path):
        patch.setattr(CosineAnnealingLR, "load_state_dict", load_and_fail)
        other.load(tmp_path)


# ---- saves that fail


@contextmanager
def limit_file_size(max_bytes: int, *, enabled: bool = True) -> Iterator[None]:
    """Let writes beyond `max_bytes` of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if enabled:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ranks(1, 2, 3)
@sampled("in_background", [False, True])
@pytest.mark.parametrize("on_rank0", [False, True])
def test_full_disk_fails_the_save_and_keeps_the_last_checkpoint(
    ctx: RankContext, tmp_path: Path, in_background: bool, on_rank0: bool
) -> None:
    """The disk is full on the last rank, or on rank 0, which writes the metadata."""
    run = TrainingRun()
    run.save(tmp_path, 1)
    is_full_here = ctx.rank == (0 if on_rank0 else ctx.world_size - 1)
    with (
        assert_rejected(run, "writing the checkpoint to .* failed.*File too large", tmp_path),
        limit_file_size(2000, enabled=is_full_here),
    ):
        run.save(tmp_path, 2, in_background=in_background)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith((".writing", ".leaving"))]
    run.save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000002"


@ranks(1, 2)
def test_unwritable_path_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with assert_rejected(run, "file", tmp_path):
            run.save(path)


HOLD_LOCK_SCRIPT = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@ranks(1, 2)
def test_save_fails_while_another_process_holds_the_lock(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    lock_holder: Any = None
    if ctx.rank == 0:
        command = [sys.executable, "-c", HOLD_LOCK_SCRIPT, str(tmp_path / ".lock")]
        lock_holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert lock_holder.stdout.readline() == b"held\n"
    dist.barrier()
    with assert_rejected(run, "another process is writing", tmp_path):
        run.save(tmp_path, 2)
    if lock_holder is not None:
        lock_holder.communicate(b"\n", timeout=20)
    dist.barrier()
    run.save(tmp_path, 2)


@ranks(1, 2, 3, timeout=60)
def test_invalid_arguments_are_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """The argument is invalid on one rank, or on all ranks."""
    run = TrainingRun()
    run.save(tmp_path)
    calls = partial(checkpoint.save, tmp_path, step=3), partial(checkpoint.load, tmp_path)
    invalid_arguments: list[tuple[str, Any, str]] = [
        ("model", 5, r"expected model= to be a torch\.nn\.Module or None, got int"),
        ("optimizer", run.model, r"expected optimizer= to have param_groups and \w*state_dict\(\)"),
        ("scheduler", "x", r"expected scheduler= to have \w*state_dict\(\)"),
        ("progress", "x", r"expected progress= to be True, False, a function or None"),
        ("progress", torch.ones(2), r"expected progress= to be True, False, a function or None"),
    ]
    for call, (name, value, message), on_one_rank in product(calls, invalid_arguments, (False, True)):
        is_invalid_here = not on_one_rank or ctx.rank == ctx.world_size - 1
        with assert_rejected(run, message, tmp_path, error=ConfigError if is_invalid_here else CheckpointError):
            call(**run.parts() | ({name: value} if is_invalid_here else {}))
    run.load(tmp_path)


@ranks(2, 3)
def test_rank_mismatch_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    with assert_rejected(run, "step 3", tmp_path, error=RankMismatchError):
        run.save(tmp_path, 3 + ctx.rank)
    with assert_rejected(run, "path", tmp_path, error=RankMismatchError):
        run.save(tmp_path / str(ctx.rank), 3)
    with assert_rejected(run, "path", tmp_path, error=RankMismatchError):
        run.load(tmp_path / str(ctx.rank))
    with assert_rejected(run, "optimizer", tmp_path, error=RankMismatchError):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer if ctx.rank else None)
    with assert_rejected(run, "strict", tmp_path, error=RankMismatchError):
        run.load(tmp_path, strict=ctx.rank == 0)


@ranks(1, 2)
@sampled("in_background", [False, True])
def test_failure_to_collect_state_on_one_rank_raises_on_all(
    ctx: RankContext, tmp_path: Path, in_background: bool
) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    is_last = ctx.rank == ctx.world_size - 1
    with assert_rejected(run, r"\['position'\]: a Evil cannot be sent safely", tmp_path):
        run.save(tmp_path, 2, extra={"position": Evil(tmp_path)} if is_last else 1, in_background=in_background)

    def fail(*_: Any) -> None:
        if is_last:
            raise RuntimeError("I will not")

    handle = run.model.register_state_dict_post_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match="I will not"):
        run.save(tmp_path, 2, in_background=in_background)
    handle.remove()
    run.save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="TypeError"):
        checkpoint.save(None if is_last else tmp_path, step=3, model=run.model)  # type: ignore[arg-type]


@ranks(1, 2)
def test_async_save_error_is_raised_once(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    files = file_checksums(tmp_path)
    save_handle = checkpoint.async_save(tmp_path, step=1, model=run.model)
    with pytest.raises(CheckpointError, match="already exists"):
        save_handle.wait()
    run.save(tmp_path, 2)  # wait() has already raised the error
    checkpoint.async_save(tmp_path, step=1, model=run.model)
    with pytest.raises(CheckpointError, match="already exists"):
        run.save(tmp_path / "elsewhere", 3)
    run.save(tmp_path / "elsewhere", 3)
    dist.barrier()
    assert files.items() - {("latest", files["latest"])} <= file_checksums(tmp_path).items()


@ranks(2, 3)
def test_async_save_error_seen_by_one_rank_also_raises_on_others(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    save_handle = checkpoint.async_save(tmp_path, step=1, model=run.model)
    if ctx.rank == 0:
        with pytest.raises(CheckpointError, match="already exists"):
            save_handle.wait()
    with pytest.raises(CheckpointError, match="already exists"):
        run.save(tmp_path, 2)
    run.save(tmp_path, 2)


@ranks(1, 2, 3)
def test_concurrent_async_saves_to_several_directories(ctx: RankContext, tmp_path: Path) -> None:
    """Their messages do not mix."""
    run = TrainingRun(make_optimizer=one_bucket)
    save_handles = [
        checkpoint.async_save(tmp_path / str(number % 2), step=number, **run.parts()) for number in range(6)
    ]
    assert [save_handle.wait().name for save_handle in save_handles] == [f"step-{number:09d}" for number in range(6)]
    assert all(
        checkpoint.load(tmp_path / directory, **run.parts()).step == step for directory, step in (("0", 4), ("1", 5))
    )
