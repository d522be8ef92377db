"""Process groups: which ranks take part, and what they are called."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.oracles import DdpTwins, Twins, assert_same, mlp, setups, small_model
from tests.support.tiers import sampled
from zeroshard import ConfigError, ZeroRedundancyOptimizer, shard
from zeroshard.ddp_hooks import hook_with_zero_step


def new_subgroup(*members: int) -> dist.ProcessGroup | None:
    """A group of these ranks, on its members; all ranks must ask for it."""
    group = dist.new_group(list(members))
    return group if isinstance(group, dist.ProcessGroup) else None


@pytest.mark.parametrize("members", [(0, 1), (1, 2), (0, 2), (2,), (2, 0, 1)], ids=str)
@ranks(3)
def test_group_ranks_may_differ_from_global_ranks(ctx: RankContext, members: tuple[int, ...]) -> None:
    group = new_subgroup(*members)
    if group is None:
        return
    for bucket_view in (False, True):
        zero_only = {"process_group": group, "parameters_as_bucket_view": bucket_view}
        twins = Twins(torch.optim.AdamW, zero_only=zero_only, lr=0.1)
        twins.train(3)
        zero = twins.zero
        assert zero.process_group is group
        assert (zero.rank, zero.global_rank, zero.world_size) == (dist.get_rank(group), ctx.rank, len(members))
        state = zero.full_state_dict(to=zero.world_size - 1)
        assert (state is not None) == (zero.rank == zero.world_size - 1)
        if state is not None:
            assert_same(state, twins.plain.state_dict())
        zero.load_state_dict(twins.plain.state_dict())
        twins.train(1)


@ranks(4)
def test_two_optimizers_on_different_groups(ctx: RankContext) -> None:
    pairs = [(0, 2), (1, 3)]
    groups = [new_subgroup(*pair) for pair in pairs]
    number = ctx.rank % 2
    mine = Twins(torch.optim.AdamW, model=lambda: small_model(number), zero_only={"process_group": groups[number]})
    everyone = Twins(torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        mine.train(1)
        everyone.train(1)
    assert mine.zero.world_size == 2
    assert [loads > 0 for loads in mine.zero.layout.numel_per_rank(trainable=True)] == [True, True]


@sampled("members", [(1, 2), (2, 0)], ids=str)
@ranks(3)
def test_overlap_on_a_subgroup(ctx: RankContext, members: tuple[int, ...]) -> None:
    group = new_subgroup(*members)
    if group is None:
        return
    for setup in setups(group=group, static_graph=False):
        twins = DdpTwins(setup, mlp, torch.optim.AdamW, lr=0.01)
        twins.train(4)
        twins.zero.consolidate_state_dict(to=1)
        if twins.zero.rank == 1:
            assert_same(twins.zero.state_dict(), twins.plain.state_dict())


@ranks(2)
def test_overlap_requires_the_process_group_of_ddp(ctx: RankContext) -> None:
    alone = [new_subgroup(0), new_subgroup(1)][ctx.rank]
    ddp = nn.parallel.DistributedDataParallel(small_model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, alone, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ConfigError, match="give both the same group"):
        hook_with_zero_step(lambda *_: torch.futures.Future(), ddp, zero)


@ranks(3)
def test_rank_outside_the_group_is_rejected(ctx: RankContext) -> None:
    group = dist.new_group([0, 2])
    if ctx.rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member"):
            ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    else:
        Twins(torch.optim.SGD, zero_only={"process_group": group}, lr=0.1).train(2)


@pytest.mark.parametrize("given", [torch.ones(2), "gloo", [0, 1], 0], ids=repr)
@ranks(2, timeout=20)
def test_invalid_process_group_is_rejected(ctx: RankContext, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"is what torch\.distributed\.new_group"):
        ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, process_group=given, lr=0.1)
    with pytest.raises(ConfigError, match=r"is what torch\.distributed\.new_group"):
        shard(small_model(), torch.optim.SGD, process_group=given, lr=0.1)


def test_uninitialized_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, lr=0.1)
