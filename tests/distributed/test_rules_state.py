"""State of several optimizer classes: state dicts and checkpoints at any world size, also for plain optimizers."""

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
    RulesParityRun,
    Words,
    assert_same,
    is_hidden_matrix,
    make_seeded,
    muon_and_adamw,
    rules,
    split_by_group,
)
from zeroshard import CheckpointError, ConfigError, ParamRule, RankFailedError, checkpoint, remaining_params, shard

State = dict[str, Any]


def broadcast_from_rank0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def train_on_same_data(model: nn.Module, optimizer: Any, steps: int, *, first_step: int = 0) -> None:
    """Train on the same data on all ranks: averages over 1, 2 or 4 ranks are exact."""
    for number in range(first_step, first_step + steps):
        words = torch.randperm(11, generator=torch.Generator().manual_seed(number))[:7]
        torch.autograd.backward(nn.functional.cross_entropy(model(words), words.roll(1)))
        optimizer.step()
        optimizer.zero_grad()


@ranks(1, 2, 3)
def test_state_dict_round_trips_through_plain_optimizers(ctx: RankContext) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(2)
    full_state = broadcast_from_rank0(parity.zero.full_state_dict())
    for member, group_state in zip(parity.plain.members, split_by_group(full_state), strict=True):
        member.load_state_dict(group_state)
    parity.train(1)
    plain = parity.plain.state_dict()
    original = copy.deepcopy(plain)
    parity.zero.load_state_dict(plain)
    assert_same(plain, original, "the loaded dict")
    assert [group["optimizer"] for group in parity.zero.param_groups] == ["Muon", "AdamW"]
    parity.train(2)
    parity.check_state()


@ranks(4)
def test_state_dict_loads_at_another_world_size(ctx: RankContext) -> None:
    reference = make_seeded(Words)
    train_on_same_data(reference, muon_and_adamw(reference), 4)
    for saving, loading in ((1, 4), (4, 2), (2, 1)):
        group = first_ranks(saving)
        saved: list[Any] = [None, None]
        if group is not None:
            model = make_seeded(Words)
            zero = shard(model, rules(), process_group=group, config=CONFIGS[1])
            train_on_same_data(model, zero, 2)
            saved = [zero.full_state_dict(), model.state_dict()]
        dist.broadcast_object_list(saved, src=0)
        group = first_ranks(loading)
        if group is not None:
            model = make_seeded(Words, 9)
            zero = shard(model, rules(), process_group=group)
            zero.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            train_on_same_data(model, zero, 2, first_step=2)
            assert_same(model.state_dict(), reference.state_dict(), f"{saving} to {loading}")
        dist.barrier()


@ranks(2)
def test_state_dict_of_other_optimizer_classes_is_rejected(ctx: RankContext) -> None:
    """The groups, and the names and shapes of the state, are the same."""
    other_rules = [
        ParamRule(is_hidden_matrix, SGD, lr=0.1, momentum=0.9),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]
    model = make_seeded(Words)
    zero = shard(model, other_rules, config=CONFIGS[1])
    train_on_same_data(model, zero, 1)
    saved = broadcast_from_rank0(zero.full_state_dict())
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(1)
    with pytest.raises(CheckpointError, match=r"group 0 of the loaded state dict belongs to SGD, .* with Muon"):
        parity.zero.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="different number of parameter groups: it has 1, this optimizer has 2"):
        parity.zero.load_state_dict({"state": {}, "param_groups": saved["param_groups"][:1]})
    parity.train(1)
    parity.check_state()


@ranks(2)
def test_load_failure_in_second_optimizer_rolls_back_the_first(ctx: RankContext) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(2)
    saved = broadcast_from_rank0(parity.zero.full_state_dict())
    parity.train(1)

    def fail_to_load(*_: Any) -> None:
        raise ArithmeticError("not this one")

    hook = parity.zero.inner_optimizers[1].register_load_state_dict_post_hook(
        fail_to_load if ctx.rank == 1 else lambda _: None
    )
    with pytest.raises(ArithmeticError if ctx.rank == 1 else RankFailedError, match="not this one"):
        parity.zero.load_state_dict(saved)
    hook.remove()
    parity.train(1)
    parity.check_state()


@ranks(1, 2, 3)
def test_torch_state_dict_helpers_and_dcp_round_trip(ctx: RankContext, tmp_path: Path) -> None:
    """`get_optimizer_state_dict` by name, also before the first step, then DCP and `set_optimizer_state_dict`."""
    parity = RulesParityRun(config=CONFIGS[1])
    early: State = get_optimizer_state_dict(parity.model, parity.zero)
    assert {*chain(*ctx.gather(list(early["state"]["blocks.0.1.weight"])))} == {"momentum_buffer"}
    parity.train(2)
    dcp_save({"optim": get_optimizer_state_dict(parity.model, parity.zero)}, checkpoint_id=tmp_path)
    expected = broadcast_from_rank0(parity.zero.full_state_dict())
    loaded_model = make_seeded(Words, 5)
    loaded_optimizer = shard(loaded_model, rules(), config=CONFIGS[4])
    target = {"optim": get_optimizer_state_dict(loaded_model, loaded_optimizer)}
    dcp_load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(loaded_model, loaded_optimizer, target["optim"])
    found = broadcast_from_rank0(loaded_optimizer.full_state_dict())
    assert_same(
        [group_state["state"] for group_state in split_by_group(found)],
        [group_state["state"] for group_state in split_by_group(expected)],
        "the state",
    )
    assert found["param_groups"] == expected["param_groups"]


@ranks(1, 2)
def test_torch_state_dict_helpers_load_into_plain_optimizers(ctx: RankContext) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(2)
    full = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(parity.model, parity.zero, options=full)
    model = make_seeded(Words, 5)
    named = dict(model.named_parameters())
    plain: list[Optimizer] = [Muon([named[name] for name in parity.zero.param_groups[0]["param_names"]], **MUON)]
    plain.append(AdamW([named[name] for name in parity.zero.param_groups[1]["param_names"]], **RULES_ADAMW))
    set_optimizer_state_dict(model, plain, found, options=full)
    expected = broadcast_from_rank0(parity.zero.full_state_dict())["state"]
    assert_same(
        [state for optimizer in plain for state in optimizer.state_dict()["state"].values()], list(expected.values())
    )


@ranks(1)
def test_checkpoint_of_one_rule_loads_into_two_rules_of_the_same_class(ctx: RankContext, tmp_path: Path) -> None:
    parity = RulesParityRun()
    parity.train(2)
    checkpoint.save(tmp_path, step=2, model=parity.model, optimizer=parity.zero)
    adamw = rules()[1]
    muon_rules = [
        ParamRule(lambda name, param: is_hidden_matrix(name, param) and "0" in name, Muon),
        ParamRule(lambda name, param: is_hidden_matrix(name, param) and "0" not in name, Muon),
    ]
    model = make_seeded(Words, 1)
    several = shard(model, [*muon_rules, adamw])
    assert [group["optimizer"] for group in several.param_groups] == ["Muon", "Muon 2", "AdamW"]
    checkpoint.load(tmp_path, model=model, optimizer=several)
    assert [group["optimizer"] for group in several.param_groups] == ["Muon", "Muon 2", "AdamW"]
    found, expected = (
        {name: dict(optimizer.state[param]) for name, param in net.named_parameters()}
        for optimizer, net in ((several, model), (parity.zero, parity.model))
    )
    assert_same(found, expected)


@ranks(2, 3)
def test_sharded_state_dict_holds_only_owned_state(ctx: RankContext) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(1)
    sharded_state = parity.zero.sharded_state_dict()
    assert set(sharded_state["state"]) == set(range(len(parity.zero.layout.params)))
    owned = {
        spec.index
        for spec in parity.zero.layout.params
        if spec.index in parity.zero.layout.params_owned_by(parity.zero.rank)
    }
    assert {index for index, state in sharded_state["state"].items() if state} == owned
    assert [group["optimizer"] for group in sharded_state["param_groups"]] == ["Muon", "AdamW"]


@ranks(4)
def test_checkpoint_resumes_at_another_world_size(ctx: RankContext, tmp_path: Path) -> None:
    reference = make_seeded(Words)
    train_on_same_data(reference, muon_and_adamw(reference), 5)
    for saving, loading in ((1, 4), (4, 2), (2, 1)):
        folder = tmp_path / f"from-{saving}"
        group = first_ranks(saving)
        if group is not None:
            model = make_seeded(Words)
            zero = shard(model, rules(), process_group=group, config=CONFIGS[1])
            train_on_same_data(model, zero, 2)
            checkpoint.save(folder, step=2, model=model, optimizer=zero, process_group=group)
        dist.barrier()
        group = first_ranks(loading)
        if group is not None:
            model = make_seeded(Words, 9)
            zero = shard(model, rules(), process_group=group)
            train_on_same_data(model, zero, 1)
            checkpoint.load(folder, model=model, optimizer=zero, process_group=group)
            train_on_same_data(model, zero, 3, first_step=2)
            assert_same(model.state_dict(), reference.state_dict(), f"{saving} to {loading}")
        dist.barrier()


@ranks(2)
def test_checkpoint_loads_into_plain_optimizers(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(Words)
    zero = shard(model, rules())
    train_on_same_data(model, zero, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=zero)
    full_state = broadcast_from_rank0(zero.full_state_dict())
    plain_model = make_seeded(Words, 5)
    plain = muon_and_adamw(plain_model)
    for member in plain.members:
        checkpoint.load(tmp_path, model=plain_model, optimizer=member, strict=False)
    assert_same(plain_model.state_dict(), model.state_dict(), "the model")
    assert_same(
        [member.state_dict()["state"] for member in plain.members],
        [group_state["state"] for group_state in split_by_group(full_state)],
        "the state",
    )


def make_other_rules() -> list[ParamRule]:
    return [ParamRule(is_hidden_matrix, AdamW, **RULES_ADAMW), ParamRule(remaining_params, SGD, lr=0.1, momentum=0.9)]


@ranks(1, 2, 3)
def test_checkpoint_of_other_rules_is_rejected_without_changes(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(Words, 5)
    other = shard(model, make_other_rules())
    train_on_same_data(model, other, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=other)
    parity = RulesParityRun(config=CONFIGS[1])
    parity.train(1)
    with pytest.raises(CheckpointError, match="but this optimizer uses"):
        checkpoint.load(tmp_path, model=parity.model, optimizer=parity.zero)
    parity.train(1)
    parity.check_state()


@ranks(2)
def test_checkpoint_of_class_with_same_state_keys_is_rejected_by_class_name(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(Words, 5)
    other = shard(
        model,
        [ParamRule(is_hidden_matrix, SGD, lr=0.1, momentum=0.9), ParamRule(remaining_params, AdamW, **RULES_ADAMW)],
    )
    train_on_same_data(model, other, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=other)
    parity = RulesParityRun()
    parity.train(1)
    with pytest.raises(
        CheckpointError, match=r"has state of SGD for blocks\.0\.1\.weight, but this optimizer uses Muon"
    ):
        checkpoint.load(tmp_path, model=parity.model, optimizer=parity.zero)
    parity.train(1)


# ---- Groups added later


class GrowingNet(nn.Module):
    """`Words`, with a block that `grow` adds."""

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
        parity = RulesParityRun(GROWING_RULES, make_plain_optimizers, make=GrowingNet, config=config)
        parity.train(2)
        for model in (parity.model, parity.plain_model):
            model.grow()  # type: ignore[operator]
        parity.wrap_plain()
        add_block_groups(parity, at_once=at_once)
        assert [group["optimizer"] for group in parity.zero.param_groups] == ["Muon", "AdamW", "Muon", "AdamW"]
        assert parity.zero.param_groups[2]["param_names"] == ["late.0.weight", "late.2.weight"]
        parity.train(3)
        saved = broadcast_from_rank0(parity.zero.full_state_dict())
        parity.zero.load_state_dict(saved)
        parity.train(1)


def add_block_groups(parity: RulesParityRun, *, at_once: bool = False) -> None:
    muon, adamw = parity.plain.members
    new_groups: list[dict[str, Any]] = []
    add = new_groups.append if at_once else parity.zero.add_param_group
    for model, add_matrices, add_rest in (
        (parity.model, add, add),
        (parity.plain_model, muon.add_param_group, adamw.add_param_group),
    ):
        is_sharded = model is parity.model
        new_params = dict(model.late.named_parameters(prefix="late"))  # type: ignore[union-attr]
        matrices = [item for item in new_params.items() if item[1].dim() == 2]
        biases = [item for item in new_params.items() if item[1].dim() == 1]
        # The groups are the same as for plain optimizers, except for the option `optimizer`.
        add_matrices({"params": matrices, "lr": 0.1, **({"optimizer": "Muon"} if is_sharded else {})})
        add_rest({"params": biases, "lr": 0.2, **({"optimizer": "AdamW"} if is_sharded else {})})
    if at_once:
        parity.zero.add_param_groups(new_groups)


@ranks(1, 2, 3)
def test_rejected_group_changes_nothing(ctx: RankContext) -> None:
    parity = RulesParityRun(GROWING_RULES, make_plain_optimizers, make=GrowingNet, config=CONFIGS[1])
    parity.train(1)
    for model in (parity.model, parity.plain_model):
        model.grow()  # type: ignore[operator]
    parity.wrap_plain()
    new_params = [*parity.model.late.parameters()]  # type: ignore[union-attr]
    digest = parity.zero.layout.digest
    for group, problem in (
        ({"params": new_params}, r"group\['optimizer'\] to one of \['Muon', 'AdamW'\], got None"),
        ({"params": new_params, "optimizer": "SGD"}, r"\['Muon', 'AdamW'\], got 'SGD'"),
        ({"params": [*new_params, new_params[0]], "optimizer": "Muon"}, "share memory"),
        ({"params": new_params, "optimizer": "AdamW" if ctx.rank else "SGD"}, "got 'SGD'"),
    ):
        is_valid_here = group.get("optimizer") == "AdamW"  # rank 0 has another one
        with pytest.raises(RankFailedError if is_valid_here else ConfigError, match=problem):
            parity.zero.add_param_group(group)
        assert parity.zero.layout.digest == digest
        assert len(parity.zero.param_groups) == 2
        assert [len(inner.param_groups) for inner in parity.zero.inner_optimizers] == [1, 1]
    add_block_groups(parity)
    parity.train(2)
