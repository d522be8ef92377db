"""Corrupted state dicts on one rank or on all: rejected on all ranks without changes, or loaded as torch loads them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import RankContext, ranks
from tests.support.checkpoints import MakeOptimizer, TrainingRun, dropin, flat, net, plain, train
from tests.support.fuzzing import TENSORS, TensorSubclass, mutate, rounds, time_limit
from tests.support.monitoring import forbid_side_effects
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
        return [(repr(key), fingerprint(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


LOAD_CALLS: dict[str, Callable[[Any, Any], object]] = {
    "load_state_dict": lambda optimizer, state_dict: optimizer.load_state_dict(state_dict),
    "assign": lambda optimizer, state_dict: optimizer.load_state_dict(state_dict, assign=True),
    "check": lambda optimizer, state_dict: optimizer._check_state_dict(state_dict),
}


def try_load(run: TrainingRun, call: str, state_dict: Any) -> Exception | None:
    """Return the error raised, if any. A failed load changes nothing, and the argument is never modified."""
    before, fingerprint_before = run.capture(), fingerprint(state_dict)
    failure: Exception | None = None
    with forbid_side_effects():
        try:
            LOAD_CALLS[call](run.optimizer, state_dict)
        except Exception as error:
            failure = error
    assert fingerprint(state_dict) == fingerprint_before, "the argument was modified"
    if failure is not None or call == "check":
        assert_same(run.capture(), before, "the run")
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
    return map_tensors(
        value,
        lambda tensor: tensor.clone() if tensor.layout == torch.strided and tensor.numel() < 1000 else tensor,
    )


def assert_trains_like_torch(run: TrainingRun, state_dict: Any) -> None:
    model = net()
    model.load_state_dict(run.model.state_dict())
    plain_optimizer = plain(model)
    plain_optimizer.load_state_dict(clone_tensors(state_dict))
    errors = [_train_and_catch(run.model, run.optimizer), _train_and_catch(model, plain_optimizer)]
    if errors[1] is None:
        assert errors[0] is None, errors
        ours, theirs = _param_values(run.model), _param_values(model)
        if any(group.get("fused") for group in plain_optimizer.param_groups):
            # Fused CPU kernels round the last elements of a tensor differently, and shards end elsewhere.
            torch.testing.assert_close(ours, theirs)
        else:
            assert_same(ours, theirs, "the params after training, compared with torch")


def _train_and_catch(model: torch.nn.Module, optimizer: Any) -> Exception | None:
    try:
        train(model, optimizer, 2, first=7)
    except Exception as error:
        return error
    return None


def _param_values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().nan_to_num(123.0).contiguous() for param in model.parameters()]


def is_loadable_by_torch(state_dict: Any) -> bool:
    """Whether torch itself can load the state dict and then write to its tensors."""
    is_unusual: list[bool] = []

    def examine(tensor: torch.Tensor) -> None:
        overlaps = tensor.layout == torch.strided and tensor.numel() > 1 and 0 in tensor.stride()
        is_unusual.append(
            tensor.is_meta or tensor.layout != torch.strided or isinstance(tensor, TensorSubclass) or overlaps
        )

    map_tensors(state_dict, examine)
    return not any(is_unusual)


@ranks(1, 2, timeout=time_limit(100))
@sampled("make_optimizer", [flat, dropin])
def test_corrupted_state_dicts(ctx: RankContext, make_optimizer: MakeOptimizer) -> None:
    good, run, num_accepted = make_valid_state_dict(), TrainingRun(make_optimizer=make_optimizer), 0
    for seed in range(rounds(60)):
        rng = Random(seed)
        bad, bad_rank = mutate(good, rng), rng.choice((None, None, 0, ctx.world_size - 1))
        call = rng.choice(("load_state_dict", "load_state_dict", "assign", "check"))
        state_dict = bad if bad_rank in (None, ctx.rank) else good
        try:
            failure = try_load(run, call, clone_tensors(state_dict))
            if call == "check":
                continue
            assert len(set(gather_from_ranks(failure is not None))) == 1, failure
            if failure is not None:
                continue
            num_accepted += 1
            if bad_rank is None and is_loadable_by_torch(bad) and call == "load_state_dict":
                assert_trains_like_torch(run, bad)
            run = TrainingRun(make_optimizer=make_optimizer)
        except BaseException as error:
            error.add_note(f"example {seed}: {call} on rank {bad_rank}") if hasattr(error, "add_note") else None
            raise
    assert num_accepted, "all state dicts were rejected: nothing was compared"
    assert_same(run.capture(), TrainingRun(make_optimizer=make_optimizer).capture(), "an untouched run")
    train(run.model, run.optimizer, 1)


@ranks(1, 2, timeout=time_limit(100))
@sampled("make_optimizer", [flat, dropin, with_master_weights])
def test_unusual_state_tensors(ctx: RankContext, make_optimizer: MakeOptimizer) -> None:
    good, run = make_valid_state_dict(), TrainingRun(make_optimizer=make_optimizer)
    for kind, change in TENSORS.items():
        for index in (0, 1):
            bad = {**good, "state": {**good["state"]}}
            bad["state"][index] = {**good["state"][index], "exp_avg": change(good["state"][index]["exp_avg"])}
            failure = try_load(run, "load_state_dict", clone_tensors(bad))
            assert len(set(gather_from_ranks(failure is not None))) == 1, (kind, failure)
            if failure is None:
                if is_loadable_by_torch(bad) and make_optimizer is not with_master_weights:
                    assert_trains_like_torch(run, bad)
                run = TrainingRun(make_optimizer=make_optimizer)


# ---- regressions


@ranks(1, 2)
def test_lower_precision_state_of_one_param(ctx: RankContext) -> None:
    """Regression: all parameters that share a flat tensor were rounded to the dtype of the first."""
    good = make_valid_state_dict()
    for index in (0, 1):
        run, bad = TrainingRun(make_optimizer=flat), clone_tensors(good)
        bad["state"][index]["exp_avg"] = bad["state"][index]["exp_avg"].half()
        run.optimizer.load_state_dict(bad)
        assert_trains_like_torch(run, bad)


@ranks(1, 2)
def test_state_key_of_only_one_param(ctx: RankContext) -> None:
    good, run = make_valid_state_dict(), TrainingRun(make_optimizer=flat)
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
            odd_values = {number: state["odd"].tolist() for number, state in found["state"].items() if state}
            assert odd_values == {number: [float(number)] * 20 for number in bad["state"]}


@ranks(1, 2)
@sampled("master", [torch.ones(1), "x", torch.ones(7, 7), torch.empty(6, 4, device="meta"), None])
def test_invalid_master_weights_are_rejected(ctx: RankContext, master: Any) -> None:
    """Regression: a single element was broadcast to all elements."""
    run, bad = TrainingRun(make_optimizer=with_master_weights), make_valid_state_dict()
    bad["state"][0] = {**bad["state"][0], "master_weights": master}
    failure = try_load(run, "load_state_dict", bad)
    assert gather_from_ranks(isinstance(failure, ZeroError)) == [True] * ctx.world_size


@ranks(2, 3)
@pytest.mark.parametrize("key", ["\ud800", 5, (1, 2)])
def test_invalid_group_key_on_one_rank(ctx: RankContext, key: Any) -> None:
    """Regression: the failure could not be sent to the other ranks, which then hung."""
    run, bad = TrainingRun(make_optimizer=flat), make_valid_state_dict()
    if ctx.rank == ctx.world_size - 1:
        bad["param_groups"][0][key] = 1
    failure = try_load(run, "load_state_dict", bad)
    assert gather_from_ranks(isinstance(failure, ZeroError)) == [True] * ctx.world_size
    train(run.model, run.optimizer, 1)


@ranks(1, 2)
def test_recursive_and_deeply_nested_state_dicts(ctx: RankContext) -> None:
    run, deep_list = TrainingRun(make_optimizer=flat), 1
    for _ in range(5000):
        deep_list = [deep_list]  # type: ignore[assignment]
    recursive: dict[str, Any] = make_valid_state_dict()
    recursive["state"][0]["x"] = recursive
    nested = make_valid_state_dict()
    nested["state"][0]["x"] = deep_list
    for bad in (recursive, nested):
        before = run.capture()
        with pytest.raises(CheckpointError, match="nested too deeply or contains itself"):
            run.optimizer.load_state_dict(bad)
        assert_same(run.capture(), before)
