"""`overlap_param_gather=True`: parameters are in flight after a step, and every read of the model sees final values."""

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
from tests.support.oracles import TINY, Branches, ShardParityRun, assert_same, branches_loss, mlp
from zeroshard import (
    ConfigError,
    FlatShards,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)
from zeroshard.engine.param_sync import ParamAllGather

HIDDEN_SIZE = 700
ONE_BUCKET_PER_LAYER = FlatShards(bucket_bytes=2**20)
"""One bucket per layer of `make_large_model`."""


def make_large_model() -> nn.Sequential:
    """A model whose parameters take much longer to arrive than to read."""
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(4)]
    return nn.Sequential(nn.Linear(1, HIDDEN_SIZE), *layers, nn.Linear(HIDDEN_SIZE, 1))


def make_inputs(seed: int) -> Tensor:
    return torch.randn(2, 1, generator=torch.Generator().manual_seed(seed))


class OverlapGatherParityRun:
    """A model with overlapped parameter all-gather, and one with blocking all-gather."""

    def __init__(self, make_model: Callable[[], nn.Module] = make_large_model, **options: Any) -> None:
        self.models = [make_model(), make_model()]
        configs = [
            ZeroConfig(partition=ONE_BUCKET_PER_LAYER, overlap_param_gather=is_overlapped, **options)
            for is_overlapped in (True, False)
        ]
        self.overlapping, self.blocking = (
            shard(model, optim.SGD, lr=0.1, foreach=True, config=config)
            for model, config in zip(self.models, configs, strict=True)
        )
        self.steps = 0

    def compare(self, read: Callable[[Any], Any], name: str = "") -> None:
        """Step both optimizers, read each model immediately, and check that both reads give the same."""
        for model in self.models:
            torch.autograd.backward(model(make_inputs(self.steps)).square().mean())
        self.steps += 1
        self.blocking.step()
        expected = read(self.models[1])
        self.overlapping.step()
        assert self.has_params_in_flight
        assert_same(read(self.models[0]), expected, name)
        for optimizer in (self.overlapping, self.blocking):
            optimizer.zero_grad()

    @property
    def has_params_in_flight(self) -> bool:
        return self.overlapping._engine.param_sync.is_in_flight


def clone_in_reverse(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Clone the current values, last parameters first, because these arrive last."""
    return [tensor.detach().clone() for tensor in reversed(list(tensors))]


def read_by_averaging(model: nn.Module) -> list[Tensor]:
    """Average the new parameters with zeros."""
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
"""Another optimizer of a model, created before its parameters are in flight."""

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
    overlapped = OverlapGatherParityRun()
    SECOND_OPTIMIZERS.update({model: optim.SGD(model.parameters(), lr=0.01) for model in overlapped.models})
    for name, reader in READERS.items():
        overlapped.compare(reader, name)
    overlapped.compare(READERS["parameters"])


def load_ones(model: nn.Module) -> list[Tensor]:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    OPTIMIZERS[model].wait_for_params()
    return clone_in_reverse(model.parameters())


def load_prepared(model: nn.Module) -> list[Tensor]:
    """Load without reading the model before."""
    model.load_state_dict(PREPARED_STATE_DICT)
    OPTIMIZERS[model].wait_for_params()
    return clone_in_reverse(model.parameters())


OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, ShardedOptimizer] = weakref.WeakKeyDictionary()
PREPARED_STATE_DICT: dict[str, Tensor] = {}


@ranks(2, 3)
def test_loaded_params_are_not_overwritten_by_the_gather(ctx: RankContext) -> None:
    """Parameters that arrive after loading must not overwrite loaded values."""
    overlapped = OverlapGatherParityRun()
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
    """Modules that contain the model, under any name, see the same values."""
    overlapped = OverlapGatherParityRun()
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
    overlapped = OverlapGatherParityRun()
    params_by_model = {model: list(model.parameters()) for model in overlapped.models}
    OPTIMIZERS.update(zip(overlapped.models, (overlapped.overlapping, overlapped.blocking), strict=True))

    def wait_and_read(model: nn.Module) -> list[Tensor]:
        OPTIMIZERS[model].wait_for_params()
        assert not overlapped.has_params_in_flight
        return clone_in_reverse(params_by_model[model])

    overlapped.compare(wait_and_read)
    overlapped.overlapping.wait_for_params()  # nothing is in flight


@ranks(1, 2, 3, 4)
def test_training_equals_plain(ctx: RankContext) -> None:
    parity = ShardParityRun(optim.AdamW, config=ZeroConfig(partition=TINY, overlap_param_gather=True))
    parity.train(3)
    parity.check_state()
    config = ZeroConfig(partition=TINY, overlap_param_gather=True)
    ShardParityRun(optim.AdamW, make=Branches, loss=branches_loss, find_unused=True, config=config).train(4)


def attribute_types(model: nn.Module) -> list[dict[str, type]]:
    return [{name: type(value) for name, value in vars(module).items()} for module in model.modules()]


@ranks(2, 3)
def test_forward_waits_only_for_the_layer_that_runs(ctx: RankContext) -> None:
    """Each layer's forward pass leaves the later ones in flight; once all have arrived, the model is unchanged."""
    overlapped = OverlapGatherParityRun()
    model = cast(nn.Sequential, overlapped.models[0])
    before = attribute_types(model)
    torch.autograd.backward(model(make_inputs(0)).square().mean())
    overlapped.overlapping.step()
    assert overlapped.has_params_in_flight
    param_sync = cast(ParamAllGather, overlapped.overlapping._engine.param_sync)
    num_in_flight: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_: num_in_flight.append(len(param_sync._in_flight))) for layer in model
    ]
    model[0](make_inputs(1))
    model(make_inputs(1))
    for handle in handles:
        handle.remove()
    first, repeated, *others = num_in_flight
    assert first == repeated > others[0] > others[1] > others[2] > others[3] == others[4] == 0
    assert attribute_types(model) == before


@ranks(2, 3)
def test_consecutive_steps_without_forward(ctx: RankContext) -> None:
    """A step waits for the parameters of the previous step, even without a forward pass in between."""
    overlapped = OverlapGatherParityRun()
    for model in overlapped.models:
        torch.autograd.backward(model(make_inputs(0)).square().mean())
    for _ in range(3):
        for optimizer in (overlapped.overlapping, overlapped.blocking):
            optimizer.step()
    overlapped_values, blocking_values = (clone_in_reverse(model.parameters()) for model in overlapped.models)
    assert_same(overlapped_values, blocking_values)


@ranks(2)
def test_overlap_with_master_weights(ctx: RankContext) -> None:
    overlapped = OverlapGatherParityRun(lambda: make_large_model().to(torch.float32), master_dtype=torch.float64)
    for name in ("state_dict", "evaluation", "parameters"):
        overlapped.compare(READERS[name], name)


@ranks(2, 3)
def test_model_is_usable_after_dropping_the_optimizer(ctx: RankContext) -> None:
    overlapped = OverlapGatherParityRun()
    overlapped_model, blocking_model = overlapped.models
    for model in overlapped.models:
        torch.autograd.backward(model(make_inputs(0)).square().mean())
    overlapped.blocking.step()
    overlapped.overlapping.step()
    assert overlapped.has_params_in_flight
    dropped = [weakref.ref(overlapped.overlapping), weakref.ref(overlapped.blocking)]
    del overlapped
    gc.collect()
    assert_same(overlapped_model(make_inputs(1)), blocking_model(make_inputs(1)))
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]
    for model in (overlapped_model, blocking_model):
        model.zero_grad()
        torch.autograd.backward(model(make_inputs(2 + ctx.rank)).square().mean())
    plain = make_large_model()
    plain.load_state_dict(overlapped_model.state_dict())
    torch.autograd.backward(plain(make_inputs(2 + ctx.rank)).square().mean())
    for model in (overlapped_model, blocking_model):  # gradients are this rank's own again
        found, expected = ([param.grad for param in module.parameters()] for module in (model, plain))
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
    overlapped = OverlapGatherParityRun()
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
    with pytest.raises(ConfigError, match=r"overlap_param_gather=True needs the model\. Use zeroshard\.shard"):
        ZeroRedundancyOptimizer(
            mlp().parameters(), optim.SGD, lr=0.1, config=ZeroConfig(partition=TINY, overlap_param_gather=True)
        )
