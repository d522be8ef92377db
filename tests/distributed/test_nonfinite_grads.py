"""Steps with non-finite gradients: equal to an unsharded optimizer that skips the same steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR

from tests.support import RankContext, ranks
from tests.support.oracles import (
    WIDTH,
    ZERO1,
    ZERO2,
    ParityRun,
    ParitySide,
    ShardParityRun,
    Words,
    all_equal,
    assert_same,
    batch,
    clone_values,
    hybrid_parity_run,
    make_seeded,
    mlp,
    next_word_loss,
    regression,
    rules,
    set_grads,
    small_model,
)
from zeroshard import (
    ConfigError,
    CPUOffload,
    FlatShards,
    GradScaler,
    NonFiniteError,
    NonFiniteGrads,
    RankFailedError,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard.engine.checks import NonFiniteSteps, _are_finite

SKIP = NonFiniteGrads("skip")
Corruptions = dict[int, tuple[str, int, float]]
"""By step: the parameter, its element and the value that one rank's gradient gets."""
THREE_CORRUPTIONS: Corruptions = {
    1: ("0.weight", 0, math.nan),
    2: ("4.bias", 5, math.inf),
    4: ("8.weight", 35, -math.inf),
}

pytestmark = pytest.mark.filterwarnings("ignore:step .* gradients of:RuntimeWarning")


def has_finite_grads(model: nn.Module) -> bool:
    return all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)


class SkippingOracle:
    """The oracle: an optimizer that skips steps with non-finite gradients."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer, self.skipped = model, optimizer, 0

    def step(self) -> None:
        if has_finite_grads(self._model):
            self._optimizer.step()
        else:
            self.skipped += 1


class CorruptedParityRun(ShardParityRun):
    """Gradients of one rank are corrupted during backward, on both sides."""

    def __init__(self, ctx: RankContext, factory: Any, corruptions: Corruptions, **options: Any) -> None:
        super().__init__(factory, **options)
        self._is_corrupting_rank, self._corruptions = ctx.rank == ctx.world_size - 1, corruptions
        self.oracle = SkippingOracle(self.plain_model, self.plain)
        for side in self.sides:
            for name, param in side.model.named_parameters():
                param.register_hook(self._make_hook(name))  # type: ignore[no-untyped-call]

    def _make_hook(self, name: str) -> Callable[[Tensor], Tensor]:
        def corrupt(grad: Tensor) -> Tensor:
            corrupted_name, element, value = self._corruptions.get(self.steps, ("", 0, 0.0))
            if not self._is_corrupting_rank or corrupted_name != name:
                return grad
            return grad.flatten().index_fill(0, torch.tensor([element]), value).view(grad.shape)

        return corrupt

    def train(self, steps: int = 1, before_step: Callable[[ParitySide], object] = lambda _: None) -> None:
        for _ in range(steps):
            self.backward()
            for side in self.sides:
                before_step(side)
            result = self.zero.step()
            self.oracle.step()
            assert result is None
            for side in self.sides:
                side.model.zero_grad()
            self.steps += 1
            self.check()
            assert self.zero.nonfinite.skipped == self.oracle.skipped


@pytest.mark.parametrize(
    "config",
    [ZERO2, ZERO1, ZeroConfig(), replace(ZERO2, overlap_param_gather=True)],
    ids=["zero2", "zero1", "one-bucket", "overlap"],
)
@ranks(1, 2, 3, 4)
def test_skips_the_same_steps_as_the_oracle(ctx: RankContext, config: ZeroConfig) -> None:
    for factory, options in ((AdamW, {"lr": 0.05}), (SGD, {"lr": 0.1, "momentum": 0.9})):
        parity = CorruptedParityRun(ctx, factory, THREE_CORRUPTIONS, config=replace(config, nonfinite=SKIP), **options)
        schedulers = [ExponentialLR(side.optimizer, 0.5) for side in parity.sides]
        for _ in range(6):
            parity.train(1)
            for scheduler in schedulers:
                scheduler.step()
        parity.check_state()
        assert ctx.gather(parity.zero.nonfinite) == [NonFiniteSteps(3, 3, 0, 5)] * ctx.world_size


@ranks(2, 3)
def test_any_nonfinite_element_skips_the_step_on_all_ranks(ctx: RankContext) -> None:
    """Only the owner sees the element, and all ranks skip the step."""
    elements = [(name, element) for name in ("0.weight", "2.bias", "8.weight") for element in (0, 3, 5)]
    corruptions = {1 + step: (name, element, math.inf) for step, (name, element) in enumerate(elements)}
    parity = CorruptedParityRun(ctx, AdamW, corruptions, config=replace(ZERO2, nonfinite=SKIP), lr=0.05)
    parity.train(len(elements) + 3)
    parity.check_state()
    assert parity.zero.nonfinite == NonFiniteSteps(9, 9, 0, 10)


@ranks(4)
def test_step_is_skipped_on_all_replicas(ctx: RankContext) -> None:
    config = replace(ZERO2, nonfinite=SKIP)
    parity = hybrid_parity_run((2, 2), AdamW, config=config, lr=0.05)
    for step in range(5):
        parity.backward()
        if step in (1, 3):  # in a gradient shard of one rank in one shard group, after averaging
            parity.zero.clip_grad_norm_(math.inf)
            if ctx.rank == 3:
                parity.zero._engine.grads.grad_tensors()[0][0] = math.nan
        before = clone_values(parity.model)
        parity.zero.step()
        if step in (1, 3):
            assert all_equal([clone_values(parity.model), before])
        else:
            parity.plain.step()
        for side in parity.sides:
            side.model.zero_grad()
        parity.check()
    parity.check_state()
    assert set(ctx.gather(parity.zero.nonfinite)) == {NonFiniteSteps(2, 2, 0, 4)}


@ranks(2)
def test_skip_with_master_weights_and_rules(ctx: RankContext) -> None:
    for model, optimizer in (
        _make_sharded(mlp, AdamW, torch.bfloat16, master_dtype=torch.float32, nonfinite=SKIP),
        _make_sharded(Words, rules(), torch.float32, nonfinite=SKIP),
    ):
        loss = next_word_loss if isinstance(model, Words) else _bf16_loss
        for step in range(4):
            torch.autograd.backward(loss(model, step) * (math.nan if step == 2 and ctx.rank else 1.0))
            before, state = clone_values(model), optimizer.full_state_dict()
            optimizer.step()
            optimizer.zero_grad()
            is_unchanged = all_equal([clone_values(model), before])
            assert is_unchanged == (step == 2)
            if is_unchanged:
                assert_same(optimizer.full_state_dict(), state)
        assert optimizer.nonfinite == NonFiniteSteps(1, 1, 0, 3)


def _make_sharded(
    make_model: Callable[[], nn.Module], optimizer: Any, dtype: torch.dtype, **policies: Any
) -> tuple[nn.Module, Any]:
    model = make_seeded(make_model, 0).to(dtype)
    return model, shard(model, optimizer, config=replace(ZERO2, **policies))


def _bf16_loss(model: nn.Module, number: int) -> Tensor:
    out: Tensor = model(torch.full((2, WIDTH), 0.1 * (number + 1), dtype=torch.bfloat16)).float().square().mean()
    return out


def corrupt_grad(model: nn.Module, name: str, value: float) -> None:
    grad = model.get_parameter(name).grad
    assert grad is not None
    grad.view(-1)[-1] = value


DROP_IN_OPTIONS: list[dict[str, Any]] = [
    {"config": ZeroConfig(nonfinite=SKIP)},
    {"config": ZeroConfig(nonfinite=SKIP), "parameters_as_bucket_view": True},
    {"config": ZeroConfig(nonfinite=SKIP, partition=FlatShards())},
]


@ranks(1, 2, 3, 4)
def test_drop_in_skips_nonfinite_steps(ctx: RankContext) -> None:
    for options in DROP_IN_OPTIONS:
        parity = ParityRun(AdamW, zero_only=options, lr=0.05, foreach=True)
        oracle = SkippingOracle(parity.plain_model, parity.plain)
        for step in range(5):
            for model, _ in parity.sides:
                set_grads(model.parameters(), step)
                if step in (1, 3):
                    corrupt_grad(model, f"{step - 1}.weight", math.inf if step == 1 else math.nan)
            assert parity.zero.step() is None
            oracle.step()
            parity.check()
        found = parity.zero.full_state_dict()
        if found is not None:
            assert_same(found, parity.plain.state_dict())
        assert ctx.gather(parity.zero.nonfinite) == [NonFiniteSteps(2, 2, 0, 4)] * ctx.world_size


def _run_closure(model: nn.Module, step: int, calls: list[int]) -> Tensor:
    """A closure. In step 2 its gradients are not finite."""
    calls.append(step)
    model.zero_grad()
    loss: Tensor = model(torch.full((2, WIDTH), 0.1 * step)).square().mean()
    torch.autograd.backward(loss * (math.nan if step == 2 else 1.0))
    return loss


@ranks(1, 2)
def test_skip_with_closure(ctx: RankContext) -> None:
    """The closure is called once per step. An applied step returns its loss, a skipped one returns None."""
    for options in (*DROP_IN_OPTIONS, None):
        model, plain_model = (make_seeded(mlp, 0) for _ in range(2))
        zero: Any = (
            ZeroRedundancyOptimizer(model.parameters(), AdamW, **options, lr=0.05, foreach=True)
            if options
            else shard(model, AdamW, config=replace(ZERO2, nonfinite=SKIP), lr=0.05, foreach=True)
        )
        plain = AdamW(plain_model.parameters(), lr=0.05, foreach=True)
        calls: list[int] = []
        for step in range(4):
            found = zero.step(partial(_run_closure, model, step, calls))
            expected = _run_closure(plain_model, step, calls)
            if step == 2:
                assert found is None
            else:
                plain.step()
                assert torch.equal(found, expected)
            assert_same(model.state_dict(), plain_model.state_dict())
        assert calls == [step for step in range(4) for _ in range(2)]
        assert zero.nonfinite == NonFiniteSteps(1, 1, 0, 3)


@ranks(1, 2, 3)
def test_raise_action(ctx: RankContext) -> None:
    for config in (ZERO2, ZERO1):
        model = make_seeded(mlp, 0)
        zero = shard(model, AdamW, config=replace(config, nonfinite=NonFiniteGrads("raise")), lr=0.05)
        before, state = clone_values(model), zero.full_state_dict()
        torch.autograd.backward(regression(model, 0) * (math.nan if ctx.rank == 0 else 1.0))
        with pytest.raises(NonFiniteError, match=r"step 1: gradients of parameter 0 \(0\.weight\), .* and 5 more"):
            zero.step()
        assert all_equal([clone_values(model), before])
        assert_same(zero.full_state_dict(), state)
        zero.zero_grad()
        torch.autograd.backward(regression(model, 1))
        zero.step()
        assert ctx.gather(zero.nonfinite) == [NonFiniteSteps(1, 0, 0, 1)] * ctx.world_size
        assert not all_equal([clone_values(model), before])


@ranks(1, 2)
def test_warn_action_applies_and_counts_the_step(ctx: RankContext) -> None:
    results = []
    for policy in (NonFiniteGrads("warn"), None):
        model = make_seeded(mlp, 0)
        zero = shard(model, SGD, config=replace(ZERO2, nonfinite=policy), lr=0.1)
        for step in range(3):
            torch.autograd.backward(regression(model, step))
            if step == 1:
                zero.clip_grad_norm_(math.inf)
                if ctx.rank == 0:
                    zero._engine.grads.grad_tensors()[0][0] = math.nan
            zero.step()
            zero.zero_grad()
        results.append([value.nan_to_num(nan=7.0) for value in clone_values(model)])
        assert zero.nonfinite == (NonFiniteSteps(2, 0, 2, 3) if policy else NonFiniteSteps())
    assert all_equal(results)


@ranks(2)
def test_max_consecutive_skips_raises(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, SGD, config=replace(ZERO2, nonfinite=NonFiniteGrads("skip", max_consecutive=2)), lr=0.1)

    def step(factor: float) -> None:
        zero.zero_grad()
        torch.autograd.backward(regression(model, 0) * (factor if ctx.rank else 1.0))
        zero.step()

    for factor in (math.nan, 1.0, math.nan):
        step(factor)
    before = clone_values(model)
    for num_consecutive in (2, 3):
        with pytest.raises(
            NonFiniteError,
            match=rf"That is {num_consecutive} steps in a row, and NonFiniteGrads\(action='skip', max_consecutive=2\)",
        ):
            step(math.inf)
    assert all_equal([clone_values(model), before])
    step(1.0)
    assert zero.nonfinite == NonFiniteSteps(4, 4, 0, 5)


@ranks(1, 3)
@pytest.mark.filterwarnings("default")
def test_warnings_are_rate_limited_and_identical_on_all_ranks(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, SGD, config=replace(ZERO2, nonfinite=SKIP), lr=0.1)
    messages: list[str] = []
    for number in range(9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero.zero_grad()
            torch.autograd.backward(regression(model, 0) * (math.nan if ctx.rank == ctx.world_size - 1 else 1.0))
            zero.step()
        messages += [str(warning.message) for warning in caught]
        assert all(Path(warning.filename).name == Path(__file__).name for warning in caught), number
    assert [message.partition(":")[0] for message in messages] == ["step 1", "step 2", "step 4", "step 8"]
    assert messages[0].endswith(
        "The step is skipped, as NonFiniteGrads(action='skip', max_consecutive=None) says; once so far."
    )
    assert len(set(ctx.gather(tuple(messages)))) == 1


@ranks(1, 2, 3)
def test_skipped_grads_accumulate_until_cleared(ctx: RankContext) -> None:
    """The next pass adds to them, as in torch and as after a step that a scaler skips."""
    for config in (ZERO2, ZERO1):
        parity = CorruptedParityRun(
            ctx, SGD, {0: ("0.weight", 1, math.nan)}, config=replace(config, nonfinite=SKIP), lr=0.1
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "gradients of the last step were not cleared")
            for step in range(3):
                parity.steps = step
                parity.backward()
                parity.zero.step()
                parity.oracle.step()
                parity.check()
        assert parity.zero.nonfinite == NonFiniteSteps(3, 3, 3, 3)
        for side in parity.sides:
            side.model.zero_grad()
        parity.train(2)


@pytest.mark.parametrize("fused", [False, True])
@ranks(1, 2)
def test_steps_skipped_by_grad_scaler_are_not_counted(ctx: RankContext, fused: bool) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, AdamW, config=replace(ZERO2, nonfinite=SKIP), lr=0.05, fused=fused)
    twin = make_seeded(mlp, 0)
    plain = shard(twin, AdamW, config=ZERO2, lr=0.05, fused=fused)
    scalers = [GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        for module, optimizer, scaler in ((model, zero, scalers[0]), (twin, plain, scalers[1])):
            factor = math.inf if step == 1 and ctx.rank == 0 else 1.0
            torch.autograd.backward(scaler.scale(regression(module, step) * factor))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_same(model.state_dict(), twin.state_dict())
    assert zero.nonfinite == NonFiniteSteps()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    torch.autograd.backward(regression(model, 4) * math.nan)
    zero.step()
    assert zero.nonfinite == NonFiniteSteps(1, 1, 1, 4)


@ranks(1, 2)
def test_drop_in_with_grad_scaler(ctx: RankContext) -> None:
    for options in DROP_IN_OPTIONS:
        model = make_seeded(mlp, 0)
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, **options, lr=0.05, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            set_grads(model.parameters(), step)
            scaler.scale(torch.zeros(()))
            if step == 1:
                corrupt_grad(model, "4.weight", math.inf)
            before = clone_values(model)
            scaler.step(zero)
            scaler.update()
            assert all_equal([clone_values(model), before]) == (step == 1)
        assert zero.nonfinite == NonFiniteSteps()


@ranks(2, 3)
def test_uneven_inputs_with_shard(ctx: RankContext) -> None:
    """A rank that has joined owns gradient shards, and takes part in the decision."""
    model = make_seeded(mlp, 0)
    zero = shard(model, SGD, config=replace(ZERO2, nonfinite=SKIP), lr=0.1)
    with Join([zero]):
        for step in range(2 + ctx.rank):
            torch.autograd.backward(regression(model, step) * (math.nan if step == ctx.world_size else 1.0))
            before = clone_values(model)
            zero.step()
            zero.zero_grad()
            assert all_equal([clone_values(model), before]) == (step == ctx.world_size)
    assert all_equal(ctx.gather(clone_values(model)))
    assert ctx.gather(zero.nonfinite) == [NonFiniteSteps(1, 1, 1, ctx.world_size + 1)] * ctx.world_size


@ranks(2, 3)
def test_uneven_inputs_under_ddp(ctx: RankContext) -> None:
    for options in DROP_IN_OPTIONS:
        ddp = DistributedDataParallel(make_seeded(mlp, 0))
        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, **options, lr=0.1)
        with Join([ddp, zero]):
            for step in range(2 + ctx.rank):
                zero.zero_grad()
                torch.autograd.backward(regression(ddp, step) * (math.nan if step == ctx.world_size else 1.0))
                zero.step()
        assert all_equal(ctx.gather(clone_values(ddp)))
        assert all(value.isfinite().all() for value in clone_values(ddp))
        assert ctx.gather(zero.nonfinite) == [NonFiniteSteps(1, 1, 1, ctx.world_size + 1)] * ctx.world_size


@ranks(1, 2, 3)
def test_grad_shards_from_ddp_hook(ctx: RankContext) -> None:
    ddp = DistributedDataParallel(make_seeded(mlp, 0))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **DROP_IN_OPTIONS[2], lr=0.05)
    ddp.register_comm_hook(None, zero.ddp_hook())
    for step in range(4):
        torch.autograd.backward(regression(ddp, step) * (math.inf if step == 2 and ctx.rank == 0 else 1.0))
        before = clone_values(ddp)
        zero.step()
        zero.zero_grad()
        assert all_equal([clone_values(ddp), before]) == (step == 2)
    assert ctx.gather(zero.nonfinite) == [NonFiniteSteps(1, 1, 0, 3)] * ctx.world_size


@ranks(1, 2)
def test_stale_grads_of_a_param_without_grad_are_ignored(ctx: RankContext) -> None:
    """Its gradient shard still holds them, and is not used."""
    model = make_seeded(mlp, 0)
    sharded = shard(model, SGD, config=ZeroConfig(nonfinite=SKIP), lr=0.1)
    other = make_seeded(mlp, 0)
    for module, zero in (
        (model, sharded),
        (other, ZeroRedundancyOptimizer(other.parameters(), SGD, **DROP_IN_OPTIONS[2], lr=0.1)),
    ):
        set_grads(module.parameters(), 0)
        corrupt_grad(module, "0.weight", math.nan)
        zero.step()
        zero.zero_grad()
        before = clone_values(module)
        set_grads(list(module.parameters())[2:], 1)
        zero.step()
        assert zero.nonfinite == NonFiniteSteps(1, 1, 0, 1)
        changed = [not torch.equal(new, old) for new, old in zip(clone_values(module), before, strict=True)]
        assert changed == [False, False, *[True] * 8]


class UnusualParams(nn.Module):
    """A complex parameter, an empty one, one without a gradient, and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.complex_param = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.empty_param = nn.Parameter(torch.empty(0, 3))
        self.unused_param = nn.Parameter(torch.ones(3))
        self.dense_param = nn.Parameter(torch.ones(5))


@ranks(1, 2)
def test_complex_and_sparse_gradients(ctx: RankContext) -> None:
    big = torch.finfo(torch.float32).max
    for config in (ZeroConfig(), ZeroConfig(partition=FlatShards())):
        model = UnusualParams()
        zero: Any = ZeroRedundancyOptimizer(
            model.parameters(), SGD, config=replace(config, nonfinite=SKIP, allow_mixed_dtypes=True), lr=0.0
        )
        for value, count in (
            (complex(big, big), 0),
            (complex(0.0, math.nan), 1),
            (complex(-math.inf, 0.0), 2),
            (1.0, 2),
        ):
            model.complex_param.grad = torch.full((4,), value, dtype=torch.complex64)
            model.empty_param.grad, model.dense_param.grad = torch.empty(0, 3), torch.ones(5)
            zero.step()
            assert zero.nonfinite.detected == count, value
    embedding = nn.Embedding(6, 3, sparse=True)
    zero = ZeroRedundancyOptimizer(embedding.parameters(), SparseAdam, config=ZeroConfig(nonfinite=SKIP), lr=0.1)
    for values, count in (([1.0, 2.0], 0), ([1.0, math.inf], 1), ([big, big], 2), ([], 2)):
        row_values = torch.tensor(values).view(-1, 1).expand(-1, 3)
        indices = torch.full((1, len(values)), 4)
        embedding.weight.grad = torch.sparse_coo_tensor(indices, row_values, (6, 3))
        zero.step()
        assert zero.nonfinite.detected == count, values
    assert embedding.weight.isfinite().all()


def test_are_finite_for_every_dtype_and_shape() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128):
        for bad_value in (math.nan, math.inf, -math.inf):
            tensors = [torch.ones(shape, dtype=dtype) for shape in ((), (3, 4), (0,), (40_000,))]
            transposed = torch.ones(5, 6, dtype=dtype).t()
            assert _are_finite([*tensors, transposed]) == [True] * 5
            for index in (0, 1, 3):
                tensors[index].view(-1)[-1] = bad_value
            transposed[1, 2] = bad_value
            assert _are_finite([*tensors, transposed]) == [False, False, True, False, False]
    assert _are_finite([]) == []


@ranks(2)
def test_checkpoint_after_skipped_steps(ctx: RankContext, tmp_path: Path) -> None:
    """The checkpoint equals that of the plain optimizer, which can load it, and training resumes from it."""
    parity = CorruptedParityRun(ctx, AdamW, THREE_CORRUPTIONS, config=replace(ZERO2, nonfinite=SKIP), lr=0.05)
    parity.train(3)
    checkpoint.save(tmp_path, step=3, model=parity.model, optimizer=parity.zero)
    other = make_seeded(mlp, 1)
    plain = AdamW(other.named_parameters(), lr=0.05, foreach=True)
    checkpoint.load(tmp_path, model=other, optimizer=plain)
    assert_same(other.state_dict(), parity.plain_model.state_dict())
    assert_same(plain.state_dict()["state"], parity.plain.state_dict()["state"])
    checkpoint.load(tmp_path, model=parity.model, optimizer=parity.zero)
    parity.train(3)
    parity.check_state()


@ranks(2)
def test_failed_check_on_one_rank_raises_on_all(ctx: RankContext) -> None:
    for facade in ("shard", "drop-in"):
        model = make_seeded(small_model, 0)
        zero: Any = (
            shard(model, SGD, config=replace(ZERO2, nonfinite=SKIP), lr=0.1)
            if facade == "shard"
            else ZeroRedundancyOptimizer(model.parameters(), SGD, **DROP_IN_OPTIONS[0], lr=0.1)
        )
        before = clone_values(model)
        set_grads(model.parameters(), 0)
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank:
                patch.setattr(torch, "aminmax", _raise_memory_error)
            with pytest.raises(MemoryError if ctx.rank else RankFailedError, match="nothing left"):
                zero.step()
        assert all_equal([clone_values(model), before])
        set_grads(model.parameters(), 0)
        zero.step()
        assert not all_equal([clone_values(model), before])


def _raise_memory_error(*_: Any) -> Any:
    raise MemoryError("nothing left")


@ranks(2)
def test_rejected_with_overlap_with_ddp(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"NonFiniteGrads\(\.\.\.\) cannot be used with overlap_with_ddp=True"):
        ZeroRedundancyOptimizer(
            mlp().parameters(), SGD, overlap_with_ddp=True, config=DROP_IN_OPTIONS[0]["config"], lr=0.1
        )


@pytest.mark.gpu
@ranks(1, 2)
def test_skip_on_gpu(ctx: RankContext) -> None:
    """With and without offloaded state, for every dtype."""
    for policies in ({}, {"offload": CPUOffload()}, {"stage": 1}):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            model = make_seeded(mlp, 0).to("cuda", dtype)
            zero = shard(model, AdamW, config=replace(ZERO2, nonfinite=SKIP, **policies), lr=0.05)
            for step in range(4):
                loss = model(batch(step).to("cuda", dtype)).float().square().mean()
                torch.autograd.backward(loss * (math.nan if step == 2 and ctx.rank == 0 else 1.0))
                before, state = clone_values(model), zero.full_state_dict()
                zero.step()
                zero.zero_grad()
                assert all_equal([clone_values(model), before]) == (step == 2)
                if step == 2:
                    assert_same(zero.full_state_dict(), state)
            assert zero.nonfinite == NonFiniteSteps(1, 1, 0, 3)
