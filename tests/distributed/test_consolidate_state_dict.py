"""State from all ranks to one: equal to the plain optimizer's, sent to no one else, never changed afterwards."""

from __future__ import annotations

import copy
import io
import warnings
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.optimizers import Keeper
from tests.support.oracles import Twins, assert_same, in_groups, set_grads, small_model
from zeroshard import CheckpointError, RankFailedError, RankMismatchError, ZeroRedundancyOptimizer
from zeroshard.state import serialization

Pair = namedtuple("Pair", "left right")


def consolidate_on(ctx: RankContext, zero: ZeroRedundancyOptimizer, to: int) -> dict[str, Any] | None:
    zero.consolidate_state_dict(to)
    return zero.state_dict() if ctx.rank == to else None


def assert_consolidates(ctx: RankContext, twins: Twins, to: int) -> None:
    found = consolidate_on(ctx, twins.zero, to)
    if found is not None:
        assert_same(found, twins.plain.state_dict(), "the state dict")


def split_into_named_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.named_parameters()
    return [{"params": rest}, {"params": [first]}]


def make_odd_shaped_model() -> nn.Module:
    shapes = [(0, 3), (), (4, 3, 2, 2), (6, 5)]
    model = nn.ParameterList(nn.Parameter(torch.full(shape, 0.5)) for shape in shapes)
    model[2].data = model[2].data.contiguous(memory_format=torch.channels_last)
    model[3].data = torch.full((12, 5), 0.5).t()[:, ::2].t()
    return model


CASES = [
    partial(Twins, SGD, lr=0.1),
    partial(Twins, SGD, lr=0.1, momentum=0.9),
    partial(Twins, SGD, lr=0.1, momentum=0.9, model=make_odd_shaped_model),
    partial(Twins, Adam, lr=0.1, model=make_odd_shaped_model, zero_only={"parameters_as_bucket_view": True}),
    partial(Twins, Adam, lr=torch.tensor(0.1), foreach=False),
    partial(Twins, Adam, lr=0.1, amsgrad=True, handed=in_groups),
    partial(Twins, AdamW, lr=0.1, fused=True, handed=nn.Module.named_parameters),
    partial(Twins, Adagrad, lr=0.1, initial_accumulator_value=0.5, handed=split_into_named_groups),
    partial(Twins, Adadelta),
    partial(Twins, Adafactor),
    partial(Twins, NAdam),
    partial(Twins, RMSprop, momentum=0.5, centered=True),
    partial(Twins, Rprop),
    partial(Twins, Adam, model=lambda: small_model().to(torch.bfloat16)),
    partial(Twins, Adam, model=lambda: small_model().to(torch.complex64)),
]


@ranks(1, 2, 3, 4)
def test_consolidated_state_equals_plain_state_dict(ctx: RankContext) -> None:
    for number, make in enumerate(CASES):
        twins = make()
        assert_consolidates(ctx, twins, number % ctx.world_size)
        for step in range(2):
            twins.train(1)
            assert_consolidates(ctx, twins, (number + step) % ctx.world_size)


@ranks(2, 3)
def test_params_without_gradients_have_no_state(ctx: RankContext) -> None:
    twins = Twins(SGD, lr=0.1, momentum=0.9)
    for model in (twins.model, twins.plain_model):
        set_grads([param for place, param in enumerate(model.parameters()) if place in (1, 4)], 0)
    twins.zero.step()
    twins.plain.step()
    twins.check()
    for to in range(ctx.world_size):
        assert_consolidates(ctx, twins, to)


@ranks(2)
def test_sparse_momentum_is_consolidated(ctx: RankContext) -> None:
    def tables() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Embedding(6, 3, sparse=True) for _ in range(3))

    twins = Twins(SGD, model=tables, lr=0.1, momentum=0.9)
    for rows in ([0, 2], [2, 5]):
        for model, optimizer in ((twins.model, twins.zero), (twins.plain_model, twins.plain)):
            optimizer.zero_grad()
            losses = [table(torch.tensor(rows)).sin().sum() for table in model.children()]
            torch.autograd.backward(losses)
            optimizer.step()
    twins.check()
    for to in range(ctx.world_size):
        assert_consolidates(ctx, twins, to)


@ranks(3, 4)
def test_subgroup_ranks_differ_from_global_ranks(ctx: RankContext) -> None:
    members = [1, ctx.world_size - 1]
    group = dist.new_group(members)
    if ctx.rank in members:
        twins = Twins(Adam, zero_only={"process_group": group})
        twins.train(2)
        for to in range(2):
            assert_consolidates(RankContext(members.index(ctx.rank), 2), twins, to)


@ranks(1, 2, 3)
def test_state_dict_on_other_ranks_says_to_consolidate(ctx: RankContext) -> None:
    twins = Twins(Adam)
    twins.train(1)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\) on all ranks"):
        twins.zero.state_dict()
    for to in range(ctx.world_size):
        twins.zero.consolidate_state_dict(to)
        if ctx.rank <= to:  # the earlier targets keep theirs
            assert_same(twins.zero.state_dict(), twins.plain.state_dict())
        else:
            with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\) on all ranks"):
                twins.zero.state_dict()


@ranks(1, 2, 3)
def test_full_state_dict_returns_on_target_and_stores_nothing(ctx: RankContext) -> None:
    twins = Twins(Adam, handed=nn.Module.named_parameters)
    twins.train(2)
    for to in range(ctx.world_size):
        found = twins.zero.full_state_dict(to)
        if ctx.rank == to:
            assert_same(found, twins.plain.state_dict())
        else:
            assert found is None
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        twins.zero.state_dict()


@ranks(1, 2, 3)
def test_consolidated_state_is_immutable_and_warns_when_stale(ctx: RankContext) -> None:
    twins = Twins(Adam, lr=torch.tensor(0.1), foreach=False, handed=nn.Module.named_parameters)
    twins.train(1)
    before = copy.deepcopy(twins.plain.state_dict())
    found = consolidate_on(ctx, twins.zero, 0)
    with torch.no_grad():
        twins.zero.param_groups[0]["lr"].mul_(0.5)
        twins.plain.param_groups[0]["lr"].mul_(0.5)
    twins.train(2)
    if found is not None:
        assert_same(found, before)
        with pytest.warns(UserWarning, match=r"2 steps ago.*consolidate_state_dict"):
            assert_same(twins.zero.state_dict(), before)
    consolidate_on(ctx, twins.zero, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if ctx.rank == 0:
            assert_same(twins.zero.state_dict(), twins.plain.state_dict())


@ranks(1, 2)
def test_editing_returned_state_dict_has_no_side_effects(ctx: RankContext) -> None:
    twins = Twins(Keeper, handed=nn.Module.named_parameters)
    twins.train(1)
    for found in (consolidate_on(ctx, twins.zero, 0), twins.zero.full_state_dict(0)):
        if found is not None:
            found["param_groups"][0]["params"].clear()
            found["param_groups"][0]["param_names"].append("another")
            found["param_groups"][0]["lr"] = 7.0
            for state in found["state"].values():
                state.pop("text")
                state["list"].clear()
                state["nested"]["deep"]["deeper"] = None
            del found["state"][0]
    if ctx.rank == 0:
        assert_same(twins.zero.state_dict(), twins.plain.state_dict())
    found = twins.zero.full_state_dict(0) or {"state": {}}
    for state in found["state"].values():
        state["buffer"].fill_(9)
    twins.train(2)
    assert_consolidates(ctx, twins, 0)


@ranks(1, 2, 3)
def test_invalid_target_rank_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    twins = Twins(Adam)
    twins.train(1)
    targets: list[Any] = [-1, ctx.world_size, "0", None, 0.5]
    for to in targets:
        for call in (twins.zero.consolidate_state_dict, twins.zero.full_state_dict):
            with pytest.raises((ValueError, TypeError), match="rank"):
                call(to)
    assert_consolidates(ctx, twins, 0)


@ranks(2, 3)
def test_different_target_ranks_raise_rank_mismatch(ctx: RankContext) -> None:
    twins = Twins(Adam)
    twins.train(1)
    last = ctx.world_size - 1
    with pytest.raises(RankMismatchError, match=rf"to=0.*rank {last}: to={last}"):
        twins.zero.consolidate_state_dict(last if ctx.rank == last else 0)
    with pytest.raises(RankMismatchError, match=r"consolidate_state_dict.*full_state_dict"):
        (twins.zero.full_state_dict if ctx.rank == last else twins.zero.consolidate_state_dict)(0)
    assert_consolidates(ctx, twins, last)


@ranks(2, 3)
def test_different_hyperparameters_raise_rank_mismatch(ctx: RankContext) -> None:
    twins = Twins(Adam, lr=0.1)
    if ctx.rank == 1:
        twins.zero.param_groups[0]["lr"] = 0.2
    with pytest.raises(RankMismatchError, match=r"ranks? 0(, 2)?: .*lr=0\.1.*rank 1: .*lr=0\.2"):
        twins.zero.consolidate_state_dict()


@ranks(2, 3, 4)
def test_state_is_sent_only_to_the_target_in_bounded_chunks(ctx: RankContext) -> None:
    twins = Twins(Adam, model=partial(small_model, width=40))
    twins.train(1)
    mine = sum(tensor.nbytes for state in twins.zero.optim.state.values() for tensor in state.values())
    most, to = 512, ctx.world_size - 1
    with pytest.MonkeyPatch.context() as patch, recorded() as traffic:
        patch.setattr(serialization, "MESSAGE_BYTES", most)
        twins.zero.consolidate_state_dict(to)
    talk = [(verb, size) for verb, size in traffic if verb not in ("isend", "irecv")]
    assert talk == [("all_reduce", 72), ("all_reduce", 8)]  # the agreement, and whether there are types to be allowed
    if ctx.rank == to:
        assert not traffic.sizes("isend")
        assert_same(twins.zero.state_dict(), twins.plain.state_dict())
    else:
        assert not traffic.sizes("irecv")
        length, header, *pieces = traffic.sizes("isend")
        assert length == 8
        assert header < 8192
        assert sum(pieces) == mine
        assert not pieces or max(pieces) <= most
    received, sent = zip(*ctx.gather((sum(traffic.sizes("irecv")), sum(traffic.sizes("isend")))), strict=True)
    assert sum(received) == received[to] == sum(sent)


@ranks(2)
def test_peak_memory_is_the_result_plus_a_small_buffer(ctx: RankContext) -> None:
    twins = Twins(SGD, model=lambda: nn.ParameterList([torch.zeros(1), torch.zeros(24 << 20)]), lr=0.1, momentum=0.9)
    big = next(param for param in twins.model.parameters() if param.numel() > 1)
    del twins.plain_model, twins.plain
    big.grad = torch.zeros_like(big)
    twins.zero.step()
    owner = next(rank for rank, owns in enumerate(ctx.gather(big in twins.zero.state)) if owns)
    Path("/proc/self/clear_refs").write_text("5")
    before = read_process_memory_kib("VmRSS")
    twins.zero.consolidate_state_dict(1 - owner)
    grown = read_process_memory_kib("VmHWM") - before
    state, buffer = 96 << 10, 32 << 10
    if ctx.rank == owner:
        assert grown < buffer
    else:
        assert state * 0.9 < grown < state + buffer


def read_process_memory_kib(field: str) -> int:
    """In KiB, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@ranks(1, 2, 3)
def test_containers_and_scalars_keep_their_types(ctx: RankContext) -> None:
    twins = Twins(Keeper)
    twins.train(2)
    states: list[dict[Any, Any]] = [twins.zero.state, twins.plain.state]
    for state in states:
        state["shared"] = {"count": 3, "names": ("a", "b"), "moment": torch.arange(3.0)}
    for to in range(ctx.world_size):
        assert_consolidates(ctx, twins, to)


@ranks(1, 2)
def test_strided_expanded_and_conjugate_tensors_keep_their_values(ctx: RankContext) -> None:
    odd = {
        "gaps": torch.arange(12.0).view(3, 4)[:, ::2],
        "overlap": torch.tensor(2.0).expand(3, 2),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "part": nn.Parameter(torch.ones(5))[1:3],
    }
    twins = Twins(Keeper)
    twins.train(1)
    for optimizer in (twins.zero, twins.plain):
        for state in optimizer.state.values():
            state.update(odd)
    for to in range(ctx.world_size):
        found = consolidate_on(ctx, twins.zero, to)
        for state in (found or {"state": {}})["state"].values():
            for key, value in odd.items():
                assert torch.equal(state[key], value.detach()), key
                assert state[key].untyped_storage().nbytes() == state[key].nbytes, key


@ranks(1, 2, 3)
@pytest.mark.parametrize("value", [Pair(1, 2), Path("x"), [torch.ones(1), {"deep": Path("x")}]], ids=repr)
def test_unsafe_types_are_rejected_on_all_ranks_with_param_and_key(ctx: RankContext, value: object) -> None:
    twins = Twins(Adam)
    twins.train(1)
    params = list(twins.model.parameters())
    owner = next(rank for rank, owns in enumerate(ctx.gather(params[2] in twins.zero.state)) if owns)
    if ctx.rank == owner:
        twins.zero.state[params[2]]["history"] = value
    expected = CheckpointError if ctx.rank == owner else RankFailedError
    for to in range(ctx.world_size):
        with pytest.raises(expected, match=r"params.*2.*history.*(Pair|PosixPath).*add_safe_globals"):
            twins.zero.consolidate_state_dict(to)
    if ctx.rank == owner:
        del twins.zero.state[params[2]]["history"]
    assert_consolidates(ctx, twins, 0)


class MaliciousPickle:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def pack_unchecked(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@ranks(2)
def test_received_data_is_never_executed(ctx: RankContext, tmp_path: Path) -> None:
    twins = Twins(Adam)
    twins.train(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "dumps", pack_unchecked)
        if ctx.rank == 1:
            twins.zero.state.clear()  # what follows a refused header would wait for its receiver
            twins.zero.state["trap"] = MaliciousPickle(tmp_path / "sprung")
            twins.zero.consolidate_state_dict()
        else:
            with pytest.raises(Exception, match=r"[Ww]eights"):
                twins.zero.consolidate_state_dict()
    assert not (tmp_path / "sprung").exists()


@ranks(1, 2)
def test_state_dict_hooks_run_once_and_can_replace_the_dict(ctx: RankContext) -> None:
    twins = Twins(Adam)
    twins.train(1)
    calls: list[str] = []

    def replace(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "hooked": True}

    twins.zero.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    twins.zero.register_state_dict_post_hook(lambda _, found: calls.append(f"post {len(found)}"))
    twins.zero.register_state_dict_post_hook(replace)
    twins.zero.consolidate_state_dict()
    assert calls == []
    if ctx.rank == 0:
        assert_same(twins.zero.state_dict(), {**twins.plain.state_dict(), "hooked": True})
        assert calls == ["pre", "post 2"]
