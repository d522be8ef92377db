"""`load_state_dict`: from any world size and any optimizer, with torch's semantics, and atomic over all ranks."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support import RankContext, ranks
from tests.support.optimizers import Keeper
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model, three_groups
from zeroshard import (
    CheckpointError,
    RankFailedError,
    RankMismatchError,
    ZeroRedundancyOptimizer,
    broadcast_object,
)

StateDict = dict[str, Any]
named_params = nn.Module.named_parameters


def make_trained_run(make_run: Callable[[], ParityRun], steps: int = 2) -> ParityRun:
    parity = make_run()
    parity.train(steps)
    return parity


def resume(make_run: Callable[[], ParityRun], saved_run: ParityRun, saved: StateDict) -> ParityRun:
    """A new sharded optimizer that resumes from `saved`, next to a plain one that was never interrupted."""
    resumed = make_run()
    resumed.model.load_state_dict(saved_run.plain_model.state_dict())
    resumed.plain_model, resumed.plain = copy.deepcopy((saved_run.plain_model, saved_run.plain))
    resumed.steps = saved_run.steps
    resumed.zero.load_state_dict(saved)
    return resumed


def assert_loads_like_torch(parity: ParityRun, saved: StateDict) -> None:
    """Check that both optimizers load the dict to the same state, and that further training is equal."""
    parity.zero.load_state_dict(copy.deepcopy(saved))
    parity.plain.load_state_dict(copy.deepcopy(saved))
    assert_full_state_matches(parity)
    parity.train(2)


def assert_full_state_matches(parity: ParityRun) -> None:
    found = parity.zero.full_state_dict()
    if found is not None:
        assert_same(found, parity.plain.state_dict(), "the state dict")


CASES: list[Callable[..., ParityRun]] = [
    partial(ParityRun, Adam, lr=0.05, get_params=three_groups),
    partial(ParityRun, SGD, lr=0.05, momentum=0.9, get_params=named_params),
    partial(ParityRun, Adagrad, lr=0.05),
    partial(ParityRun, Adafactor, lr=0.05),
    partial(ParityRun, AdamW, lr=torch.tensor(0.05), fused=True),
]


@ranks(4)
def test_resumes_bitwise_at_any_world_size(ctx: RankContext, tmp_path: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in range(1, 5)}
    own_groups = {size: group for size, group in groups.items() if ctx.rank < size}
    saved_runs: dict[int, ParityRun] = {}
    for size, group in own_groups.items():
        for number, make_run in enumerate(CASES[:3]):
            saved_runs[number] = make_trained_run(partial(make_run, zero_only={"process_group": group}))
            saved = saved_runs[number].zero.full_state_dict()
            if saved is not None:
                torch.save(saved, tmp_path / f"{number} from {size}")
    dist.barrier()
    for size, group in own_groups.items():
        for number, make_run in enumerate(CASES[:3]):
            for saved_size in groups:
                saved = torch.load(tmp_path / f"{number} from {saved_size}", weights_only=True)
                options = {"process_group": group, "parameters_as_bucket_view": saved_size == size}
                resume(partial(make_run, zero_only=options), saved_runs[number], saved).train(5)


@ranks(1, 2, 3)
def test_resumes_from_torch_optimizers(ctx: RankContext) -> None:
    for make_run in CASES:
        saved_run = make_trained_run(make_run)
        resume(make_run, saved_run, saved_run.plain.state_dict()).train(2)
    model = small_model()
    theirs = TorchZero(model.parameters(), Adam, lr=0.05)
    for step in range(2):
        set_grads(model.parameters(), step)
        theirs.step()
    theirs.consolidate_state_dict()
    saved = [theirs.state_dict() if ctx.rank == 0 else None]
    dist.broadcast_object_list(saved)
    assert saved[0] is not None
    make_run = partial(ParityRun, Adam, lr=0.05)
    resume(make_run, make_trained_run(make_run), saved[0]).train(2)


@ranks(2)
def test_resumes_with_sparse_momentum(ctx: RankContext) -> None:
    def set_sparse_grads(params: Iterable[torch.Tensor], step: int) -> None:
        set_grads(params := list(params), step)
        for param in params:
            assert param.grad is not None
            param.grad = (param.grad * (torch.arange(len(param)) % 2 == step % 2).unsqueeze(1)).to_sparse(1)

    def make_embeddings() -> nn.Module:
        return nn.ModuleList(nn.Embedding(6, 3, _weight=torch.ones(6, 3)) for _ in range(3))

    make_run = partial(ParityRun, SGD, model=make_embeddings, lr=0.1, momentum=0.9)
    saved_run = make_run()
    saved_run.train(2, set_sparse_grads)
    saved = saved_run.plain.state_dict()
    resume(make_run, saved_run, saved).train(2, set_sparse_grads)


def renumber_params(saved: StateDict, ids: list[Any]) -> StateDict:
    """The same dict with other parameter ids, and with its state in another order."""
    groups = copy.deepcopy(saved["param_groups"])
    for group in groups:
        group["params"] = [ids[number] for number in group["params"]]
    state = {ids[number]: saved["state"][number] for number in reversed(saved["state"])}
    return {"param_groups": groups, "state": state}


@ranks(1, 2, 3)
def test_param_ids_need_not_be_consecutive(ctx: RankContext) -> None:
    for make_run in CASES[:2]:
        for ids in ([5, 4, 3, 2, 1, 0], [70, 10, 50, 20, 0, 90], list("fedcba"), [(0, "x"), 1.5, None, "a", 3, -1]):
            saved_run = make_trained_run(make_run)
            resume(make_run, saved_run, renumber_params(saved_run.plain.state_dict(), ids)).train(2)


@ranks(1, 2, 3)
def test_state_of_unlisted_ids_is_not_assigned_to_params(ctx: RankContext) -> None:
    saved_run = make_trained_run(partial(ParityRun, Adam))
    saved = renumber_params(saved_run.plain.state_dict(), [70, 10, 50, 20, 80, 90])
    unlisted_state = {number: saved["state"].pop(number) for number in (10, 20, 70)}
    saved["state"] |= {number: unlisted_state[number * 10] for number in (1, 2)} | {0: unlisted_state[70]}
    loaded_run = ParityRun(Adam)
    loaded_run.zero.load_state_dict(saved)
    found = loaded_run.zero.full_state_dict()
    if found is not None:
        assert [number for number in found["state"] if number in range(6)] == [2, 4, 5]


def reversed_named_params(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters in one group, by name, last first."""
    return [{"params": list(model.named_parameters())[::-1], "lr": 0.05}]


def reversed_wrapped_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The same, with the name prefixes of DDP and torch.compile."""
    return [(f"module._orig_mod.{name}", param) for name, param in model.named_parameters()][::-1]


@ranks(1, 2, 3)
def test_params_are_matched_by_name_when_both_sides_have_names(ctx: RankContext) -> None:
    make_run = partial(ParityRun, Adam, lr=0.05, get_params=named_params)
    saved_run = make_trained_run(make_run)
    saved = saved_run.plain.state_dict()
    by_name = renumber_params(saved, saved["param_groups"][0]["param_names"])
    del by_name["param_groups"][0]["param_names"]
    for get_params, loaded in (
        (reversed_named_params, saved),
        (reversed_wrapped_params, saved),
        (reversed_named_params, by_name),
    ):
        resumed = resume(partial(ParityRun, Adam, lr=0.05, get_params=get_params), saved_run, loaded)
        names = resumed.zero.param_groups[0]["param_names"]
        assert names == ParityRun(Adam, get_params=get_params).plain.param_groups[0]["param_names"]
        group = resumed.plain.param_groups[0] | {"param_names": names}  # does not affect its steps
        resumed.plain.param_groups[0] = {key: group[key] for key in resumed.zero.param_groups[0]}
        resumed.train(2)


@ranks(2)
def test_unknown_param_names_are_ignored_with_a_warning(ctx: RankContext) -> None:
    make_run = partial(ParityRun, Adam, get_params=named_params)
    saved_run = make_trained_run(make_run)
    saved = saved_run.plain.state_dict()
    saved["param_groups"][0]["param_names"] = list("abcdef")
    with pytest.warns(UserWarning, match="names"):
        resume(make_run, saved_run, saved).train(1)
    unnamed = resume(partial(ParityRun, Adam), saved_run, saved)
    del unnamed.plain.param_groups[0]["param_names"]
    unnamed.train(1)


@ranks(2)
def test_param_moved_to_another_group_is_rejected(ctx: RankContext) -> None:
    def split_params(model: nn.Module, num_in_first: int) -> list[dict[str, Any]]:
        pairs = list(model.named_parameters())
        return [{"params": pairs[:num_in_first]}, {"params": pairs[num_in_first:]}]

    def swap_halves(model: nn.Module) -> list[dict[str, Any]]:
        return split_params(model, 3)[::-1]

    saved = make_trained_run(
        partial(ParityRun, Adam, get_params=partial(split_params, num_in_first=3))
    ).plain.state_dict()
    with pytest.raises(CheckpointError, match=r"parameter \d \(\d\.(weight|bias)\) is in another parameter group"):
        ParityRun(Adam, get_params=swap_halves).zero.load_state_dict(saved)


Point = namedtuple("Point", "where value")


class RecordsLoadedTypes(Keeper):
    """Records the types in the state that it gets to load, and in the state that it then has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen_types: list[type] = []

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._record_types(state_dict["state"])
        super().load_state_dict(state_dict)

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._record_types(self.state)

    def _record_types(self, state: dict[Any, Any]) -> None:
        for param_state in state.values():
            self.seen_types += [
                type(value) for key, value in param_state.items() if key in ("point", "ordered", "text", "list")
            ]
            param_state["list"].append("seen")


@ranks(1, 2, 3)
def test_containers_in_loaded_state_keep_their_types(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, RecordsLoadedTypes))
    inner = parity.zero.optim
    assert isinstance(inner, RecordsLoadedTypes)
    saved = copy.deepcopy(parity.plain.state_dict())
    for state in saved["state"].values():
        state["point"] = Point("here", torch.ones(1))
    saved["state"]["shared"] = {"list": [1, torch.ones(2)]}
    parity.zero.load_state_dict(saved)
    for param, param_state in parity.zero.state.items():
        if param != "shared":
            # Torch casts all tensors to the dtype of the parameter.
            number = next(index for index, own_param in enumerate(parity.model.parameters()) if own_param is param)
            expected = tree_map_only(torch.Tensor, torch.Tensor.float, saved["state"][number])
            expected["list"] += ["seen", "seen"]
            expected["size"] = torch.Size(expected["size"])
            assert_same(param_state, expected, f"state of parameter {number}")
    assert_same(parity.zero.state["shared"], {"list": [1, torch.ones(2), "seen", "seen"]})
    owned = len(parity.zero.state) - 1
    assert Counter(inner.seen_types) == Counter(2 * (owned * [list, OrderedDict, str, Point] + [list]))
    parity.train(2)


@ranks(1, 2)
def test_loads_edited_state_dicts_like_torch(ctx: RankContext) -> None:
    make_run = partial(ParityRun, Adam, lr=0.1, get_params=three_groups)
    original = make_trained_run(make_run).plain.state_dict()
    for number, edit in enumerate(state_dict_edits()):
        saved = copy.deepcopy(original)
        edit(saved)
        assert_loads_like_torch(make_trained_run(make_run, steps=number % 2), saved)


def state_dict_edits() -> Iterator[Callable[[StateDict], object]]:
    """Edits that may happen to a state dict between two runs."""
    yield lambda _: None
    yield lambda saved: saved["state"].clear()
    yield lambda saved: [saved["state"].pop(number) for number in (0, 3)]
    yield lambda saved: saved["state"].update(note="text", shared={"moment": torch.ones(2, dtype=torch.float64)})
    yield lambda saved: saved.update(version=3)
    yield lambda saved: [group.update(lr=0.7, mine="own") for group in saved["param_groups"]]
    yield lambda saved: [group.pop("fused") for group in saved["param_groups"]]  # an older version of torch
    yield lambda saved: [group.update(lr=torch.tensor(0.2), foreach=False) for group in saved["param_groups"]]
    yield lambda saved: [state.update(step=int(state["step"])) for state in saved["state"].values()]
    yield lambda saved: [group.update(fused=True) for group in saved["param_groups"]]
    yield lambda saved: [state.update(exp_avg=state["exp_avg"].double()) for state in saved["state"].values()]
    yield lambda saved: [state.update(exp_avg=state["exp_avg"].bfloat16()) for state in saved["state"].values()]
    yield lambda saved: [state.update(step=state["step"].double()) for state in saved["state"].values()]
    yield lambda saved: [state.update(mine=[torch.ones(1).half(), 3]) for state in saved["state"].values()]


@ranks(1, 2)
def test_state_dtypes_follow_the_param_as_in_torch(ctx: RankContext) -> None:
    saved = make_trained_run(partial(ParityRun, Adam, lr=0.1)).plain.state_dict()
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        for factory in (Adam, partial(Adam, fused=True), partial(Adam, amsgrad=True), partial(Adam, foreach=False)):
            parity = ParityRun(factory, lr=0.1, model=partial(small_model().to, dtype))
            for optimizer in (parity.zero, parity.plain):
                optimizer.load_state_dict(copy.deepcopy(saved))
            assert_full_state_matches(parity)
    capturable = ParityRun(Adam, capturable=True)
    for optimizer in (capturable.zero, capturable.plain):
        optimizer.load_state_dict({**saved, "param_groups": saved_param_groups(capturable.plain)})
    assert_full_state_matches(capturable)


def saved_param_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def storage_ptrs(value: Any) -> set[int]:
    """Addresses of the memory of all tensors in `value`."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.nbytes]
    assert tensors
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@ranks(1, 2, 3)
def test_load_neither_changes_nor_aliases_the_given_dict(ctx: RankContext) -> None:
    for make_run in (
        partial(ParityRun, RecordsLoadedTypes),
        partial(ParityRun, Adam, lr=torch.tensor(0.1), fused=True, get_params=named_params),
    ):
        saved = copy.deepcopy(make_trained_run(make_run).plain.state_dict())
        saved["state"]["shared"] = {"moment": torch.ones(2), "list": [1]}
        original = copy.deepcopy(saved)
        loaded_run = make_run()
        loaded_run.zero.load_state_dict(saved)
        loaded_state = [
            list(loaded_run.zero.state.values()),
            loaded_run.zero.param_groups,
            loaded_run.zero.optim.param_groups,
        ]
        assert not storage_ptrs(loaded_state) & storage_ptrs(saved)
        for optimizer in (loaded_run.zero, loaded_run.zero.optim):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        set_grads(loaded_run.model.parameters(), 0)
        loaded_run.zero.step()
        loaded_run.zero.state["shared"]["list"].append(2)
        assert_same(saved, original)


def invalid_state_dicts() -> Iterator[tuple[str, Callable[[StateDict], Any]]]:
    """Patterns of error messages, each with a function that makes an invalid dict from a valid one."""

    def without(saved: StateDict, key: str) -> StateDict:
        return {other: value for other, value in saved.items() if other != key}

    def with_group(saved: StateDict, number: int, **changed: Any) -> StateDict:
        saved["param_groups"][number].update(changed)
        return saved

    def with_state(saved: StateDict, number: int, **changed: Any) -> StateDict:
        saved["state"][number].update(changed)
        return saved

    yield "state dict", lambda _: None
    yield "state dict", lambda saved: [saved]
    yield "'state'", lambda saved: without(saved, "state")
    yield "'param_groups'", lambda saved: without(saved, "param_groups")
    yield "'state'", lambda saved: {**saved, "state": None}
    yield "'param_groups'", lambda saved: {**saved, "param_groups": 3}
    yield "'params'", lambda saved: {**saved, "param_groups": [{}, {}]}
    yield "groups.* 1.* 2", lambda saved: {**saved, "param_groups": saved["param_groups"][:1]}
    yield "groups.* 4.* 2", lambda saved: {**saved, "param_groups": saved["param_groups"] * 2}
    yield "group 0 has 1 .* 5 here", lambda saved: {**saved, "param_groups": saved["param_groups"][::-1]}
    yield "twice", lambda saved: with_group(saved, 1, params=[0])
    yield "'exp_avg' of parameter 2 does not match", lambda saved: with_state(saved, 2, exp_avg=torch.ones(3))
    yield "'exp_avg_sq' of parameter 0 does not match", lambda saved: with_state(saved, 0, exp_avg_sq=torch.ones(()))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": rest[::-1]}, {"params": [first]}]


@ranks(1, 2, 3)
def test_invalid_state_dict_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, Adam, lr=0.1, get_params=two_groups))
    valid_run = ParityRun(Adam, lr=0.9, get_params=two_groups)
    valid_run.train(3)
    saved = valid_run.plain.state_dict()
    for message, make_invalid in invalid_state_dicts():
        invalid = make_invalid(copy.deepcopy(saved))
        for failing_rank in range(ctx.world_size):
            with pytest.raises(CheckpointError, match=message):
                parity.zero.load_state_dict(invalid)
            is_failing_rank = ctx.rank == failing_rank
            with pytest.raises(CheckpointError if is_failing_rank else RankFailedError, match=message) as caught:
                parity.zero.load_state_dict(invalid if is_failing_rank else saved)
            assert is_failing_rank or f"rank {failing_rank}" in str(caught.value)
        assert_full_state_matches(parity)
        parity.train(1)
    parity.zero.load_state_dict(saved)  # a valid dict still loads


@ranks(2, 3)
def test_different_state_dicts_are_a_mismatch_and_change_nothing(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, Adam, lr=0.1))
    saved = copy.deepcopy(parity.plain.state_dict())
    changes: list[tuple[str, Callable[[StateDict], object]]] = [
        ("lr=0.2", lambda saved: saved["param_groups"][0].update(lr=0.2)),
        ("parameter 3", lambda saved: saved["state"].pop(3)),
        ("parameter 4.*mine", lambda saved: saved["state"][4].update(mine=3)),
        ("parameter 5.*bfloat16", lambda saved: saved["state"][5].update(exp_avg=torch.ones(2).bfloat16())),
    ]
    for difference, change in changes:
        changed = copy.deepcopy(saved)
        change(changed)
        with pytest.raises(RankMismatchError, match=f"load_state_dict.*ranks? 0(, 2)?: (?=.*{difference}).*rank 1: "):
            parity.zero.load_state_dict(changed if ctx.rank == 1 else saved)
        assert_full_state_matches(parity)
        parity.train(1)


class FailsInSetState(Adam):
    """Raises if `should_fail` is set, after it has taken over the state."""

    should_fail = False

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.marked = True
        if self.should_fail:
            raise LookupError("not to my taste")


@ranks(1, 2, 3)
def test_failed_load_on_one_rank_is_rolled_back_on_all(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, FailsInSetState, lr=0.1))
    other = make_trained_run(partial(ParityRun, FailsInSetState, lr=0.7), steps=3).plain.state_dict()
    for failing_rank in range(ctx.world_size):
        inner = parity.zero.optim
        assert isinstance(inner, FailsInSetState)
        inner.should_fail = ctx.rank == failing_rank
        with pytest.raises(LookupError if inner.should_fail else RankFailedError, match="not to my taste"):
            parity.zero.load_state_dict(other)
        inner.should_fail = False
        assert not hasattr(inner, "marked")
        assert_full_state_matches(parity)
        parity.train(1)


class ExtendsStateDict(SGD):
    """Adds an entry to its state dict, and requires it when loading."""

    extra = 0

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.extra = state_dict["extra"] + 1
        super().load_state_dict(state_dict)


@ranks(1, 2, 3)
def test_extra_state_dict_entries_reach_the_inner_optimizer(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, ExtendsStateDict, lr=0.1, momentum=0.9))
    assert isinstance(parity.zero.optim, ExtendsStateDict)
    parity.zero.optim.extra = parity.plain.extra = 7  # type: ignore[attr-defined]
    assert_full_state_matches(parity)
    assert_loads_like_torch(parity, parity.plain.state_dict())
    assert parity.zero.optim.extra == 8


@ranks(1, 2)
def test_load_hooks_fire_once_and_may_replace_the_dict(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, Adam, lr=0.1))
    other = make_trained_run(partial(ParityRun, Adam, lr=0.5)).plain.state_dict()
    calls: list[str] = []

    def before(optimizer: Optimizer, saved: StateDict) -> StateDict:
        calls.append("before")
        groups = [{**group, "lr": group["lr"] + 1} for group in saved["param_groups"]]
        return {"state": {}, "param_groups": groups}

    def after(optimizer: Optimizer) -> None:
        calls.append(f"after, lr={optimizer.param_groups[0]['lr']}")

    original = copy.deepcopy(other)
    for optimizer in (parity.zero, parity.plain):
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"))
        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)
        calls.clear()
        optimizer.load_state_dict(other)
        assert calls == ["first", "before", "after, lr=1.5"]
    assert_same(other, original)
    assert_full_state_matches(parity)
    parity.train(2)


@ranks(1, 2)
def test_load_discards_the_consolidated_state_dict(ctx: RankContext) -> None:
    parity = make_trained_run(partial(ParityRun, Adam))
    saved = parity.plain.state_dict()
    parity.zero.consolidate_state_dict()
    parity.zero.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        parity.zero.state_dict()


@ranks(1, 2)
def test_default_device_has_no_effect(ctx: RankContext) -> None:
    with torch.device("meta"):
        parity = ParityRun(SGD, lr=0.1, momentum=0.9, model=lambda: small_model().to_empty(device="cpu"))
    parity.model.load_state_dict(small_model().state_dict())
    parity.plain_model.load_state_dict(small_model().state_dict())
    parity.train(1)
    with torch.device("meta"):
        saved = broadcast_object(parity.zero.full_state_dict(), 0)
        parity.zero.load_state_dict(saved)
        found = parity.zero.full_state_dict()
    if found is not None:
        assert_same(found, parity.plain.state_dict())
    parity.train(1)


@ranks(2)
def test_state_of_another_class_is_named(ctx: RankContext) -> None:
    model = small_model()
    plain = SGD(model.parameters(), lr=0.1, momentum=0.9)
    set_grads(model.parameters(), 0)
    plain.step()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    with pytest.raises(CheckpointError, match=r"an optimizer class other than AdamW.*momentum.*but not betas"):
        optimizer.load_state_dict(plain.state_dict())


@ranks(1, 2)
def test_state_of_another_class_is_refused_even_if_it_could_be_assigned(ctx: RankContext) -> None:
    """Without the options of its own class, an optimizer would fail in its next step."""
    parity = ParityRun(SGD, lr=0.1, momentum=0.9)
    parity.train(1)
    adam = AdamW(small_model().parameters())
    with pytest.raises(CheckpointError, match=r"an optimizer class other than SGD.*betas.*but not momentum"):
        parity.zero.load_state_dict(adam.state_dict())
    parity.train(1)


@ranks(2)
def test_options_of_schedulers_and_older_versions_may_differ(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1, momentum=0.9)
    parity.train(1)
    saved = parity.plain.state_dict()
    for group in saved["param_groups"]:
        del group["fused"], group["maximize"]  # SGD.__setstate__ adds them
        group["max_lr"] = 0.3
    for optimizer in (parity.zero, parity.plain):
        optimizer.load_state_dict(saved)
    parity.train(1)
