"""Thousands of steps with everything that happens in a long training run, in an order that a seed decides."""

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
from tests.support.lost_ranks import assert_swept
from tests.support.monitoring import Footprint, footprint
from tests.support.oracles import average, from_all_ranks, in_rank_order
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

# ---- The plain optimizer with the gradients of all ranks, in one process

WIDTH = 16
ADAMW: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.05}
LATER: dict[str, Any] = {"lr": 0.001, "weight_decay": 0.0}
"""Options of the group that is added."""
FREEZABLE = ("first.bias", "branch.weight", "scale")

Pass = Sequence["Share"]
"""What each rank does in one backward pass."""


class Share(NamedTuple):
    """One rank's part in a backward pass."""

    takes_part: bool
    uses_branch: bool


class Net(nn.Module):
    """Two dtypes, a branch that may be left out, a parameter that begins to train later, and a buffer."""

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
    """On inputs of this position in the data, other ones for each rank."""
    draw = torch.Generator().manual_seed(1000 * position + rank)
    inputs, target = torch.randn(2, 4, WIDTH, generator=draw)
    loss: Tensor = (model(inputs, use_branch) - target).square().mean()
    return loss


def groups_of(model: Net, *, added: bool) -> list[dict[str, Any]]:
    """Two groups, and a third that may have been added, by names."""
    named = dict(model.named_parameters())
    later = named.pop("later")
    flat = {name: param for name, param in named.items() if param.dim() <= 1}
    rest = {name: param for name, param in named.items() if name not in flat}
    groups: list[dict[str, Any]] = [{"params": list(rest.items())}, {"params": list(flat.items()), "weight_decay": 0.0}]
    return [*groups, {"params": [("later", later)], **LATER}] if added else groups


def scheduler_of(optimizer: torch.optim.Optimizer) -> CosineAnnealingWarmRestarts:
    return CosineAnnealingWarmRestarts(optimizer, T_0=40)


class Oracle:
    """The model and the plain optimizer, which know what every rank does.

    Several passes of a step add up in one of three manners: their averages are "added"; each rank adds "onto" what it
    has, and that is averaged; each rank adds up its own, and they are averaged "once".
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self.model = ranks, net()
        self._saved: dict[int, Any] = {}
        self.begin(added=False)

    def begin(self, *, added: bool) -> None:
        """Without any state."""
        self.model.later.requires_grad_(added)
        self.optimizer = torch.optim.AdamW(groups_of(self.model, added=added), **ADAMW)
        self.scheduler = scheduler_of(self.optimizer)
        self.model.zero_grad()

    def add_group(self) -> None:
        self.model.later.requires_grad_(True)
        self.optimizer.add_param_group(groups_of(self.model, added=True)[-1])
        self.scheduler = scheduler_of(self.optimizer)

    def accumulate(self, position: int, passes: Sequence[tuple[Pass, bool]], sums: str) -> None:
        """Gradients of passes one after the other; those with True are kept local until the next one."""
        params = [param for param in self.model.parameters() if param.requires_grad]
        waiting = self._begun(params, sums)
        for number, (shares, is_local) in enumerate(passes):
            for rank, share in enumerate(shares):
                waiting[rank].add(self._grads(params, position + number, rank, share))
            if not is_local and (sums != "once" or number + 1 == len(passes)):
                self._meet(params, waiting, onto=sums == "onto")
                waiting = self._begun(params, sums)

    def _begun(self, params: list[nn.Parameter], sums: str) -> list[_Sum]:
        return [_Sum([param.grad if sums == "onto" else None for param in params]) for _ in range(self._ranks)]

    def _grads(self, params: list[nn.Parameter], position: int, rank: int, share: Share) -> Sequence[Tensor | None]:
        if not share.takes_part:
            return [None] * len(params)
        loss = loss_of(self.model, position, rank, use_branch=share.uses_branch)
        return torch.autograd.grad(loss, params, allow_unused=True)

    def _meet(self, params: list[nn.Parameter], parts: list[_Sum], *, onto: bool) -> None:
        for place, param in enumerate(params):
            mine = [part.grads[place] for part in parts]
            if any(grad is not None for grad in mine):
                mean = average([torch.zeros_like(param) if grad is None else grad for grad in mine])
                param.grad = mean if param.grad is None or onto else param.grad + mean

    def step(self, norm: Tensor | None, most: float) -> None:
        """`norm`: that of all gradients, which has been found; a sum in another order would differ in its last bit."""
        if norm is not None:
            params = [param for param in self.model.parameters() if param.grad is not None]
            expected = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
            torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-7)
            nn.utils.clip_grads_with_norm_(params, most, norm)
        self.optimizer.step()

    def save(self, step: int) -> None:
        """The last two stay."""
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
    """Gradients of one rank, added up in its passes."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = list(grads)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = [a if b is None else b if a is None else a + b for a, b in zip(self.grads, grads, strict=True)]


# ---- Ways to train the model

TINY = FlatShards(bucket_bytes=6000)


class Way:
    """An optimizer for a model. `sums`: how several passes add up, as `Oracle.accumulate` knows it."""

    name: str
    sums: str
    needs_all_ranks = False
    """Every rank must make every backward pass, as with DDP."""
    overlaps = False
    """Reading the model would end what it is to test."""
    optimizer: ZeroRedundancyOptimizer

    def __init__(self, model: Net, *, added: bool) -> None:
        self.model, self.forward = model, model
        self.begin(added=added)

    def begin(self, *, added: bool) -> None:
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def after_backward(self) -> None:
        """What a script does with gradients that nobody else averages."""

    def other_params_train(self) -> None:
        """Some were frozen, thawed or added."""


class Sharded(Way):
    config: ZeroConfig

    def begin(self, *, added: bool) -> None:
        groups = groups_of(self.model, added=added)
        self.optimizer = self.sharded = shard(self.model, torch.optim.AdamW, params=groups, config=self.config, **ADAMW)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharded.no_sync()


class Zero2(Sharded):
    name, sums = "zero2", "added"
    config = ZeroConfig(partition=TINY, consistency_check=ConsistencyCheck(every=3), nonfinite=NonFiniteGrads("raise"))


class Zero1(Sharded):
    name, sums = "zero1", "once"
    config = ZeroConfig(partition=TINY, stage=1, peer_checkpoint=PeerCheckpoint(every=7))


class Overlapped(Sharded):
    name, sums, config, overlaps = "overlap", "added", ZeroConfig(partition=TINY, overlap_param_gather=True), True


class DropIn(Way):
    """Gradients are averaged by the script."""

    name, sums = "drop-in", "onto"
    bucket_view = True

    def begin(self, *, added: bool) -> None:
        groups, config = groups_of(self.model, added=added), ZeroConfig(allow_mixed_dtypes=True)
        self.optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, config=config, parameters_as_bucket_view=self.bucket_view, **ADAMW
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def after_backward(self) -> None:
        params = [param for param in self.model.parameters() if param.requires_grad]
        flags = from_all_ranks(torch.tensor([param.grad is not None for param in params], dtype=torch.int64))
        used = [param for param, count in zip(params, sum(flags, torch.zeros(len(params))), strict=True) if count]
        for dtype in dict.fromkeys(param.dtype for param in used):
            _average_grads([param for param in used if param.dtype == dtype])


def _average_grads(params: list[torch.nn.Parameter]) -> None:
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    mean = average(from_all_ranks(torch.cat([grad.flatten() for grad in grads])))
    for param, part in zip(params, torch.split(mean, [param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).clone()


class UnderDdp(DropIn):
    name, bucket_view, needs_all_ranks = "drop-in under DDP", False, True

    def begin(self, *, added: bool) -> None:
        super().begin(added=added)
        self.other_params_train()

    def other_params_train(self) -> None:
        """DDP must be wrapped anew."""
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.ddp.register_comm_hook(None, in_rank_order)
        self.forward = self.ddp  # type: ignore[assignment]

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.ddp.no_sync()
        return context

    def after_backward(self) -> None:
        pass


WAYS: list[type[Way]] = [Zero2, DropIn, Overlapped, UnderDdp, Zero1]


# ---- The run

EVENTS = {
    "save": 2,
    "save in the background": 3,
    "load": 2,
    "state through a dict": 2,
    "add a group": 2,
    "freeze or thaw": 3,
    "evaluate": 3,
    "a closure fails": 2,
    "a step fails": 1,
    "nothing": 80,
}
"""How often, of a hundred steps; the last one as often as a plan says."""
HARMLESS = ("nothing", "evaluate", "save", "save in the background", "state through a dict")
"""Events after which the same parameters are used."""
CLIP = 0.5


@dataclass(frozen=True)
class Plan:
    """What all ranks do alike, and `timing`, which only decides when."""

    steps: int
    segment: int
    """Steps until the optimizer is given up and another one made."""
    digest: int
    """Steps from one digest to the next."""
    timing: int
    pauses: float
    """Of how many steps, at each of three places."""
    calm: int = EVENTS["nothing"]
    """How often nothing happens, for 20 times that something does."""
    leak: Literal["none", "process", "optimizer"] = "none"
    """An object a step stays in memory, with the process or as long as the optimizer."""
    seed: int = 3
    """All that may happen does happen, also in 200 steps."""


@dataclass
class Record:
    """What a rank has seen."""

    digests: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    midway: list[Footprint] = field(default_factory=list)
    """In the middle of each segment."""
    at_the_end: list[Footprint] = field(default_factory=list)
    between: list[Footprint] = field(default_factory=list)
    """After its end, without any optimizer."""
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds in which it was at work."""


def run_long(ctx: RankContext, folder: Path, plan: Plan) -> Record:
    """The whole run, on this rank."""
    begun, busy = time.monotonic(), time.process_time()
    voyage = LongRun(ctx, folder, plan)
    for step in range(1, plan.steps + 1):
        voyage.advance(step)
    voyage.record.seconds, voyage.record.cpu = time.monotonic() - begun, time.process_time() - busy
    return voyage.record


class LongRun:
    def __init__(self, ctx: RankContext, folder: Path, plan: Plan) -> None:
        self._ctx, self._folder, self._plan, self.record = ctx, folder, plan, Record()
        self._timing = random.Random(f"{plan.timing} {ctx.rank}")
        self._model = net()
        self._oracle = Oracle(ctx.world_size) if ctx.rank == 0 else None
        self._added, self._position, self._saved = False, 0, 0
        self._step, self._done = 0, "nothing yet"
        self._as_before = False
        """Parameters are used as they were in the last step."""
        self._begin(WAYS[0])
        self._save(behind=False)

    # ---- the order of things

    def advance(self, step: int) -> None:
        self._step = step
        draw = random.Random(f"{self._plan.seed} {step}")
        event = draw.choices(list(EVENTS), [*list(EVENTS.values())[:-1], self._plan.calm])[0]
        self._pause()
        getattr(self, "_" + event.replace(" ", "_"))(draw)
        self.record.events[event] += 1
        self._as_before = self._as_before and event in HARMLESS
        self._train(draw)
        self._pause()
        self._leak()
        self._look()

    def _look(self) -> None:
        step, plan = self._step, self._plan
        if not self._way.overlaps or step % 10 == 0:
            self._compare()
        if step % plan.digest == 0:
            self.record.digests.append(self._digest())
        if step % plan.segment == plan.segment // 2:
            self._clear()
            self.record.midway.append(self._footprint())
        if step % plan.segment == 0:
            self._change_ways(random.Random(f"{plan.seed} change {step}"))

    def _pause(self) -> None:
        if self._timing.random() < self._plan.pauses:
            time.sleep(self._timing.uniform(0, 0.003))

    def _leak(self) -> None:
        keeper = {"process": vars(self), "optimizer": vars(self._way.optimizer)}.get(self._plan.leak)
        if keeper is not None:
            keeper.setdefault("leaked", []).append([])

    def _begin(self, make: Callable[..., Way]) -> None:
        self._way = make(self._model, added=self._added)
        self._scheduler = scheduler_of(self._way.optimizer)
        self.record.events[self._way.name] += 1

    def _change_ways(self, draw: random.Random) -> None:
        """The optimizer goes, and nothing of it is left. Another one goes on from what was saved, or afresh."""
        carry = draw.random() < 0.5
        self._clear()
        if carry:
            self._save(behind=False)
        self.record.at_the_end.append(self._footprint())
        del self._way, self._scheduler
        self.record.between.append(self._footprint())
        self._added = self._added and carry
        self._model.later.requires_grad_(self._added)
        self._as_before = False
        self._begin(WAYS[self._step // self._plan.segment % len(WAYS)])
        if carry:
            self._load(draw)
            return
        if self._oracle:
            self._oracle.begin(added=False)
        self._save(behind=False)

    # ---- a step

    def _train(self, draw: random.Random) -> None:
        passes, clips = draw.choice([1, 1, 1, 2, 3]), draw.random() < 0.3
        # Where averages are added, a parameter that was not used in the last step travels later than others, so that
        # its sum is made in another order: one pass there, and passes but the last stay local.
        passes = passes if self._as_before or self._way.sums != "added" else 1
        local = 1.0 if self._way.sums == "added" else 0.5
        plan = [
            (self._shares(draw, alone=passes == 1), number < passes and draw.random() < local)
            for number in range(1, passes + 1)
        ]
        self._done = f"{plan}, clips {clips}"
        by_closure = passes == 1 and draw.random() < 0.2
        self.record.events["with a closure" if by_closure else f"{passes} passes"] += 1
        if by_closure:
            self._way.optimizer.step(partial(self._backward, 0, *plan[0]))
        else:
            for number, part in enumerate(plan):
                self._backward(number, *part)
            self._pause()
        norm = self._clip() if clips and not by_closure else None
        if not by_closure:
            self._way.optimizer.step()
        if self._oracle:
            self._oracle.accumulate(self._position, plan, self._way.sums)
            self._oracle.step(norm, CLIP)
        self._position += passes
        self._as_before = all(share == Share(True, True) for shares, _ in plan for share in shares)
        self._after_the_step(draw)

    def _shares(self, draw: random.Random, *, alone: bool) -> list[Share]:
        """Mostly all ranks do all; else some leave out the branch, or one makes no backward pass.

        That in the only pass of a step: where averages of several are added, one rank's pass would meet another one of
        the rest, and the sum be made in another order.
        """
        ranks, kind, absent = range(self._ctx.world_size), draw.random(), None
        alone, any_order = alone and not self._way.needs_all_ranks, alone or self._way.sums != "added"
        if kind < 0.05 and alone:
            absent = draw.randrange(self._ctx.world_size)
        without = [kind > 0.85 and any_order and draw.random() < 0.5 for _ in ranks]
        self.record.events["a rank without backward"] += absent is not None
        self.record.events["ranks without the branch"] += any(without)
        return [Share(rank != absent, not without[rank]) for rank in ranks]

    def _backward(self, number: int, shares: list[Share], is_local: bool) -> torch.Tensor:
        mine = shares[self._ctx.rank]
        with self._way.no_sync() if is_local else nullcontext():
            # All ranks make the forward pass, in which buffers travel.
            loss = loss_of(self._way.forward, self._position + number, self._ctx.rank, use_branch=mine.uses_branch)
            if mine.takes_part:
                torch.autograd.backward(loss)
        if not is_local:
            self._way.after_backward()
        return loss.detach()

    def _clip(self) -> torch.Tensor:
        self.record.events["clipped"] += 1
        return self._way.optimizer.clip_grad_norm_(CLIP)

    def _after_the_step(self, draw: random.Random) -> None:
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
            self._way.optimizer.zero_grad(set_to_none=kind == "optimizer")
        if self._oracle:
            self._oracle.optimizer.zero_grad(set_to_none=kind != "zeros")

    def _clear(self) -> None:
        self._way.optimizer.zero_grad()
        if self._way.optimizer._peer_checkpointer is not None:
            self._way.optimizer._peer_checkpointer.wait()
        if self._oracle:
            self._oracle.optimizer.zero_grad()

    # ---- events, each named in EVENTS

    def _nothing(self, _: random.Random) -> None:
        pass

    def _save(self, _: random.Random | None = None, *, behind: bool = False) -> None:
        self._saved += 1
        save = checkpoint.async_save if behind else checkpoint.save
        saved = save(
            self._folder,
            step=self._saved,
            model=self._model,
            optimizer=self._way.optimizer,
            scheduler=self._scheduler,
            extra={"position": self._position},
            keep=2,
        )
        self._saving = saved if isinstance(saved, checkpoint.SaveHandle) else None
        if self._oracle:
            self._oracle.save(self._saved)

    def _save_in_the_background(self, draw: random.Random) -> None:
        self._save(draw, behind=True)

    def _load(self, _: random.Random) -> None:
        """The run goes back to where it was."""
        found = checkpoint.load(
            self._folder, model=self._model, optimizer=self._way.optimizer, scheduler=self._scheduler
        )
        assert found.step == self._saved
        self._position = found.extra["position"]
        if self._oracle:
            self._oracle.load(self._saved)
        self._compare()

    def _state_through_a_dict(self, _: random.Random) -> None:
        mine = self._way.optimizer.full_state_dict()
        if self._oracle:
            assert mine is not None
            assert_same_state(mine["state"], self._oracle.optimizer.state_dict()["state"])
        self._way.optimizer.load_state_dict(broadcast_object(mine, 0))

    def _add_a_group(self, _: random.Random) -> None:
        """Once, and in the first half of a segment."""
        if self._added or self._step % self._plan.segment >= self._plan.segment // 2:
            return
        self._added = True
        self._model.later.requires_grad_(True)
        self._way.optimizer.add_param_group(groups_of(self._model, added=True)[-1])
        self._scheduler = scheduler_of(self._way.optimizer)
        self._way.other_params_train()
        if self._oracle:
            self._oracle.add_group()
        self.record.events["added"] += 1
        self._save()  # what was saved before has a group less

    def _freeze_or_thaw(self, draw: random.Random) -> None:
        name = draw.choice(FREEZABLE)
        for model in (self._model, self._oracle.model) if self._oracle else (self._model,):
            param = model.get_parameter(name)
            param.requires_grad_(not param.requires_grad)
        self._way.other_params_train()

    @torch.no_grad()
    def _evaluate(self, _: random.Random) -> None:
        """As scripts do between steps."""
        self._model.eval()
        loss_of(self._model, self._position, self._ctx.rank)
        self._model.train()

    def _a_closure_fails(self, draw: random.Random) -> None:
        """On one rank, which makes no backward pass unless others rely on it."""
        ranks, failing = range(self._ctx.world_size), draw.randrange(self._ctx.world_size)
        shares = [Share(rank != failing or self._way.needs_all_ranks, True) for rank in ranks]

        def closure() -> torch.Tensor:
            loss = self._backward(0, shares, False)
            if self._ctx.rank == failing:
                raise OSError("on purpose")
            return loss

        with self._raised(failing):
            self._way.optimizer.step(closure)
        self._clear()

    def _a_step_fails(self, draw: random.Random) -> None:
        """On one rank, when others have made theirs: all go back to what was saved."""
        failing = draw.randrange(self._ctx.world_size)
        self._backward(0, [Share(True, True)] * self._ctx.world_size, False)

        def refuse(*_: Any) -> None:
            raise OSError("on purpose")

        hook = self._way.optimizer.optim.register_step_pre_hook(refuse) if self._ctx.rank == failing else None
        with self._raised(failing):
            self._way.optimizer.step()
        if hook is not None:
            hook.remove()
        self._clear()
        self._load(draw)

    @contextmanager
    def _raised(self, failing: int) -> Iterator[None]:
        error = OSError if self._ctx.rank == failing else RankFailedError
        with pytest.raises(error, match="on purpose"):
            yield

    # ---- what is looked at

    def _compare(self) -> None:
        if self._oracle:
            self._oracle.compare(self._model, f"after step {self._step} ({self._done}) with {self._way.name}")

    def _digest(self) -> str:
        """Of all parameters, and of the state that this rank holds."""
        tensors = [param.detach() for param in self._model.parameters()]
        for param in self._model.parameters():
            tensors += [it for it in self._way.optimizer.state.get(param, {}).values() if isinstance(it, torch.Tensor)]
        data = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def _footprint(self) -> Footprint:
        if self._saving is not None:
            self._saving.wait()
        dist.barrier()
        if self._ctx.rank == 0:
            assert_swept(self._folder)
        return footprint()
