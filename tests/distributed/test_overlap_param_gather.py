"""`overlap_param_gather=True`: parameters are under way after a step, and whoever looks at the model sees the final "
"ones."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support import RankContext, ranks
from tests.support.oracles import TINY, Branches, Pair, assert_same, mlp, through_branches
from zeroshard import (
    ConfigError,
    FlatShards,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)

HIDDEN_SIZE = 700
ONE_BUCKET_PER_LAYER = FlatShards(bucket_bytes=2**20)
"""A bucket for each layer of `large`."""


def make_large_model() -> nn.Sequential:
    """Its parameters take much longer to arrive than it takes to look at them."""
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(4)]
    return nn.Sequential(nn.Linear(1, HIDDEN_SIZE), *layers, nn.Linear(HIDDEN_SIZE, 1))


def make_inputs(seed: int) -> Tensor:
    return torch.randn(2, 1, generator=torch.Generator().manual_seed(seed))


class OverlapPair:
    """A model whose parameters arrive late, and one whose parameters do not."""

    def __init__(self, make: Callable[[], nn.Module] = make_large_model, **options: Any) -> None:
        self.models = [make(), make()]
        configs = [
            ZeroConfig(partition=ONE_BUCKET_PER_LAYER, overlap_param_gather=late, **options) for late in (True, False)
        ]
        self.overlapping, self.blocking = (
            shard(model, optim.SGD, lr=0.1, foreach=True, config=config)
            for model, config in zip(self.models, configs, strict=True)
        )
        self.steps = 0

    def compare(self, use: Callable[[Any], Any], name: str = "") -> None:
        """Make a step and use the model at once; both uses must give the same."""
        for model in self.models:
            torch.autograd.backward(model(make_inputs(self.steps)).square().mean())
        self.steps += 1
        self.blocking.step()
        expected = use(self.models[1])
        self.overlapping.step()
        assert self.has_params_in_flight
        assert_same(use(self.models[0]), expected, name)
        for optimizer in (self.overlapping, self.blocking):
            optimizer.zero_grad()

    @property
    def has_params_in_flight(self) -> bool:
        return self.overlapping._engine.param_sync.is_in_flight


def clone_in_reverse(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What they are now; first those that arrive last."""
    return [tensor.detach().clone() for tensor in reversed(list(tensors))]


def read_by_averaging(model: nn.Module) -> list[Tensor]:
    """The average of the new parameters and of zeros."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for param in average.module.parameters():
            param.zero_()
    average.n_averaged += 1
    average.update_parameters(model)
    return clone_in_reverse(average.module.parameters())


def read_by_saving(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return clone_in_reverse(torch.load(file, weights_only=False).parameters())


def evaluate(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        output: Tensor = model(make_inputs(99))
    model.train()
    return output


def step_second_optimizer(model: nn.Module) -> list[Tensor]:
    second = SECOND_OPTIMIZERS[model]
    for param in second.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    second.step()
    second.zero_grad()
    return clone_in_reverse(second.param_groups[0]["params"])


SECOND_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, optim.Optimizer] = weakref.WeakKeyDictionary()
"""Another optimizer of a model, made before its parameters are under way."""

READERS: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda model: clone_in_reverse(model.parameters()),
    "named_parameters": lambda model: clone_in_reverse(param for _, param in model.named_parameters()),
    "state_dict": lambda model: clone_in_reverse(model.state_dict().values()),
    "a submodule's parameters": lambda model: (
        clone_in_reverse(model[5].parameters()) + clone_in_reverse(model[3].parameters())
    ),
    "a submodule's state_dict": lambda model: clone_in_reverse(model[5].state_dict().values()),
    "a vector": lambda model: parameters_to_vector(model.parameters()).detach(),
    "deepcopy": lambda model: clone_in_reverse(copy.deepcopy(model).parameters()),
    "deepcopy of a submodule": lambda model: clone_in_reverse(copy.deepcopy(model[4]).parameters()),
    "save": read_by_saving,
    "an average": read_by_averaging,
    "evaluation": evaluate,
    "a submodule's forward": lambda model: model[5](torch.ones(1, HIDDEN_SIZE)).detach(),
    "functional use": lambda model: functional_call(model, dict(model.named_parameters()), (make_inputs(7),)).detach(),
    "a second optimizer": step_second_optimizer,
}


@ranks(2, 3)
def test_readers_see_the_final_values(ctx: RankContext) -> None:
    overlapped = OverlapPair()
    SECOND_OPTIMIZERS.update({model: optim.SGD(model.parameters(), lr=0.01) for model in overlapped.models})
    for name, reader in READERS.items():
        overlapped.compare(reader, name)
    overlapped.compare(READERS["parameters"])


def load_ones(model: nn.Module) -> list[Tensor]:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    OPTIMIZERS[model].wait_for_params()
    return clone_in_reverse(model.parameters())


def load_prepared(model: nn.Module) -> list[Tensor]:
    """Without asking the model for anything before."""
    model.load_state_dict(PREPARED_STATE_DICT)
    OPTIMIZERS[model].wait_for_params()
    return clone_in_reverse(model.parameters())


OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, ShardedOptimizer] = weakref.WeakKeyDictionary()
PREPARED_STATE_DICT: dict[str, Tensor] = {}


@ranks(2, 3)
def test_loaded_params_are_not_overwritten_by_the_gather(ctx: RankContext) -> None:
    """By parameters that arrive afterwards."""
    overlapped = OverlapPair()
    OPTIMIZERS.update(zip(overlapped.models, (overlapped.overlapping, overlapped.blocking), strict=True))
    PREPARED_STATE_DICT.update(
        {name: torch.full_like(value, 0.01) for name, value in overlapped.models[0].state_dict().items()}
    )
    overlapped.compare(load_ones)
    overlapped.compare(load_prepared)
    overlapped.compare(READERS["parameters"])
    overlapped.compare(lambda model: clone_in_reverse(model.to(torch.float64).parameters()), "to")


def wrap_in_container(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"model": model})


def load_into_container(model: nn.Module) -> list[Tensor]:
    wrap_in_container(model).load_state_dict({f"model.{name}": value for name, value in PREPARED_STATE_DICT.items()})
    OPTIMIZERS[model].wait_for_params()
    return clone_in_reverse(model.parameters())


@ranks(2, 3)
def test_container_modules_read_and_load_final_values(ctx: RankContext) -> None:
    """Whoever holds the model, under whatever name, sees the same."""
    overlapped = OverlapPair()
    OPTIMIZERS.update(zip(overlapped.models, (overlapped.overlapping, overlapped.blocking), strict=True))
    PREPARED_STATE_DICT.update(
        {name: torch.full_like(value, 0.01) for name, value in overlapped.models[0].state_dict().items()}
    )
    for name in ("parameters", "state_dict", "deepcopy", "save", "an average"):
        reader = READERS[name]
        overlapped.compare(lambda model, reader=reader: reader(wrap_in_container(model)), name)  # type: ignore[misc]
    compiled = {model: cast(nn.Module, torch.compile(model, backend="eager")) for model in overlapped.models}
    overlapped.compare(lambda model: clone_in_reverse(compiled[model].parameters()), "compiled")
    overlapped.compare(load_into_container, "load_state_dict")


@ranks(2, 3)
def test_wait_for_params(ctx: RankContext) -> None:
    overlapped = OverlapPair()
    by_hand = {model: list(model.parameters()) for model in overlapped.models}
    OPTIMIZERS.update(zip(overlapped.models, (overlapped.overlapping, overlapped.blocking), strict=True))

    def wait_and_read(model: nn.Module) -> list[Tensor]:
        OPTIMIZERS[model].wait_for_params()
        assert not overlapped.has_params_in_flight
        return clone_in_reverse(by_hand[model])

    overlapped.compare(wait_and_read)
    overlapped.overlapping.wait_for_params()  # for nothing


@ranks(1, 2, 3, 4)
def test_training_equals_plain(ctx: RankContext) -> None:
    pair = Pair(optim.AdamW, config=ZeroConfig(partition=TINY, overlap_param_gather=True))
    pair.train(3)
    pair.check_state()
    config = ZeroConfig(partition=TINY, overlap_param_gather=True)
    Pair(optim.AdamW, make=Branches, loss=through_branches, find_unused=True, config=config).train(4)


def attribute_types(model: nn.Module) -> list[dict[str, type]]:
    return [{name: type(value) for name, value in vars(module).items()} for module in model.modules()]


@ranks(2, 3)
def test_forward_waits_only_for_the_layer_that_runs(ctx: RankContext) -> None:
    """Each layer's forward pass leaves the later ones under way; once all have come, the model is as it was."""
    overlapped = OverlapPair()
    model = cast(nn.Sequential, overlapped.models[0])
    before = attribute_types(model)
    torch.autograd.backward(model(make_inputs(0)).square().mean())
    overlapped.overlapping.step()
    assert overlapped.has_params_in_flight
    sync = overlapped.overlapping._engine.param_sync
    waiting: list[int] = []
    handles = [layer.register_forward_hook(lambda *_: waiting.append(len(sync._in_flight))) for layer in model]
    model[0](make_inputs(1))
    model(make_inputs(1))
    for handle in handles:
        handle.remove()
    first, again, *others = waiting
    assert first == again > others[0] > others[1] > others[2] > others[3] == others[4] == 0
    assert attribute_types(model) == before


@ranks(2, 3)
def test_consecutive_steps_without_forward(ctx: RankContext) -> None:
    """A step waits for the parameters of the one before, also when no forward pass came in between."""
    overlapped = OverlapPair()
    for model in overlapped.models:
        torch.autograd.backward(model(make_inputs(0)).square().mean())
    for _ in range(3):
        for optimizer in (overlapped.overlapping, overlapped.blocking):
            optimizer.step()
    late, prompt = (clone_in_reverse(model.parameters()) for model in overlapped.models)
    assert_same(late, prompt)


@ranks(2)
def test_overlap_with_master_weights(ctx: RankContext) -> None:
    overlapped = OverlapPair(lambda: make_large_model().to(torch.float32), master_dtype=torch.float64)
    for name in ("state_dict", "evaluation", "parameters"):
        overlapped.compare(READERS[name], name)


@ranks(2, 3)
def test_model_is_usable_after_dropping_the_optimizer(ctx: RankContext) -> None:
    overlapped = OverlapPair()
    late, prompt = overlapped.models
    for model in overlapped.models:
        torch.autograd.backward(model(make_inputs(0)).square().mean())
    overlapped.blocking.step()
    overlapped.overlapping.step()
    assert overlapped.has_params_in_flight
    dropped = [weakref.ref(overlapped.overlapping), weakref.ref(overlapped.blocking)]
    del overlapped
    gc.collect()
    assert_same(late(make_inputs(1)), prompt(make_inputs(1)))
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]
    for model in (late, prompt):
        model.zero_grad()
        torch.autograd.backward(model(make_inputs(2 + ctx.rank)).square().mean())
    plain = make_large_model()
    plain.load_state_dict(late.state_dict())
    torch.autograd.backward(plain(make_inputs(2 + ctx.rank)).square().mean())
    for model in (late, prompt):  # gradients are this rank's own again
        found, expected = ([param.grad for param in each.parameters()] for each in (model, plain))
        assert_same(found, expected)
        assert_same(read_by_saving(model), read_by_saving(plain))
        model.to(torch.float64)


SCRIPT_WITHOUT_ZEROSHARD = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "zeroshard":
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import torch

for path in sys.argv[1:]:
    model, inputs = torch.load(path, weights_only=False)
    model.zero_grad()
    model(inputs).square().mean().backward()
    outputs = [param.detach() for param in model.parameters()] + [param.grad for param in model.parameters()]
    torch.save(outputs, path)
"""


@ranks(2)
def test_saved_model_loads_without_zeroshard(ctx: RankContext, tmp_path: Path) -> None:
    overlapped = OverlapPair()
    paths = [tmp_path / f"{ctx.rank} {name}" for name in ("late", "prompt")]

    def save(model: nn.Module) -> None:
        torch.save((model, make_inputs(5)), paths[overlapped.models.index(model)])

    overlapped.compare(save)
    if ctx.rank:
        return
    subprocess.run([sys.executable, "-c", SCRIPT_WITHOUT_ZEROSHARD, *map(str, paths)], check=True, timeout=50)
    plain = make_large_model()
    plain.load_state_dict(overlapped.models[1].state_dict())
    torch.autograd.backward(plain(make_inputs(5)).square().mean())
    expected = [*(param.detach() for param in plain.parameters()), *(param.grad for param in plain.parameters())]
    for path in paths:
        assert_same(torch.load(path), expected)


@ranks(1, 2)
def test_drop_in_rejects_overlap_param_gather(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"use zeroshard\.shard"):
        ZeroRedundancyOptimizer(
            mlp().parameters(), optim.SGD, lr=0.1, config=ZeroConfig(partition=TINY, overlap_param_gather=True)
        )
