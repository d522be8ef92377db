"""Process groups: which ranks take part, and how they are numbered."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.oracles import OverlapParityRun, ParityRun, assert_same, mlp, setups, small_model
from tests.support.tiers import sampled
from zeroshard import ConfigError, RankLostError, ZeroRedundancyOptimizer, shard
from zeroshard._torch_compat import open_groups
from zeroshard.comm.collectives import Comm
from zeroshard.comm.failure import _GlooConnections
from zeroshard.comm.process_group import Group
from zeroshard.ddp_hooks import hook_with_zero_step


def new_subgroup(*members: int) -> dist.ProcessGroup | None:
    """Create a group of these ranks. All ranks must call; other ranks get None."""
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
        parity = ParityRun(torch.optim.AdamW, zero_only=zero_only, lr=0.1)
        parity.train(3)
        zero = parity.zero
        assert zero.process_group is group
        assert (zero.rank, zero.global_rank, zero.world_size) == (dist.get_rank(group), ctx.rank, len(members))
        state = zero.full_state_dict(to=zero.world_size - 1)
        assert (state is not None) == (zero.rank == zero.world_size - 1)
        if state is not None:
            assert_same(state, parity.plain.state_dict())
        zero.load_state_dict(parity.plain.state_dict())
        parity.train(1)


@ranks(4)
def test_two_optimizers_on_different_groups(ctx: RankContext) -> None:
    pairs = [(0, 2), (1, 3)]
    groups = [new_subgroup(*pair) for pair in pairs]
    pair_index = ctx.rank % 2
    own_pair = ParityRun(
        torch.optim.AdamW, model=lambda: small_model(pair_index), zero_only={"process_group": groups[pair_index]}
    )
    all_ranks = ParityRun(torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        own_pair.train(1)
        all_ranks.train(1)
    assert own_pair.zero.world_size == 2
    assert [numel > 0 for numel in own_pair.zero.layout.numel_per_rank(trainable=True)] == [True, True]


@sampled("members", [(1, 2), (2, 0)], ids=str)
@ranks(3)
def test_overlap_on_a_subgroup(ctx: RankContext, members: tuple[int, ...]) -> None:
    group = new_subgroup(*members)
    if group is None:
        return
    for setup in setups(group=group, static_graph=False):
        parity = OverlapParityRun(setup, mlp, torch.optim.AdamW, lr=0.01)
        parity.train(4)
        parity.zero.consolidate_state_dict(to=1)
        if parity.zero.rank == 1:
            assert_same(parity.zero.state_dict(), parity.plain.state_dict())


@ranks(2)
def test_overlap_requires_the_process_group_of_ddp(ctx: RankContext) -> None:
    single_rank_group = [new_subgroup(0), new_subgroup(1)][ctx.rank]
    ddp = nn.parallel.DistributedDataParallel(small_model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, single_rank_group, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ConfigError, match=r"ranks \[\d\], but DDP uses other ranks\. Pass the same process_group"):
        hook_with_zero_step(lambda *_: torch.futures.Future(), ddp, zero)


@ranks(3)
def test_rank_outside_the_group_is_rejected(ctx: RankContext) -> None:
    group = dist.new_group([0, 2])
    if ctx.rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member"):
            ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    else:
        ParityRun(torch.optim.SGD, zero_only={"process_group": group}, lr=0.1).train(2)


@pytest.mark.parametrize("invalid_group", [torch.ones(2), "gloo", [0, 1], 0], ids=repr)
@ranks(2, timeout=20)
def test_invalid_process_group_is_rejected(ctx: RankContext, invalid_group: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a process group from torch\.distributed\.new_group\(\), got "):
        ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, process_group=invalid_group, lr=0.1)
    with pytest.raises(ConfigError, match=r"expected a process group from torch\.distributed\.new_group\(\), got "):
        shard(small_model(), torch.optim.SGD, process_group=invalid_group, lr=0.1)


@ranks(2, 3)
def test_control_messages_have_a_group_of_their_own(ctx: RankContext) -> None:
    """gloo pairs collectives by their order: those of the program must not meet status messages."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    comm = Comm(Group(group))
    values = torch.full((1000,), float(ctx.rank))
    if ctx.rank == 0:
        assert comm.all_reduce_max([7]) == [7]
    work = dist.all_reduce(values, group=group, async_op=True)
    if ctx.rank > 0:
        assert comm.all_reduce_max([ctx.rank]) == [7]
    assert work is not None
    work.wait()
    assert values.tolist() == [sum(range(ctx.world_size))] * 1000


@ranks(2, 3)
def test_companion_groups_are_shared(ctx: RankContext) -> None:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    first, second = Group(group), Group(group)
    control, background = first.cpu_group, first.background_group()
    assert second.cpu_group is control
    assert second.background_group().process_group is background.process_group
    assert background.cpu_group is background.process_group, "it needs no companion of its own"
    assert len({group, control, background.process_group}) == 3
    assert {control, background.process_group} <= {*open_groups()}


@ranks(3)
def test_companion_of_a_subgroup_whose_members_are_in_different_groups(ctx: RankContext) -> None:
    """torch's own name for it would differ between the members, who would wait for each other."""
    group, _ = new_subgroup(0, 2), new_subgroup(2)
    if group is not None:
        assert Comm(Group(group)).all_gather_text(str(ctx.rank)) == ["0", "2"]
        ParityRun(torch.optim.SGD, zero_only={"process_group": group}, lr=0.1).train(2)


@ranks(2, 3)
def test_rank_lost_before_the_companion_exists_is_noticed_at_once(ctx: RankContext) -> None:
    """Creating a gloo group waits in the store, where nobody notices that a rank is gone."""
    group = dist.new_group(timeout=timedelta(hours=1))
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()
    if ctx.rank == ctx.world_size - 1:
        _GlooConnections(group).close()
    else:
        with pytest.raises(RankLostError, match=f"rank {ctx.world_size - 1} of {ctx.world_size} is gone"):
            Comm(Group(group)).all_reduce_max([0])
    dist.barrier()


@ranks(2)
def test_groups_that_replace_a_destroyed_one(ctx: RankContext) -> None:
    for number in range(3):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        assert Comm(Group(group)).all_reduce_max([number + ctx.rank]) == [number + 1]
        dist.barrier()
        dist.destroy_process_group(group)


def test_uninitialized_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, lr=0.1)
