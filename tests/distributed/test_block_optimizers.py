"""Optimizers that work on blocks: parameters are split between blocks and updated like unsplit ones."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.checkpoints import first_ranks
from tests.support.optimizers import Blocks
from tests.support.oracles import ParityRun, assert_same, set_grads
from zeroshard import (
    ConfigError,
    FlatShards,
    PeerCheckpoint,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    broadcast_object,
    checkpoint,
)
from zeroshard.peer_checkpoint.restore import restore_from_peers
from zeroshard.peer_checkpoint.snapshot import PeerSnapshots
from zeroshard.state.tensor_utils import inner_tensors, is_wrapper_subclass

SHAPES: list[tuple[int, ...]] = [(16, 320), (7,), (3000,), (1536,), (), (64, 33), (2, 8, 256)]
"""The parameters of 5120, 1536 and 4096 elements can be split, into blocks of 256 elements."""


class WeightList(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES, *, transposed: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in shapes]
        weights = [weight.t() if transposed and weight.dim() == 2 else weight for weight in weights]
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])


def flat_options(**options: int) -> dict[str, Any]:
    return {"config": ZeroConfig(partition=FlatShards(**options))}


def make_parity_run(**overrides: Any) -> ParityRun:
    return ParityRun(Blocks, **{"model": WeightList, "zero_only": flat_options(), "lr": 0.05, **overrides})


def shard_lengths(zero: ZeroRedundancyOptimizer) -> list[list[int]]:
    """Return the number of elements of each shard of each parameter."""
    return [
        [param_shard.in_param.length for param_shard in zero.layout.param_shards(spec.index)]
        for spec in zero.layout.params
    ]


def assert_full_state_matches_plain(parity: ParityRun) -> None:
    """Check that the full state dict equals the plain optimizer's, with parameters in order."""
    expected = parity.plain.state_dict()
    expected["state"] = dict(sorted(expected["state"].items()))
    assert_same(broadcast_object(parity.zero.full_state_dict(), 0), expected)


@pytest.mark.parametrize("bucket_bytes", [1, 9000, 60_000])
@ranks(1, 2, 3, 4)
def test_split_params_are_updated_like_whole_params(ctx: RankContext, bucket_bytes: int) -> None:
    parity = make_parity_run(zero_only=flat_options(bucket_bytes=bucket_bytes))
    parity.train(4)
    split = {index: lengths for index, lengths in enumerate(shard_lengths(parity.zero)) if len(lengths) > 1}
    assert (0 in split) == (ctx.world_size > 1)
    assert split.keys() <= {0, 3, 6}
    assert all(length % 256 == 0 and length >= 512 for lengths in split.values() for length in lengths)
    assert_full_state_matches_plain(parity)


def test_unaligned_splits_change_the_result() -> None:
    """Check the check: this optimizer's result depends on where a parameter is split."""
    unsplit = nn.Parameter(torch.ones(5120))
    halves = [nn.Parameter(torch.ones(size)) for size in (2500, 2620)]
    grad = torch.linspace(-1, 2, 5120)
    for params, grads in (([unsplit], [grad]), (halves, [grad[:2500], grad[2500:]])):
        for param, grad_slice in zip(params, grads, strict=True):
            param.grad = grad_slice.clone()
        Blocks(params).step()
    assert not torch.equal(torch.cat([half.detach() for half in halves]), unsplit.detach())


@ranks(1, 2, 3)
def test_missing_gradients_leave_shards_unchanged(ctx: RankContext) -> None:
    parity = make_parity_run()
    for step in range(5):
        for model, optimizer in parity.sides:
            set_grads(model.parameters(), step)
            for index, param in enumerate(model.parameters()):
                param.grad = None if (index + step) % 3 == 0 else param.grad
            optimizer.step()
        parity.check()
    assert_full_state_matches_plain(parity)


@ranks(1, 3)
def test_non_contiguous_params_are_not_split(ctx: RankContext) -> None:
    parity = make_parity_run(model=lambda: WeightList([(16, 320), (4096,)], transposed=True))
    parity.train(3)
    assert len(shard_lengths(parity.zero)[0]) == 1
    assert len(shard_lengths(parity.zero)[1]) == min(2, ctx.world_size)


@ranks(1, 2, 3)
def test_add_param_group(ctx: RankContext) -> None:
    parity = make_parity_run(get_params=lambda model: list(model.parameters())[:3])
    parity.train(2)
    for model, optimizer in parity.sides:
        optimizer.add_param_group({"params": list(model.parameters())[3:], "lr": 0.2})
    parity.train(2)
    assert_full_state_matches_plain(parity)


@ranks(3)
def test_state_reshards_through_checkpoint_and_state_dict(ctx: RankContext, tmp_path: Path) -> None:
    """From 3 ranks to 2 through files, and to whole parameters through a state dict."""
    directory, before = ctx.gather(tmp_path)[0], make_parity_run()
    before.train(3)
    saved = broadcast_object(before.zero.full_state_dict(), 0)
    checkpoint.save(directory, step=1, model=before.model, optimizer=before.zero)
    group = first_ranks(2)
    options = [{"config": ZeroConfig(partition=WholeParams())}, {**flat_options(), "process_group": group}]
    for through_files, zero_only in enumerate(options[: 1 if group is None else 2]):
        after = make_parity_run(zero_only=zero_only)
        after.plain_model, after.plain, after.steps = *copy.deepcopy((before.plain_model, before.plain)), before.steps
        if through_files:
            checkpoint.load(directory, model=after.model, optimizer=after.zero, process_group=group)
        else:
            after.model.load_state_dict(before.model.state_dict())
            after.zero.load_state_dict(saved)
        after.train(2)
    dist.barrier()


@ranks(1, 2)
def test_too_fine_alignment_is_rejected_and_coarser_is_accepted(ctx: RankContext) -> None:
    for options in ({"align": 64}, {"align": 256}, {"align": 384, "min_numel": 768}, {"min_numel": 4096}):
        with pytest.raises(ConfigError, match=r"splits parameters too finely for Blocks.*align=256 and min_numel=512"):
            make_parity_run(zero_only=flat_options(**options))
    for options in ({"align": 512}, {"align": 256, "min_numel": 1024}):
        parity = make_parity_run(zero_only=flat_options(**options))
        parity.train(2)
        assert all(
            length % 256 == 0 for lengths in shard_lengths(parity.zero) if len(lengths) > 1 for length in lengths
        )
    with pytest.raises(ConfigError, match=r"FlatShards\(\) cannot be used"):
        ParityRun(torch.optim.Adafactor, model=WeightList, zero_only=flat_options())


@ranks(2)
def test_elementwise_optimizer_accepts_alignment(ctx: RankContext) -> None:
    parity = ParityRun(torch.optim.AdamW, model=WeightList, zero_only=flat_options(align=64), lr=0.05)
    parity.train(3)
    assert all(length % 64 == 0 for lengths in shard_lengths(parity.zero) if len(lengths) > 1 for length in lengths)
    assert_full_state_matches_plain(parity)


@ranks(2)
def test_quantized_state_round_trips_with_plain_optimizer(ctx: RankContext, tmp_path: Path) -> None:
    optimizer_class = pytest.importorskip("torchao.optim").AdamW8bit
    directory = ctx.gather(tmp_path)[0]
    with torch.compiler.set_stance("force_eager"):
        make = partial(
            ParityRun,
            optimizer_class,
            model=partial(WeightList, [(48, 256), (7,), (4096,)]),
            zero_only=flat_options(),
            lr=0.05,
        )
        before = make()
        before.train(3)
        assert len(shard_lengths(before.zero)[0]) == 2
        for source in ("zero", "plain"):
            model = before.model if source == "zero" else before.plain_model
            checkpoint.save(directory / source, step=1, model=model, optimizer=getattr(before, source))
            for target in ("zero", "plain"):
                after = make()
                model = after.model if target == "zero" else after.plain_model
                checkpoint.load(directory / source, model=model, optimizer=getattr(after, target))
                if target == "plain":
                    assert_same_optimizer_state(after.plain.state_dict(), before.plain.state_dict())
                else:
                    assert_same_optimizer_state(after.zero.full_state_dict(), before.plain.state_dict())


def assert_same_optimizer_state(found: Any, expected: dict[str, Any]) -> None:
    """Compare bit for bit, including the tensor classes."""
    for index, state in expected["state"].items() if found is not None else ():
        assert state.keys() == found["state"][index].keys()
        for key, value in state.items():
            found_value = found["state"][index][key]
            assert (type(found_value), found_value.shape) == (type(value), value.shape)
            for found_inner, inner in zip(get_inner_tensors(found_value), get_inner_tensors(value), strict=True):
                assert torch.equal(found_inner, inner), (index, key)


def get_inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    return list(inner_tensors(value).values()) if is_wrapper_subclass(value) else [value]


@ranks(3)
def test_peer_snapshots_reshard_quantized_state(ctx: RankContext) -> None:
    """Quantized state of 3 ranks is restored on 2: into flat shards, into whole parameters, into flat shards again."""
    optimizer_class = pytest.importorskip("torchao.optim").AdamW8bit
    group = first_ranks(2)
    with torch.compiler.set_stance("force_eager"):
        make = partial(
            ParityRun, optimizer_class, model=partial(WeightList, [(48, 256), (7,), (12288,), (4096,)]), lr=0.05
        )
        configs = [
            ZeroConfig(partition=partition, peer_checkpoint=PeerCheckpoint(every=3))
            for partition in (FlatShards(), WholeParams())
        ]
        before = make(zero_only={"config": configs[0]})
        before.train(3)
        assert max(map(len, shard_lengths(before.zero))) == 2
        snapshots: PeerSnapshots | None = wait_for_snapshots(before.zero)
        for config in (*configs, configs[0]) if group is not None else ():
            after = make(zero_only={"config": config, "process_group": group})
            assert restore_from_peers(after.zero, snapshots) == 3
            assert_same(after.model.state_dict(), before.model.state_dict())
            assert_same_optimizer_state(after.zero.full_state_dict(), before.plain.state_dict())
            snapshots = wait_for_snapshots(after.zero)
        dist.barrier()


def wait_for_snapshots(zero: ZeroRedundancyOptimizer) -> PeerSnapshots:
    assert zero._peer_checkpointer is not None
    zero._peer_checkpointer.wait()
    return zero._peer_checkpointer.snapshots
