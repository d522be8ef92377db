"""`optimizer.ddp_hook()`: DDP's gradients go to their owners only; all else is as with DDP and the plain optimizer."""

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
    from_all_ranks,
    in_rank_order,
    mlp,
    of_complex,
    regression,
    through_branches,
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


class DDPHookTwins:
    """Two equal models under DDP, one with the hook; `wrap` are DDP's options."""

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
        self.plain_net.register_comm_hook(None, in_rank_order)
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
            # Ours is in the order of parameters, torch's in that of their first gradients.
            assert_same(found, {**expected, "state": dict(sorted(expected["state"].items()))})


def make_seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def ddp_options() -> Iterator[Options]:
    """All ways to set DDP up; the small caps make it rebuild its buckets after the first pass."""
    for view, static, cap in product((False, True), (False, True), (BUCKET_MB, 25)):
        yield {"gradient_as_bucket_view": view, "static_graph": static, "bucket_cap_mb": cap}


@ranks(1, 2, 3, 4)
def test_matches_ddp_from_the_first_backward(ctx: RankContext) -> None:
    for wrap, inner in zip(ddp_options(), cycle(INNER_OPTIMIZERS)):
        hooked = DDPHookTwins(inner, **wrap)
        hooked.train(3)
        hooked.check_state()


@ranks(1, 2)
def test_bitwise_equal_to_ddp_average(ctx: RankContext) -> None:
    """At two ranks there is only one order to add in."""
    net = DistributedDataParallel(make_seeded(mlp), bucket_cap_mb=BUCKET_MB)
    plain = optim.AdamW(net.parameters(), foreach=True)
    hooked = DDPHookTwins((optim.AdamW, {"foreach": True}), bucket_cap_mb=BUCKET_MB)
    for step in range(3):
        torch.autograd.backward(regression(net, step))
        plain.step()
        plain.zero_grad()
        hooked.train(1)
        assert_same(net.state_dict(), hooked.net.state_dict())


@ranks(1, 2, 3, 4)
def test_unused_params_match_ddp(ctx: RankContext) -> None:
    """By no rank: they stay as they are. By some ranks: the others' share is zero."""
    for view, partition in product((False, True), (TINY, FlatShards())):
        wrap = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "bucket_cap_mb": BUCKET_MB}
        hooked = DDPHookTwins(INNER_OPTIMIZERS[1], Branches, ZeroConfig(partition=partition), through_branches, **wrap)
        hooked.train(4)
        hooked.check_state()


def make_sparse_embedding_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))


def sparse_rows_loss(net: nn.Module, number: int) -> Tensor:
    """Other rows on each rank, one of them twice."""
    rows = torch.tensor([1, 1, 2 + torch.distributed.get_rank(), number])
    loss: Tensor = net(rows).square().mean()
    return loss


@ranks(1, 2, 3)
def test_sparse_gradients_match_ddp(ctx: RankContext) -> None:
    """They are averaged as dense ones. DDP with its own average is the oracle, up to rounding."""
    for config in (ZeroConfig(partition=TINY), ZeroConfig(partition=FlatShards())):
        plain_net, net = (DistributedDataParallel(make_seeded(make_sparse_embedding_model)) for _ in range(2))
        plain = optim.SGD(plain_net.parameters(), lr=0.5)
        zero = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.5, config=config)
        net.register_comm_hook(None, zero.ddp_hook())
        for number in range(3):
            for each, optimizer in ((net, zero), (plain_net, plain)):
                torch.autograd.backward(sparse_rows_loss(each, number))
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(net.parameters(), plain_net.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class MixedLayoutModel(nn.Module):
    """Parameters that are not contiguous, complex ones, and several dtypes."""

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
        for part in (self.complex64, self.complex128) if number % 2 else ():
            total = total + of_complex(part, number)
        return total


@ranks(1, 2, 3)
def test_mixed_strides_and_dtypes(ctx: RankContext) -> None:
    """In DDP's buckets gradients lie as their parameters do, and complex ones as pairs of real numbers."""
    config = ZeroConfig(partition=FlatShards(bucket_bytes=200), allow_mixed_dtypes=True)
    for (view, unused), inner in zip(product((False, True), repeat=2), cycle(INNER_OPTIMIZERS)):
        wrap = {"gradient_as_bucket_view": view, "bucket_cap_mb": BUCKET_MB, "find_unused_parameters": unused}
        loss = partial(mixed_layout_loss, odd=not unused)
        hooked = DDPHookTwins(inner, MixedLayoutModel, config, loss, **wrap)
        hooked.train(3)
        hooked.train(1, local_passes=1)
        hooked.check_state()


def mixed_layout_loss(net: nn.Module, number: int, *, odd: bool) -> Tensor:
    """`odd`: complex parameters are used in every pass."""
    loss: Tensor = net(batch(number), 2 * number + 1 if odd else number)
    return loss


@ranks(1, 2, 3, 4)
def test_gradient_accumulation_under_no_sync(ctx: RankContext) -> None:
    for view in (False, True):
        hooked = DDPHookTwins(bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=view)
        hooked.train(1)
        hooked.train(2, local_passes=2)
        hooked.train(1)


@ranks(1, 2, 3)
def test_gradient_accumulation_with_sync_in_each_pass(ctx: RankContext) -> None:
    """Several synchronised passes before a step. Each averages all that came before it again, which rounds."""
    hooked = DDPHookTwins((optim.SGD, {"lr": 0.1, "foreach": True}), bucket_cap_mb=BUCKET_MB)
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

    DDPHookTwins(bucket_cap_mb=BUCKET_MB).train(3, before_step=clip)


@ranks(2, 3, 4)
@pytest.mark.parametrize("left", ["nothing", "the last step's", "those of a pass without a step"])
def test_leftover_gradients_do_not_affect_join_steps(ctx: RankContext, left: str) -> None:
    """What is `left` in `param.grad` when a rank runs out of inputs has no part in the steps that it only shadows."""
    for counts, inner in zip(uneven_counts(ctx.world_size), cycle(INNER_OPTIMIZERS)):
        hooked = DDPHookTwins(inner, bucket_cap_mb=BUCKET_MB)
        joinables: list[list[Any]] = [[hooked.net, hooked.zero], [hooked.plain_net]]
        for (net, optimizer), joined in zip(hooked.sides, joinables, strict=True):
            with Join(joined):
                for step in range(counts[ctx.rank]):
                    optimizer.zero_grad()
                    torch.autograd.backward(regression(net, step))
                    optimizer.step()
                if left != "the last step's":
                    optimizer.zero_grad()
                if left == "those of a pass without a step":
                    with net.no_sync():
                        torch.autograd.backward(regression(net.module, 100))
        assert_same(hooked.net.state_dict(), hooked.plain_net.state_dict(), f"with {counts} inputs")


@ranks(2, 3, 4)
def test_stale_gradients_of_joined_ranks_are_not_sent(ctx: RankContext) -> None:
    """Of a parameter that DDP has not: there is no gradient of zeros from DDP in the place of the one that is left."""
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
            expected -= average([torch.full((3,), (rank + 1.0) * (step < n)) for rank, n in enumerate(counts)])
        assert_same(scale.detach(), expected, f"with {counts} inputs")


@ranks(2, 3)
def test_param_grad_holds_the_local_gradient(ctx: RankContext) -> None:
    hooked = DDPHookTwins(bucket_cap_mb=BUCKET_MB)
    alone = make_seeded(mlp)
    for net in (hooked.net, alone):
        torch.autograd.backward(regression(net, 0))
    for ours, theirs in zip(hooked.net.parameters(), alone.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)


@ranks(2, 3, 4)
def test_communication_volume_does_not_exceed_ddp(ctx: RankContext) -> None:
    """An all-reduce takes 2 (N - 1) times the bytes of the gradients, from all ranks together."""
    hooked = DDPHookTwins(make=lambda: nn.Linear(WIDTH, 1000), loss=lambda net, n: net(batch(n)).square().mean())
    hooked.train(1)
    with recorded() as traffic:
        torch.autograd.backward(hooked.loss(hooked.net, 1))
        hooked.zero.step()
    messages = sum(ctx.gather(sum(traffic.sizes("isend"))))
    words = sum(ctx.gather(sum(traffic.sizes("all_reduce"))))
    everything = sum(param.nbytes for param in hooked.net.parameters())
    assert messages + words <= 1.02 * 2 * (ctx.world_size - 1) * everything
    assert set(traffic.verbs) <= {"isend", "irecv", "all_reduce"}


@ranks(2, 3)
def test_reduce_in_bfloat16(ctx: RankContext) -> None:
    config = ZeroConfig(partition=TINY, reduce_dtype=torch.bfloat16)
    hooked = DDPHookTwins((optim.SGD, {"lr": 1.0, "foreach": True}), config=config)
    torch.autograd.backward(regression(hooked.plain_net.module, 0))
    expected = []
    for param in hooked.plain_net.parameters():
        assert param.grad is not None
        expected.append(param.detach() - average(from_all_ranks(param.grad.bfloat16())))
    torch.autograd.backward(regression(hooked.net, 0))
    hooked.zero.step()
    assert_same([param.detach() for param in hooked.net.parameters()], expected)


@ranks(2, 3)
def test_master_weights_receive_unrounded_averages(ctx: RankContext) -> None:
    """Averages of bfloat16 gradients reach the masters unrounded."""
    net = DistributedDataParallel(make_seeded(lambda: mlp().bfloat16()), bucket_cap_mb=BUCKET_MB)
    alone = make_seeded(lambda: mlp().bfloat16())
    masters = [nn.Parameter(param.detach().float()) for param in alone.parameters()]
    plain = optim.AdamW(masters, lr=1e-3, foreach=True)
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)
    zero = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, lr=1e-3, foreach=True, config=config)
    net.register_comm_hook(None, zero.ddp_hook())
    for step in range(3):
        for each in (net, alone):
            torch.autograd.backward(each(batch(step).bfloat16()).float().square().mean())
        zero.step()
        zero.zero_grad()
        for param, master in zip(alone.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = average(from_all_ranks(param.grad))
            param.grad = None
        plain.step()
        with torch.no_grad():
            for param, master in zip(alone.parameters(), masters, strict=True):
                param.copy_(master)
        assert_same(net.module.state_dict(), alone.state_dict())


@ranks(1, 2)
def test_whole_params_reject_ddp_hook(ctx: RankContext) -> None:
    for config in (None, ZeroConfig(partition=WholeParams())):
        zero = ZeroRedundancyOptimizer(mlp().parameters(), optim.AdamW, config=config)
        with pytest.raises(ConfigError, match=r"it needs partition=FlatShards\(\)"):
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
    """Such a rank settles gradients by other messages than the others."""
    net = make_seeded(mlp)
    zero = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.1, config=ZeroConfig(partition=TINY))
    if ctx.rank == 1:
        zero.ddp_hook()
    torch.autograd.backward(regression(net, 0))
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(RankMismatchError, match=r"step 1, with gradients of param\.grad.*slices from all ranks"):
        zero.step()
    assert_same([param.detach() for param in net.parameters()], before)
