"""Thousands of steps with all events of a long training run. A seed decides their order."""

from __future__ import annotations

import copy
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from tests.support.checkpoints import assert_same_state
from tests.support.lost_ranks import assert_no_leftovers
from tests.support.monitoring import Footprint, footprint
from tests.support.oracles import average, gather_from_all_ranks, rank_order_hook
from tests.support.pool import RankContext
from zeroshard import (
    ConsistencyCheck,
    FlatShards,
    NonFiniteGrads,
    PeerCheckpoint,
    RankFailedError,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    broadcast_object,
    checkpoint,
    shard,
)
from zeroshard.comm import failure

# ---- The plain optimizer with the gradients of all ranks, in one process

WIDTH = 16
ADAMW: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.05}
ADDED_GROUP: dict[str, Any] = {"lr": 0.001, "weight_decay": 0.0}
"""Options of the group that is added."""
FREEZABLE = ("first.bias", "branch.weight", "scale")

Pass = Sequence["RankPass"]
"""One backward pass of all ranks."""


class RankPass(NamedTuple):
    """One backward pass of one rank."""

    takes_part: bool
    uses_branch: bool


class Net(nn.Module):
    """A model with two dtypes, an optional branch, a parameter that trains only later, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2 * WIDTH, dtype=torch.float64))
        self.later = nn.Parameter(torch.zeros(2 * WIDTH), requires_grad=False)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, use_branch: bool = True) -> Tensor:
        if self.training:
            self.passes += 1
        hidden = torch.tanh(self.first(x))
        if use_branch:
            hidden = hidden + self.branch(hidden)
        out: Tensor = self.last((hidden.double() * self.scale).float() + self.later)
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, position: int, rank: int, *, use_branch: bool = True) -> Tensor:
    """Return the loss on the inputs of this position and rank."""
    generator = torch.Generator().manual_seed(1000 * position + rank)
    inputs, target = torch.randn(2, 4, WIDTH, generator=generator)
    loss: Tensor = (model(inputs, use_branch) - target).square().mean()
    return loss


def make_groups(model: Net, *, added: bool) -> list[dict[str, Any]]:
    """Return two groups of named parameters, and a third if it was added."""
    named = dict(model.named_parameters())
    later = named.pop("later")
    vectors = {name: param for name, param in named.items() if param.dim() <= 1}
    others = {name: param for name, param in named.items() if name not in vectors}
    groups: list[dict[str, Any]] = [
        {"params": list(others.items())},
        {"params": list(vectors.items()), "weight_decay": 0.0},
    ]
    return [*groups, {"params": [("later", later)], **ADDED_GROUP}] if added else groups


def make_scheduler(optimizer: torch.optim.Optimizer) -> CosineAnnealingWarmRestarts:
    return CosineAnnealingWarmRestarts(optimizer, T_0=40)


class Oracle:
    """The model and the plain optimizer, trained with the gradients of all ranks.

    `accumulation` says how the passes of a step add up:

    - "sum of means": each pass is averaged, and the averages are added.
    - "mean of totals": each rank adds a pass to its `param.grad`, and the results are averaged.
    - "mean of sums": each rank adds up its passes, and the sums are averaged once.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self.model = ranks, net()
        self._saved: dict[int, Any] = {}
        self.make_optimizer(added=False)

    def make_optimizer(self, *, added: bool) -> None:
        """Create a new optimizer without state."""
        self.model.later.requires_grad_(added)
        self.optimizer = torch.optim.AdamW(make_groups(self.model, added=added), **ADAMW)
        self.scheduler = make_scheduler(self.optimizer)
        self.model.zero_grad()

    def add_group(self) -> None:
        self.model.later.requires_grad_(True)
        self.optimizer.add_param_group(make_groups(self.model, added=True)[-1])
        self.scheduler = make_scheduler(self.optimizer)

    def accumulate(self, position: int, passes: Sequence[tuple[Pass, bool]], accumulation: str) -> None:
        """Accumulate the gradients of all passes. Passes with True stay local until the next one."""
        params = [param for param in self.model.parameters() if param.requires_grad]
        sums = self._make_sums(params, accumulation)
        for number, (rank_passes, is_local) in enumerate(passes):
            for rank, rank_pass in enumerate(rank_passes):
                sums[rank].add(self._grads(params, position + number, rank, rank_pass))
            if not is_local and (accumulation != "mean of sums" or number + 1 == len(passes)):
                self._average(params, sums, replace=accumulation == "mean of totals")
                sums = self._make_sums(params, accumulation)

    def _make_sums(self, params: list[nn.Parameter], accumulation: str) -> list[_Sum]:
        starts_with_grad = accumulation == "mean of totals"
        return [_Sum([param.grad if starts_with_grad else None for param in params]) for _ in range(self._ranks)]

    def _grads(
        self, params: list[nn.Parameter], position: int, rank: int, rank_pass: RankPass
    ) -> Sequence[Tensor | None]:
        if not rank_pass.takes_part:
            return [None] * len(params)
        loss = loss_of(self.model, position, rank, use_branch=rank_pass.uses_branch)
        return torch.autograd.grad(loss, params, allow_unused=True)

    def _average(self, params: list[nn.Parameter], sums: list[_Sum], *, replace: bool) -> None:
        for index, param in enumerate(params):
            by_rank = [rank_sum.grads[index] for rank_sum in sums]
            if any(grad is not None for grad in by_rank):
                mean = average([torch.zeros_like(param) if grad is None else grad for grad in by_rank])
                param.grad = mean if param.grad is None or replace else param.grad + mean

    def step(self, norm: Tensor | None, max_norm: float) -> None:
        """Clip and step. `norm` is the result of the optimizer under test: summed differently, its last bit differs."""
        if norm is not None:
            params = [param for param in self.model.parameters() if param.grad is not None]
            expected = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
            torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-7)
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        self.optimizer.step()

    def save(self, step: int) -> None:
        """Save to memory. Keep only the last two."""
        self._saved[step] = copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict())
        )
        for old in sorted(self._saved)[:-2]:
            del self._saved[old]

    def load(self, step: int) -> None:
        model, optimizer, scheduler = copy.deepcopy(self._saved[step])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)

    def compare(self, model: nn.Module, where: str) -> None:
        for (name, ours), theirs in zip(model.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} {where}: differs by {(ours - theirs).abs().max().item()}"


class _Sum:
    """Accumulate the gradients of one rank over its passes."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = list(grads)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = [a if b is None else b if a is None else a + b for a, b in zip(self.grads, grads, strict=True)]


# ---- Training modes

TINY = FlatShards(bucket_bytes=6000)


class TrainingMode:
    """An optimizer for a model. `accumulation`: see `Oracle`."""

    name: str
    accumulation: str
    needs_all_ranks = False
    """Whether every rank must make every backward pass, as with DDP."""
    overlaps = False
    """Whether reading parameters would end the overlap under test."""
    optimizer: ZeroRedundancyOptimizer

    def __init__(self, model: Net, *, added: bool) -> None:
        self.model, self.forward = model, model
        self.make_optimizer(added=added)

    def make_optimizer(self, *, added: bool) -> None:
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def after_backward(self) -> None:
        """Average gradients, if the training script must do so."""

    def after_requires_grad_change(self) -> None:
        """Called after parameters were frozen, unfrozen or added."""


class Sharded(TrainingMode):
    config: ZeroConfig

    def make_optimizer(self, *, added: bool) -> None:
        groups = make_groups(self.model, added=added)
        self.optimizer = self.sharded = shard(self.model, torch.optim.AdamW, params=groups, config=self.config, **ADAMW)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharded.no_sync()


class Zero2(Sharded):
    name, accumulation = "zero2", "sum of means"
    config = ZeroConfig(partition=TINY, consistency_check=ConsistencyCheck(every=3), nonfinite=NonFiniteGrads("raise"))


class Zero1(Sharded):
    name, accumulation = "zero1", "mean of sums"
    config = ZeroConfig(partition=TINY, stage=1, peer_checkpoint=PeerCheckpoint(every=7))


class Overlapped(Sharded):
    name, accumulation, overlaps = "overlap", "sum of means", True
    config = ZeroConfig(partition=TINY, overlap_param_gather=True)


class DropIn(TrainingMode):
    """The training script averages gradients."""

    name, accumulation = "drop-in", "mean of totals"
    bucket_view = True

    def make_optimizer(self, *, added: bool) -> None:
        groups, config = make_groups(self.model, added=added), ZeroConfig(allow_mixed_dtypes=True)
        self.optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, config=config, parameters_as_bucket_view=self.bucket_view, **ADAMW
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def after_backward(self) -> None:
        params = [param for param in self.model.parameters() if param.requires_grad]
        has_grad = gather_from_all_ranks(torch.tensor([param.grad is not None for param in params], dtype=torch.int64))
        used = [param for param, count in zip(params, sum(has_grad, torch.zeros(len(params))), strict=True) if count]
        for dtype in dict.fromkeys(param.dtype for param in used):
            _average_grads([param for param in used if param.dtype == dtype])


def _average_grads(params: list[torch.nn.Parameter]) -> None:
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    mean = average(gather_from_all_ranks(torch.cat([grad.flatten() for grad in grads])))
    for param, part in zip(params, torch.split(mean, [param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).clone()


class UnderDdp(DropIn):
    name, bucket_view, needs_all_ranks = "drop-in under DDP", False, True

    def make_optimizer(self, *, added: bool) -> None:
        super().make_optimizer(added=added)
        self.after_requires_grad_change()

    def after_requires_grad_change(self) -> None:
        """Wrap the model in a new DDP, as DDP requires."""
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.ddp.register_comm_hook(None, rank_order_hook)
        self.forward = self.ddp  # type: ignore[assignment]

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.ddp.no_sync()
        return context

    def after_backward(self) -> None:
        pass


TRAINING_MODES: list[type[TrainingMode]] = [Zero2, DropIn, Overlapped, UnderDdp, Zero1]


# ---- The run

EVENTS = {
    "save": 2,
    "async save": 3,
    "load": 2,
    "state dict round trip": 2,
    "add group": 2,
    "freeze or unfreeze": 3,
    "evaluate": 3,
    "fail in closure": 2,
    "fail in step": 1,
    "nothing": 80,
}
"""Weights of the events, which add up to 100. A plan replaces the last one."""
EVENTS_WITHOUT_EFFECT = ("nothing", "evaluate", "save", "async save", "state dict round trip")
"""Events after which the same parameters get gradients."""
MAX_NORM = 0.5


@dataclass(frozen=True)
class Plan:
    """Seed and options of a run, the same on all ranks except `timing`, which only adds delays."""

    steps: int
    segment: int
    """Steps until the optimizer is replaced by a new one."""
    digest_every: int
    """Steps from one digest to the next."""
    timing: int
    """Seed of the pauses."""
    pause_probability: float
    """Probability of a pause at each of three places in a step."""
    nothing_weight: int = EVENTS["nothing"]
    """Weight of steps without an event. All events together have a weight of 20."""
    leak: Literal["none", "process", "optimizer"] = "none"
    """Leak one object per step, which lives as long as the process or the optimizer."""
    seed: int = 3
    """With this seed every event occurs even in 200 steps."""


@dataclass
class Record:
    """The record of a rank."""

    digests: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    segment_middles: list[Footprint] = field(default_factory=list)
    """In the middle of each segment."""
    segment_ends: list[Footprint] = field(default_factory=list)
    """At the end of each segment, with its optimizer."""
    between_segments: list[Footprint] = field(default_factory=list)
    """After each segment, without any optimizer."""
    seconds: float = 0.0
    cpu: float = 0.0
    """CPU seconds."""


def run_long(ctx: RankContext, folder: Path, plan: Plan) -> Record:
    """Run the plan on this rank."""
    start, cpu_start = time.monotonic(), time.process_time()
    run = LongRun(ctx, folder, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "WATCHER_IDLE_S", 0.2)  # each footprint waits until the watcher thread has ended
        for step in range(1, plan.steps + 1):
            run.advance(step)
    run.record.seconds, run.record.cpu = time.monotonic() - start, time.process_time() - cpu_start
    return run.record


class LongRun:
    def __init__(self, ctx: RankContext, folder: Path, plan: Plan) -> None:
        self._ctx, self._folder, self._plan, self.record = ctx, folder, plan, Record()
        self._timing = random.Random(f"{plan.timing} {ctx.rank}")
        self._model = net()
        self._oracle = Oracle(ctx.world_size) if ctx.rank == 0 else None
        self._added, self._position, self._saved = False, 0, 0
        self._step, self._last_passes = 0, "no pass yet"
        self._uses_same_params = False
        """Whether all ranks used all parameters in the last step, and the same parameters still train."""
        self._start_mode(TRAINING_MODES[0])
        self._save(in_background=False)

    # ---- events and checks

    def advance(self, step: int) -> None:
        self._step = step
        draw = random.Random(f"{self._plan.seed} {step}")
        event = draw.choices(list(EVENTS), [*list(EVENTS.values())[:-1], self._plan.nothing_weight])[0]
        self._pause()
        getattr(self, "_" + event.replace(" ", "_"))(draw)
        self.record.events[event] += 1
        self._uses_same_params = self._uses_same_params and event in EVENTS_WITHOUT_EFFECT
        self._train(draw)
        self._pause()
        self._leak()
        self._check()

    def _check(self) -> None:
        step, plan = self._step, self._plan
        if not self._mode.overlaps or step % 10 == 0:
            self._compare()
        if step % plan.digest_every == 0:
            self.record.digests.append(self._digest())
        if step % plan.segment == plan.segment // 2:
            self._clear()
            self.record.segment_middles.append(self._footprint())
        if step % plan.segment == 0:
            self._change_mode(random.Random(f"{plan.seed} change {step}"))

    def _pause(self) -> None:
        if self._timing.random() < self._plan.pause_probability:
            time.sleep(self._timing.uniform(0, 0.003))

    def _leak(self) -> None:
        owner = {"process": vars(self), "optimizer": vars(self._mode.optimizer)}.get(self._plan.leak)
        if owner is not None:
            owner.setdefault("leaked", []).append([])

    def _start_mode(self, make: Callable[..., TrainingMode]) -> None:
        self._mode = make(self._model, added=self._added)
        self._scheduler = make_scheduler(self._mode.optimizer)
        self.record.events[self._mode.name] += 1

    def _change_mode(self, draw: random.Random) -> None:
        """Delete the optimizer and check for leaks. A new one resumes from the checkpoint or starts from scratch."""
        resumes = draw.random() < 0.5
        self._clear()
        if resumes:
            self._save(in_background=False)
        self.record.segment_ends.append(self._footprint())
        del self._mode, self._scheduler
        self.record.between_segments.append(self._footprint())
        self._added = self._added and resumes
        self._model.later.requires_grad_(self._added)
        self._uses_same_params = False
        self._start_mode(TRAINING_MODES[self._step // self._plan.segment % len(TRAINING_MODES)])
        if resumes:
            self._load(draw)
            return
        if self._oracle:
            self._oracle.make_optimizer(added=False)
        self._save(in_background=False)

    # ---- a step

    def _train(self, draw: random.Random) -> None:
        num_passes, clips = draw.choice([1, 1, 1, 2, 3]), draw.random() < 0.3
        # With a sum of means, a parameter that was not used in the last step is reduced later than the others, and its
        # gradients are summed in another order. Then make only one pass, and keep all passes but the last local.
        num_passes = num_passes if self._uses_same_params or self._mode.accumulation != "sum of means" else 1
        local_probability = 1.0 if self._mode.accumulation == "sum of means" else 0.5
        passes = [
            (self._draw_pass(draw, is_only=num_passes == 1), number < num_passes and draw.random() < local_probability)
            for number in range(1, num_passes + 1)
        ]
        self._last_passes = f"{passes}, clips {clips}"
        uses_closure = num_passes == 1 and draw.random() < 0.2
        self.record.events["with a closure" if uses_closure else f"{num_passes} passes"] += 1
        if uses_closure:
            self._mode.optimizer.step(partial(self._backward, 0, *passes[0]))
        else:
            for number, single_pass in enumerate(passes):
                self._backward(number, *single_pass)
            self._pause()
        norm = self._clip() if clips and not uses_closure else None
        if not uses_closure:
            self._mode.optimizer.step()
        if self._oracle:
            self._oracle.accumulate(self._position, passes, self._mode.accumulation)
            self._oracle.step(norm, MAX_NORM)
        self._position += num_passes
        self._uses_same_params = all(
            rank_pass == RankPass(True, True) for rank_passes, _ in passes for rank_pass in rank_passes
        )
        self._after_step(draw)

    def _draw_pass(self, draw: random.Random, *, is_only: bool) -> list[RankPass]:
        """Usually all ranks make the full pass. Otherwise some skip the branch, or one makes no backward pass.

        A rank skips backward only in the only pass of a step. In a sum of means, its next pass would otherwise be
        reduced with this pass of the others, and gradients would be summed in another order.
        """
        ranks, chance, absent = range(self._ctx.world_size), draw.random(), None
        may_skip_branch = is_only or self._mode.accumulation != "sum of means"
        may_skip_backward = is_only and not self._mode.needs_all_ranks
        if chance < 0.05 and may_skip_backward:
            absent = draw.randrange(self._ctx.world_size)
        skips_branch = [chance > 0.85 and may_skip_branch and draw.random() < 0.5 for _ in ranks]
        self.record.events["a rank without backward"] += absent is not None
        self.record.events["ranks without the branch"] += any(skips_branch)
        return [RankPass(rank != absent, not skips_branch[rank]) for rank in ranks]

    def _backward(self, number: int, rank_passes: list[RankPass], is_local: bool) -> torch.Tensor:
        mine = rank_passes[self._ctx.rank]
        with self._mode.no_sync() if is_local else nullcontext():
            # All ranks make the forward pass, which broadcasts buffers.
            loss = loss_of(self._mode.forward, self._position + number, self._ctx.rank, use_branch=mine.uses_branch)
            if mine.takes_part:
                torch.autograd.backward(loss)
        if not is_local:
            self._mode.after_backward()
        return loss.detach()

    def _clip(self) -> torch.Tensor:
        self.record.events["clipped"] += 1
        return self._mode.optimizer.clip_grad_norm_(MAX_NORM)

    def _after_step(self, draw: random.Random) -> None:
        if draw.random() < 0.3:
            self.record.events["scheduler"] += 1
            self._scheduler.step()
            if self._oracle:
                self._oracle.scheduler.step()
        kind = draw.choice(["optimizer", "model", "zeros"])
        self.record.events[f"cleared: {kind}"] += 1
        if kind == "model":
            self._model.zero_grad()
        else:
            self._mode.optimizer.zero_grad(set_to_none=kind == "optimizer")
        if self._oracle:
            self._oracle.optimizer.zero_grad(set_to_none=kind != "zeros")

    def _clear(self) -> None:
        self._mode.optimizer.zero_grad()
        if self._mode.optimizer._peer_checkpointer is not None:
            self._mode.optimizer._peer_checkpointer.wait()
        if self._oracle:
            self._oracle.optimizer.zero_grad()

    # ---- events: methods named as in EVENTS

    def _nothing(self, _: random.Random) -> None:
        pass

    def _save(self, _: random.Random | None = None, *, in_background: bool = False) -> None:
        self._saved += 1
        save = checkpoint.async_save if in_background else checkpoint.save
        result = save(
            self._folder,
            step=self._saved,
            model=self._model,
            optimizer=self._mode.optimizer,
            scheduler=self._scheduler,
            extra={"position": self._position},
            keep=2,
        )
        self._save_handle = result if isinstance(result, checkpoint.SaveHandle) else None
        if self._oracle:
            self._oracle.save(self._saved)

    def _async_save(self, draw: random.Random) -> None:
        self._save(draw, in_background=True)

    def _load(self, _: random.Random) -> None:
        """Load the latest checkpoint."""
        result = checkpoint.load(
            self._folder, model=self._model, optimizer=self._mode.optimizer, scheduler=self._scheduler
        )
        assert result.step == self._saved
        self._position = result.extra["position"]
        if self._oracle:
            self._oracle.load(self._saved)
        self._compare()

    def _state_dict_round_trip(self, _: random.Random) -> None:
        state_dict = self._mode.optimizer.full_state_dict()
        if self._oracle:
            assert state_dict is not None
            assert_same_state(state_dict["state"], self._oracle.optimizer.state_dict()["state"])
        self._mode.optimizer.load_state_dict(broadcast_object(state_dict, 0))

    def _add_group(self, _: random.Random) -> None:
        """Add the group, if it is missing and this is the first half of a segment."""
        if self._added or self._step % self._plan.segment >= self._plan.segment // 2:
            return
        self._added = True
        self._model.later.requires_grad_(True)
        self._mode.optimizer.add_param_group(make_groups(self._model, added=True)[-1])
        self._scheduler = make_scheduler(self._mode.optimizer)
        self._mode.after_requires_grad_change()
        if self._oracle:
            self._oracle.add_group()
        self.record.events["added"] += 1
        self._save()  # earlier checkpoints have one group less

    def _freeze_or_unfreeze(self, draw: random.Random) -> None:
        name = draw.choice(FREEZABLE)
        for model in (self._model, self._oracle.model) if self._oracle else (self._model,):
            param = model.get_parameter(name)
            param.requires_grad_(not param.requires_grad)
        self._mode.after_requires_grad_change()

    @torch.no_grad()
    def _evaluate(self, _: random.Random) -> None:
        """Evaluate as scripts do between steps."""
        self._model.eval()
        loss_of(self._model, self._position, self._ctx.rank)
        self._model.train()

    def _fail_in_closure(self, draw: random.Random) -> None:
        """Fail on one rank, which makes no backward pass unless others need it."""
        ranks, failing = range(self._ctx.world_size), draw.randrange(self._ctx.world_size)
        rank_passes = [RankPass(rank != failing or self._mode.needs_all_ranks, True) for rank in ranks]

        def closure() -> torch.Tensor:
            loss = self._backward(0, rank_passes, False)
            if self._ctx.rank == failing:
                raise OSError("on purpose")
            return loss

        with self._assert_raises(failing):
            self._mode.optimizer.step(closure)
        self._clear()

    def _fail_in_step(self, draw: random.Random) -> None:
        """Fail on one rank after others have updated their parameters. All load the latest checkpoint."""
        failing = draw.randrange(self._ctx.world_size)
        self._backward(0, [RankPass(True, True)] * self._ctx.world_size, False)

        def fail(*_: Any) -> None:
            raise OSError("on purpose")

        hook = self._mode.optimizer.optim.register_step_pre_hook(fail) if self._ctx.rank == failing else None
        with self._assert_raises(failing):
            self._mode.optimizer.step()
        if hook is not None:
            hook.remove()
        self._clear()
        self._load(draw)

    @contextmanager
    def _assert_raises(self, failing: int) -> Iterator[None]:
        error = OSError if self._ctx.rank == failing else RankFailedError
        with pytest.raises(error, match="on purpose"):
            yield

    # ---- checks

    def _compare(self) -> None:
        if self._oracle:
            self._oracle.compare(self._model, f"after step {self._step} ({self._last_passes}) with {self._mode.name}")

    def _digest(self) -> str:
        """Digest of all parameters and of this rank's state."""
        tensors = [param.detach() for param in self._model.parameters()]
        for param in self._model.parameters():
            values = self._mode.optimizer.state.get(param, {}).values()
            tensors += [value for value in values if isinstance(value, torch.Tensor)]
        data = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def _footprint(self) -> Footprint:
        if self._save_handle is not None:
            self._save_handle.wait()
        dist.barrier()
        if self._ctx.rank == 0:
            assert_no_leftovers(self._folder)
        return footprint()
