"""Corrupted state dicts on one rank or on all: rejected on all ranks without changes, or loaded as torch loads them."""

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


def with_master_weights(model: torch.nn.Module, group: Any = None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=FlatShards(bucket_bytes=160), master_dtype=torch.float64)
    return shard(model, torch.optim.AdamW, process_group=group, config=config, lr=0.05, weight_decay=0.1)


def make_valid_state_dict() -> dict[str, Any]:
    model = net()
    optimizer = plain(model)
    train(model, optimizer, 2)
    return optimizer.state_dict()


def fingerprint(value: Any) -> Any:
    """Return a fingerprint that changes when anything in the value does."""
    if isinstance(value, dict):
        return [(repr(key), fingerprint(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [fingerprint(part) for part in value]
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


LOAD_CALLS: dict[str, Callable[[Any, Any], object]] = {
    "load_state_dict": lambda optimizer, given: optimizer.load_state_dict(given),
    "assign": lambda optimizer, given: optimizer.load_state_dict(given, assign=True),
    "check": lambda optimizer, given: optimizer._check_state_dict(given),
}


def try_load(run: TrainingRun, call: str, given: Any) -> Exception | None:
    """Return the error raised, if any. A failed load changes nothing, and the argument is never modified."""
    before, was = run.look(), fingerprint(given)
    failure: Exception | None = None
    with watched():
        try:
            LOAD_CALLS[call](run.optimizer, given)
        except Exception as error:
            failure = error
    assert fingerprint(given) == was, "what was given is changed"
    if failure is not None or call == "check":
        assert_same(run.look(), before, "what was running")
    if failure is not None:
        assert isinstance(failure, (ZeroError, TypeError, ValueError)), repr(failure)
        assert not isinstance(failure, UnicodeError), repr(failure)
        assert len(str(failure)) > 10, repr(failure)
    return failure


def gather_from_ranks(value: bool) -> list[bool]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def clone_tensors(value: Any) -> Any:
    """Clone the tensors, so that they may be modified."""
    return map_tensors(value, lambda it: it.clone() if it.layout == torch.strided and it.numel() < 1000 else it)


def assert_trains_like_torch(run: TrainingRun, given: Any) -> None:
    model = net()
    model.load_state_dict(run.model.state_dict())
    theirs = plain(model)
    theirs.load_state_dict(clone_tensors(given))
    ended = [_train_and_catch(run.model, run.optimizer), _train_and_catch(model, theirs)]
    if ended[1] is None:
        assert ended[0] is None, ended
        assert_same(_param_values(run.model), _param_values(model), "what torch makes of it")


def _train_and_catch(model: torch.nn.Module, optimizer: Any) -> Exception | None:
    try:
        train(model, optimizer, 2, first=7)
    except Exception as error:
        return error
    return None


def _param_values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().nan_to_num(123.0).contiguous() for param in model.parameters()]


def is_loadable_by_torch(given: Any) -> bool:
    """Whether torch itself can load it without keeping a given tensor and writing to it."""
    strange: list[bool] = []

    def look(it: torch.Tensor) -> None:
        overlaps = it.layout == torch.strided and it.numel() > 1 and 0 in it.stride()
        strange.append(it.is_meta or it.layout != torch.strided or isinstance(it, Stranger) or overlaps)

    map_tensors(given, look)
    return not any(strange)


@ranks(1, 2, timeout=100)
@sampled("way", [flat, dropin])
def test_corrupted_state_dicts(ctx: RankContext, way: Way) -> None:
    good, run, accepted = make_valid_state_dict(), TrainingRun(way=way), 0
    for seed in range(rounds(60)):
        draw = Random(seed)
        bad, odd = mutated(good, draw), draw.choice((None, None, 0, ctx.world_size - 1))
        call = draw.choice(("load_state_dict", "load_state_dict", "assign", "check"))
        given = bad if odd in (None, ctx.rank) else good
        try:
            failed = try_load(run, call, clone_tensors(given))
            if call == "check":
                continue
            assert len(set(gather_from_ranks(failed is not None))) == 1, failed
            if failed is not None:
                continue
            accepted += 1
            if odd is None and is_loadable_by_torch(bad) and call == "load_state_dict":
                assert_trains_like_torch(run, bad)
            run = TrainingRun(way=way)
        except BaseException as error:
            error.add_note(f"example {seed}: {call} on rank {odd}") if hasattr(error, "add_note") else None
            raise
    assert accepted, "all were refused: nothing was compared"
    assert_same(run.look(), TrainingRun(way=way).look(), "one that nobody has touched")
    train(run.model, run.optimizer, 1)


@ranks(1, 2)
@sampled("way", [flat, dropin, with_master_weights])
def test_unusual_state_tensors(ctx: RankContext, way: Way) -> None:
    good, run = make_valid_state_dict(), TrainingRun(way=way)
    for kind, change in TENSORS.items():
        for index in (0, 1):
            bad = {**good, "state": {**good["state"]}}
            bad["state"][index] = {**good["state"][index], "exp_avg": change(good["state"][index]["exp_avg"])}
            failed = try_load(run, "load_state_dict", clone_tensors(bad))
            assert len(set(gather_from_ranks(failed is not None))) == 1, (kind, failed)
            if failed is None:
                if is_loadable_by_torch(bad) and way is not with_master_weights:
                    assert_trains_like_torch(run, bad)
                run = TrainingRun(way=way)


# ---- regressions


@ranks(1, 2)
def test_lower_precision_state_of_one_param(ctx: RankContext) -> None:
    """Parameters that share a flat tensor were all rounded to the dtype of the first."""
    good = make_valid_state_dict()
    for index in (0, 1):
        run, bad = TrainingRun(way=flat), clone_tensors(good)
        bad["state"][index]["exp_avg"] = bad["state"][index]["exp_avg"].half()
        run.optimizer.load_state_dict(bad)
        assert_trains_like_torch(run, bad)


@ranks(1, 2)
def test_state_key_of_only_one_param(ctx: RankContext) -> None:
    good, run = make_valid_state_dict(), TrainingRun(way=flat)
    for index in good["state"]:
        bad = clone_tensors(good)
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
def test_invalid_master_weights_are_rejected(ctx: RankContext, master: Any) -> None:
    """A single element was broadcast to all elements."""
    run, bad = TrainingRun(way=with_master_weights), make_valid_state_dict()
    bad["state"][0] = {**bad["state"][0], "master_weights": master}
    failed = try_load(run, "load_state_dict", bad)
    assert gather_from_ranks(isinstance(failed, ZeroError)) == [True] * ctx.world_size


@ranks(2, 3)
@pytest.mark.parametrize("key", ["\ud800", 5, (1, 2)])
def test_invalid_group_key_on_one_rank(ctx: RankContext, key: Any) -> None:
    """The failure could not be sent to the other ranks, which then hung."""
    run, bad = TrainingRun(way=flat), make_valid_state_dict()
    if ctx.rank == ctx.world_size - 1:
        bad["param_groups"][0][key] = 1
    failed = try_load(run, "load_state_dict", bad)
    assert gather_from_ranks(isinstance(failed, ZeroError)) == [True] * ctx.world_size
    train(run.model, run.optimizer, 1)


@ranks(1, 2)
def test_recursive_and_deeply_nested_state_dicts(ctx: RankContext) -> None:
    run, deep = TrainingRun(way=flat), 1
    for _ in range(5000):
        deep = [deep]  # type: ignore[assignment]
    around: dict[str, Any] = make_valid_state_dict()
    around["state"][0]["x"] = around
    nested = make_valid_state_dict()
    nested["state"][0]["x"] = deep
    for bad in (around, nested):
        before = run.look()
        with pytest.raises(CheckpointError, match="nested too deeply, or has itself in it"):
            run.optimizer.load_state_dict(bad)
        assert_same(run.look(), before)
