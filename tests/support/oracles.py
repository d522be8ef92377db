"""Oracles: the unsharded optimizer, DDP and sums in rank order, each beside the optimizer under test.

`Twins` compares the drop-in on equal gradients, `DdpTwins` the overlap hooks, `ShardTwins` and `Pair` a model under
`shard` with DDP, `RulesPair` several optimizer classes, `hybrid_pair` a grid of ranks.
"""

# Annotations are evaluated here: DDP compares those of a communication hook with `GradBucket`.

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

# ---- The drop-in beside the plain optimizer, on equal gradients

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version, for what older ones do not do."""


def small_model(seed: int = 0, width: int = 7) -> nn.Sequential:
    """Six parameters of several sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 4), nn.Linear(4, 2))


def set_grads(params: Iterable[torch.Tensor], step: int) -> None:
    """Gradients that depend on the step and the place of the parameter, and on nothing else."""
    for place, param in enumerate(params):
        wave = torch.arange(param.numel(), dtype=torch.float64).mul_(0.7).add_(3 * step + place).sin_()
        values = torch.complex(wave, wave.flip(0)) if param.is_complex() else wave
        param.grad = torch.empty_like(param).copy_(values.view(param.shape))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, one of them empty, in another order than the model's."""
    first, *rest = model.parameters()
    return [{"params": rest, "lr": 0.3}, {"params": []}, {"params": [first], "weight_decay": 0.1}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The second is too small for every rank to own something in it."""
    *others, last = model.parameters()
    return [{"params": others}, {"params": [last], "lr": 0.05}]


class Twins:
    """A sharded optimizer and the plain one, on equal models that get equal gradients.

    `handed` says what of the model is handed to the optimizers; `zero_only` are options of the sharded one.
    """

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        model: Callable[[], nn.Module] = small_model,
        handed: Callable[[nn.Module], Any] = nn.Module.parameters,
        zero_only: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.model, self.plain_model = model(), model()
        self.zero = ZeroRedundancyOptimizer(handed(self.model), factory, **zero_only, **copy.deepcopy(options))
        self.plain = factory(handed(self.plain_model), **options)
        self.steps = 0

    @property
    def sides(self) -> list[tuple[Any, Any]]:
        """Both models, each with its optimizer."""
        return [(self.model, self.zero), (self.plain_model, self.plain)]

    def train(self, steps: int, grads: Callable[[Iterable[torch.Tensor], int], None] = set_grads) -> None:
        """Steps of both, after each of which they must be equal. Frozen parameters get no new gradients."""
        for _ in range(steps):
            for model, optimizer in self.sides:
                grads([param for param in model.parameters() if param.requires_grad], self.steps)
                optimizer.step()
            self.steps += 1
            self.check()

    def check(self) -> None:
        """All parameters are equal, and all options of the groups."""
        assert_same(self.model.state_dict(), self.plain_model.state_dict(), "the model")
        ours, theirs = ([_options(group) for group in opt.param_groups] for opt in (self.zero, self.plain))
        assert_same(ours, theirs, "param_groups")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Parameters have the same values afterwards, each in memory of its own."""
    before = [param.detach().clone() for param in model.parameters()]
    yield
    params = list(model.parameters())
    assert_same([param.detach() for param in params], before)
    assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)


def assert_same(found: Any, expected: Any, where: str = "it") -> None:
    """Nested values are equal: in types, keys, order, shapes, strides, dtypes and every bit of every tensor."""
    assert type(found) is type(expected), f"{where} is a {type(found)} instead of a {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert _kind(found) == _kind(expected), f"{where}: {_kind(found)} instead of {_kind(expected)}"
        assert torch.equal(found.to_dense(), expected.to_dense()), f"{where}: {found} instead of {expected}"
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where} has the keys {list(found)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(found) == len(expected), f"{where} has {len(found)} items instead of {len(expected)}"
        for place, (item, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same(item, wanted, f"{where}[{place}]")
    else:
        assert found == expected, f"{where} is {found!r} instead of {expected!r}"


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape), strides


# ---- Learning-rate schedulers on both sides of `Twins`

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


def follow(twins: Twins, make: Callable[[Any], Any], epochs: int = 5) -> set[str]:
    """Train both with a scheduler each; returns what values the options of the first group went through."""
    schedulers = [make(twins.zero), make(twins.plain)]
    twins.check()
    seen = set()
    for _ in range(epochs):
        twins.train(1)
        for scheduler in schedulers:
            metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*metric)
        twins.check()
        assert_same(schedulers[0].get_last_lr(), schedulers[1].get_last_lr())
        seen.add(str({k: v for k, v in twins.zero.param_groups[0].items() if k in ("lr", "momentum", "betas")}))
    return seen


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
    """A parameter as an optimizer would see it; contiguous unless told otherwise."""
    if stride is None:
        inner = [max(1, size) for size in shape[:0:-1]]
        stride = tuple(accumulate(inner, lambda a, b: a * b, initial=1))[::-1] if shape else ()
    return ParamSpec(index, name, shape, stride, dtype, torch.device(device), group, trainable)


def specs(sizes: list[int], *, group: int = 0, first: int = 0, trainable: bool = True) -> list[ParamSpec]:
    """Flat parameters of these sizes."""
    return [spec(first + i, (size,), group=group, trainable=trainable) for i, size in enumerate(sizes)]


# ---- DDP beside DDP with an overlap hook

WIDTH = 6
BUCKET_MB = 0.0003  # about one layer of `mlp`


@dataclass(frozen=True)
class Setup:
    """How DDP and the hook are set up."""

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
    """All combinations of what is not fixed."""
    free = [name for name in ("interleaved", "shard_buckets", "bucket_view", "static_graph") if name not in fixed]
    for values in product((False, True), repeat=len(free)):
        chosen: dict[str, Any] = dict(zip(free, values, strict=True))
        yield Setup(**chosen, **fixed)


ReadParams = Callable[[nn.Module], Any]
Loss = Callable[[nn.Module, int], torch.Tensor]


class DdpTwins:
    """Trains both, pass by pass, on the same inputs, and compares them after each."""

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
        self.plain_ddp, self.ddp = (setup.wrap(seeded(model)) for _ in range(2))
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
        """`local`: without gradient synchronisation, so that gradients add up and nothing is updated."""
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
        """Put the overlapped one where the plain one is."""
        self.zero.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(self.ddp.parameters(), self.plain_ddp.parameters(), strict=True):
                ours.copy_(theirs)
        self.zero.load_state_dict(self.plain.state_dict())

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.ddp.named_parameters(), self.plain_ddp.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} differs after pass {self.passes} with {self.setup}"


def mlp(layers: int = 5) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def batch(number: int) -> torch.Tensor:
    """An input that differs from pass to pass and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def regression(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(number)) - batch(number + 500)).square().mean()
    return loss


class Branches(nn.Module):
    """One layer that only odd ranks use, one that no rank ever uses, one that none uses in even passes."""

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


def through_branches(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number), number).square().mean()
    return loss


class Complex(nn.Module):
    """Complex parameters with all kinds of strides: DDP has real buckets for them."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(WIDTH, 5, dtype=dtype))
        self.transposed = nn.Parameter(torch.randn(4, 5, dtype=dtype).t())
        self.gapped = nn.Parameter(torch.randn(4, 6, dtype=dtype)[:, ::2])
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x.to(self.plain.dtype) @ self.plain @ self.transposed @ self.gapped * self.scale
        return output


def of_complex(model: nn.Module, number: int) -> torch.Tensor:
    output = model(batch(number))
    loss: torch.Tensor = (output.real.square() + output.imag).tanh().mean()
    return loss


# ---- `shard` beside DDP

TINY = FlatShards(bucket_bytes=200)
"""Less than two layers of `mlp` fit into a bucket."""

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
    """Every stage, size of buckets and way back of parameters."""
    stages: list[Literal[1, 2]] = [2, 1]
    for stage, partition, overlap in product(stages, (TINY, FlatShards()), (False, True)):
        yield ZeroConfig(partition=partition, stage=stage, overlap_param_gather=overlap)


@dataclass(frozen=True)
class Side:
    """A model, its optimizer, and how to keep gradients local."""

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


class ShardTwins:
    """Both get the same inputs, other ones on each rank. The sharded model starts from other values on each rank.

    `plain_model` makes another model for DDP, `handed` says what of them the optimizers get, `where` which ranks share.
    """

    def __init__(
        self,
        config: ZeroConfig | None = ZERO2,
        model: Callable[[], nn.Module] = mlp,
        optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        plain_model: Callable[[], nn.Module] | None = None,
        handed: Callable[[nn.Module], Any] | None = None,
        find_unused: bool = False,
        group: dist.ProcessGroup | None = None,
        where: Mapping[str, Any] = MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        defaults = defaults or ADAMW
        self.config, self.passes, self._find_unused, self._group = config or ZeroConfig(), 0, find_unused, group
        self.plain_model, self.model = seeded(plain_model or model, 0), seeded(model, dist.get_rank(group))
        self.wrap_plain()
        params = handed(self.model) if handed else None
        self.plain = optimizer_class((handed or nn.Module.parameters)(self.plain_model), **defaults)
        self.zero: ShardedOptimizer = shard(
            self.model, optimizer_class, params=params, process_group=group, config=config, **where, **defaults
        )

    def wrap_plain(self) -> None:
        """A new DDP: it must be wrapped anew when other parameters train."""
        self.ddp = DistributedDataParallel(
            self.plain_model, process_group=self._group, find_unused_parameters=self._find_unused
        )

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sharded one, then the plain one."""
        ours = Side(self.model, self.zero, self.zero.no_sync)
        return ours, Side(self.ddp, self.plain, self.ddp.no_sync)

    def train(self, steps: int, loss: Loss = regression) -> None:
        self.run(steps, lambda side, number: side.iterate(number, loss))

    def run(self, steps: int, iteration: Iteration) -> None:
        """Iterations of both. They are compared after each, or, if that would end the overlap, after the last."""
        for _ in range(steps):
            for side in self.sides:
                iteration(side, self.passes)
            self.passes += 1
            if not self.config.overlap_param_gather:
                self.compare()
        self.compare()

    def compare(self, *, exactly: bool = True) -> None:
        """`exactly`: as exactly as can be, see `assert_equal_sums`."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            where = f"{name} after pass {self.passes} with {self.config}"
            assert_equal_sums(ours, theirs, where, exactly=exactly)


def assert_equal_sums(found: torch.Tensor, expected: torch.Tensor, where: str, *, exactly: bool = True) -> None:
    """Bitwise up to two ranks, unless the caller knows why not.

    Beyond that a sum of gradients depends on the order, and gloo adds them in another one than that of ranks: one
    rounding of float32 (6e-8 of the summands) in gradients, a little more in what AdamW makes of small ones.
    """
    assert found.dtype == expected.dtype
    if exactly and dist.get_world_size() <= 2:
        assert torch.equal(found, expected), f"{where}: differs by {(found - expected).abs().max().item()}"
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [value.detach().clone() for value in model.state_dict().values()]


def all_equal(lists: list[list[torch.Tensor]]) -> bool:
    first, *others = lists
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# ---- `shard` beside DDP with sums in rank order: equal bit by bit at any world size


def average(parts: list[Tensor]) -> Tensor:
    """The sum of all ranks' parts, each divided first as DDP does it, in the order of ranks, and in float32 where they
    are less precise."""
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    first, *others = [part.to(exact) * (1 / len(parts)) for part in parts]
    for part in others:
        first = first + part
    return first


def from_all_ranks(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def in_rank_order(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """A hook for DDP: with it there is one right answer at any number of ranks, and it can be compared bit by bit."""
    done: Future[Tensor] = Future()
    buffer = bucket.buffer()
    done.set_result(buffer.copy_(average(from_all_ranks(buffer))))
    return done


class PairSide(NamedTuple):
    net: nn.Module
    """What the forward pass goes through."""
    model: nn.Module
    optimizer: Any


Handed = Callable[[nn.Module], Any]


class Pair:
    """Trains both, and compares them after each step. `handed` says what the optimizers get of the model,
    `hook` how DDP averages, `where` which ranks share."""

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        *,
        make: Callable[[], nn.Module] = mlp,
        handed: Handed = nn.Module.named_parameters,
        config: ZeroConfig | None = None,
        loss: Loss = regression,
        find_unused: bool = False,
        hook: Callable[[Any, GradBucket], Future[Tensor]] = in_rank_order,
        where: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.plain_model, self.model = seeded(make), seeded(make)
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=find_unused)
        self.ddp.register_comm_hook(None, hook)
        if "fused" not in options and "foreach" in inspect.signature(factory).parameters:
            options.setdefault("foreach", True)  # fused kernels, the default here, may round in another way
        self.plain: Any = factory(handed(self.plain_model), **copy.deepcopy(options))
        self.zero: ShardedOptimizer = shard(
            self.model, factory, params=handed(self.model), config=config, **where, **options
        )
        self.loss, self.steps = loss, 0

    @property
    def sides(self) -> list[PairSide]:
        return [PairSide(self.model, self.model, self.zero), PairSide(self.ddp, self.plain_model, self.plain)]

    def train(self, steps: int = 1, before_step: Callable[[PairSide], object] = lambda _: None) -> None:
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
        """The consolidated state is the plain one's."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(found, self.plain.state_dict(), "the state dict")


# ---- Several optimizer classes beside plain ones

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
    """Six matrices of several shapes between an embedding and a head. A block in `skipped` is not used."""

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
    """Other ones on each rank. No word twice: sums of several in one pass would be made in another order."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randperm(WORDS, generator=generator)[:7]


def next_word(model: nn.Module, number: int) -> Tensor:
    words = ids(number)
    return cross_entropy(model(words).float(), words.roll(1))


def hidden(name: str, param: Tensor) -> bool:
    """The matrices of `Words`, chosen without the code under test."""
    return name.startswith("blocks.") and param.dim() == 2


def rules(**muon: Any) -> list[ParamRule]:
    return [
        ParamRule(matrix_params(exclude=("embed", "head")), Muon, **{**MUON, **muon}),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]


class Several:
    """Plain optimizers that step one after the other."""

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
        return joined([member.state_dict() for member in self.members])


def muon_and_adamw(model: nn.Module) -> Several:
    named = list(model.named_parameters())
    first = [(name, param) for name, param in named if hidden(name, param)]
    rest = [(name, param) for name, param in named if not hidden(name, param)]
    return Several(Muon(first, **MUON), AdamW(rest, **RULES_ADAMW))


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """State dicts of several optimizers as one with all groups."""
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    start = 0
    for part in parts:
        whole["state"] |= {start + number: state for number, state in part["state"].items()}
        for group in part["param_groups"]:
            whole["param_groups"].append({**group, "params": [start + number for number in group["params"]]})
        start += sum(len(group["params"]) for group in part["param_groups"])
    return whole


def parted(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The dict of each group by itself, as the plain optimizer of that group would write it."""
    for group in whole["param_groups"]:
        start, count = min(group["params"], default=0), len(group["params"])
        state = {n - start: state for n, state in sorted(whole["state"].items()) if start <= n < start + count}
        options = {key: value for key, value in group.items() if key != "optimizer"}
        yield {"state": state, "param_groups": [{**options, "params": list(range(count))}]}


class RulesPair(Pair):
    """Trains both, and compares them after each step."""

    def __init__(
        self,
        given: Sequence[ParamRule] | None = None,
        plain: Callable[[nn.Module], Several] = muon_and_adamw,
        *,
        make: Callable[[], nn.Module] = Words,
        config: ZeroConfig | None = None,
        loss: Callable[[nn.Module, int], Tensor] = next_word,
        find_unused: bool = False,
    ) -> None:
        self.plain_model, self.model = seeded(make), seeded(make)
        self._find_unused = find_unused
        self.wrap_plain()
        self.plain: Any = plain(self.plain_model)
        self.zero: ShardedOptimizer = shard(self.model, given or rules(), config=config)
        self.loss, self.steps = loss, 0

    def wrap_plain(self) -> None:
        """A new DDP: it must be wrapped anew when other parameters train."""
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=self._find_unused)
        self.ddp.register_comm_hook(None, in_rank_order)

    def check(self) -> None:
        self.zero.wait_for_params()
        super().check()

    def check_state(self) -> None:
        """The consolidated state is that of the plain ones, and each group says whose it is."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(list(parted(found)), list(parted(self.plain.state_dict())), "the state dict")
            assert len({group["optimizer"] for group in found["param_groups"]}) == len(self.plain.members)


# ---- Ranks that shard within rows and replicate across columns

Grid = tuple[int, int]
"""How many rows, and how many ranks share in each."""


def grids(world_size: int) -> list[Grid]:
    """From all share to none does."""
    return [(world_size // within, within) for within in range(world_size, 0, -1) if world_size % within == 0]


def rows_of(grid: Grid) -> list[list[int]]:
    rows: list[list[int]] = torch.arange(grid[0] * grid[1]).view(grid).tolist()
    return rows


def meshed(grid: Grid) -> dict[str, Any]:
    """Arguments for `shard`."""
    return {"mesh": init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))}


def within(grid: Grid) -> dict[str, Any]:
    return {"shard_group_size": grid[1]}


@contextmanager
def launched(local_rank: object, local_size: object) -> Iterator[None]:
    """As torchrun tells a process its place on its host."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size)):
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, str(value))
        yield


def added(parts: list[Tensor]) -> Tensor:
    first, *others = parts
    for part in others:
        first = first + part
    return first


def average_by_rows(parts: list[Tensor], grid: Grid) -> Tensor:
    """Each part divided first; sums of rows in the order of ranks, then of rows; in float32 where parts are less
    precise, and rounded to their dtype at the end."""
    exact = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    shares = [part.to(exact) * (1 / len(parts)) for part in parts]
    return added([added([shares[rank] for rank in row]) for row in rows_of(grid)])


def in_order_of_rows(grid: Grid, dtype: torch.dtype | None = None) -> Callable[[Any, GradBucket], Future[Tensor]]:
    """A hook for DDP: with it there is one right answer, and it can be compared bit by bit.

    `dtype`: what each rank's gradients are rounded to before they are added up.
    """

    def hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        buffer = bucket.buffer()
        parts = from_all_ranks(buffer.to(dtype or buffer.dtype))
        done.set_result(buffer.copy_(average_by_rows(parts, grid)))
        return done

    return hook


def hybrid_pair(grid: Grid, factory: Callable[..., Optimizer], *, where: Any = within, **options: Any) -> Pair:
    """DDP with the plain optimizer, beside ranks in such a grid."""
    return Pair(factory, hook=in_order_of_rows(grid), where=where(grid), **options)


def state_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    """What this rank holds."""
    held = optimizer.optim.state.values()
    return [value.clone() for entry in held for value in entry.values() if isinstance(value, torch.Tensor)]


def assert_replicas_are_equal(grid: Grid, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """All ranks have the same model, and those of a column the same state, bit by bit."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (values_of(model), state_of(optimizer)))
    assert all_equal([values for values, _ in found])
    for column in zip(*rows_of(grid), strict=True):
        assert all_equal([found[rank][1] for rank in column])


def trained(where: dict[str, Any], dtype: torch.dtype = torch.float32, steps: int = 4) -> list[Tensor]:
    """What a model becomes on such ranks."""
    model = seeded(mlp, 0).to(dtype)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **where, lr=0.05, weight_decay=0.1)
    for number in range(steps):
        torch.autograd.backward(model(batch(number).to(dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)
