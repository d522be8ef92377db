"""Oracles: parity runs train the optimizer under test and a reference on the same data, and compare them.

`ParityRun`: the drop-in and the plain optimizer, on equal gradients. `OverlapParityRun`: the overlap hooks and DDP.
`DdpParityRun` and `ShardParityRun`: a model under `shard` and DDP. `RulesParityRun`: several optimizer classes.
`hybrid_parity_run`: hybrid sharding.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a communication hook with `GradBucket`.

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, product
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.support.tiers import sampled
from zeroshard import (
    FlatShards,
    ParamRule,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zeroshard.engine.ddp import CommHook
from zeroshard.layout.spec import ParamSpec

# ---- The drop-in and the plain optimizer, on equal gradients

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Version of torch, for features that older ones lack."""


def small_model(seed: int = 0, width: int = 7) -> nn.Sequential:
    """Six parameters of several sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 4), nn.Linear(4, 2))


def set_grads(params: Iterable[torch.Tensor], step: int) -> None:
    """Set gradients that depend only on the step and the index of the parameter."""
    for index, param in enumerate(params):
        wave = torch.arange(param.numel(), dtype=torch.float64).mul_(0.7).add_(3 * step + index).sin_()
        values = torch.complex(wave, wave.flip(0)) if param.is_complex() else wave
        param.grad = torch.empty_like(param).copy_(values.view(param.shape))


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, one of them empty, not in the order of the model."""
    first, *rest = model.parameters()
    return [{"params": rest, "lr": 0.3}, {"params": []}, {"params": [first], "weight_decay": 0.1}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups; the second is too small for every rank to own a part."""
    *others, last = model.parameters()
    return [{"params": others}, {"params": [last], "lr": 0.05}]


class ParityRun:
    """A sharded and a plain optimizer, on equal models with equal gradients.

    `get_params` returns the parameters or groups of a model; `zero_only` are options of the sharded optimizer only.
    """

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        model: Callable[[], nn.Module] = small_model,
        get_params: Callable[[nn.Module], Any] = nn.Module.parameters,
        zero_only: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.model, self.plain_model = model(), model()
        self.zero = ZeroRedundancyOptimizer(get_params(self.model), factory, **zero_only, **copy.deepcopy(options))
        self.plain = factory(get_params(self.plain_model), **options)
        self.steps = 0

    @property
    def sides(self) -> list[tuple[Any, Any]]:
        """Both models with their optimizers, the sharded one first."""
        return [(self.model, self.zero), (self.plain_model, self.plain)]

    def train(self, steps: int, grads: Callable[[Iterable[torch.Tensor], int], None] = set_grads) -> None:
        """Step both and compare them after each step. Frozen parameters get no new gradients."""
        for _ in range(steps):
            for model, optimizer in self.sides:
                grads([param for param in model.parameters() if param.requires_grad], self.steps)
                optimizer.step()
            self.steps += 1
            self.check()

    def check(self) -> None:
        """Compare all parameters and all options of the groups."""
        assert_same(self.model.state_dict(), self.plain_model.state_dict(), "the model")
        ours, theirs = ([_options(group) for group in opt.param_groups] for opt in (self.zero, self.plain))
        assert_same(ours, theirs, "param_groups")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@contextmanager
def assert_params_unchanged(model: nn.Module) -> Iterator[None]:
    """Check that the body leaves parameters with the same values, each in its own storage."""
    before = [param.detach().clone() for param in model.parameters()]
    yield
    params = list(model.parameters())
    assert_same([param.detach() for param in params], before)
    assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)


def assert_same(found: Any, expected: Any, label: str = "value") -> None:
    """Check that nested values are equal: types, keys, order, shapes, strides, dtypes and bits of all tensors."""
    assert type(found) is type(expected), f"{label} is a {type(found)} instead of a {type(expected)}"
    if isinstance(expected, torch.Tensor):
        ours, theirs = _tensor_type(found), _tensor_type(expected)
        assert ours == theirs, f"{label}: {ours} instead of {theirs}"
        assert torch.equal(found.to_dense(), expected.to_dense()), f"{label}: {found} instead of {expected}"
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{label} has the keys {list(found)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{label}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(found) == len(expected), f"{label} has {len(found)} items instead of {len(expected)}"
        for index, (found_item, expected_item) in enumerate(zip(found, expected, strict=True)):
            assert_same(found_item, expected_item, f"{label}[{index}]")
    else:
        assert found == expected, f"{label} is {found!r} instead of {expected!r}"


def _tensor_type(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape), strides


# ---- Learning-rate schedulers on both sides of a `ParityRun`

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda epoch: 1 - 0.1 * epoch),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=2),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 3, power=2.0),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=10),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.3, anneal_epochs=3),
}


def train_with_scheduler(parity: ParityRun, make: Callable[[Any], Any], epochs: int = 5) -> set[str]:
    """Train both, each with its own scheduler. Return all values that the options of the first group had."""
    schedulers = [make(parity.zero), make(parity.plain)]
    parity.check()
    values = set()
    for _ in range(epochs):
        parity.train(1)
        for scheduler in schedulers:
            metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*metric)
        parity.check()
        assert_same(schedulers[0].get_last_lr(), schedulers[1].get_last_lr())
        options = parity.zero.param_groups[0]
        values.add(str({key: value for key, value in options.items() if key in ("lr", "momentum", "betas")}))
    return values


# ---- Parameter specs without parameters


def spec(
    index: int = 0,
    shape: tuple[int, ...] = (4,),
    *,
    stride: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    group: int = 0,
    trainable: bool = True,
    name: str | None = None,
) -> ParamSpec:
    """The spec of a parameter, contiguous by default."""
    if stride is None:
        inner = [max(1, size) for size in shape[:0:-1]]
        stride = tuple(accumulate(inner, lambda a, b: a * b, initial=1))[::-1] if shape else ()
    return ParamSpec(index, name, shape, stride, dtype, torch.device(device), group, trainable)


def specs(sizes: list[int], *, group: int = 0, first: int = 0, trainable: bool = True) -> list[ParamSpec]:
    """Specs of one-dimensional parameters of these sizes."""
    return [spec(first + i, (size,), group=group, trainable=trainable) for i, size in enumerate(sizes)]


# ---- DDP with and without an overlap hook

WIDTH = 6
BUCKET_MB = 0.0003  # about one layer of `mlp`


@dataclass(frozen=True)
class Setup:
    """Options of DDP and of the hook."""

    interleaved: bool = False
    shard_buckets: bool = False
    bucket_view: bool = False
    static_graph: bool = False
    find_unused: bool = False
    hook: CommHook = allreduce_hook
    group: dist.ProcessGroup | None = None

    @property
    def warmup(self) -> int:
        return 3 if self.static_graph else 2

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model,
            process_group=self.group,
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=self.bucket_view,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
        )

    def connect(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
        make = hook_with_zero_step_interleaved if self.interleaved else hook_with_zero_step
        ddp.register_comm_hook(self.group, make(self.hook, ddp, zero, shard_buckets=self.shard_buckets))


def setups(**fixed: Any) -> Iterator[Setup]:
    """Yield all combinations of the options that are not fixed."""
    free = [name for name in ("interleaved", "shard_buckets", "bucket_view", "static_graph") if name not in fixed]
    for values in product((False, True), repeat=len(free)):
        chosen: dict[str, Any] = dict(zip(free, values, strict=True))
        yield Setup(**chosen, **fixed)


ReadParams = Callable[[nn.Module], Any]
Loss = Callable[[nn.Module, int], torch.Tensor]


class OverlapParityRun:
    """DDP with a plain optimizer and DDP with an overlap hook: trained on the same inputs, compared after each pass."""

    def __init__(
        self,
        setup: Setup,
        model: Callable[[], nn.Module],
        optimizer_class: Callable[..., Optimizer],
        *,
        read: ReadParams = lambda model: model.parameters(),
        overlapped_class: Callable[..., Optimizer] | None = None,
        **defaults: Any,
    ) -> None:
        self.setup, self.passes = setup, 0
        self.plain_ddp, self.ddp = (setup.wrap(make_seeded(model)) for _ in range(2))
        self.plain = optimizer_class(read(self.plain_ddp.module), **defaults)
        self.zero = ZeroRedundancyOptimizer(
            read(self.ddp.module),
            overlapped_class or optimizer_class,
            process_group=setup.group,
            overlap_with_ddp=True,
            **defaults,
        )
        self.plain_ddp.register_comm_hook(setup.group, setup.hook)
        setup.connect(self.ddp, self.zero)

    def train(self, passes: int, loss: Loss | None = None, *, local: bool = False) -> None:
        """Train both. `local`: inside `no_sync()`, so gradients accumulate and nothing is updated."""
        for _ in range(passes):
            self.train_plain(loss, local=local)
            self.train_overlapped(loss, local=local)
            self.passes += not local
            self.compare()

    def train_plain(self, loss: Loss | None = None, *, local: bool = False) -> None:
        with self.plain_ddp.no_sync() if local else nullcontext():
            torch.autograd.backward((loss or regression)(self.plain_ddp, self.passes))
        if not local:
            if self.passes >= self.setup.warmup:
                self.plain.step()
            self.plain.zero_grad()

    def train_overlapped(self, loss: Loss | None = None, *, local: bool = False) -> None:
        with self.ddp.no_sync() if local else nullcontext():
            torch.autograd.backward((loss or regression)(self.ddp, self.passes))
        if not local:
            self.zero.zero_grad()

    def return_to_plain(self) -> None:
        """Copy parameters and state of the plain optimizer to the overlapped one."""
        self.zero.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(self.ddp.parameters(), self.plain_ddp.parameters(), strict=True):
                ours.copy_(theirs)
        self.zero.load_state_dict(self.plain.state_dict())

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.ddp.named_parameters(), self.plain_ddp.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} differs after pass {self.passes} with {self.setup}"


def mlp(layers: int = 5) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def batch(number: int) -> torch.Tensor:
    """An input that differs from pass to pass and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def regression(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(number)) - batch(number + 500)).square().mean()
    return loss


class Branches(nn.Module):
    """Has one layer that only odd ranks use, one that no rank ever uses, and one that no rank uses in even passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.never, self.sometimes, self.final = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.first(x)
        if dist.get_rank() % 2:
            x = self.odd(x)
        if number % 2:
            x = self.sometimes(x)
        output: torch.Tensor = self.final(x)
        return output


def branches_loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number), number).square().mean()
    return loss


class Complex(nn.Module):
    """Has complex parameters with various strides. DDP stores them in real buckets."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(WIDTH, 5, dtype=dtype))
        self.transposed = nn.Parameter(torch.randn(4, 5, dtype=dtype).t())
        self.gapped = nn.Parameter(torch.randn(4, 6, dtype=dtype)[:, ::2])
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x.to(self.plain.dtype) @ self.plain @ self.transposed @ self.gapped * self.scale
        return output


def complex_loss(model: nn.Module, number: int) -> torch.Tensor:
    output = model(batch(number))
    loss: torch.Tensor = (output.real.square() + output.imag).tanh().mean()
    return loss


# ---- `shard` and DDP

TINY = FlatShards(bucket_bytes=200)
"""A bucket is smaller than two layers of `mlp`."""

ZERO2 = ZeroConfig(partition=TINY)
ZERO1 = ZeroConfig(partition=TINY, stage=1)
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}

both_stages = sampled("config", [ZERO2, ZERO1], ids=["zero2", "zero1"])
some_configs = sampled(
    "config",
    [ZERO2, ZERO1, ZeroConfig(), replace(ZERO2, overlap_param_gather=True)],
    ids=["zero2", "zero1", "one-bucket", "overlap"],
)


def all_configs() -> Iterator[ZeroConfig]:
    """Yield all combinations of stage, bucket size and overlap of the all-gather."""
    stages: list[Literal[1, 2]] = [2, 1]
    for stage, partition, overlap in product(stages, (TINY, FlatShards()), (False, True)):
        yield ZeroConfig(partition=partition, stage=stage, overlap_param_gather=overlap)


@dataclass(frozen=True)
class Side:
    """A model, its optimizer, and its `no_sync`."""

    model: nn.Module
    optimizer: Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]

    def backward(self, number: int, loss: Loss = regression) -> None:
        torch.autograd.backward(loss(self.model, number))

    def backward_locally(self, number: int, loss: Loss = regression) -> None:
        with self.no_sync():
            self.backward(number, loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate(self, number: int, loss: Loss = regression) -> None:
        self.backward(number, loss)
        self.update()


Iteration = Callable[[Side, int], None]


class DdpParityRun:
    """`shard` and DDP on the same inputs, which differ between ranks, as do initial values of the sharded model.

    `plain_model` makes a different model for DDP, `get_params` returns the parameters or groups of a model, and
    `group_options` are arguments of `shard` that select the shard group.
    """

    def __init__(
        self,
        config: ZeroConfig | None = ZERO2,
        model: Callable[[], nn.Module] = mlp,
        optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        plain_model: Callable[[], nn.Module] | None = None,
        get_params: Callable[[nn.Module], Any] | None = None,
        find_unused: bool = False,
        group: dist.ProcessGroup | None = None,
        group_options: Mapping[str, Any] = MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        defaults = defaults or ADAMW
        self.config, self.passes, self._find_unused, self._group = config or ZeroConfig(), 0, find_unused, group
        self.plain_model, self.model = make_seeded(plain_model or model, 0), make_seeded(model, dist.get_rank(group))
        self.wrap_plain()
        params = get_params(self.model) if get_params else None
        self.plain = optimizer_class((get_params or nn.Module.parameters)(self.plain_model), **defaults)
        self.zero: ShardedOptimizer = shard(
            self.model, optimizer_class, params=params, process_group=group, config=config, **group_options, **defaults
        )

    def wrap_plain(self) -> None:
        """Wrap the model in a new DDP, as DDP requires when `requires_grad` of parameters changes."""
        self.ddp = DistributedDataParallel(
            self.plain_model, process_group=self._group, find_unused_parameters=self._find_unused
        )

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sharded side, then the plain one."""
        ours = Side(self.model, self.zero, self.zero.no_sync)
        return ours, Side(self.ddp, self.plain, self.ddp.no_sync)

    def train(self, steps: int, loss: Loss = regression) -> None:
        self.run(steps, lambda side, number: side.iterate(number, loss))

    def run(self, steps: int, iteration: Iteration) -> None:
        """Run iterations of both. Compare after each, or only after the last if comparing would end the overlap."""
        for _ in range(steps):
            for side in self.sides:
                iteration(side, self.passes)
            self.passes += 1
            if not self.config.overlap_param_gather:
                self.compare()
        self.compare()

    def compare(self, *, exactly: bool = True) -> None:
        """Compare parameters. `exactly`: see `assert_equal_sums`."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            label = f"{name} after pass {self.passes} with {self.config}"
            assert_equal_sums(ours, theirs, label, exactly=exactly)


def assert_equal_sums(found: torch.Tensor, expected: torch.Tensor, label: str, *, exactly: bool = True) -> None:
    """Compare bitwise up to two ranks, unless the caller has a reason not to.

    With more ranks gloo does not sum gradients in rank order. They differ by one float32 rounding (a relative 6e-8);
    AdamW amplifies that for small gradients.
    """
    assert found.dtype == expected.dtype
    if exactly and dist.get_world_size() <= 2:
        assert torch.equal(found, expected), f"{label}: differs by {(found - expected).abs().max().item()}"
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{label}: {text}")


def make_seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def clone_values(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [value.detach().clone() for value in model.state_dict().values()]


def all_equal(lists: list[list[torch.Tensor]]) -> bool:
    first, *others = lists
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# ---- `shard` and DDP with sums in rank order: bitwise equal at any world size


def average(parts: list[Tensor]) -> Tensor:
    """Average in rank order. Divide before summing, as DDP does; 16-bit dtypes are summed in float32."""
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    first, *others = [part.to(exact) * (1 / len(parts)) for part in parts]
    for part in others:
        first = first + part
    return first


def gather_from_all_ranks(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def rank_order_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook that averages in rank order, so results are bitwise comparable at any world size."""
    done: Future[Tensor] = Future()
    buffer = bucket.buffer()
    done.set_result(buffer.copy_(average(gather_from_all_ranks(buffer))))
    return done


class ParitySide(NamedTuple):
    net: nn.Module
    """The module whose forward pass is called: DDP or the model itself."""
    model: nn.Module
    optimizer: Any


GetParams = Callable[[nn.Module], Any]


class ShardParityRun:
    """`shard` and DDP, trained on the same data and compared bitwise after each step.

    `get_params` returns the parameters or groups of a model, `hook` is DDP's communication hook, and `group_options`
    are arguments of `shard` that select the shard group.
    """

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        make: Callable[[], nn.Module] = mlp,
        get_params: GetParams = nn.Module.named_parameters,
        config: ZeroConfig | None = None,
        loss: Loss = regression,
        find_unused: bool = False,
        hook: Callable[[Any, GradBucket], Future[Tensor]] = rank_order_hook,
        group_options: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.plain_model, self.model = make_seeded(make), make_seeded(make)
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=find_unused)
        self.ddp.register_comm_hook(None, hook)
        if "fused" not in options and "foreach" in inspect.signature(factory).parameters:
            options.setdefault("foreach", True)  # fused kernels, the default here, may round differently
        self.plain: Any = factory(get_params(self.plain_model), **copy.deepcopy(options))
        self.zero: ShardedOptimizer = shard(
            self.model, factory, params=get_params(self.model), config=config, **group_options, **options
        )
        self.loss, self.steps = loss, 0

    @property
    def sides(self) -> list[ParitySide]:
        return [ParitySide(self.model, self.model, self.zero), ParitySide(self.ddp, self.plain_model, self.plain)]

    def train(self, steps: int = 1, before_step: Callable[[ParitySide], object] = lambda _: None) -> None:
        for _ in range(steps):
            self.backward()
            for side in self.sides:
                before_step(side)
                side.optimizer.step()
                side.model.zero_grad()
            self.steps += 1
            self.check()

    def backward(self) -> None:
        for side in self.sides:
            torch.autograd.backward(self.loss(side.net, self.steps))

    def check(self) -> None:
        assert_same(self.model.state_dict(), self.plain_model.state_dict(), f"the model after step {self.steps}")

    def check_state(self) -> None:
        """Check that the full state dict equals that of the plain optimizer."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(found, self.plain.state_dict(), "the state dict")


# ---- Several optimizer classes

WORDS = 11
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
RULES_ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
CONFIGS = (
    ZeroConfig(),
    ZeroConfig(partition=TINY),
    ZeroConfig(partition=TINY, stage=1),
    ZeroConfig(partition=TINY, overlap_param_gather=True),
    ZeroConfig(partition=WholeParams()),
)


class Words(nn.Module):
    """A language model: six matrices of several shapes between an embedding and a head. Skips blocks in `skipped`."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size), nn.Tanh(), nn.Linear(size, WIDTH, bias=False))
            for size in (8, 9, 9, 9)[:blocks]
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.skipped: set[int] = set()

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else x + block(x)
        result: Tensor = self.head(x)
        return result


def ids(number: int) -> Tensor:
    """Token ids that differ between ranks. No id occurs twice: embedding gradients may add up in any order."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randperm(WORDS, generator=generator)[:7]


def next_word_loss(model: nn.Module, number: int) -> Tensor:
    words = ids(number)
    return cross_entropy(model(words).float(), words.roll(1))


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether a parameter is a hidden matrix of `Words`; independent of the code under test."""
    return name.startswith("blocks.") and param.dim() == 2


def rules(**muon_options: Any) -> list[ParamRule]:
    return [
        ParamRule(matrix_params(exclude=("embed", "head")), Muon, **{**MUON, **muon_options}),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]


class PlainOptimizers:
    """Several plain optimizers with the interface of one."""

    def __init__(self, *members: Optimizer) -> None:
        self.members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return merge_state_dicts([member.state_dict() for member in self.members])


def muon_and_adamw(model: nn.Module) -> PlainOptimizers:
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if is_hidden_matrix(name, param)]
    others = [(name, param) for name, param in named if not is_hidden_matrix(name, param)]
    return PlainOptimizers(Muon(matrices, **MUON), AdamW(others, **RULES_ADAMW))


def merge_state_dicts(state_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge state dicts of several optimizers into one with all groups."""
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    start = 0
    for state_dict in state_dicts:
        merged["state"] |= {start + index: state for index, state in state_dict["state"].items()}
        for group in state_dict["param_groups"]:
            merged["param_groups"].append({**group, "params": [start + index for index in group["params"]]})
        start += sum(len(group["params"]) for group in state_dict["param_groups"])
    return merged


def split_by_group(state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state dict of each group, as the plain optimizer of that group returns it."""
    for group in state_dict["param_groups"]:
        start, count = min(group["params"], default=0), len(group["params"])
        state = {n - start: state for n, state in sorted(state_dict["state"].items()) if start <= n < start + count}
        options = {key: value for key, value in group.items() if key != "optimizer"}
        yield {"state": state, "param_groups": [{**options, "params": list(range(count))}]}


class RulesParityRun(ShardParityRun):
    """`shard` with rules and plain optimizers under DDP, compared after each step."""

    def __init__(
        self,
        param_rules: Sequence[ParamRule] | None = None,
        plain: Callable[[nn.Module], PlainOptimizers] = muon_and_adamw,
        *,
        make: Callable[[], nn.Module] = Words,
        config: ZeroConfig | None = None,
        loss: Callable[[nn.Module, int], Tensor] = next_word_loss,
        find_unused: bool = False,
    ) -> None:
        self.plain_model, self.model = make_seeded(make), make_seeded(make)
        self._find_unused = find_unused
        self.wrap_plain()
        self.plain: Any = plain(self.plain_model)
        self.zero: ShardedOptimizer = shard(self.model, param_rules or rules(), config=config)
        self.loss, self.steps = loss, 0

    def wrap_plain(self) -> None:
        """Wrap the model in a new DDP, as DDP requires when `requires_grad` of parameters changes."""
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=self._find_unused)
        self.ddp.register_comm_hook(None, rank_order_hook)

    def check(self) -> None:
        self.zero.wait_for_params()
        super().check()

    def check_state(self) -> None:
        """Check that the full state dict equals those of the plain optimizers, and that groups name their optimizer."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(list(split_by_group(found)), list(split_by_group(self.plain.state_dict())), "the state dict")
            assert len({group["optimizer"] for group in found["param_groups"]}) == len(self.plain.members)


# ---- Hybrid sharding on a grid: each row is a shard group, each column a replica group

Grid = tuple[int, int]
"""Number of replicas, and of ranks per shard group."""


def grids(world_size: int) -> list[Grid]:
    """Return all grids, from one shard group to one rank per shard group."""
    return [(world_size // size, size) for size in range(world_size, 0, -1) if world_size % size == 0]


def shard_groups_of(grid: Grid) -> list[list[int]]:
    """Return the ranks of each shard group."""
    shard_groups: list[list[int]] = torch.arange(grid[0] * grid[1]).view(grid).tolist()
    return shard_groups


def mesh_options(grid: Grid) -> dict[str, Any]:
    """Arguments of `shard` that select shard groups by a mesh."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))}


def group_size_options(grid: Grid) -> dict[str, Any]:
    return {"shard_group_size": grid[1]}


@contextmanager
def torchrun_env(local_rank: object, local_size: object) -> Iterator[None]:
    """Set the environment variables with which torchrun starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size)):
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, str(value))
        yield


def sum_in_order(parts: list[Tensor]) -> Tensor:
    first, *others = parts
    for part in others:
        first = first + part
    return first


def average_by_shard_group(parts: list[Tensor], grid: Grid) -> Tensor:
    """Average in the order of hybrid sharding: sum each shard group in rank order, then the groups.

    16-bit dtypes are summed in float32.
    """
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    scaled = [part.to(exact) * (1 / len(parts)) for part in parts]
    return sum_in_order([sum_in_order([scaled[rank] for rank in group]) for group in shard_groups_of(grid)])


def make_shard_group_order_hook(
    grid: Grid, dtype: torch.dtype | None = None
) -> Callable[[Any, GradBucket], Future[Tensor]]:
    """Return a DDP communication hook that averages in the order of hybrid sharding.

    `dtype`: dtype to which each rank's gradients are rounded before the sum.
    """

    def hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        buffer = bucket.buffer()
        parts = gather_from_all_ranks(buffer.to(dtype or buffer.dtype))
        done.set_result(buffer.copy_(average_by_shard_group(parts, grid)))
        return done

    return hook


def hybrid_parity_run(
    grid: Grid, factory: Callable[..., Optimizer], *, make_group_options: Any = group_size_options, **options: Any
) -> ShardParityRun:
    """Compare hybrid sharding on a grid with DDP."""
    hook = make_shard_group_order_hook(grid)
    return ShardParityRun(factory, hook=hook, group_options=make_group_options(grid), **options)


def clone_state(optimizer: ShardedOptimizer) -> list[Tensor]:
    """Clone all tensors of this rank's optimizer state."""
    entries = optimizer.optim.state.values()
    return [value.clone() for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


def assert_replicas_are_equal(grid: Grid, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Check that all ranks have the same parameters, and the ranks of a replica group the same state, bitwise."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (clone_values(model), clone_state(optimizer)))
    assert all_equal([values for values, _ in by_rank])
    for replica_group in zip(*shard_groups_of(grid), strict=True):
        assert all_equal([by_rank[rank][1] for rank in replica_group])


def train_with_group_options(
    group_options: dict[str, Any], dtype: torch.dtype = torch.float32, steps: int = 4
) -> list[Tensor]:
    """Train a model with these shard groups and return its values."""
    model = make_seeded(mlp, 0).to(dtype)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **group_options, lr=0.05, weight_decay=0.1)
    for number in range(steps):
        torch.autograd.backward(model(batch(number).to(dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return clone_values(model)
