"""Draw valid programs. This module defines which parts can be combined.

A program is a function of a sequence of small integers. Random integers give a random program; `shrink.py` deletes and
lowers integers of a failing program. Every sequence gives a valid program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import torch

from tests.programs.program import (
    BLOCK_NAMES,
    MODES,
    UNUSED,
    AddGroup,
    Backward,
    Block,
    Clip,
    Consolidate,
    EditOptions,
    EditState,
    Evaluate,
    Freeze,
    Mode,
    Op,
    Optimizer,
    Program,
    RejectedCall,
    Restart,
    ScaleGrads,
    Step,
    UnevenInputs,
    ZeroGrad,
)

T = TypeVar("T")

VARIANTS = {
    **dict.fromkeys(BLOCK_NAMES, 1),
    "MLP": 3,
    "Conv": 3,
    "Embedding": 3,
    "Tied": 2,
    "Shared": 2,
    "Experts": 2,
    "RankExperts": 3,
    "Unused": 2,
    "BatchNorm": 3,
    "Listed": 2,
    "Parametrized": 3,
    "Mixed": 3,
    "Empty": 2,
    "Transposed": 2,
}
CHECKPOINTING = ("", "", "", "", "", "", "", "", "non-reentrant", "reentrant")
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "SGD": (("momentum", 0.9), ("nesterov", True), ("weight_decay", 0.1), ("maximize", True), ("foreach", True)),
    "Adam": (("amsgrad", True), ("weight_decay", 0.1), ("maximize", True), ("foreach", True)),
    "AdamW": (("amsgrad", True), ("foreach", True), ("maximize", True), ("foreach", False), ("fused", True)),
    "Adagrad": (("lr_decay", 0.1), ("weight_decay", 0.1), ("foreach", True), ("maximize", True)),
    "RMSprop": (("momentum", 0.9), ("centered", True), ("foreach", True), ("maximize", True)),
    "NAdam": (("weight_decay", 0.1), ("decoupled_weight_decay", True), ("foreach", True)),
    "Adamax": (("weight_decay", 0.1), ("foreach", True), ("maximize", True)),
    "Muon + AdamW": (("amsgrad", True), ("weight_decay", 0.1)),
}
SCHEDULERS = ("", "StepLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau")


def _restores_state(optimizer_class: Callable[..., torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer can step after its state was removed, and with groups added later."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizer_class([param])
    optimizer.state.clear()
    param.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


if not _restores_state(torch.optim.Adagrad):  # before torch 2.13
    del OPTIONS["Adagrad"]
EDITS = ("clear", "delete every other", "pop the first", "zero in place", "halve in place", "assign zeros")
REJECTED_IN_ALL_MODES = (
    "load",
    "known parameter",
    "LBFGS",
    "flat Muon",
    "shard of DDP",
    "mixed dtypes",
    "option that differs",
)


class Draws:
    """Replays the given choices, then makes random ones, or the simplest ones if `random` is None.

    The first of several options is the simplest; shrinking ends with it.
    """

    def __init__(self, replayed: Sequence[int] = (), random: Random | None = None) -> None:
        self._replayed, self._random = replayed, random
        self.made: list[int] = []
        self.spans: list[tuple[int, int]] = []
        """Start and end of choices that belong together and can be deleted together."""

    def choose(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)]

    def flip(self, chances: int = 2) -> bool:
        """Return True with a probability of 1 / `chances`."""
        return self.number(0, chances - 1) == chances - 1

    def number(self, first: int, last: int) -> int:
        count = last - first + 1
        if len(self.made) < len(self._replayed):
            value = self._replayed[len(self.made)] % count
        else:
            value = self._random.randrange(count) if self._random is not None else 0
        self.made.append(value)
        return first + value

    def repeat(self, max_count: int, chances: int) -> Iterator[int]:
        """Iterate at most `max_count` times; stop before each iteration with a probability of 1 / `chances`."""
        for iteration in range(max_count):
            start = len(self.made)
            if self.number(0, chances - 1) == 0:
                return
            yield iteration
            self.spans.append((start, len(self.made)))


def draw_program(draws: Draws, ranks: int, modes: Sequence[str] = MODES) -> Program:
    """Draw a program for this number of ranks."""
    mode = _draw_mode(draws, ranks, modes)
    optimizer = _draw_optimizer(draws, mode)
    scaler = not mode.is_overlapped and not mode.master_weights and draws.flip(5)
    if dict(optimizer.options).get("fused") and mode.skip_nonfinite:
        scaler = False  # fused kernels that skip a step create zero state; a step that is not called creates none
    without_blocks = Program(ranks, mode, (), optimizer, (), scaler=scaler)
    blocks = _draw_blocks(draws, without_blocks)
    dtype = "bfloat16" if mode.master_weights else draws.choose(("float32", "float32", "float64"))
    without_loop = replace(
        without_blocks, blocks=blocks, dtype=dtype, batch=draws.number(4, 6), seed=draws.number(0, 99)
    )
    return _Loop(draws, without_loop).draw()


def random_program(seed: int, ranks: int, modes: Sequence[str] = MODES) -> Program:
    return draw_program(Draws(random=Random(seed)), ranks, modes)


def _draw_mode(draws: Draws, ranks: int, modes: Sequence[str]) -> Mode:
    kind = draws.choose([*modes, *("shard" for name in modes if name == "shard" for _ in range(3))])
    small_buckets = draws.flip()
    if kind in ("overlap", "overlap_interleaved"):
        return Mode(kind, small_buckets=small_buckets)
    master_weights = kind not in ("dropin", "bucket_view") and draws.flip(6)
    reduce_dtype = "bfloat16" if kind in ("shard", "ddp_hook") and draws.flip(6) else ""
    mode = Mode(
        kind,
        small_buckets=small_buckets,
        master_weights=master_weights,
        reduce_dtype=reduce_dtype,
        skip_nonfinite=draws.flip(6),
    )
    if kind != "shard":
        return mode
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    return replace(
        mode,
        stage=draws.choose((2, 1)),
        overlap_param_gather=draws.flip(3),
        shard_group_size=draws.choose(divisors) if draws.flip(4) else 0,
        mesh=draws.flip(3),
        offload=draws.flip(6),
        whole_params=not master_weights and draws.flip(8),
    )


def _draw_optimizer(draws: Draws, mode: Mode) -> Optimizer:
    kinds = [kind for kind in OPTIONS if kind != "Muon + AdamW" or (mode.kind == "shard" and not mode.master_weights)]
    kind = draws.choose(kinds)
    lr = 0.01 if kind in ("Adam", "AdamW", "NAdam", "Adamax", "RMSprop", "Muon + AdamW") else 0.05
    options: dict[str, Any] = {"lr": lr}
    if kind != "SGD":
        options["eps"] = 1e-4  # otherwise noise in gradients near zero becomes full steps
    for name, value in OPTIONS[kind]:
        if draws.flip(3):
            options.setdefault(name, value)
    if kind == "SGD" and options.get("maximize"):
        options["lr"] = 0.002  # otherwise the loss diverges, and so do last bits
    if options.get("nesterov"):
        options.setdefault("momentum", 0.9)
    if options.get("fused"):
        options.pop("foreach", None)
    groups = "one" if kind == "Muon + AdamW" else draws.choose(("one", "by dimensions", "alternating"))
    scheduler = draws.choose(SCHEDULERS) if draws.flip(3) else ""
    return Optimizer(kind, tuple(options.items()), groups, scheduler)


def _draw_blocks(draws: Draws, program: Program) -> tuple[Block, ...]:
    mode, options = program.mode, dict(program.optimizer.options)
    kinds = list(BLOCK_NAMES)
    if mode.master_weights:  # the oracle averages without DDP, which would broadcast buffers
        kinds = [kind for kind in kinds if kind not in ("BatchNorm", "Centre", "Complex", "Mixed")]
    if program.optimizer.kind == "Muon + AdamW":
        kinds = [kind for kind in kinds if kind not in ("Complex", "Mixed")]
    if options.get("fused") or program.optimizer.kind in ("NAdam", "Adamax"):
        kinds = [kind for kind in kinds if kind not in ("Complex", "Mixed")]
    if mode.reduce_dtype:  # sending in 16 bits amplifies a difference in the last bit of 16-bit weights
        kinds = [kind for kind in kinds if kind != "Mixed"]
    if program.scaler or mode.reduce_dtype:  # DDP's buckets do not mark complex numbers
        kinds = [kind for kind in kinds if kind != "Complex"]
    blocks = [Block("MLP", draws.number(0, 2))]
    for _ in draws.repeat(3, 4):
        kind = draws.choose(kinds)
        variants = VARIANTS[kind]
        if kind == "Mixed" and (mode.is_flat or mode.shards_grads):
            variants = 1  # a difference in the last bit of a 16-bit weight exceeds the tolerances
        if kind == "Transposed" and options.get("fused"):
            variants = 1  # torch's fused CPU kernels ignore gaps
        if kind == "Parametrized" and mode.master_weights:
            variants = 2  # the third has buffers
        block = Block(kind, draws.number(0, variants - 1), checkpointed=draws.choose(CHECKPOINTING))
        if kind == "Embedding" and block.checkpointed:
            block = replace(block, checkpointed="non-reentrant")  # if frozen, none of its outputs has a gradient
        if kind != "LoRA" and not mode.is_overlapped and draws.flip(6):
            block = replace(block, frozen=True)
        elif kind != "LoRA" and _can_add_groups(program) and draws.flip(8):
            block = replace(block, late=True)
        blocks.append(block)
    if any(block.kind in UNUSED for block in blocks):
        # DDP's search for unused parameters does not see those that reentrant checkpointing uses.
        return tuple(replace(block, checkpointed=block.checkpointed and "non-reentrant") for block in blocks)
    return tuple(blocks)


def _can_add_groups(program: Program) -> bool:
    is_plain = not program.mode.master_weights and program.optimizer.kind != "Muon + AdamW"
    return is_plain and not program.mode.is_overlapped and not program.optimizer.scheduler


class _Loop:
    """Draws iterations of passes, a step and clearing, with extra operations before, within and after them."""

    def __init__(self, draws: Draws, program: Program) -> None:
        self.draws, self.program, self.mode = draws, program, program.mode
        self.ops: list[Op] = []
        self.added: set[int] = set()
        self.frozen = {number for number, block in enumerate(program.blocks) if block.frozen}
        self.is_exact = not self.mode.reduce_dtype and not self.mode.master_weights
        """Gradients may accumulate over several synchronized passes."""

    def draw(self) -> Program:
        if self.mode.is_overlapped:
            self.ops += [Backward(), Step(), ZeroGrad()] * 2
        self._draw_iteration()
        for _ in self.draws.repeat(4, 5):
            self._draw_between()
            self._draw_iteration()
        return replace(self.program, loop=tuple(self.ops))

    def _draw_iteration(self) -> None:
        draws, mode = self.draws, self.mode
        nonfinite = (self.program.scaler or mode.skip_nonfinite) and draws.flip(4)
        if not mode.is_overlapped and not self.program.scaler and not nonfinite and draws.flip(8):
            self.ops += [Step(closure=True, record=self._draw_record()), self._draw_clearing()]
            return
        passes = draws.choose((1, 1, 2, 3)) if self.is_exact and not mode.is_overlapped else 1
        for number in range(passes):
            is_last = number == passes - 1
            self.ops.append(self._draw_pass(is_only=passes == 1, nonfinite=nonfinite and is_last))
            if not mode.is_overlapped and (is_last or not self.program.scaler) and draws.flip(4):
                self.ops.append(self._draw_clip())
        if mode.shards_grads and self._was_sent() and draws.flip(8):
            if mode.kind == "shard" and mode.stage == 2:
                self.ops.append(RejectedCall(draws.choose(("torch clip", "read grad"))))
            elif not self.program.scaler:
                self.ops += [RejectedCall("step after torch clip"), ZeroGrad()]  # the rejected step clears gradients
                return
        if mode.is_overlapped:
            self.ops += [Step(record=self._draw_record()), ZeroGrad()]
            return
        if mode.kind in ("dropin", "bucket_view", "flat") and draws.flip(6):
            self.ops.append(ScaleGrads())
        if not draws.flip(8) or self.program.scaler:
            self.ops.append(Step(record=self._draw_record()))
        self.ops.append(ZeroGrad() if nonfinite else self._draw_clearing())

    def _was_sent(self) -> bool:
        """Return whether the last pass was outside of `no_sync()`, so gradients are sharded."""
        return [op.synced for op in self.ops if isinstance(op, Backward)][-1]

    def _draw_pass(self, *, is_only: bool, nonfinite: bool) -> Backward:
        draws = self.draws
        local = draws.choose([(0,), (0,), (1,), (2,), (1, 0), (0, 2, 1)])
        if nonfinite:
            return Backward(local, nonfinite_rank=draws.number(0, self.program.ranks - 1))
        can_sync_in_step = self.mode.kind == "shard" and is_only and not self.program.scaler
        # DDP needs its own synchronization for buffers and unused parameters.
        can_sync_in_step = can_sync_in_step and not self.program.has_buffers and not self.program.finds_unused
        if can_sync_in_step and any(local) and draws.flip(4):
            return Backward(tuple(max(1, count) for count in local), synced=False)
        return Backward(local)

    def _draw_clip(self) -> Clip:
        kinds, blocks = ["inf", "norm", "value"], {block.kind for block in self.program.blocks}
        if "Empty" in blocks:
            kinds.remove("inf")  # torch has no largest element of an empty tensor
        if "Complex" in blocks:
            kinds.remove("value")
        if self.mode.reduce_dtype:
            kinds.remove("norm")  # sending in 16 bits amplifies a difference in the last bit
        kind = self.draws.choose(kinds)
        by_torch = self.mode.kind in ("dropin", "bucket_view", "flat") and self.draws.flip()
        return Clip(kind, {"inf": 0.05, "norm": 0.3, "value": 0.02}[kind], by_torch)

    def _draw_clearing(self) -> ZeroGrad:
        options = [ZeroGrad(), ZeroGrad("model"), ZeroGrad("hand")]
        options += [ZeroGrad(to_none=False), ZeroGrad("model", to_none=False)]
        return self.draws.choose(options if self.is_exact else [option for option in options if option.to_none])

    def _draw_record(self) -> bool:
        return not self.mode.overlap_param_gather or self.draws.flip(3)

    def _draw_between(self) -> None:
        """Draw an extra operation between two iterations, or none."""
        if self.draws.flip(3):
            return
        op = self.draws.choose(self._extras())()
        if isinstance(op, AddGroup):
            self.added.add(op.block)
        if isinstance(op, Freeze):
            (self.frozen.add if op.frozen else self.frozen.discard)(op.block)
        self.ops.append(op)

    def _extras(self) -> list[Callable[[], Op]]:
        draws, mode, program = self.draws, self.mode, self.program
        last_evaluated_rank = 0 if program.has_buffers else program.ranks - 1
        found: list[Callable[[], Op]] = [
            Consolidate,
            EditOptions,
            lambda: Evaluate(draws.number(0, last_evaluated_rank)),
            self._draw_rejected_call,
        ]
        if mode.is_overlapped:
            return found
        if not mode.master_weights:
            found.append(lambda: EditState(draws.choose(EDITS)))
        found += [self._draw_restart] * 2
        if self._can_join():
            found.append(self._draw_uneven)
        for number, block in enumerate(program.blocks):
            if block.late and number not in self.added:
                found += [partial(AddGroup, number)] * 3
            elif number and not block.late and block.kind != "LoRA":
                found.append(partial(Freeze, number, number not in self.frozen))
        return found

    def _draw_restart(self) -> Op:
        should_reshard = not self.program.scaler and self.draws.flip()  # the scale of absent ranks would be outdated
        ranks = self.draws.number(1, self.program.ranks - 1) if should_reshard else 0
        return Restart(self.draws.choose(("checkpoint", "state_dict")), ranks)

    def _draw_uneven(self) -> Op:
        counts = tuple(self.draws.number(0, 3) for _ in range(self.program.ranks))
        return UnevenInputs((*counts[:-1], max(1, counts[-1])))

    def _can_join(self) -> bool:
        mode, program = self.mode, self.program
        if program.optimizer.kind == "NAdam":
            return False  # loading its state on the plain side casts some of it
        if mode.master_weights or program.scaler:
            return False
        # DDP takes buffers from the last rank with inputs, and treats parameters as used that a rank without inputs
        # used in its last pass. Both sides agree only if DDP does both on both sides.
        return not mode.shards_grads or not (program.finds_unused or program.has_buffers)

    def _draw_rejected_call(self) -> Op:
        calls = list(REJECTED_IN_ALL_MODES)
        if self.mode.is_overlapped:
            calls = [*calls[2:], "add_param_group"]
        if self.mode.kind in ("dropin", "bucket_view"):
            calls.append("ddp_hook")
        if self.mode.kind in ("flat", "ddp_hook", "shard"):  # otherwise the update comes before the check and is kept
            calls.append("step in which lr differs")
        if not self.mode.is_overlapped:
            calls.append("state_dict")
        return RejectedCall(self.draws.choose(calls))
