"""State of several optimizer classes: one dict and one checkpoint, at any number of ranks, and into plain torch."""

from __future__ import annotations

import copy
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.support import RankContext, ranks
from tests.support.checkpoints import first_ranks
from tests.support.oracles import (
    CONFIGS,
    MUON,
    RULES_ADAMW,
    RulesPair,
    Words,
    assert_same,
    hidden,
    muon_and_adamw,
    parted,
    rules,
    seeded,
)
from zeroshard import CheckpointError, ParamRule, RankFailedError, checkpoint, remaining_params, shard

State = dict[str, Any]


def broadcast_from_rank0(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def train_on_same_data(model: nn.Module, optimizer: Any, steps: int, *, first_step: int = 0) -> None:
    """On the same data on all ranks: means over a power of two of them are exact."""
    for number in range(first_step, first_step + steps):
        words = torch.randperm(11, generator=torch.Generator().manual_seed(number))[:7]
        torch.autograd.backward(nn.functional.cross_entropy(model(words), words.roll(1)))
        optimizer.step()
        optimizer.zero_grad()


@ranks(1, 2, 3)
def test_state_dict_round_trips_through_plain_optimizers(ctx: RankContext) -> None:
    pair = RulesPair(config=CONFIGS[1])
    pair.train(2)
    whole = broadcast_from_rank0(pair.zero.full_state_dict())
    for member, part in zip(pair.plain.members, parted(whole), strict=True):
        member.load_state_dict(part)
    pair.train(1)
    plain = pair.plain.state_dict()
    kept = copy.deepcopy(plain)
    pair.zero.load_state_dict(plain)
    assert_same(plain, kept, "what was given")
    assert [group["optimizer"] for group in pair.zero.param_groups] == ["Muon", "AdamW"]
    pair.train(2)
    pair.check_state()


@ranks(4)
def test_state_dict_loads_at_another_world_size(ctx: RankContext) -> None:
    reference = seeded(Words)
    train_on_same_data(reference, muon_and_adamw(reference), 4)
    for saving, loading in ((1, 4), (4, 2), (2, 1)):
        group = first_ranks(saving)
        saved: list[Any] = [None, None]
        if group is not None:
            model = seeded(Words)
            zero = shard(model, rules(), process_group=group, config=CONFIGS[1])
            train_on_same_data(model, zero, 2)
            saved = [zero.full_state_dict(), model.state_dict()]
        dist.broadcast_object_list(saved, src=0)
        group = first_ranks(loading)
        if group is not None:
            model = seeded(Words, 9)
            zero = shard(model, rules(), process_group=group)
            zero.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            train_on_same_data(model, zero, 2, first_step=2)
            assert_same(model.state_dict(), reference.state_dict(), f"{saving} to {loading}")
        dist.barrier()


@ranks(2)
def test_state_dict_of_other_optimizer_classes_is_rejected(ctx: RankContext) -> None:
    """The same groups, and state of the same names and shapes."""
    given = [ParamRule(hidden, SGD, lr=0.1, momentum=0.9), ParamRule(remaining_params, AdamW, **RULES_ADAMW)]
    model = seeded(Words)
    zero = shard(model, given, config=CONFIGS[1])
    train_on_same_data(model, zero, 1)
    saved = broadcast_from_rank0(zero.full_state_dict())
    pair = RulesPair(config=CONFIGS[1])
    pair.train(1)
    with pytest.raises(CheckpointError, match="group 0 of the loaded state dict is of SGD, but Muon updates it here"):
        pair.zero.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="different number of parameter groups: it has 1, this optimizer has 2"):
        pair.zero.load_state_dict({"state": {}, "param_groups": saved["param_groups"][:1]})
    pair.train(1)
    pair.check_state()


@ranks(2)
def test_load_failure_in_second_optimizer_rolls_back_the_first(ctx: RankContext) -> None:
    pair = RulesPair(config=CONFIGS[1])
    pair.train(2)
    saved = broadcast_from_rank0(pair.zero.full_state_dict())
    pair.train(1)

    def refuse(*_: Any) -> None:
        raise ArithmeticError("not this one")

    hook = pair.zero.inner_optimizers[1].register_load_state_dict_post_hook(refuse if ctx.rank == 1 else lambda _: None)
    with pytest.raises(ArithmeticError if ctx.rank == 1 else RankFailedError, match="not this one"):
        pair.zero.load_state_dict(saved)
    hook.remove()
    pair.train(1)
    pair.check_state()


@ranks(1, 2, 3)
def test_torch_state_dict_helpers_and_dcp_round_trip(ctx: RankContext, tmp_path: Path) -> None:
    """`get_optimizer_state_dict` by names, DCP, and `set_optimizer_state_dict`; before the first step, too."""
    pair = RulesPair(config=CONFIGS[1])
    early: State = get_optimizer_state_dict(pair.model, pair.zero)
    assert {*chain(*ctx.gather(list(early["state"]["blocks.0.1.weight"])))} == {"momentum_buffer"}
    pair.train(2)
    dcp_save({"optim": get_optimizer_state_dict(pair.model, pair.zero)}, checkpoint_id=tmp_path)
    expected = broadcast_from_rank0(pair.zero.full_state_dict())
    other = seeded(Words, 5)
    into = shard(other, rules(), config=CONFIGS[4])
    target = {"optim": get_optimizer_state_dict(other, into)}
    dcp_load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, into, target["optim"])
    found = broadcast_from_rank0(into.full_state_dict())
    assert_same([it["state"] for it in parted(found)], [it["state"] for it in parted(expected)], "the state")
    assert found["param_groups"] == expected["param_groups"]


@ranks(1, 2)
def test_torch_state_dict_helpers_load_into_plain_optimizers(ctx: RankContext) -> None:
    pair = RulesPair(config=CONFIGS[1])
    pair.train(2)
    whole = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(pair.model, pair.zero, options=whole)
    model = seeded(Words, 5)
    named = dict(model.named_parameters())
    plain: list[Optimizer] = [Muon([named[n] for n in pair.zero.param_groups[0]["param_names"]], **MUON)]
    plain.append(AdamW([named[n] for n in pair.zero.param_groups[1]["param_names"]], **RULES_ADAMW))
    set_optimizer_state_dict(model, plain, found, options=whole)
    expected = broadcast_from_rank0(pair.zero.full_state_dict())["state"]
    assert_same([state for it in plain for state in it.state_dict()["state"].values()], list(expected.values()))


@ranks(1)
def test_checkpoint_of_one_rule_loads_into_two_rules_of_the_same_class(ctx: RankContext, tmp_path: Path) -> None:
    pair = RulesPair()
    pair.train(2)
    checkpoint.save(tmp_path, step=2, model=pair.model, optimizer=pair.zero)
    adamw = rules()[1]
    half = [
        ParamRule(lambda n, p: hidden(n, p) and "0" in n, Muon),
        ParamRule(lambda n, p: hidden(n, p) and "0" not in n, Muon),
    ]
    model = seeded(Words, 1)
    several = shard(model, [*half, adamw])
    assert [group["optimizer"] for group in several.param_groups] == ["Muon", "Muon 2", "AdamW"]
    checkpoint.load(tmp_path, model=model, optimizer=several)
    assert [group["optimizer"] for group in several.param_groups] == ["Muon", "Muon 2", "AdamW"]
    found, expected = (
        {name: dict(it.state[p]) for name, p in m.named_parameters()}
        for it, m in ((several, model), (pair.zero, pair.model))
    )
    assert_same(found, expected)


@ranks(2, 3)
def test_sharded_state_dict_holds_only_owned_state(ctx: RankContext) -> None:
    pair = RulesPair(config=CONFIGS[1])
    pair.train(1)
    part = pair.zero.sharded_state_dict()
    assert set(part["state"]) == set(range(len(pair.zero.layout.params)))
    mine = {
        spec.index for spec in pair.zero.layout.params if spec.index in pair.zero.layout.params_owned_by(pair.zero.rank)
    }
    assert {index for index, state in part["state"].items() if state} == mine
    assert [group["optimizer"] for group in part["param_groups"]] == ["Muon", "AdamW"]


@ranks(4)
def test_checkpoint_resumes_at_another_world_size(ctx: RankContext, tmp_path: Path) -> None:
    reference = seeded(Words)
    train_on_same_data(reference, muon_and_adamw(reference), 5)
    for saving, loading in ((1, 4), (4, 2), (2, 1)):
        folder = tmp_path / f"from-{saving}"
        group = first_ranks(saving)
        if group is not None:
            model = seeded(Words)
            zero = shard(model, rules(), process_group=group, config=CONFIGS[1])
            train_on_same_data(model, zero, 2)
            checkpoint.save(folder, step=2, model=model, optimizer=zero, process_group=group)
        dist.barrier()
        group = first_ranks(loading)
        if group is not None:
            model = seeded(Words, 9)
            zero = shard(model, rules(), process_group=group)
            train_on_same_data(model, zero, 1)
            checkpoint.load(folder, model=model, optimizer=zero, process_group=group)
            train_on_same_data(model, zero, 3, first_step=2)
            assert_same(model.state_dict(), reference.state_dict(), f"{saving} to {loading}")
        dist.barrier()


@ranks(2)
def test_checkpoint_loads_into_plain_optimizers(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(Words)
    zero = shard(model, rules())
    train_on_same_data(model, zero, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=zero)
    whole = broadcast_from_rank0(zero.full_state_dict())
    reference = seeded(Words, 5)
    plain = muon_and_adamw(reference)
    for member in plain.members:
        checkpoint.load(tmp_path, model=reference, optimizer=member, strict=False)
    assert_same(reference.state_dict(), model.state_dict(), "the model")
    assert_same([it.state_dict()["state"] for it in plain.members], [it["state"] for it in parted(whole)], "the state")


def make_other_rules() -> list[ParamRule]:
    return [ParamRule(hidden, AdamW, **RULES_ADAMW), ParamRule(remaining_params, SGD, lr=0.1, momentum=0.9)]


@ranks(1, 2, 3)
def test_checkpoint_of_other_rules_is_rejected_without_changes(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(Words, 5)
    other = shard(model, make_other_rules())
    train_on_same_data(model, other, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=other)
    pair = RulesPair(config=CONFIGS[1])
    pair.train(1)
    with pytest.raises(CheckpointError, match="is of another optimizer class"):
        checkpoint.load(tmp_path, model=pair.model, optimizer=pair.zero)
    pair.train(1)
    pair.check_state()


@ranks(2)
def test_checkpoint_of_class_with_same_state_keys_is_rejected_by_class_name(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(Words, 5)
    other = shard(
        model, [ParamRule(hidden, SGD, lr=0.1, momentum=0.9), ParamRule(remaining_params, AdamW, **RULES_ADAMW)]
    )
    train_on_same_data(model, other, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=other)
    pair = RulesPair()
    pair.train(1)
    with pytest.raises(CheckpointError, match="is of SGD, but Muon updates it here"):
        checkpoint.load(tmp_path, model=pair.model, optimizer=pair.zero)
    pair.train(1)


# ---- groups that come later


class GrowingNet(nn.Module):
    """`Words`, with a block that is not there at first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words(2)
        self.late: nn.Module | None = None

    def grow(self) -> None:
        torch.manual_seed(3)
        self.late = nn.Sequential(nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 11, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        return x if self.late is None else x + self.late(x)


def make_plain_optimizers(model: nn.Module) -> Any:
    return muon_and_adamw(model.words)  # type: ignore[arg-type]


GROWING_RULES = [ParamRule(lambda name, param: ".blocks." in name and param.dim() == 2, Muon, **MUON), rules()[1]]


@ranks(1, 2, 3)
def test_added_groups_name_their_optimizer(ctx: RankContext) -> None:
    for config, at_once in product((CONFIGS[0], CONFIGS[1]), (False, True)):
        pair = RulesPair(GROWING_RULES, make_plain_optimizers, make=GrowingNet, config=config)
        pair.train(2)
        for model in (pair.model, pair.plain_model):
            model.grow()  # type: ignore[operator]
        pair.wrap_plain()
        add_block_groups(pair, at_once=at_once)
        assert [group["optimizer"] for group in pair.zero.param_groups] == ["Muon", "AdamW", "Muon", "AdamW"]
        assert pair.zero.param_groups[2]["param_names"] == ["late.0.weight", "late.2.weight"]
        pair.train(3)
        saved = broadcast_from_rank0(pair.zero.full_state_dict())
        pair.zero.load_state_dict(saved)
        pair.train(1)


def add_block_groups(pair: RulesPair, *, at_once: bool = False) -> None:
    muon, adamw = pair.plain.members
    kept: list[dict[str, Any]] = []
    add = kept.append if at_once else pair.zero.add_param_group
    for model, add_matrices, add_rest in (
        (pair.model, add, add),
        (pair.plain_model, muon.add_param_group, adamw.add_param_group),
    ):
        ours = model is pair.model
        late = dict(model.late.named_parameters(prefix="late"))  # type: ignore[union-attr]
        large = [it for it in late.items() if it[1].dim() == 2]
        small = [it for it in late.items() if it[1].dim() == 1]
        # All that the plain classes take; that they are told apart is what is new.
        add_matrices({"params": large, "lr": 0.1, **({"optimizer": "Muon"} if ours else {})})
        add_rest({"params": small, "lr": 0.2, **({"optimizer": "AdamW"} if ours else {})})
    if at_once:
        pair.zero.add_param_groups(kept)


@ranks(1, 2, 3)
def test_rejected_group_changes_nothing(ctx: RankContext) -> None:
    pair = RulesPair(GROWING_RULES, make_plain_optimizers, make=GrowingNet, config=CONFIGS[1])
    pair.train(1)
    for model in (pair.model, pair.plain_model):
        model.grow()  # type: ignore[operator]
    pair.wrap_plain()
    late = [*pair.model.late.parameters()]  # type: ignore[union-attr]
    digest = pair.zero.layout.digest
    for group, problem in (
        ({"params": late}, r"'optimizer' is to be one of \['Muon', 'AdamW'\], not None"),
        ({"params": late, "optimizer": "SGD"}, r"\['Muon', 'AdamW'\], not 'SGD'"),
        ({"params": [*late, late[0]], "optimizer": "Muon"}, "share memory"),
        ({"params": late, "optimizer": "AdamW" if ctx.rank else "SGD"}, "not 'SGD'"),
    ):
        with pytest.raises(Exception, match=problem):
            pair.zero.add_param_group(group)
        assert pair.zero.layout.digest == digest
        assert len(pair.zero.param_groups) == 2
        assert [len(it.param_groups) for it in pair.zero.inner_optimizers] == [1, 1]
    add_block_groups(pair)
    pair.train(2)
