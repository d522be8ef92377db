"""Private names of torch's ZeroRedundancyOptimizer that public code uses, compared with torch's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.futures import Future
from torch.optim import SGD, AdamW, Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import (
    OverlapParityRun,
    ParityRun,
    Setup,
    assert_same,
    mlp,
    set_grads,
    small_model,
    two_groups,
)
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
    """Replace parameters by their indices, to compare the value with that of another model."""
    if isinstance(value, torch.Tensor):
        return next((index for index, param in enumerate(params) if param is value), tuple(value.shape))
    if isinstance(value, dict):
        return {
            replace_params_by_index(key, params): replace_params_by_index(item, params) for key, item in value.items()
        }
    if isinstance(value, list):
        return [replace_params_by_index(item, params) for item in value]
    return value


def param_indices_per_rank(groups_per_rank: Any, params: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """Return the sorted parameter indices of each rank and group; torch lists the largest parameters first."""
    return [
        [sorted(replace_params_by_index(group["params"], params)) for group in groups] for groups in groups_per_rank
    ]


def local_state(cls: Any, optimizer: Any) -> dict[str, Any]:
    """Return this rank's state by global indices, as public training code collects it to save a file per rank."""
    optimizer._check_overlap_initialized()
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
    local, found = optimizer.optim.state_dict(), super(cls, optimizer).state_dict()
    groups = zip(local["param_groups"], optimizer._partition_parameters()[optimizer.rank], strict=True)
    for param_ids, params in ((local_group["params"], owned_group["params"]) for local_group, owned_group in groups):
        for param_id, param in zip(param_ids, params, strict=True):
            found["state"][optimizer._param_to_index[param]] = local["state"][param_id]
    return {**found, "state": dict(sorted(found["state"].items()))}


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(1, 2, 3, 4)
def test_private_attributes_match_torch(ctx: RankContext, bucket_view: bool) -> None:
    model, torch_model = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(two_groups(model), AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    theirs: Any = TorchZeroRedundancyOptimizer(
        two_groups(torch_model), AdamW, parameters_as_bucket_view=bucket_view, lr=0.1
    )
    sides = [(ours, list(model.parameters())), (theirs, list(torch_model.parameters()))]
    for name in COMPARED_ATTRIBUTES:
        found, expected = (replace_params_by_index(getattr(optimizer, name), params) for optimizer, params in sides)
        assert found == expected, name
        assert type(found) is type(expected), name
    found, expected = (param_indices_per_rank(optimizer._partition_parameters(), params) for optimizer, params in sides)
    assert found == expected
    assert [set(group) for group in ours._partition_parameters()[ctx.rank]] == [
        set(group) for group in ours.optim.param_groups
    ]
    assert [len(bucket) for bucket in ours._buckets] == [len(bucket) for bucket in theirs._buckets]
    if bucket_view:
        indices_by_device = [
            {
                device: [sorted(replace_params_by_index(rank_params, params)) for rank_params in params_per_rank]
                for device, params_per_rank in optimizer._device_to_params_per_rank.items()
            }
            for optimizer, params in sides
        ]
        assert indices_by_device[0] == indices_by_device[1]
        device = ours._default_device
        for rank, bucket in enumerate(ours._buckets[ours._device_to_device_index[device]]):
            start, stop = bucket.data_ptr(), bucket.data_ptr() + bucket.nbytes
            assert all(start <= param.data_ptr() < stop for param in ours._device_to_params_per_rank[device][rank])
    for optimizer, params in sides:
        params.append(torch.nn.Parameter(torch.ones(5)))
        optimizer.add_param_group({"params": params[-1:]})
    found, expected = (replace_params_by_index(optimizer._param_to_rank, params) for optimizer, params in sides)
    assert found == expected
    assert ours._all_params[-1] is sides[0][1][-1]


@ranks(2)
def test_private_attributes_are_read_only(ctx: RankContext) -> None:
    zero = ZeroRedundancyOptimizer(small_model().parameters(), SGD, lr=0.1)
    for name in ("_all_params", "_param_to_rank", "_buckets", "_overlap_with_ddp"):
        with pytest.raises(AttributeError, match=f"{name} is a read-only view"):
            setattr(zero, name, None)
    assert not hasattr(zero, "_overlap_info")
    assert zero.functional_optim_map is vars(torch.distributed.optim.utils)["functional_optim_map"]
    param_to_index = zero._param_to_index
    assert zero._param_to_index is param_to_index, "not cached, but public code reads it once per parameter"
    zero._clear_cache()
    assert zero._param_to_index == param_to_index


@pytest.mark.parametrize("shard_buckets", [False, True])
@ranks(1, 2, 3, 4)
def test_overlap_info_matches_torch(ctx: RankContext, shard_buckets: bool) -> None:
    """torch's hooks reject gloo, so torch's class gets the buckets that DDP passed to ours."""
    seen_buckets: list[list[torch.Tensor]] = []

    def record(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        seen_buckets[bucket.index() :] = [bucket.parameters()]
        return allreduce_hook(state, bucket)

    record.__annotations__ = {"bucket": GradBucket, "return": Future[torch.Tensor]}
    parity = OverlapParityRun(Setup(shard_buckets=shard_buckets, hook=record), mlp, AdamW, lr=0.01)
    ours, torch_model = parity.zero, mlp()
    theirs: Any = TorchZeroRedundancyOptimizer(torch_model.parameters(), AdamW, overlap_with_ddp=True, lr=0.01)
    params, torch_params = list(parity.ddp.module.parameters()), list(torch_model.parameters())
    assert vars(ours._overlap_info).keys() <= vars(theirs._overlap_info).keys()
    before, expected = (
        {field: getattr(optimizer._overlap_info, field) for field in OVERLAP_INFO_FIELDS}
        for optimizer in (ours, theirs)
    )
    assert before == {**expected, "shard_buckets": shard_buckets}
    for call in (ours._check_overlap_initialized, theirs._check_overlap_initialized, ours._init_zero_for_overlap):
        with pytest.raises(RuntimeError):
            call()
    parity.train(4)
    ours._check_overlap_initialized()
    ours._init_zero_for_overlap()
    assert replace_params_by_index(ours._overlap_info.params_per_bucket, params) == replace_params_by_index(
        seen_buckets, params
    )
    info = theirs._overlap_info
    info.shard_buckets, info.total_size = shard_buckets, sum(param.numel() for param in torch_params)
    info.params_per_bucket = [
        [torch_params[index] for index in bucket] for bucket in replace_params_by_index(seen_buckets, params)
    ]
    theirs._init_zero_for_overlap()
    found, expected = (
        {
            field: replace_params_by_index(getattr(optimizer._overlap_info, field), model_params)
            for field in OVERLAP_INFO_FIELDS
        }
        for optimizer, model_params in ((ours, params), (theirs, torch_params))
    )
    our_assignments, their_assignments = (
        [
            {bucket: vars(assignment) for bucket, assignment in assignments.items()}
            for assignments in optimizer._bucket_assignments_per_rank
        ]
        for optimizer in (ours, theirs)
    )
    if shard_buckets:
        assert found.keys() == expected.keys()
        assert sorted(index for owned in found["params_per_rank"] for index in owned) == list(range(len(params)))
        with pytest.raises(RuntimeError, match="several owners"):
            ours._get_assigned_rank(0)
    else:
        assert found == expected
        assert replace_params_by_index(ours._param_to_rank, params) == replace_params_by_index(
            theirs._param_to_rank, torch_params
        )
        assert [ours._get_assigned_rank(index) for index in range(9)] == [
            theirs._get_assigned_rank(index) for index in range(9)
        ]
        for our_buckets, their_buckets in zip(our_assignments, their_assignments, strict=True):
            assert replace_params_by_index(our_buckets, params) == {
                bucket: {**replace_params_by_index(assignment, torch_params), "tensor": None}
                for bucket, assignment in their_buckets.items()
            }
    owned = found["params_per_rank"][ctx.rank]
    for bucket, offset in found["offsets"].items():
        assigned = replace_params_by_index(our_assignments[ctx.rank][bucket]["parameters"], params)
        assert owned[offset : offset + len(assigned)] == assigned


@pytest.mark.parametrize("bucket_view", [False, True])
@ranks(1, 2, 3, 4)
def test_local_step_and_sync_params_equal_step(ctx: RankContext, bucket_view: bool) -> None:
    parity = ParityRun(AdamW, get_params=two_groups, zero_only={"parameters_as_bucket_view": bucket_view}, lr=0.1)
    parity.train(1)
    parity.zero.consolidate_state_dict()
    for model, optimizer in parity.sides:
        set_grads(model.parameters(), 5)
        optimizer.param_groups[0]["lr"] = 0.3
        if optimizer is parity.plain:
            optimizer.step()
    assert parity.zero._local_step(closure=lambda: 3.0) == 3.0
    is_owned = [parity.zero._param_to_rank[param] == ctx.rank for param in parity.model.parameters()]
    pairs = zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == is_owned, "_local_step must not communicate"
    parity.zero._sync_params()
    parity.check()
    if ctx.rank == 0:
        with pytest.warns(UserWarning, match="1 step ago"):
            parity.zero.state_dict()
    assert_same(parity.zero.full_state_dict(), parity.plain.state_dict() if ctx.rank == 0 else None)
    parity.train(1)


@ranks(2, 3)
def test_local_step_with_bucket_grads(ctx: RankContext) -> None:
    parity = OverlapParityRun(Setup(), mlp, AdamW, lr=0.01)
    zero = parity.zero
    with pytest.raises(RuntimeError, match="Call it after 2 backward passes"):
        zero._local_step()
    parity.train(3)
    owned = zero._overlap_info.params_per_rank[ctx.rank]
    with pytest.raises(ValueError, match=rf"expected {len(owned)} gradients and nothing else, got 0"):
        zero._local_step([])
    for model in (parity.plain_ddp, parity.ddp):
        set_grads(model.parameters(), 7)
    parity.plain.step()
    zero._local_step([None if param.grad is None else param.grad.clone() for param in owned])
    zero._sync_params()
    parity.compare()
    assert_same(zero.full_state_dict(), parity.plain.state_dict() if ctx.rank == 0 else None)


@ranks(1, 2, 3, 4)
def test_local_state_dict_collected_as_in_public_code(ctx: RankContext) -> None:
    """`super()` of the class reaches torch's Optimizer, and each rank's state equals that of torch's class."""
    parity = ParityRun(AdamW, get_params=two_groups, lr=0.1)
    model = small_model()
    theirs: Any = TorchZeroRedundancyOptimizer(two_groups(model), AdamW, lr=0.1)
    for step in range(2):
        set_grads(model.parameters(), step)
        theirs.step()
    parity.train(2)
    inherited: Any = super(ZeroRedundancyOptimizer, parity.zero).state_dict
    assert inherited.__func__ is Optimizer.state_dict
    found = local_state(ZeroRedundancyOptimizer, parity.zero)
    assert_same(found, local_state(TorchZeroRedundancyOptimizer, theirs))
    assert_same(super(ZeroRedundancyOptimizer, parity.zero).state_dict()["state"], found["state"])
    merged = {index: state for rank_state in ctx.gather(found["state"]) for index, state in rank_state.items()}
    assert_same({**found, "state": dict(sorted(merged.items()))}, parity.plain.state_dict())


@ranks(1, 2, 3, 4)
def test_frozen_group_goes_to_least_loaded_rank(ctx: RankContext) -> None:
    """The same counts as in PyTorch's test of `add_param_group`."""
    sizes = ([9, 7, 5, 3] * ctx.world_size)[:-1]
    our_params, torch_params = ([torch.nn.Parameter(torch.rand(size)) for size in sizes] for _ in range(2))
    frozen = torch.nn.Parameter(torch.rand(3), requires_grad=False)
    for cls, params in ((ZeroRedundancyOptimizer, our_params), (TorchZeroRedundancyOptimizer, torch_params)):
        zero: Any = cls(params, SGD, lr=0.1)
        assert sorted(ctx.gather(sum(param.numel() for param in zero.optim.param_groups[0]["params"])))[0] == 21
        zero.add_param_group({"params": [frozen]})
        assert sum(param.numel() for group in zero.optim.param_groups for param in group["params"]) == 24


@ranks(2, 3)
def test_private_names_with_flat_shards(ctx: RankContext) -> None:
    parity = ParityRun(AdamW, zero_only={"config": ZeroConfig(partition=FlatShards())}, lr=0.1)
    zero, params = parity.zero, list(parity.model.parameters())
    assert not hasattr(zero, "_param_to_rank")
    indices_per_rank = param_indices_per_rank(zero._partition_parameters(), params)
    assert {index for groups in indices_per_rank for group in groups for index in group} == set(range(len(params)))
    assert sum(view.numel() for bucket in zero._buckets for view in bucket) >= sum(param.numel() for param in params)
    with pytest.raises(ConfigError, match=r"call step\(\)"):
        zero._local_step()
    zero._sync_params()
    parity.train(2)


@ranks(2, 3)
def test_sync_params_failure_on_one_rank_is_raised_on_all(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1)
    removed = parity.zero.param_groups[0]["params"].pop() if ctx.rank == 1 else None
    with pytest.raises((BindingError, RuntimeError), match="were changed by hand"):
        parity.zero._sync_params()
    if removed is not None:
        parity.zero.param_groups[0]["params"].append(removed)
    parity.zero._sync_params()
    parity.train(1)


@ranks(2)
def test_private_functions_match_torch(ctx: RankContext) -> None:
    ours: Any = zero_redundancy_optimizer
    import torch.distributed.optim.zero_redundancy_optimizer as theirs

    assert {name: member.value for name, member in ours._OverlapStatus.__members__.items()} == {
        name: member.value for name, member in theirs._OverlapStatus.__members__.items()
    }
    nested = {"a": [torch.ones(2), (3, torch.zeros(1))], "b": {"c": None, "d": "text"}, "rank": ctx.rank}
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for module in (ours, theirs):
        assert_same(module._recursive_copy_to_device(nested, False, cpu), nested)
        assert module._recursive_copy_to_device(nested, True, meta)["a"][0].device == meta
        assert_same(module._broadcast_object(nested, src_rank=1, group=None, device=cpu), {**nested, "rank": 1})
        assert [module._is_trainable(tensor) for tensor in (torch.ones(1), torch.nn.Parameter(torch.ones(1)))] == [
            False,
            True,
        ]
        with pytest.raises(ValueError):
            module._DDPBucketAssignment(0, [], 0)
    zero = ZeroRedundancyOptimizer(small_model().parameters(), SGD, lr=0.1)
    hook = zero.join_hook()
    assert isinstance(hook, ours._ZeROJoinHook)
    assert hook.zero is zero
