"""`optimizer.ddp_hook()`: gradients go to their owners only; results equal DDP with the plain optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.distributed.test_join import uneven_counts
from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    BUCKET_MB,
    TINY,
    WIDTH,
    Branches,
    Complex,
    assert_same,
    average,
    batch,
    branches_loss,
    complex_loss,
    gather_from_all_ranks,
    mlp,
    rank_order_hook,
    regression,
)
from zeroshard import (
    ConfigError,
    FlatShards,
    RankMismatchError,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
)

Options = dict[str, Any]
INNER_OPTIMIZERS: list[tuple[type[optim.Optimizer], Options]] = [
    (optim.AdamW, {"lr": 0.05, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
]


class DdpHookParityRun:
    """Two equal models under DDP, one with the hook; `wrap` holds DDP's options."""

    def __init__(
        self,
        inner: tuple[type[optim.Optimizer], Options] = INNER_OPTIMIZERS[0],
        make: Callable[[], nn.Module] = mlp,
        config: ZeroConfig = ZeroConfig(partition=TINY),  # noqa: B008 (frozen)
        loss: Callable[[nn.Module, int], Tensor] = regression,
        **wrap: Any,
    ) -> None:
        factory, options = inner
        self.plain_net, self.net = (DistributedDataParallel(make_seeded(make), **wrap) for _ in range(2))
        self.plain: Any = factory(self.plain_net.parameters(), **options)
        self.zero = ZeroRedundancyOptimizer(self.net.parameters(), factory, config=config, **options)
        self.plain_net.register_comm_hook(None, rank_order_hook)
        self.net.register_comm_hook(None, self.zero.ddp_hook())
        self.loss, self.steps = loss, 0

    @property
    def sides(self) -> list[tuple[DistributedDataParallel, Any]]:
        return [(self.net, self.zero), (self.plain_net, self.plain)]

    def train(
        self, steps: int, *, local_passes: int = 0, before_step: Callable[[Any, Any], object] = lambda *_: None
    ) -> None:
        for _ in range(steps):
            for net, optimizer in self.sides:
                for turn in range(local_passes + 1):
                    with net.no_sync() if turn < local_passes else nullcontext():
                        torch.autograd.backward(self.loss(net, self.steps + turn))
                before_step(net, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            self.steps += 1
            assert_same(self.net.state_dict(), self.plain_net.state_dict(), f"the model after step {self.steps}")

    def check_state(self) -> None:
        found = self.zero.full_state_dict()
        if found is not None:
            expected = self.plain.state_dict()
            # zeroshard's state is in parameter order, torch's in the order of first gradients.
            assert_same(found, {**expected, "state": dict(sorted(expected["state"].items()))})


def make_seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def ddp_options() -> Iterator[Options]:
    """Yield all combinations of DDP's options; with the small cap DDP rebuilds its buckets after the first pass."""
    for bucket_view, static_graph, bucket_cap_mb in product((False, True), (False, True), (BUCKET_MB, 25)):
        yield {"gradient_as_bucket_view": bucket_view, "static_graph": static_graph, "bucket_cap_mb": bucket_cap_mb}


@ranks(1, 2, 3, 4)
def test_matches_ddp_from_the_first_backward(ctx: RankContext) -> None:
    for wrap, inner in zip(ddp_options(), cycle(INNER_OPTIMIZERS)):
        hooked = DdpHookParityRun(inner, **wrap)
        hooked.train(3)
        hooked.check_state()


@ranks(1, 2)
def test_bitwise_equal_to_ddp_average(ctx: RankContext) -> None:
    """Two ranks have only one summation order."""
    net = DistributedDataParallel(make_seeded(mlp), bucket_cap_mb=BUCKET_MB)
    plain = optim.AdamW(net.parameters(), foreach=True)
    hooked = DdpHookParityRun((optim.AdamW, {"foreach": True}), bucket_cap_mb=BUCKET_MB)
    for step in range(3):
        torch.autograd.backward(regression(net, step))
        plain.step()
        plain.zero_grad()
        hooked.train(1)
        assert_same(net.state_dict(), hooked.net.state_dict())


@ranks(1, 2, 3, 4)
def test_unused_params_match_ddp(ctx: RankContext) -> None:
    """Parameters that no rank uses stay unchanged. For those that some ranks use, the others contribute zeros."""
    for view, partition in product((False, True), (TINY, FlatShards())):
        wrap = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "bucket_cap_mb": BUCKET_MB}
        hooked = DdpHookParityRun(INNER_OPTIMIZERS[1], Branches, ZeroConfig(partition=partition), branches_loss, **wrap)
        hooked.train(4)
        hooked.check_state()


def make_sparse_embedding_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))


def sparse_rows_loss(net: nn.Module, number: int) -> Tensor:
    """A loss that uses other rows on each rank, one of them twice."""
    rows = torch.tensor([1, 1, 2 + torch.distributed.get_rank(), number])
    loss: Tensor = net(rows).square().mean()
    return loss


@ranks(1, 2, 3)
def test_sparse_gradients_match_ddp(ctx: RankContext) -> None:
    """They are averaged as dense ones. The oracle is DDP with its own averaging, up to rounding."""
    for config in (ZeroConfig(partition=TINY), ZeroConfig(partition=FlatShards())):
        plain_net, net = (DistributedDataParallel(make_seeded(make_sparse_embedding_model)) for _ in range(2))
        plain = optim.SGD(plain_net.parameters(), lr=0.5)
        zero = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.5, config=config)
        net.register_comm_hook(None, zero.ddp_hook())
        for number in range(3):
            for each_net, optimizer in ((net, zero), (plain_net, plain)):
                torch.autograd.backward(sparse_rows_loss(each_net, number))
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(net.parameters(), plain_net.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class MixedLayoutModel(nn.Module):
    """Non-contiguous parameters, complex ones, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.strided = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.float64 = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex64, self.complex128 = Complex(), Complex(torch.complex128)

    def forward(self, x: Tensor, number: int) -> Tensor:
        images = x.repeat(1, 3).view(4, 2, 3, 3)
        real: Tensor = (self.conv(images).mean((2, 3)) @ self.transposed @ self.strided).double() @ self.float64
        total: Tensor = real.square().tanh().mean() * self.scale + self.empty.sum()
        for layer in (self.complex64, self.complex128) if number % 2 else ():
            total = total + complex_loss(layer, number)
        return total


@ranks(1, 2, 3)
def test_mixed_strides_and_dtypes(ctx: RankContext) -> None:
    """In DDP's buckets gradients have the strides of their parameters, and complex ones are pairs of real numbers."""
    config = ZeroConfig(partition=FlatShards(bucket_bytes=200), allow_mixed_dtypes=True)
    for (view, unused), inner in zip(product((False, True), repeat=2), cycle(INNER_OPTIMIZERS)):
        wrap = {"gradient_as_bucket_view": view, "bucket_cap_mb": BUCKET_MB, "find_unused_parameters": unused}
        loss = partial(mixed_layout_loss, odd=not unused)
        hooked = DdpHookParityRun(inner, MixedLayoutModel, config, loss, **wrap)
        hooked.train(3)
        hooked.train(1, local_passes=1)
        hooked.check_state()


def mixed_layout_loss(net: nn.Module, number: int, *, odd: bool) -> Tensor:
    """With `odd`, every pass uses the complex parameters."""
    loss: Tensor = net(batch(number), 2 * number + 1 if odd else number)
    return loss


@ranks(1, 2, 3, 4)
def test_gradient_accumulation_under_no_sync(ctx: RankContext) -> None:
    for view in (False, True):
        hooked = DdpHookParityRun(bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=view)
        hooked.train(1)
        hooked.train(2, local_passes=2)
        hooked.train(1)


@ranks(1, 2, 3)
def test_gradient_accumulation_with_sync_in_each_pass(ctx: RankContext) -> None:
    """Several synchronized passes before a step. Each averages the accumulated gradients again, which rounds."""
    hooked = DdpHookParityRun((optim.SGD, {"lr": 0.1, "foreach": True}), bucket_cap_mb=BUCKET_MB)
    for _ in range(2):
        for net, optimizer in hooked.sides:
            for turn in range(3):
                torch.autograd.backward(regression(net, turn))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        for ours, theirs in zip(hooked.net.parameters(), hooked.plain_net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(1, 2, 3, 4)
def test_clip_through_optimizer_matches_torch(ctx: RankContext) -> None:
    def clip(net: nn.Module, optimizer: Any) -> None:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.clip_grad_norm_(0.01, math.inf)
        else:
            clip_grad_norm_(net.parameters(), 0.01, math.inf)

    DdpHookParityRun(bucket_cap_mb=BUCKET_MB).train(3, before_step=clip)


@ranks(2, 3, 4)
@pytest.mark.parametrize("leftover", ["none", "last step", "pass without step"])
def test_leftover_gradients_do_not_affect_join_steps(ctx: RankContext, leftover: str) -> None:
    """Gradients that a rank still has when it runs out of inputs do not enter the steps that it only shadows."""
    for counts, inner in zip(uneven_counts(ctx.world_size), cycle(INNER_OPTIMIZERS)):
        hooked = DdpHookParityRun(inner, bucket_cap_mb=BUCKET_MB)
        joinables: list[list[Any]] = [[hooked.net, hooked.zero], [hooked.plain_net]]
        for (net, optimizer), joined in zip(hooked.sides, joinables, strict=True):
            with Join(joined):
                for step in range(counts[ctx.rank]):
                    optimizer.zero_grad()
                    torch.autograd.backward(regression(net, step))
                    optimizer.step()
                if leftover != "last step":
                    optimizer.zero_grad()
                if leftover == "pass without step":
                    with net.no_sync():
                        torch.autograd.backward(regression(net.module, 100))
        assert_same(hooked.net.state_dict(), hooked.plain_net.state_dict(), f"with {counts} inputs")


@ranks(2, 3, 4)
def test_stale_gradients_of_joined_ranks_are_not_sent(ctx: RankContext) -> None:
    """Of a parameter outside DDP, whose leftover gradient DDP does not replace by zeros."""
    for counts in uneven_counts(ctx.world_size):
        net, scale = DistributedDataParallel(make_seeded(mlp)), nn.Parameter(torch.zeros(3))
        config = ZeroConfig(partition=FlatShards())
        zero = ZeroRedundancyOptimizer([*net.parameters(), scale], optim.SGD, lr=1.0, foreach=True, config=config)
        net.register_comm_hook(None, zero.ddp_hook())
        with Join([net, zero]):
            for step in range(counts[ctx.rank]):
                torch.autograd.backward(regression(net, step))
                scale.grad = torch.full((3,), ctx.rank + 1.0)
                zero.step()
                zero.zero_grad()
            scale.grad = torch.full((3,), 100.0)  # a pass without a step
        expected = torch.zeros(3)
        for step in range(max(counts)):
            expected -= average([torch.full((3,), (rank + 1.0) * (step < count)) for rank, count in enumerate(counts)])
        assert_same(scale.detach(), expected, f"with {counts} inputs")


@ranks(2, 3)
def test_param_grad_holds_the_local_gradient(ctx: RankContext) -> None:
    hooked = DdpHookParityRun(bucket_cap_mb=BUCKET_MB)
    local_model = make_seeded(mlp)
    for net in (hooked.net, local_model):
        torch.autograd.backward(regression(net, 0))
    for ours, theirs in zip(hooked.net.parameters(), local_model.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)


@ranks(2, 3, 4)
def test_communication_volume_does_not_exceed_ddp(ctx: RankContext) -> None:
    """An all-reduce sends 2 (N - 1) times the bytes of the gradients, summed over all ranks."""
    hooked = DdpHookParityRun(
        make=lambda: nn.Linear(WIDTH, 1000), loss=lambda net, number: net(batch(number)).square().mean()
    )
    hooked.train(1)
    with recorded() as traffic:
        torch.autograd.backward(hooked.loss(hooked.net, 1))
        hooked.zero.step()
    p2p_bytes = sum(ctx.gather(sum(traffic.sizes("isend"))))
    all_reduce_bytes = sum(ctx.gather(sum(traffic.sizes("all_reduce"))))
    grad_bytes = sum(param.nbytes for param in hooked.net.parameters())
    assert p2p_bytes + all_reduce_bytes <= 1.02 * 2 * (ctx.world_size - 1) * grad_bytes
    assert set(traffic.verbs) <= {"isend", "irecv", "all_reduce"}


@ranks(2, 3)
def test_reduce_in_bfloat16(ctx: RankContext) -> None:
    config = ZeroConfig(partition=TINY, reduce_dtype=torch.bfloat16)
    hooked = DdpHookParityRun((optim.SGD, {"lr": 1.0, "foreach": True}), config=config)
    torch.autograd.backward(regression(hooked.plain_net.module, 0))
    expected = []
    for param in hooked.plain_net.parameters():
        assert param.grad is not None
        expected.append(param.detach() - average(gather_from_all_ranks(param.grad.bfloat16())))
    torch.autograd.backward(regression(hooked.net, 0))
    hooked.zero.step()
    assert_same([param.detach() for param in hooked.net.parameters()], expected)


@ranks(2, 3)
def test_master_weights_receive_unrounded_averages(ctx: RankContext) -> None:
    """Averages of bfloat16 gradients reach the masters unrounded."""
    net = DistributedDataParallel(make_seeded(lambda: mlp().bfloat16()), bucket_cap_mb=BUCKET_MB)
    local_model = make_seeded(lambda: mlp().bfloat16())
    masters = [nn.Parameter(param.detach().float()) for param in local_model.parameters()]
    plain = optim.AdamW(masters, lr=1e-3, foreach=True)
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)
    zero = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, lr=1e-3, foreach=True, config=config)
    net.register_comm_hook(None, zero.ddp_hook())
    for step in range(3):
        for each_model in (net, local_model):
            torch.autograd.backward(each_model(batch(step).bfloat16()).float().square().mean())
        zero.step()
        zero.zero_grad()
        for param, master in zip(local_model.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = average(gather_from_all_ranks(param.grad))
            param.grad = None
        plain.step()
        with torch.no_grad():
            for param, master in zip(local_model.parameters(), masters, strict=True):
                param.copy_(master)
        assert_same(net.module.state_dict(), local_model.state_dict())


@ranks(1, 2)
def test_whole_params_reject_ddp_hook(ctx: RankContext) -> None:
    for config in (None, ZeroConfig(partition=WholeParams())):
        zero = ZeroRedundancyOptimizer(mlp().parameters(), optim.AdamW, config=config)
        with pytest.raises(ConfigError, match=r"ddp_hook\(\) needs ZeroConfig\(partition=FlatShards\(\)\)"):
            zero.ddp_hook()


@ranks(1, 2)
def test_param_unknown_to_the_optimizer_is_rejected(ctx: RankContext) -> None:
    net = DistributedDataParallel(mlp())
    config = ZeroConfig(partition=TINY)
    zero = ZeroRedundancyOptimizer(list(net.parameters())[:4], optim.SGD, lr=0.1, config=config)
    net.register_comm_hook(None, zero.ddp_hook())
    with pytest.raises(ConfigError, match="that the optimizer does not have"):
        torch.autograd.backward(regression(net, 0))


@ranks(2, 3)
def test_hook_on_one_rank_only_raises_on_all_ranks(ctx: RankContext) -> None:
    """That rank reduces gradients with other messages than the other ranks."""
    net = make_seeded(mlp)
    zero = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.1, config=ZeroConfig(partition=TINY))
    if ctx.rank == 1:
        zero.ddp_hook()
    torch.autograd.backward(regression(net, 0))
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(RankMismatchError, match=r"step 1, with gradients in param\.grad.*reduce-scattered gradients"):
        zero.step()
    assert_same([param.detach() for param in net.parameters()], before)
    # That rank alone has taken message tags. The next optimizer must not depend on them.
    another = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.1)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    another.step()
    torch.testing.assert_close([param.detach() for param in net.parameters()], [value - 0.1 for value in before])
