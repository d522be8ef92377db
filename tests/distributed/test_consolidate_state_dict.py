"""State gathered on one rank: equal to the plain optimizer's, sent to no other rank, never changed afterwards."""

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
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model, three_groups
from zeroshard import CheckpointError, RankFailedError, RankMismatchError, ZeroRedundancyOptimizer
from zeroshard.state import serialization

Pair = namedtuple("Pair", "left right")


def consolidate_on(ctx: RankContext, zero: ZeroRedundancyOptimizer, to: int) -> dict[str, Any] | None:
    zero.consolidate_state_dict(to)
    return zero.state_dict() if ctx.rank == to else None


def assert_consolidates(ctx: RankContext, parity: ParityRun, to: int) -> None:
    found = consolidate_on(ctx, parity.zero, to)
    if found is not None:
        assert_same(found, parity.plain.state_dict(), "the state dict")


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
    partial(ParityRun, SGD, lr=0.1),
    partial(ParityRun, SGD, lr=0.1, momentum=0.9),
    partial(ParityRun, SGD, lr=0.1, momentum=0.9, model=make_odd_shaped_model),
    partial(ParityRun, Adam, lr=0.1, model=make_odd_shaped_model, zero_only={"parameters_as_bucket_view": True}),
    partial(ParityRun, Adam, lr=torch.tensor(0.1), foreach=False),
    partial(ParityRun, Adam, lr=0.1, amsgrad=True, get_params=three_groups),
    partial(ParityRun, AdamW, lr=0.1, fused=True, get_params=nn.Module.named_parameters),
    partial(ParityRun, Adagrad, lr=0.1, initial_accumulator_value=0.5, get_params=split_into_named_groups),
    partial(ParityRun, Adadelta),
    partial(ParityRun, Adafactor),
    partial(ParityRun, NAdam),
    partial(ParityRun, RMSprop, momentum=0.5, centered=True),
    partial(ParityRun, Rprop),
    partial(ParityRun, Adam, model=lambda: small_model().to(torch.bfloat16)),
    partial(ParityRun, Adam, model=lambda: small_model().to(torch.complex64)),
]


@ranks(1, 2, 3, 4)
def test_consolidated_state_equals_plain_state_dict(ctx: RankContext) -> None:
    for number, make in enumerate(CASES):
        parity = make()
        assert_consolidates(ctx, parity, number % ctx.world_size)
        for step in range(2):
            parity.train(1)
            assert_consolidates(ctx, parity, (number + step) % ctx.world_size)


@ranks(2, 3)
def test_params_without_gradients_have_no_state(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1, momentum=0.9)
    for model in (parity.model, parity.plain_model):
        set_grads([param for index, param in enumerate(model.parameters()) if index in (1, 4)], 0)
    parity.zero.step()
    parity.plain.step()
    parity.check()
    for to in range(ctx.world_size):
        assert_consolidates(ctx, parity, to)


@ranks(2)
def test_sparse_momentum_is_consolidated(ctx: RankContext) -> None:
    def make_tables() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Embedding(6, 3, sparse=True) for _ in range(3))

    parity = ParityRun(SGD, model=make_tables, lr=0.1, momentum=0.9)
    for rows in ([0, 2], [2, 5]):
        for model, optimizer in ((parity.model, parity.zero), (parity.plain_model, parity.plain)):
            optimizer.zero_grad()
            losses = [table(torch.tensor(rows)).sin().sum() for table in model.children()]
            torch.autograd.backward(losses)
            optimizer.step()
    parity.check()
    for to in range(ctx.world_size):
        assert_consolidates(ctx, parity, to)


@ranks(3, 4)
def test_subgroup_ranks_differ_from_global_ranks(ctx: RankContext) -> None:
    members = [1, ctx.world_size - 1]
    group = dist.new_group(members)
    if ctx.rank in members:
        parity = ParityRun(Adam, zero_only={"process_group": group})
        parity.train(2)
        for to in range(2):
            assert_consolidates(RankContext(members.index(ctx.rank), 2), parity, to)


@ranks(1, 2, 3)
def test_state_dict_on_other_ranks_says_to_consolidate(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\) on all ranks"):
        parity.zero.state_dict()
    for to in range(ctx.world_size):
        parity.zero.consolidate_state_dict(to)
        if ctx.rank <= to:  # earlier targets keep their state dict
            assert_same(parity.zero.state_dict(), parity.plain.state_dict())
        else:
            with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\) on all ranks"):
                parity.zero.state_dict()


@ranks(1, 2, 3)
def test_full_state_dict_returns_on_target_and_stores_nothing(ctx: RankContext) -> None:
    parity = ParityRun(Adam, get_params=nn.Module.named_parameters)
    parity.train(2)
    for to in range(ctx.world_size):
        found = parity.zero.full_state_dict(to)
        if ctx.rank == to:
            assert_same(found, parity.plain.state_dict())
        else:
            assert found is None
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        parity.zero.state_dict()


@ranks(1, 2, 3)
def test_consolidated_state_is_immutable_and_warns_when_stale(ctx: RankContext) -> None:
    parity = ParityRun(Adam, lr=torch.tensor(0.1), foreach=False, get_params=nn.Module.named_parameters)
    parity.train(1)
    before = copy.deepcopy(parity.plain.state_dict())
    found = consolidate_on(ctx, parity.zero, 0)
    with torch.no_grad():
        parity.zero.param_groups[0]["lr"].mul_(0.5)
        parity.plain.param_groups[0]["lr"].mul_(0.5)
    parity.train(2)
    if found is not None:
        assert_same(found, before)
        with pytest.warns(UserWarning, match=r"2 steps ago.*consolidate_state_dict"):
            assert_same(parity.zero.state_dict(), before)
    consolidate_on(ctx, parity.zero, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if ctx.rank == 0:
            assert_same(parity.zero.state_dict(), parity.plain.state_dict())


@ranks(1, 2)
def test_editing_returned_state_dict_has_no_side_effects(ctx: RankContext) -> None:
    parity = ParityRun(Keeper, get_params=nn.Module.named_parameters)
    parity.train(1)
    for found in (consolidate_on(ctx, parity.zero, 0), parity.zero.full_state_dict(0)):
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
        assert_same(parity.zero.state_dict(), parity.plain.state_dict())
    found = parity.zero.full_state_dict(0) or {"state": {}}
    for state in found["state"].values():
        state["buffer"].fill_(9)
    parity.train(2)
    assert_consolidates(ctx, parity, 0)


@ranks(1, 2, 3)
def test_invalid_target_rank_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    targets: list[Any] = [-1, ctx.world_size, "0", None, 0.5]
    for to in targets:
        for call in (parity.zero.consolidate_state_dict, parity.zero.full_state_dict):
            with pytest.raises((ValueError, TypeError), match="rank"):
                call(to)
    assert_consolidates(ctx, parity, 0)


@ranks(2, 3)
def test_different_target_ranks_raise_rank_mismatch(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    last = ctx.world_size - 1
    with pytest.raises(RankMismatchError, match=rf"to=0.*rank {last}: to={last}"):
        parity.zero.consolidate_state_dict(last if ctx.rank == last else 0)
    with pytest.raises(RankMismatchError, match=r"consolidate_state_dict.*full_state_dict"):
        (parity.zero.full_state_dict if ctx.rank == last else parity.zero.consolidate_state_dict)(0)
    assert_consolidates(ctx, parity, last)


@ranks(2, 3)
def test_different_hyperparameters_raise_rank_mismatch(ctx: RankContext) -> None:
    parity = ParityRun(Adam, lr=0.1)
    if ctx.rank == 1:
        parity.zero.param_groups[0]["lr"] = 0.2
    with pytest.raises(RankMismatchError, match=r"ranks? 0(, 2)?: .*lr=0\.1.*rank 1: .*lr=0\.2"):
        parity.zero.consolidate_state_dict()


@ranks(2, 3, 4)
def test_state_is_sent_only_to_the_target_in_bounded_chunks(ctx: RankContext) -> None:
    parity = ParityRun(Adam, model=partial(small_model, width=40))
    parity.train(1)
    local_bytes = sum(tensor.nbytes for state in parity.zero.optim.state.values() for tensor in state.values())
    max_message_bytes, to = 512, ctx.world_size - 1
    with pytest.MonkeyPatch.context() as patch, recorded() as traffic:
        patch.setattr(serialization, "MESSAGE_BYTES", max_message_bytes)
        parity.zero.consolidate_state_dict(to)
    collectives = [(verb, size) for verb, size in traffic if verb not in ("isend", "irecv")]
    assert collectives == [("all_reduce", 72), ("all_reduce", 8)]  # the consensus, and whether types need to be allowed
    if ctx.rank == to:
        assert not traffic.sizes("isend")
        assert_same(parity.zero.state_dict(), parity.plain.state_dict())
    else:
        assert not traffic.sizes("irecv")
        length, header, *chunks = traffic.sizes("isend")
        assert length == 8
        assert header < 8192
        assert sum(chunks) == local_bytes
        assert not chunks or max(chunks) <= max_message_bytes
    received, sent = zip(*ctx.gather((sum(traffic.sizes("irecv")), sum(traffic.sizes("isend")))), strict=True)
    assert sum(received) == received[to] == sum(sent)


@ranks(2)
def test_peak_memory_is_the_result_plus_a_small_buffer(ctx: RankContext) -> None:
    parity = ParityRun(
        SGD, model=lambda: nn.ParameterList([torch.zeros(1), torch.zeros(24 << 20)]), lr=0.1, momentum=0.9
    )
    big = next(param for param in parity.model.parameters() if param.numel() > 1)
    del parity.plain_model, parity.plain
    big.grad = torch.zeros_like(big)
    parity.zero.step()
    owner = next(rank for rank, owns in enumerate(ctx.gather(big in parity.zero.state)) if owns)
    Path("/proc/self/clear_refs").write_text("5")
    before = read_process_memory_kib("VmRSS")
    parity.zero.consolidate_state_dict(1 - owner)
    growth = read_process_memory_kib("VmHWM") - before
    state_kib, buffer_kib = 96 << 10, 32 << 10
    if ctx.rank == owner:
        assert growth < buffer_kib
    else:
        assert state_kib * 0.9 < growth < state_kib + buffer_kib


def read_process_memory_kib(field: str) -> int:
    """Read a memory counter of this process from the kernel, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@ranks(1, 2, 3)
def test_containers_and_scalars_keep_their_types(ctx: RankContext) -> None:
    parity = ParityRun(Keeper)
    parity.train(2)
    states: list[dict[Any, Any]] = [parity.zero.state, parity.plain.state]
    for state in states:
        state["shared"] = {"count": 3, "names": ("a", "b"), "moment": torch.arange(3.0)}
    for to in range(ctx.world_size):
        assert_consolidates(ctx, parity, to)


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
    parity = ParityRun(Keeper)
    parity.train(1)
    for optimizer in (parity.zero, parity.plain):
        for state in optimizer.state.values():
            state.update(odd)
    for to in range(ctx.world_size):
        found = consolidate_on(ctx, parity.zero, to)
        for state in (found or {"state": {}})["state"].values():
            for key, value in odd.items():
                assert torch.equal(state[key], value.detach()), key
                assert state[key].untyped_storage().nbytes() == state[key].nbytes, key


@ranks(1, 2, 3)
@pytest.mark.parametrize("value", [Pair(1, 2), Path("x"), [torch.ones(1), {"deep": Path("x")}]], ids=repr)
def test_unsafe_types_are_rejected_on_all_ranks_with_param_and_key(ctx: RankContext, value: object) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    params = list(parity.model.parameters())
    owner = next(rank for rank, owns in enumerate(ctx.gather(params[2] in parity.zero.state)) if owns)
    if ctx.rank == owner:
        parity.zero.state[params[2]]["history"] = value
    expected = CheckpointError if ctx.rank == owner else RankFailedError
    for to in range(ctx.world_size):
        with pytest.raises(expected, match=r"params.*2.*history.*(Pair|PosixPath).*add_safe_globals"):
            parity.zero.consolidate_state_dict(to)
    if ctx.rank == owner:
        del parity.zero.state[params[2]]["history"]
    assert_consolidates(ctx, parity, 0)


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
    parity = ParityRun(Adam)
    parity.train(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "dumps", pack_unchecked)
        if ctx.rank == 1:
            parity.zero.state.clear()  # data after a rejected header would wait for its receiver
            parity.zero.state["trap"] = MaliciousPickle(tmp_path / "sprung")
            parity.zero.consolidate_state_dict()
        else:
            with pytest.raises(Exception, match=r"[Ww]eights"):
                parity.zero.consolidate_state_dict()
    assert not (tmp_path / "sprung").exists()


@ranks(1, 2)
def test_state_dict_hooks_run_once_and_can_replace_the_dict(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    calls: list[str] = []

    def replace_dict(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "hooked": True}

    parity.zero.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    parity.zero.register_state_dict_post_hook(lambda _, found: calls.append(f"post {len(found)}"))
    parity.zero.register_state_dict_post_hook(replace_dict)
    parity.zero.consolidate_state_dict()
    assert calls == []
    if ctx.rank == 0:
        assert_same(parity.zero.state_dict(), {**parity.plain.state_dict(), "hooked": True})
        assert calls == ["pre", "post 2"]
