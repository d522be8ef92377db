"""Checkpoints that are damaged, foreign or hostile, full disks, ranks that fail: all ranks raise, nothing changes."""

from __future__ import annotations

import io
import pickle
import random
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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    Evil,
    Net,
    TrainingRun,
    dropin,
    edit_metadata,
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
from zeroshard import CheckpointError, ConfigError, RankMismatchError, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint.manifest import MANIFEST, Manifest
from zeroshard.state.codec import pack

Damage = Callable[[Path], object]
DATA = "__0_0.distcp"


# ---- damaged files


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    """One bit, in the middle of the data."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def exchange(directory: Path) -> None:
    """A file of the same name and size, of the checkpoint before."""
    before = directory.parent / "step-000000001" / DATA
    assert before.stat().st_size == (directory / DATA).stat().st_size
    (directory / DATA).write_bytes(before.read_bytes())


def exchange_metadata(directory: Path) -> None:
    edit_metadata(directory, lambda it: it.planner_data.pop("ranks.0"))


def noise(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(500))


def lead_out(name: str) -> Damage:
    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    return lambda directory: edit_metadata(directory, edit)


def forget_chunks(metadata: Any) -> None:
    for it in metadata.state_dict_metadata.values():
        if hasattr(it, "chunks"):
            it.chunks.clear()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no metadata": (lambda it: (it / ".metadata").unlink(), r"no \.metadata"),
    "cut metadata": (lambda it: cut(it / ".metadata"), r"\.metadata cannot be read"),
    "empty metadata": (lambda it: (it / ".metadata").write_bytes(b""), r"\.metadata cannot be read"),
    "noise as metadata": (lambda it: noise(it / ".metadata"), r"\.metadata cannot be read"),
    "no chunks": (lambda it: edit_metadata(it, forget_chunks), r"\.metadata contradicts itself.*parts with 0 of them"),
    "another's metadata": (exchange_metadata, r"\.metadata is damaged"),
    "no data": (lambda it: (it / DATA).unlink(), f"{DATA} is missing"),
    "cut data": (lambda it: cut(it / DATA), f"{DATA} is truncated"),
    "one bit": (lambda it: flip(it / DATA), f"{DATA} is damaged"),
    "another's data": (exchange, f"{DATA} is damaged, or of another checkpoint"),
    "cut manifest": (lambda it: cut(it / MANIFEST), f"{MANIFEST} cannot be read"),
    "wrong manifest": (lambda it: (it / MANIFEST).write_text('{"format": 1, "step": []}'), f"{MANIFEST} cannot be"),
    "later manifest": (lambda it: (it / MANIFEST).write_text('{"format": 2}'), "newer version"),
    "upwards": (lead_out("../x"), "outside its directory: '../x'"),
    "absolute": (lead_out("/etc/passwd"), "outside its directory: '/etc/passwd'"),
    "nowhere": (lead_out(".."), "outside its directory"),
    "no name": (lead_out(7), "outside its directory"),  # type: ignore[arg-type]
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(ctx: RankContext, tmp_path: Path, damage: str) -> None:
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


FOREIGN_DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut data": (lambda it: cut(it / DATA), f"{DATA} is truncated"),
    "noise": (
        lambda it: (it / DATA).write_bytes(bytes((it / DATA).stat().st_size)),
        f"'.*' in .*{DATA} cannot be read",
    ),
    "no chunks": (lambda it: edit_metadata(it, forget_chunks), "elements, but parts with 0 of them"),
    "no planner data": (lambda it: edit_metadata(it, lambda m: m.planner_data.clear()), "has no optimizer|other model"),
}


@ranks(1, 2)
@pytest.mark.parametrize("damage", FOREIGN_DAMAGES)
def test_damaged_files_without_check_sums(ctx: RankContext, tmp_path: Path, damage: str) -> None:
    """As others write them: torch notices less, and says it less clearly."""
    directory = TrainingRun().save(tmp_path)
    on_rank_0((directory / MANIFEST).unlink)
    spoil, match = FOREIGN_DAMAGES[damage]
    on_rank_0(lambda: spoil(directory))
    other = TrainingRun(seed=5)
    with refused(other, match, tmp_path):
        checkpoint.load(directory, **other.parts(scheduler=False))


# ---- files that would run code


@ranks(1, 2)
def test_metadata_runs_no_code(ctx: RankContext, tmp_path: Path) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    directory = run.save(tmp_path / "run")
    for evil in (Evil(marker), Metadata({}, planner_data=Evil(marker))):
        on_rank_0(partial((directory / ".metadata").write_bytes, pickle.dumps(evil)))
        with refused(run, "no part of a checkpoint's metadata", tmp_path):
            run.load(tmp_path / "run")
    assert not marker.exists()


@ranks(1, 2)
@pytest.mark.parametrize("place", ["groups", "state", "model"])
def test_data_run_no_code(ctx: RankContext, tmp_path: Path, place: str) -> None:
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


def as_bytes(value: Any, *, safely: bool = True) -> torch.Tensor:
    if safely:
        return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


@ranks(1, 2)
@pytest.mark.parametrize("place", ["ranks", "scheduler"])
@pytest.mark.parametrize("kind", ["evil", "noise", "wrong"])
def test_packed_values_run_no_code(ctx: RankContext, tmp_path: Path, place: str, kind: str) -> None:
    run, marker = TrainingRun(), tmp_path / "marker"
    values = {
        "evil": as_bytes({"random": Evil(marker), "extra": Evil(marker)}, safely=False),
        "noise": torch.arange(100, dtype=torch.uint8),
        "wrong": as_bytes({"random": {"torch": torch.zeros(3), "python": []}, "extra": 1}),
    }
    good = as_bytes(run.scheduler.state_dict())
    contents: dict[str, Any] = {"model": run.model.state_dict(), "scheduler": good}
    contents[place] = {str(rank): values[kind] for rank in range(ctx.world_size)} if place == "ranks" else values[kind]
    dcp_save(contents, checkpoint_id=tmp_path / "evil")
    text = Manifest(1, ctx.world_size, files_below(tmp_path / "evil"), 0.0, "").text()
    on_rank_0(lambda: (tmp_path / "evil" / MANIFEST).write_text(text))
    if kind == "wrong" and place == "scheduler":
        return  # a scheduler takes any dict
    reason = {"evil": "GLOBAL posix.system", "noise": "", "wrong": ""}[kind]
    with refused(run, f"'{place}.* cannot be read.*{reason}", tmp_path):
        checkpoint.load(tmp_path / "evil", model=run.model, scheduler=run.scheduler)
    assert not marker.exists()


# ---- checkpoints of something else


@ranks(1, 2)
def test_no_checkpoint(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0((tmp_path / "empty").mkdir)
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    with refused(run, "nothing does not exist", tmp_path):
        run.load(tmp_path / "nothing")
    with refused(run, "no checkpoint in it", tmp_path):
        run.load(tmp_path / "empty")
    with refused(run, "file is a file", tmp_path):
        run.load(tmp_path / "file")


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(2, 4, 2)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Parameter(torch.randn(2))


@ranks(1, 2, 3)
@pytest.mark.parametrize("way", [flat, whole, dropin, None])
def test_another_model(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    run, longer, wider = TrainingRun(way=way), TrainingRun(way=way, model=Longer()), TrainingRun(way=way, model=Wider())
    run.save(tmp_path / "short")
    longer.save(tmp_path / "long")
    with refused(run, "Only there: further", tmp_path):
        run.load(tmp_path / "long")
    with refused(longer, "Missing there: further", tmp_path):
        longer.load(tmp_path / "short")
    with refused(wider, r"'model.kernel.* in .* has shape \(3.*\(4", tmp_path):
        wider.load(tmp_path / "short")
    alone = named_like(wider)
    with refused(wider, r"kernel.* in .* has shape \(3.*kernel.* has \(4", tmp_path):
        checkpoint.load(tmp_path / "short", optimizer=alone)


def named_like(run: TrainingRun) -> Any:
    """Its optimizer, whose parameters have the names of the model also where the model is not given."""
    for group in run.optimizer.param_groups:
        group.setdefault("param_names", [name for name, _ in run.model.named_parameters()])
    return run.optimizer


@ranks(1, 2)
@pytest.mark.parametrize("way", [flat, whole, None])
def test_what_both_have(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    """With strict=False. What is missing in the checkpoint keeps its value and its state."""
    run, longer = TrainingRun(way=way), TrainingRun(seed=3, way=way, model=Longer())
    run.save(tmp_path)
    before = longer.look()
    loaded = longer.load(tmp_path, strict=False)
    after = longer.look()
    assert loaded.step == 2
    assert torch.equal(after["model"]["further"], before["model"]["further"])
    assert torch.equal(after["model"]["mix"], run.model.state_dict()["mix"])
    if before["optimizer"] is not None:
        last = len(list(longer.model.parameters())) - 1
        order = [name for name, _ in longer.model.named_parameters()].index("further")
        assert 0 <= order <= last
        assert_same(after["optimizer"]["state"].get(order), before["optimizer"]["state"].get(order), "further")


@ranks(1, 2)
def test_parts_that_are_not_there(ctx: RankContext, tmp_path: Path) -> None:
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


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@ranks(1, 2)
@pytest.mark.parametrize("saved", KINDS)
def test_another_optimizer_class(ctx: RankContext, tmp_path: Path, saved: str) -> None:
    model = net()
    ours = shard(model, KINDS[saved])
    train(model, ours, 2)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=ours)
    for kind, made in KINDS.items():
        for steps in (0, 2):
            for sharded in (True, False):
                run = TrainingRun(seed=2, steps=0)
                run.model = net(2)
                run.optimizer = shard(run.model, made) if sharded else made(run.model.parameters())
                train(run.model, run.optimizer, steps)
                if kind == saved:
                    checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
                    train(run.model, run.optimizer, 1)
                elif {kind, saved} != {"SGD", "momentum"}:  # which are one class
                    with refused(run, "is of another optimizer class", tmp_path):
                        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


def grouped(model: nn.Module, *, swap: bool = False, mixed: bool = False, lr: float = 0.1) -> ZeroRedundancyOptimizer:
    named = list(model.named_parameters())
    first, second = named[:3], named[3:]
    if mixed:
        first, second = named[:4], named[4:]
    groups = [{"params": first, "lr": lr}, {"params": second, "lr": 0.2, "weight_decay": 0.5}]
    return shard(model, torch.optim.AdamW, params=groups[::-1] if swap else groups)


@ranks(1, 2)
def test_groups(ctx: RankContext, tmp_path: Path) -> None:
    """Names decide, whatever the order; parameters that had different options cannot have one."""
    model = net()
    optimizer = grouped(model)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    other = net(4)
    into = grouped(other, swap=True, lr=0.7)
    checkpoint.load(tmp_path, model=other, optimizer=into)
    assert [group["lr"] for group in into.param_groups] == [0.2, 0.1]
    train(model, optimizer, 2)
    train(other, into, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    run = TrainingRun(seed=5)
    run.model = net(5)
    run.optimizer = grouped(run.model, mixed=True)
    with refused(run, "in one group here, but had different options.*lr=0.1", tmp_path):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)


@ranks(1, 2)
def test_groups_that_were_added_and_parameters_that_were_frozen(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    model = Longer()
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
def test_wrapped_models_have_the_same_names(ctx: RankContext, tmp_path: Path, wrapping: str) -> None:
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


class Stubborn(Net):
    """Fails to load on the last rank, after everything else was loaded."""

    refuses = False

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, _: Any) -> None:
        if self.refuses and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("I will not")


@ranks(1, 2, 3)
@pytest.mark.parametrize("way", [flat, whole, None])
def test_a_model_that_fails_to_load(ctx: RankContext, tmp_path: Path, way: Any) -> None:
    torch.manual_seed(0)
    run, other = TrainingRun(way=way, model=Stubborn()), TrainingRun(way=way, model=Stubborn(), steps=3)
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
def test_a_scheduler_or_an_optimizer_that_fails_to_load(ctx: RankContext, tmp_path: Path, way: Any) -> None:
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
def small_files(most: int, *, here: bool = True) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ranks(1, 2, 3)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_full_disk(ctx: RankContext, tmp_path: Path, behind: bool, first: bool) -> None:
    """On the last rank, or on the first one, which writes the metadata."""
    run = TrainingRun()
    run.save(tmp_path, 1)
    here = ctx.rank == (0 if first else ctx.world_size - 1)
    with refused(run, "could not be written.*File too large", tmp_path), small_files(2000, here=here):
        run.save(tmp_path, 2, async_=behind)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"
    assert not [it for it in tmp_path.iterdir() if it.name.startswith((".writing", ".leaving"))]
    run.save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000002"


@ranks(1, 2)
def test_no_place_to_write_to(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    on_rank_0(lambda: (tmp_path / "file").write_text(""))
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(run, "file", tmp_path):
            run.save(path)


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@ranks(1, 2)
def test_another_job_writes_there(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    other: Any = None
    if ctx.rank == 0:
        command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"held\n"
    dist.barrier()
    with refused(run, "another process is writing", tmp_path):
        run.save(tmp_path, 2)
    if other is not None:
        other.communicate(b"\n", timeout=20)
    dist.barrier()
    run.save(tmp_path, 2)


@ranks(1, 2)
def test_values_that_cannot_be(ctx: RankContext, tmp_path: Path) -> None:
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


@ranks(1, 2, 3, timeout=60)
def test_what_is_no_model_no_optimizer_and_no_display(ctx: RankContext, tmp_path: Path) -> None:
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
def test_ranks_that_disagree(ctx: RankContext, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_cannot_say_what_it_has(ctx: RankContext, tmp_path: Path, behind: bool) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    is_last = ctx.rank == ctx.world_size - 1
    with refused(run, r"\['position'\]: a Evil cannot be sent safely", tmp_path):
        run.save(tmp_path, 2, extra={"position": Evil(tmp_path)} if is_last else 1, async_=behind)

    def fail(*_: Any) -> None:
        if is_last:
            raise RuntimeError("I will not")

    handle = run.model.register_state_dict_post_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match="I will not"):
        run.save(tmp_path, 2, async_=behind)
    handle.remove()
    run.save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="TypeError"):
        checkpoint.save(None if is_last else tmp_path, step=3, model=run.model)  # type: ignore[arg-type]


@ranks(1, 2)
def test_what_fails_in_the_background_is_told_once(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    files = files_below(tmp_path)
    saving = checkpoint.save(tmp_path, step=1, model=run.model, async_=True)
    with pytest.raises(CheckpointError, match="exists already"):
        saving.wait()
    run.save(tmp_path, 2)  # it was told
    checkpoint.save(tmp_path, step=1, model=run.model, async_=True)
    with pytest.raises(CheckpointError, match="exists already"):
        run.save(tmp_path / "elsewhere", 3)
    run.save(tmp_path / "elsewhere", 3)
    dist.barrier()
    assert files.items() - {("latest", files["latest"])} <= files_below(tmp_path).items()


@ranks(2, 3)
def test_what_one_rank_has_heard_of_the_others_hear_too(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path, 1)
    saving = checkpoint.save(tmp_path, step=1, model=run.model, async_=True)
    if ctx.rank == 0:
        with pytest.raises(CheckpointError, match="exists already"):
            saving.wait()
    with pytest.raises(CheckpointError, match="exists already"):
        run.save(tmp_path, 2)
    run.save(tmp_path, 2)


@ranks(1, 2, 3)
def test_saves_in_the_background_to_several_folders(ctx: RankContext, tmp_path: Path) -> None:
    """Their messages do not meet."""
    run = TrainingRun(way=one_bucket)
    savings = [
        checkpoint.save(tmp_path / str(number % 2), step=number, **run.parts(), async_=True) for number in range(6)
    ]
    assert [it.wait().name for it in savings] == [f"step-{number:09d}" for number in range(6)]
    assert all(checkpoint.load(tmp_path / folder, **run.parts()).step == step for folder, step in (("0", 4), ("1", 5)))
