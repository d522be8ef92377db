"""Damage, full disks, ranks that fail or disagree: all ranks raise, and nothing changes."""

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

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    Evil,
    Net,
    TrainingRun,
    dropin,
    files_below,
    flat,
    net,
    on_rank_0,
    one_bucket,
    refused,
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
    """In the metadata, which rank 0 reads, and in the data of the last rank."""
    run, last = TrainingRun(), f"__{ctx.world_size - 1}_0.distcp"
    damages = [
        (".metadata", truncate, r"\.metadata cannot be read"),
        (last, flip_one_bit, f"{last} is damaged"),
    ]
    for step, (name, damage, reason) in enumerate(damages, 1):
        directory = run.save(tmp_path, step)
        on_rank_0(partial(damage, directory / name))
        other = TrainingRun(seed=5)
        with refused(other, reason, tmp_path):
            other.load(tmp_path)


@ranks(2, 3)
def test_malicious_files_run_no_code_on_any_rank(ctx: RankContext, tmp_path: Path) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    directory = run.save(tmp_path / "run")
    on_rank_0(partial((directory / ".metadata").write_bytes, pickle.dumps(Evil(marker))))
    with refused(run, "no part of a checkpoint's metadata", tmp_path):
        run.load(tmp_path / "run")
    names = [name for name, _ in run.model.named_parameters()]
    state = {name: {"step": 1.0} for name in names}
    optim = {"state": state, "param_groups": [{"params": names, "lr": Evil(marker)}]}
    dcp_save({"model": run.model.state_dict(), "optim": optim}, checkpoint_id=tmp_path / "evil")
    with refused(run, r"'optim.param_groups.0.lr' holds a type .* run code", tmp_path):
        checkpoint.load(tmp_path / "evil", **run.parts(scheduler=False))
    assert not marker.exists()


@ranks(2, 3)
def test_corrupt_per_rank_entry_is_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Of the last one, which the first would not look at for itself."""
    run = TrainingRun()
    good = torch.frombuffer(bytearray(dumps({"random": get_rng_states(), "extra": 1})), dtype=torch.uint8)
    values = {str(rank): good for rank in range(ctx.world_size)}
    last = str(ctx.world_size - 1)
    for number, bad in enumerate([torch.arange(100, dtype=torch.uint8), good[:-3]]):
        path = tmp_path / str(number)
        dcp_save({"model": run.model.state_dict(), "ranks": {**values, last: bad}}, checkpoint_id=path)
        text = Manifest(1, ctx.world_size, files_below(path), 0.0, "").to_json()
        on_rank_0(partial((path / MANIFEST_FILE).write_text, text))
        with refused(run, f"'ranks.{last}' .*cannot be read", tmp_path):
            checkpoint.load(path, model=run.model)


# ---- checkpoints of something else


class NetWithExtraParam(Net):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Parameter(torch.randn(2))


@ranks(2, 3)
@sampled("way", [flat, whole, dropin, None])
def test_checkpoint_of_another_model_is_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    run, longer = TrainingRun(way=way), TrainingRun(way=way, model=NetWithExtraParam())
    longer.save(tmp_path)
    with refused(run, "Only there: further", tmp_path):
        run.load(tmp_path)


@ranks(2, 3)
@sampled("way", [flat, whole, None])
def test_non_strict_load_restores_common_params(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    """With strict=False. What the checkpoint lacks keeps its value and its state."""
    run, longer = TrainingRun(way=way), TrainingRun(seed=3, way=way, model=NetWithExtraParam())
    run.save(tmp_path)
    before = longer.look()
    longer.load(tmp_path, strict=False)
    after = longer.look()
    assert torch.equal(after["model"]["further"], before["model"]["further"])
    assert torch.equal(after["model"]["mix"], run.model.state_dict()["mix"])
    if before["optimizer"] is not None:
        order = [name for name, _ in longer.model.named_parameters()].index("further")
        assert_same(after["optimizer"]["state"].get(order), before["optimizer"]["state"].get(order), "further")


@ranks(2, 3)
def test_non_strict_load_keeps_parts_missing_from_the_checkpoint(ctx: RankContext, tmp_path: Path) -> None:
    run, other = TrainingRun(), TrainingRun(seed=4)
    checkpoint.save(tmp_path, step=1, model=run.model)
    with refused(other, "no optimizer in it", tmp_path):
        other.load(tmp_path)
    before = other.look()
    other.load(tmp_path, strict=False)
    assert_same({**other.look(), "model": 0, "random": 0}, {**before, "model": 0, "random": 0}, "what is not there")
    assert_same(other.model.state_dict(), run.model.state_dict(), "the model")


@ranks(2)
@sampled("cls", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad])
def test_state_moves_between_sharded_and_plain_optimizers(ctx: RankContext, tmp_path: Path, cls: Any) -> None:
    model = net()
    ours = shard(model, cls, lr=0.1)
    train(model, ours, 2)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=ours)
    train(model, ours, 1, first=2)
    for sharded in (True, False):
        other = net(2)
        into = shard(other, cls, lr=0.1) if sharded else cls(other.parameters(), lr=0.1)
        checkpoint.load(tmp_path, model=other, optimizer=into)
        train(other, into, 1, first=2)
        assert_same(other.state_dict(), model.state_dict(), "the model after a further step")


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
    """Names decide, whatever the order; parameters that had different options cannot have one."""
    model = net()
    optimizer = make_grouped(model)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    other = net(4)
    into = make_grouped(other, swap=True, lr=0.7)
    checkpoint.load(tmp_path, model=other, optimizer=into)
    assert [group["lr"] for group in into.param_groups] == [0.2, 0.1]
    train(model, optimizer, 2)
    train(other, into, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    run = TrainingRun(seed=5)
    run.model = net(5)
    run.optimizer = make_grouped(run.model, mixed=True)
    with refused(run, "in one group here, but had different options.*lr=0.1", tmp_path):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


@ranks(1, 2)
def test_added_param_groups_and_frozen_params(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    model = NetWithExtraParam()
    known = [(name, it) for name, it in model.named_parameters() if name != "further"]
    run.model, run.optimizer = model, shard(model, torch.optim.AdamW, params=known, **ADAMW)
    run.optimizer.add_param_group({"params": [model.further], "lr": 0.3})
    with refused(run, "Missing there: further", tmp_path):
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
@pytest.mark.parametrize("wrapping", ["ddp", "compile", "unnamed"])
def test_wrapped_models_use_the_same_param_names(ctx: RankContext, tmp_path: Path, wrapping: str) -> None:
    wraps: dict[str, Callable[..., Any]] = {
        "ddp": DistributedDataParallel,
        "compile": torch.compile,
        "unnamed": lambda it: it,
    }
    run = TrainingRun()
    run.save(tmp_path / "plain")
    model = wraps[wrapping](net(3))
    given = model.parameters() if wrapping == "unnamed" else model.named_parameters()
    optimizer = ZeroRedundancyOptimizer(given, torch.optim.AdamW, **ADAMW)
    checkpoint.load(tmp_path / "plain", model=model, optimizer=optimizer)
    assert all(map(torch.equal, model.parameters(), run.model.parameters()))
    checkpoint.save(tmp_path / "wrapped", step=1, model=model, optimizer=optimizer)
    again = TrainingRun(seed=6)
    checkpoint.load(tmp_path / "wrapped", **again.parts(scheduler=False))
    assert_same(again.look()["optimizer"], run.look()["optimizer"], "the state")
    assert all(map(torch.equal, again.model.parameters(), run.model.parameters()))


# ---- loads that fail late


class NetFailingToLoad(Net):
    """Fails to load on the last rank, after everything else was loaded."""

    refuses = False

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, _: Any) -> None:
        if self.refuses and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("I will not")


@ranks(1, 2, 3)
@sampled("way", [flat, whole, None])
def test_failing_model_load_rolls_back(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    torch.manual_seed(0)
    run, other = TrainingRun(way=way, model=NetFailingToLoad()), TrainingRun(way=way, model=NetFailingToLoad(), steps=3)
    run.save(tmp_path)
    other.load(tmp_path)
    train(other.model, other.optimizer, 2)
    other.model.refuses = True  # type: ignore[assignment]
    with refused(other, "I will not", tmp_path):
        other.load(tmp_path)
    other.model.refuses = False  # type: ignore[assignment]
    other.load(tmp_path)
    assert_same({**other.look(), "random": 0}, {**run.look(), "random": 0}, "what was loaded")


@ranks(1, 2)
@pytest.mark.parametrize("way", [flat, None])
def test_failing_scheduler_or_optimizer_load_rolls_back(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    run, other = TrainingRun(way=way), TrainingRun(seed=4, way=way)
    run.save(tmp_path)
    is_last = ctx.rank == ctx.world_size - 1

    def fail(*_: Any) -> None:
        if is_last:
            raise RuntimeError("I will not")

    handle = other.optimizer.register_load_state_dict_pre_hook(fail)
    with refused(other, "I will not", tmp_path):
        other.load(tmp_path)
    handle.remove()
    kept = other.scheduler.load_state_dict

    def spoil_and_fail(state: Any) -> None:
        kept(state)
        if state["last_epoch"] == 2 and is_last and other.scheduler.last_epoch != 1:
            other.scheduler.load_state_dict = kept  # type: ignore[method-assign]
            raise RuntimeError("I will not")

    other.scheduler.load_state_dict = spoil_and_fail  # type: ignore[method-assign,assignment]
    with refused(other, "I will not", tmp_path):
        other.load(tmp_path)


# ---- saves that fail


@contextmanager
def limit_file_size(max_bytes: int, *, enabled: bool = True) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if enabled:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ranks(1, 2, 3)
@sampled("behind", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_full_disk_fails_the_save_and_keeps_the_last_checkpoint(
    ctx: RankContext, tmp_path: Path, behind: bool, first: bool
) -> None:
    """On the last rank, or on the first one, which writes the metadata."""
    run = TrainingRun()
    run.save(tmp_path, 1)
    here = ctx.rank == (0 if first else ctx.world_size - 1)
    with refused(run, "could not be written.*File too large", tmp_path), limit_file_size(2000, enabled=here):
        run.save(tmp_path, 2, behind=behind)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"
    assert not [it for it in tmp_path.iterdir() if it.name.startswith((".writing", ".leaving"))]
    run.save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000002"


@ranks(1, 2)
def test_unwritable_path_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(run, "file", tmp_path):
            run.save(path)


HOLD_LOCK_SCRIPT = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@ranks(1, 2)
def test_save_fails_while_another_process_holds_the_lock(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    other: Any = None
    if ctx.rank == 0:
        command = [sys.executable, "-c", HOLD_LOCK_SCRIPT, str(tmp_path / ".lock")]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"held\n"
    dist.barrier()
    with refused(run, "another process is writing", tmp_path):
        run.save(tmp_path, 2)
    if other is not None:
        other.communicate(b"\n", timeout=20)
    dist.barrier()
    run.save(tmp_path, 2)


@ranks(1, 2, 3, timeout=60)
def test_invalid_arguments_are_rejected_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """On one rank, or on all."""
    run = TrainingRun()
    run.save(tmp_path)
    calls = partial(checkpoint.save, tmp_path, step=3), partial(checkpoint.load, tmp_path)
    odd: list[tuple[str, Any, str]] = [
        ("model", 5, r"model= must be a torch\.nn\.Module, or be None; it is a int"),
        ("optimizer", run.model, r"optimizer= must have param_groups and \w*state_dict\(\)"),
        ("scheduler", "x", r"scheduler= must have \w*state_dict\(\)"),
        ("progress", "x", r"progress= must be True, False or a function"),
        ("progress", torch.ones(2), r"progress= must be True, False or a function"),
    ]
    for call, (name, value, said), alone in product(calls, odd, (False, True)):
        here = not alone or ctx.rank == ctx.world_size - 1
        with refused(run, said, tmp_path, error=ConfigError if here else CheckpointError):
            call(**run.parts() | ({name: value} if here else {}))
    run.load(tmp_path)


@ranks(2, 3)
def test_rank_mismatch_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    with refused(run, "step 3", tmp_path, error=RankMismatchError):
        run.save(tmp_path, 3 + ctx.rank)
    with refused(run, "path", tmp_path, error=RankMismatchError):
        run.save(tmp_path / str(ctx.rank), 3)
    with refused(run, "path", tmp_path, error=RankMismatchError):
        run.load(tmp_path / str(ctx.rank))
    with refused(run, "optimizer", tmp_path, error=RankMismatchError):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer if ctx.rank else None)
    with refused(run, "strict", tmp_path, error=RankMismatchError):
        run.load(tmp_path, strict=ctx.rank == 0)


@ranks(1, 2)
@sampled("behind", [False, True])
def test_failure_to_collect_state_on_one_rank_raises_on_all(ctx: RankContext, tmp_path: Path, behind: bool) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    is_last = ctx.rank == ctx.world_size - 1
    with refused(run, r"\['position'\]: a Evil cannot be sent safely", tmp_path):
        run.save(tmp_path, 2, extra={"position": Evil(tmp_path)} if is_last else 1, behind=behind)

    def fail(*_: Any) -> None:
        if is_last:
            raise RuntimeError("I will not")

    handle = run.model.register_state_dict_post_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match="I will not"):
        run.save(tmp_path, 2, behind=behind)
    handle.remove()
    run.save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="TypeError"):
        checkpoint.save(None if is_last else tmp_path, step=3, model=run.model)  # type: ignore[arg-type]


@ranks(1, 2)
def test_async_save_error_is_raised_once(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    files = files_below(tmp_path)
    saving = checkpoint.async_save(tmp_path, step=1, model=run.model)
    with pytest.raises(CheckpointError, match="exists already"):
        saving.wait()
    run.save(tmp_path, 2)  # it was told
    checkpoint.async_save(tmp_path, step=1, model=run.model)
    with pytest.raises(CheckpointError, match="exists already"):
        run.save(tmp_path / "elsewhere", 3)
    run.save(tmp_path / "elsewhere", 3)
    dist.barrier()
    assert files.items() - {("latest", files["latest"])} <= files_below(tmp_path).items()


@ranks(2, 3)
def test_async_save_error_seen_by_one_rank_also_raises_on_others(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    saving = checkpoint.async_save(tmp_path, step=1, model=run.model)
    if ctx.rank == 0:
        with pytest.raises(CheckpointError, match="exists already"):
            saving.wait()
    with pytest.raises(CheckpointError, match="exists already"):
        run.save(tmp_path, 2)
    run.save(tmp_path, 2)


@ranks(1, 2, 3)
def test_concurrent_async_saves_to_several_directories(ctx: RankContext, tmp_path: Path) -> None:
    """Their messages do not meet."""
    run = TrainingRun(way=one_bucket)
    savings = [checkpoint.async_save(tmp_path / str(number % 2), step=number, **run.parts()) for number in range(6)]
    assert [it.wait().name for it in savings] == [f"step-{number:09d}" for number in range(6)]
    assert all(checkpoint.load(tmp_path / folder, **run.parts()).step == step for folder, step in (("0", 4), ("1", 5)))
