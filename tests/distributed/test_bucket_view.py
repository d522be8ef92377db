"""Parameter memory with and without bucket view: storage, communication and autograd."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded, track_allocations
from tests.support.oracles import ParityRun, assert_params_unchanged, assert_same, set_grads, small_model
from zeroshard import BindingError, FlatShards, RankFailedError, RankMismatchError, ZeroConfig, ZeroRedundancyOptimizer
from zeroshard._types import MIB, Rank

BUCKET_VIEW_OPTIONS = ({"parameters_as_bucket_view": False}, {"parameters_as_bucket_view": True})
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


# ---- memory


@ranks(1, 2, 3, 4)
def test_each_rank_has_one_contiguous_buffer(ctx: RankContext) -> None:
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    assert_same(dict(model.state_dict()), before)
    params = list(model.parameters())
    for rank in map(Rank, range(ctx.world_size)):
        spans = sorted((params[index].data_ptr(), params[index].nbytes) for index in zero.layout.params_owned_by(rank))
        for (start, size), (next_start, _) in pairwise(spans):
            assert start + size <= next_start < start + size + 64


def make_equal_params() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(4096) for _ in range(24)])


@ranks(1, 2, 3, 4)
def test_construction_peak_memory_does_not_exceed_torch(ctx: RankContext) -> None:
    """Parameters move one owner at a time, and each parameter's old memory is freed as soon as it has moved."""
    peaks = []
    for make in (ZeroRedundancyOptimizer, TorchZero):
        with track_allocations() as found:
            model = make_equal_params()
            zero = make(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=0.1)
        peaks.append(found.peak)
        del model, zero
    param_bytes, total_bytes = 4 * 4096, 4 * 4096 * 24
    assert peaks[0] <= peaks[1] + param_bytes
    assert peaks[0] <= total_bytes + -(-total_bytes // ctx.world_size) + 2 * param_bytes


@ranks(2, 3)
def test_failed_construction_restores_param_storage(ctx: RankContext) -> None:
    """Ranks disagree, or one rank's optimizer raises, when parameters have already moved on the other ranks."""
    model = make_equal_params()
    for culprit in range(ctx.world_size):
        lr = 0.2 if ctx.rank == culprit else 0.1
        with assert_params_unchanged(model), pytest.raises(RankMismatchError, match="lr"):
            ZeroRedundancyOptimizer(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=lr)
        lr, error = (-1.0, ValueError) if ctx.rank == culprit else (0.1, RankFailedError)
        with assert_params_unchanged(model), pytest.raises(error, match="learning rate"):
            ZeroRedundancyOptimizer(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=lr)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    others = nn.ParameterList([torch.randn(64) for _ in range(6)])
    with assert_params_unchanged(others), pytest.raises(RankMismatchError, match="lr"):
        zero.add_param_group({"params": others.parameters(), "lr": 0.1 * ctx.rank})


@contextmanager
def limit_address_space(extra_bytes: int) -> Iterator[None]:
    """Limit this process to mapping `extra_bytes` more than it has mapped already."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@ranks(2, 3)
def test_out_of_memory_on_one_rank_raises_on_all_ranks(ctx: RankContext) -> None:
    model = nn.ParameterList([torch.randn(64 * MIB // 4) for _ in range(ctx.world_size)])
    is_culprit = ctx.rank == ctx.world_size - 1
    error = RuntimeError if is_culprit else RankFailedError
    for option in ({"parameters_as_bucket_view": True}, {"config": ZeroConfig(partition=FlatShards())}):
        options: dict[str, Any] = {"optimizer_class": optim.SGD, "lr": 0.1, **option}
        limit = limit_address_space(32 * MIB) if is_culprit else nullcontext()
        with assert_params_unchanged(model), limit, pytest.raises(error, match="allocate"):
            ZeroRedundancyOptimizer(model.parameters(), **options)


@ranks(2, 3)
def test_staging_buffers_are_freed_after_each_step(ctx: RankContext) -> None:
    model = make_equal_params()
    for param in model:
        param.grad = torch.ones_like(param)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    with track_allocations() as found:
        for _ in range(3):
            zero.step()
    total_bytes = sum(param.nbytes for param in model)
    assert found.peak >= total_bytes // 2
    assert found.kept < total_bytes // 100
    assert not zero._engine.params.memory.staging_buffers()


@ranks(1, 2, 3, 4)
def test_saving_one_param_does_not_write_the_whole_buffer(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 2))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    set_grads(model.parameters(), 0)
    zero.step()
    for param in model.parameters():
        file = io.BytesIO()
        torch.save(param, file)
        assert file.tell() < param.nbytes + 4096
        file.seek(0)
        assert_same(torch.load(file), param)
    model_file = io.BytesIO()
    torch.save(model.state_dict(), model_file)
    model_file.seek(0)
    assert_same(torch.load(model_file), model.state_dict())


ModelEdit = Callable[[nn.Module], None]


def assign_from_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def assign_new_data(model: nn.Module) -> None:
    for param in list(model.parameters())[1::2]:
        param.data = param.data * 0.5


def rotate_data_between_params(model: nn.Module) -> None:
    """Rotate the data of three parameters."""
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    first, *others = (param.data for param in biases)
    for param, data in zip(biases, (*others, first), strict=True):
        param.data = data


def transpose_data(model: nn.Module) -> None:
    """Keep the memory, but change the order of the elements in it."""
    for param in model.parameters():
        param.data = param.data.t()


def load_scaled_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def cast_to_double_and_back(model: nn.Module) -> None:
    model.double().float()


def make_equal_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


@ranks(1, 2, 3, 4)
def test_param_data_can_be_reassigned(ctx: RankContext) -> None:
    for change in (
        assign_from_vector,
        assign_new_data,
        rotate_data_between_params,
        transpose_data,
        load_scaled_state_dict,
        cast_to_double_and_back,
    ):
        for zero_only in BUCKET_VIEW_OPTIONS:
            parity = ParityRun(optim.SGD, model=make_equal_layers, zero_only=zero_only, **MOMENTUM)
            for _ in range(2):
                parity.train(1)
                for model, _optimizer in parity.sides:
                    change(model)
            parity.train(1)


@ranks(1, 2, 3, 4)
def test_param_strides_can_change(ctx: RankContext) -> None:
    """Without bucket view the new strides stay; with it the step restores the original ones."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, model=make_equal_layers, zero_only=zero_only, **MOMENTUM)
        parity.train(1)
        for model, _ in parity.sides:
            for param in model.parameters():
                param.data = param.data.t().contiguous().t() * 0.5
        for step in (1, 2):
            values = []
            for model, optimizer in parity.sides:
                set_grads(model.parameters(), step)
                optimizer.step()
                values.append(
                    [param.detach().clone(memory_format=torch.contiguous_format) for param in model.parameters()]
                )
            assert_same(values[0], values[1])


@ranks(1, 2, 3, 4)
def test_param_data_reassigned_on_one_rank_only(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, zero_only=zero_only, **MOMENTUM)
        for step in range(3):
            if ctx.rank == step:
                for param in parity.model.parameters():
                    param.data = param.data.clone()
            parity.train(1)


def cast_model(model: nn.Module) -> None:
    model.double()


def cast_one_param(model: nn.Module) -> None:
    param = list(model.parameters())[2]
    param.data = param.data.half()


def reshape_one_param(model: nn.Module) -> None:
    param = list(model.parameters())[1]
    param.data = torch.zeros(3)


@ranks(2, 3, 4)
def test_changed_dtype_or_shape_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    for change in (cast_model, cast_one_param, reshape_one_param):
        for zero_only in BUCKET_VIEW_OPTIONS:
            parity = ParityRun(optim.SGD, zero_only=zero_only, **MOMENTUM)
            parity.train(1)
            original_data = [(param, param.data) for param in parity.model.parameters()]
            for on_all_ranks in (True, False):
                is_changed_here = on_all_ranks or ctx.rank == 0
                for param in parity.model.parameters():
                    param.grad = None
                if is_changed_here:
                    change(parity.model)
                with pytest.raises(
                    BindingError if is_changed_here else RankFailedError, match="when the optimizer was created"
                ):
                    parity.zero.step()
                for param, data in original_data:
                    param.data = data
            parity.train(2)


# ---- communication


def make_unpadded_params() -> nn.ParameterList:
    """Make parameters whose sizes need no padding."""
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(16 * size) for size in (1, 2, 3, 4, 5, 6)])


@ranks(2, 3, 4)
def test_only_trainable_params_are_sent(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, model=make_unpadded_params, zero_only=zero_only, **MOMENTUM)
        for frozen in ((), (0,), (1, 4), (0, 1, 2, 3, 4, 5), (5,), ()):
            for model, optimizer in parity.sides:
                optimizer.zero_grad()
                for index, param in enumerate(model.parameters()):
                    param.requires_grad_(index not in frozen)
            with recorded() as traffic:
                parity.train(1)
            trained = [param for param in parity.model.parameters() if param.requires_grad]
            assert sum(traffic.sizes_to_all(ctx.world_size)) == sum(param.nbytes for param in trained)


def make_half_frozen_params() -> nn.ParameterList:
    model = make_unpadded_params()
    for index in (1, 3, 5):
        model[index].requires_grad_(False)
    return model


@ranks(2, 3, 4)
def test_frozen_params_do_not_count_in_load_balancing(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, model=make_half_frozen_params, zero_only=zero_only, **MOMENTUM)
        trained = [param for param in parity.model.parameters() if param.requires_grad]
        trained_only = ZeroRedundancyOptimizer(
            [nn.Parameter(param.detach().clone()) for param in trained], optim.SGD, lr=0.1
        )
        owners = [parity.zero.layout.owner_of(index) for index in (0, 2, 4)]
        assert owners == [trained_only.layout.owner_of(index) for index in range(3)]
        with recorded() as traffic:
            parity.train(1)
        assert sum(traffic.sizes_to_all(ctx.world_size)) == sum(param.nbytes for param in trained)
        assert len(traffic.sizes_to_all(ctx.world_size)) == len(set(owners))


@ranks(2, 3, 4)
def test_one_message_per_owner(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, zero_only=zero_only, **MOMENTUM)
        with recorded() as traffic:
            parity.train(1)
        assert len(traffic.sizes_to_all(ctx.world_size)) == ctx.world_size


# ---- autograd


def make_large_and_small_params() -> nn.ParameterList:
    return nn.ParameterList([torch.ones(520, 510), torch.ones(3), torch.ones(7), torch.ones(4, 3).t()])


@ranks(1, 2, 3, 4)
def test_step_invalidates_graphs_of_updated_params(ctx: RankContext) -> None:
    """Also if another rank owns the parameter: backward through a graph from before the step must raise."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, model=make_large_and_small_params, zero_only=zero_only, lr=0.1)
        graphs = [param.square().sum() for model, _ in parity.sides for param in model.parameters()]
        parity.train(1)
        for graph in graphs:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(graph)


@ranks(2, 3)
def test_step_keeps_graphs_of_unchanged_params(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, zero_only=zero_only, lr=0.1)
        params = list(parity.model.parameters())
        graphs = [param.square().sum() for param in params[:3]]
        set_grads(params[3:], 0)
        parity.zero.step()
        for graph in graphs:
            torch.autograd.backward(graph)
