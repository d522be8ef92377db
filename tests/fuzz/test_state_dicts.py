"""Spoiled state dicts on one rank or on all: refused everywhere and nothing changes, or loaded as torch loads them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import RankContext, ranks
from tests.support.checkpoints import TrainingRun, Way, dropin, flat, net, plain, train
from tests.support.fuzzing import TENSORS, Stranger, mutated, rounds
from tests.support.monitoring import watched
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ZeroConfig, ZeroError, ZeroRedundancyOptimizer, shard
from zeroshard.layout.partition import FlatShards
from zeroshard.state.tensor_utils import map_tensors

pytestmark = pytest.mark.filterwarnings("ignore")


def with_masters(model: torch.nn.Module, group: Any = None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=FlatShards(bucket_bytes=160), master_dtype=torch.float64)
    return shard(model, torch.optim.AdamW, process_group=group, config=config, lr=0.05, weight_decay=0.1)


def good_dict() -> dict[str, Any]:
    model = net()
    optimizer = plain(model)
    train(model, optimizer, 2)
    return optimizer.state_dict()


def outline(value: Any) -> Any:
    """Changes when anything in the value does."""
    if isinstance(value, dict):
        return [(repr(key), outline(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [outline(part) for part in value]
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


LOADS: dict[str, Callable[[Any, Any], object]] = {
    "load_state_dict": lambda optimizer, given: optimizer.load_state_dict(given),
    "assign": lambda optimizer, given: optimizer.load_state_dict(given, assign=True),
    "check": lambda optimizer, given: optimizer._check_state_dict(given),
}


def tried(run: TrainingRun, call: str, given: Any) -> Exception | None:
    """What it raises; it does nothing else then, and never changes what it was given."""
    before, was = run.look(), outline(given)
    failure: Exception | None = None
    with watched():
        try:
            LOADS[call](run.optimizer, given)
        except Exception as error:
            failure = error
    assert outline(given) == was, "what was given is changed"
    if failure is not None or call == "check":
        assert_same(run.look(), before, "what was running")
    if failure is not None:
        assert isinstance(failure, (ZeroError, TypeError, ValueError)), repr(failure)
        assert not isinstance(failure, UnicodeError), repr(failure)
        assert len(str(failure)) > 10, repr(failure)
    return failure


def everywhere(value: bool) -> list[bool]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def own(value: Any) -> Any:
    """With tensors that may be changed."""
    return map_tensors(value, lambda it: it.clone() if it.layout == torch.strided and it.numel() < 1000 else it)


def goes_on_as_torch_does(run: TrainingRun, given: Any) -> None:
    model = net()
    model.load_state_dict(run.model.state_dict())
    theirs = plain(model)
    theirs.load_state_dict(own(given))
    ended = [_trained(run.model, run.optimizer), _trained(model, theirs)]
    if ended[1] is None:
        assert ended[0] is None, ended
        assert_same(_numbers(run.model), _numbers(model), "what torch makes of it")


def _trained(model: torch.nn.Module, optimizer: Any) -> Exception | None:
    try:
        train(model, optimizer, 2, first=7)
    except Exception as error:
        return error
    return None


def _numbers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().nan_to_num(123.0).contiguous() for param in model.parameters()]


def is_torchs(given: Any) -> bool:
    """Whether torch itself can load it, and without keeping what it was given to write to it."""
    strange: list[bool] = []

    def look(it: torch.Tensor) -> None:
        overlaps = it.layout == torch.strided and it.numel() > 1 and 0 in it.stride()
        strange.append(it.is_meta or it.layout != torch.strided or isinstance(it, Stranger) or overlaps)

    map_tensors(given, look)
    return not any(strange)


@ranks(1, 2, timeout=100)
@sampled("way", [flat, dropin])
def test_spoiled_dicts(ctx: RankContext, way: Way) -> None:
    good, run, accepted = good_dict(), TrainingRun(way=way), 0
    for seed in range(rounds(60)):
        draw = Random(seed)
        bad, odd = mutated(good, draw), draw.choice((None, None, 0, ctx.world_size - 1))
        call = draw.choice(("load_state_dict", "load_state_dict", "assign", "check"))
        given = bad if odd in (None, ctx.rank) else good
        try:
            failed = tried(run, call, own(given))
            if call == "check":
                continue
            assert len(set(everywhere(failed is not None))) == 1, failed
            if failed is not None:
                continue
            accepted += 1
            if odd is None and is_torchs(bad) and call == "load_state_dict":
                goes_on_as_torch_does(run, bad)
            run = TrainingRun(way=way)
        except BaseException as error:
            error.add_note(f"example {seed}: {call} on rank {odd}") if hasattr(error, "add_note") else None
            raise
    assert accepted, "all were refused: nothing was compared"
    assert_same(run.look(), TrainingRun(way=way).look(), "one that nobody has touched")
    train(run.model, run.optimizer, 1)


@ranks(1, 2)
@sampled("way", [flat, dropin, with_masters])
def test_each_kind_of_tensor(ctx: RankContext, way: Way) -> None:
    good, run = good_dict(), TrainingRun(way=way)
    for kind, change in TENSORS.items():
        for index in (0, 1):
            bad = {**good, "state": {**good["state"]}}
            bad["state"][index] = {**good["state"][index], "exp_avg": change(good["state"][index]["exp_avg"])}
            failed = tried(run, "load_state_dict", own(bad))
            assert len(set(everywhere(failed is not None))) == 1, (kind, failed)
            if failed is None:
                if is_torchs(bad) and way is not with_masters:
                    goes_on_as_torch_does(run, bad)
                run = TrainingRun(way=way)


# ---- what was found


@ranks(1, 2)
def test_state_that_is_less_precise_for_one_parameter(ctx: RankContext) -> None:
    """Parameters that share a run of memory had all of it rounded as the first was."""
    good = good_dict()
    for index in (0, 1):
        run, bad = TrainingRun(way=flat), own(good)
        bad["state"][index]["exp_avg"] = bad["state"][index]["exp_avg"].half()
        run.optimizer.load_state_dict(bad)
        goes_on_as_torch_does(run, bad)


@ranks(1, 2)
def test_state_that_one_parameter_has_and_its_neighbour_has_not(ctx: RankContext) -> None:
    good, run = good_dict(), TrainingRun(way=flat)
    for index in good["state"]:
        bad = own(good)
        bad["state"][index]["more"] = torch.full_like(bad["state"][index]["exp_avg"], 2.5)
        for number, state in bad["state"].items():
            state["odd"] = torch.full((20,), float(number))
        run.optimizer.load_state_dict(bad)
        assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
        found = run.optimizer.full_state_dict()
        if found is not None:
            assert {number for number, state in found["state"].items() if "more" in state} == {index}
            assert torch.equal(found["state"][index]["more"], bad["state"][index]["more"])
            odd = {number: state["odd"].tolist() for number, state in found["state"].items() if state}
            assert odd == {number: [float(number)] * 20 for number in bad["state"]}


@ranks(1, 2)
@sampled("master", [torch.ones(1), "x", torch.ones(7, 7), torch.empty(6, 4, device="meta"), None])
def test_master_weights_of_another_shape(ctx: RankContext, master: Any) -> None:
    """One element would have become all of them."""
    run, bad = TrainingRun(way=with_masters), good_dict()
    bad["state"][0] = {**bad["state"][0], "master_weights": master}
    failed = tried(run, "load_state_dict", bad)
    assert everywhere(isinstance(failed, ZeroError)) == [True] * ctx.world_size


@ranks(2, 3)
@pytest.mark.parametrize("key", ["\ud800", 5, (1, 2)])
def test_half_a_character_on_one_rank(ctx: RankContext, key: Any) -> None:
    """It could not be told to the others, who waited."""
    run, bad = TrainingRun(way=flat), good_dict()
    if ctx.rank == ctx.world_size - 1:
        bad["param_groups"][0][key] = 1
    failed = tried(run, "load_state_dict", bad)
    assert everywhere(isinstance(failed, ZeroError)) == [True] * ctx.world_size
    train(run.model, run.optimizer, 1)


@ranks(1, 2)
def test_dicts_that_have_themselves_in_them(ctx: RankContext) -> None:
    run, deep = TrainingRun(way=flat), 1
    for _ in range(5000):
        deep = [deep]  # type: ignore[assignment]
    around: dict[str, Any] = good_dict()
    around["state"][0]["x"] = around
    nested = good_dict()
    nested["state"][0]["x"] = deep
    for bad in (around, nested):
        before = run.look()
        with pytest.raises(CheckpointError, match="nested too deeply, or has itself in it"):
            run.optimizer.load_state_dict(bad)
        assert_same(run.look(), before)
