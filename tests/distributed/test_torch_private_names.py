"""Names that torch marks private and that public code uses, beside torch's own class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs
from torch.futures import Future
from torch.optim import SGD, AdamW, Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import DdpTwins, Setup, Twins, assert_same, mlp, set_grads, small_model, two_groups
from zeroshard import (
    BindingError,
    ConfigError,
    FlatShards,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    zero_redundancy_optimizer,
)

COMPARED_ATTRIBUTES = (
    *("_all_params", "_param_to_index", "_index_to_param", "_param_to_rank", "_overlap_with_ddp", "_optim_constructor"),
    *("_optim_defaults", "_default_device", "_is_trainable_mask"),
)
OVERLAP_INFO_FIELDS = (
    *("shard_buckets", "params_per_bucket", "params_per_rank", "offsets", "assigned_ranks_per_bucket", "total_size"),
    "status",
)


def replace_params_by_index(value: Any, params: Sequence[torch.Tensor]) -> Any:
    """The same with the places of parameters instead of these, to compare it with that of another model."""
    if isinstance(value, torch.Tensor):
        return next((i for i, param in enumerate(params) if param is value), tuple(value.shape))
    if isinstance(value, dict):
        return {
            replace_params_by_index(key, params): replace_params_by_index(item, params) for key, item in value.items()
        }
    if isinstance(value, list):
        return [replace_params_by_index(item, params) for item in value]
    return value


def param_indices_per_rank(groups_per_rank: Any, params: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """The parameters of each rank and group; torch lists the largest first."""
    return [
        [sorted(replace_params_by_index(group["params"], params)) for group in groups] for groups in groups_per_rank
    ]


def local_state(kind: Any, optimizer: Any) -> dict[str, Any]:
    """This rank's state by global indices, as public training code collects it to save a file for each rank."""
    optimizer._check_overlap_initialized()
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
    local, found = optimizer.optim.state_dict(), super(kind, optimizer).state_dict()
    groups = zip(local["param_groups"], optimizer._partition_parameters()[optimizer.rank], strict=True)
    for numbers, params in ((of_optim["params"], owned["params"]) for of_optim, owned in groups):
        for number, param in zip(numbers, params, strict=True):
            found["state"][optimizer._param_to_index[param]] = local["state"][number]
    return {**found, "state": dict(sorted(found["state"].items()))}


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(1, 2, 3, 4)
def test_private_attributes_match_torch(ctx: RankContext, bucket_view: bool) -> None:
    ours, theirs = small_model(), small_model()
    mine = ZeroRedundancyOptimizer(two_groups(ours), AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    other: Any = Theirs(two_groups(theirs), AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    sides = [(mine, list(ours.parameters())), (other, list(theirs.parameters()))]
    for name in COMPARED_ATTRIBUTES:
        found, expected = (replace_params_by_index(getattr(optimizer, name), params) for optimizer, params in sides)
        assert found == expected, name
        assert type(found) is type(expected), name
    found, expected = (param_indices_per_rank(optimizer._partition_parameters(), params) for optimizer, params in sides)
    assert found == expected
    assert [set(group) for group in mine._partition_parameters()[ctx.rank]] == [
        set(it) for it in mine.optim.param_groups
    ]
    assert [len(bucket) for bucket in mine._buckets] == [len(bucket) for bucket in other._buckets]
    if bucket_view:
        per_device = [
            {
                it: [sorted(replace_params_by_index(own, params)) for own in owned]
                for it, owned in o._device_to_params_per_rank.items()
            }
            for o, params in sides
        ]
        assert per_device[0] == per_device[1]
        device = mine._default_device
        for rank, bucket in enumerate(mine._buckets[mine._device_to_device_index[device]]):
            start, stop = bucket.data_ptr(), bucket.data_ptr() + bucket.nbytes
            assert all(start <= it.data_ptr() < stop for it in mine._device_to_params_per_rank[device][rank])
    for optimizer, params in sides:
        params.append(torch.nn.Parameter(torch.ones(5)))
        optimizer.add_param_group({"params": params[-1:]})
    found, expected = (replace_params_by_index(optimizer._param_to_rank, params) for optimizer, params in sides)
    assert found == expected
    assert mine._all_params[-1] is sides[0][1][-1]


@ranks(2)
def test_private_attributes_are_read_only(ctx: RankContext) -> None:
    zero = ZeroRedundancyOptimizer(small_model().parameters(), SGD, lr=0.1)
    for name in ("_all_params", "_param_to_rank", "_buckets", "_overlap_with_ddp"):
        with pytest.raises(AttributeError, match=f"{name} is a read-only view"):
            setattr(zero, name, None)
    assert not hasattr(zero, "_overlap_info")
    assert zero.functional_optim_map is vars(torch.distributed.optim.utils)["functional_optim_map"]
    known = zero._param_to_index
    assert zero._param_to_index is known, "public code asks for it once per parameter"
    zero._clear_cache()
    assert zero._param_to_index == known


@pytest.mark.parametrize("shard_buckets", [False, True])
@ranks(1, 2, 3, 4)
def test_overlap_info_matches_torch(ctx: RankContext, shard_buckets: bool) -> None:
    """torch's hooks refuse gloo, so its class gets the buckets that DDP has handed to ours."""
    seen: list[list[torch.Tensor]] = []

    def record(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        seen[bucket.index() :] = [bucket.parameters()]
        return allreduce_hook(state, bucket)

    record.__annotations__ = {"bucket": GradBucket, "return": Future[torch.Tensor]}
    twins = DdpTwins(Setup(shard_buckets=shard_buckets, hook=record), mlp, AdamW, lr=0.01)
    mine, other_model = twins.zero, mlp()
    other: Any = Theirs(other_model.parameters(), AdamW, overlap_with_ddp=True, lr=0.01)
    params, others = list(twins.ddp.module.parameters()), list(other_model.parameters())
    assert vars(mine._overlap_info).keys() <= vars(other._overlap_info).keys()
    before, expected = ({it: getattr(o._overlap_info, it) for it in OVERLAP_INFO_FIELDS} for o in (mine, other))
    assert before == {**expected, "shard_buckets": shard_buckets}
    for call in (mine._check_overlap_initialized, other._check_overlap_initialized, mine._init_zero_for_overlap):
        with pytest.raises(RuntimeError):
            call()
    twins.train(4)
    mine._check_overlap_initialized()
    mine._init_zero_for_overlap()
    assert replace_params_by_index(mine._overlap_info.params_per_bucket, params) == replace_params_by_index(
        seen, params
    )
    info = other._overlap_info
    info.shard_buckets, info.total_size = shard_buckets, sum(param.numel() for param in others)
    info.params_per_bucket = [[others[i] for i in bucket] for bucket in replace_params_by_index(seen, params)]
    other._init_zero_for_overlap()
    found, expected = (
        {it: replace_params_by_index(getattr(o._overlap_info, it), its) for it in OVERLAP_INFO_FIELDS}
        for o, its in ((mine, params), (other, others))
    )
    assignments, theirs = (
        [{n: vars(it) for n, it in own.items()} for own in o._bucket_assignments_per_rank] for o in (mine, other)
    )
    if shard_buckets:
        assert found.keys() == expected.keys()
        assert sorted(index for owned in found["params_per_rank"] for index in owned) == list(range(len(params)))
        with pytest.raises(RuntimeError, match="several owners"):
            mine._get_assigned_rank(0)
    else:
        assert found == expected
        assert replace_params_by_index(mine._param_to_rank, params) == replace_params_by_index(
            other._param_to_rank, others
        )
        assert [mine._get_assigned_rank(i) for i in range(9)] == [other._get_assigned_rank(i) for i in range(9)]
        for own, their in zip(assignments, theirs, strict=True):
            assert replace_params_by_index(own, params) == {
                n: {**replace_params_by_index(it, others), "tensor": None} for n, it in their.items()
            }
    own = found["params_per_rank"][ctx.rank]
    for number, offset in found["offsets"].items():
        chosen = replace_params_by_index(assignments[ctx.rank][number]["parameters"], params)
        assert own[offset : offset + len(chosen)] == chosen


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(1, 2, 3, 4)
def test_local_step_and_sync_params_equal_step(ctx: RankContext, bucket_view: bool) -> None:
    twins = Twins(AdamW, handed=two_groups, zero_only={"parameters_as_bucket_view": bucket_view}, lr=0.1)
    twins.train(1)
    twins.zero.consolidate_state_dict()
    for model, optimizer in twins.sides:
        set_grads(model.parameters(), 5)
        optimizer.param_groups[0]["lr"] = 0.3
        if optimizer is twins.plain:
            optimizer.step()
    assert twins.zero._local_step(closure=lambda: 3.0) == 3.0
    mine = [twins.zero._param_to_rank[param] == ctx.rank for param in twins.model.parameters()]
    pairs = zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == mine, "nothing was sent"
    twins.zero._sync_params()
    twins.check()
    if ctx.rank == 0:
        with pytest.warns(UserWarning, match="1 steps ago"):
            twins.zero.state_dict()
    assert_same(twins.zero.full_state_dict(), twins.plain.state_dict() if ctx.rank == 0 else None)
    twins.train(1)


@ranks(2, 3)
def test_local_step_with_bucket_grads(ctx: RankContext) -> None:
    twins = DdpTwins(Setup(), mlp, AdamW, lr=0.01)
    zero = twins.zero
    with pytest.raises(RuntimeError, match="after 2 of them"):
        zero._local_step()
    twins.train(3)
    own = zero._overlap_info.params_per_rank[ctx.rank]
    with pytest.raises(ValueError, match=rf"expected {len(own)} gradients and nothing else, got 0"):
        zero._local_step([])
    for model in (twins.plain_ddp, twins.ddp):
        set_grads(model.parameters(), 7)
    twins.plain.step()
    zero._local_step([None if param.grad is None else param.grad.clone() for param in own])
    zero._sync_params()
    twins.compare()
    assert_same(zero.full_state_dict(), twins.plain.state_dict() if ctx.rank == 0 else None)


@ranks(1, 2, 3, 4)
def test_local_state_dict_collected_as_in_public_code(ctx: RankContext) -> None:
    """`super()` of the class reaches torch's Optimizer, and each rank's state is torch's."""
    twins = Twins(AdamW, handed=two_groups, lr=0.1)
    model = small_model()
    theirs: Any = Theirs(two_groups(model), AdamW, lr=0.1)
    for step in range(2):
        set_grads(model.parameters(), step)
        theirs.step()
    twins.train(2)
    inherited: Any = super(ZeroRedundancyOptimizer, twins.zero).state_dict
    assert inherited.__func__ is Optimizer.state_dict
    found = local_state(ZeroRedundancyOptimizer, twins.zero)
    assert_same(found, local_state(Theirs, theirs))
    assert_same(super(ZeroRedundancyOptimizer, twins.zero).state_dict()["state"], found["state"])
    merged = {index: state for part in ctx.gather(found["state"]) for index, state in part.items()}
    assert_same({**found, "state": dict(sorted(merged.items()))}, twins.plain.state_dict())


@ranks(1, 2, 3, 4)
def test_frozen_group_goes_to_least_loaded_rank(ctx: RankContext) -> None:
    """As PyTorch's own test of `add_param_group` counts it."""
    sizes = ([9, 7, 5, 3] * ctx.world_size)[:-1]
    params, others = ([torch.nn.Parameter(torch.rand(size)) for size in sizes] for _ in range(2))
    frozen = torch.nn.Parameter(torch.rand(3), requires_grad=False)
    for kind, given in ((ZeroRedundancyOptimizer, params), (Theirs, others)):
        zero: Any = kind(given, SGD, lr=0.1)
        assert sorted(ctx.gather(sum(it.numel() for it in zero.optim.param_groups[0]["params"])))[0] == 21
        zero.add_param_group({"params": [frozen]})
        assert sum(it.numel() for group in zero.optim.param_groups for it in group["params"]) == 24


@ranks(2, 3)
def test_private_names_with_flat_shards(ctx: RankContext) -> None:
    twins = Twins(AdamW, zero_only={"config": ZeroConfig(partition=FlatShards())}, lr=0.1)
    zero, params = twins.zero, list(twins.model.parameters())
    assert not hasattr(zero, "_param_to_rank")
    parts = param_indices_per_rank(zero._partition_parameters(), params)
    assert {index for groups in parts for group in groups for index in group} == set(range(len(params)))
    assert sum(part.numel() for bucket in zero._buckets for part in bucket) >= sum(param.numel() for param in params)
    with pytest.raises(ConfigError, match=r"call step\(\)"):
        zero._local_step()
    zero._sync_params()
    twins.train(2)


@ranks(2, 3)
def test_sync_params_failure_on_one_rank_is_raised_on_all(ctx: RankContext) -> None:
    twins = Twins(SGD, lr=0.1)
    removed = twins.zero.param_groups[0]["params"].pop() if ctx.rank == 1 else None
    with pytest.raises((BindingError, RuntimeError), match="were changed by hand"):
        twins.zero._sync_params()
    if removed is not None:
        twins.zero.param_groups[0]["params"].append(removed)
    twins.zero._sync_params()
    twins.train(1)


@ranks(2)
def test_private_functions_match_torch(ctx: RankContext) -> None:
    ours: Any = zero_redundancy_optimizer
    import torch.distributed.optim.zero_redundancy_optimizer as theirs

    assert {name: it.value for name, it in ours._OverlapStatus.__members__.items()} == {
        name: it.value for name, it in theirs._OverlapStatus.__members__.items()
    }
    nested = {"a": [torch.ones(2), (3, torch.zeros(1))], "b": {"c": None, "d": "text"}, "rank": ctx.rank}
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for module in (ours, theirs):
        assert_same(module._recursive_copy_to_device(nested, False, cpu), nested)
        assert module._recursive_copy_to_device(nested, True, meta)["a"][0].device == meta
        assert_same(module._broadcast_object(nested, src_rank=1, group=None, device=cpu), {**nested, "rank": 1})
        assert [module._is_trainable(it) for it in (torch.ones(1), torch.nn.Parameter(torch.ones(1)))] == [False, True]
        with pytest.raises(ValueError):
            module._DDPBucketAssignment(0, [], 0)
    zero = ZeroRedundancyOptimizer(small_model().parameters(), SGD, lr=0.1)
    hook = zero.join_hook()
    assert isinstance(hook, ours._ZeROJoinHook)
    assert hook.zero is zero
