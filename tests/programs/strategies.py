"""Draw valid programs: which parts go together is said here.

A program is a function of a sequence of small integers. Random integers give a random program; `shrink.py` deletes and
lowers integers of a failing one, and every sequence is a valid program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

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
    Refuse,
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
EDITS = ("clear", "delete every other", "pop the first", "zero in place", "halve in place", "assign zeros")
REFUSED_ANYWHERE = (
    "load",
    "known parameter",
    "LBFGS",
    "flat Muon",
    "shard of DDP",
    "mixed dtypes",
    "option that differs",
)


class Draws:
    """Choices, first those that are given, then random ones, or the simplest ones where `random` is None.

    The first of several choices is the simplest: what shrinking ends with.
    """

    def __init__(self, given: Sequence[int] = (), random: Random | None = None) -> None:
        self._given, self._random = given, random
        self.made: list[int] = []
        self.spans: list[tuple[int, int]] = []
        """Where choices that belong together start and end: what may be deleted at once."""

    def choose(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)]

    def flip(self, chances: int = 2) -> bool:
        """True once in so many times."""
        return self.number(0, chances - 1) == chances - 1

    def number(self, first: int, last: int) -> int:
        count = last - first + 1
        if len(self.made) < len(self._given):
            value = self._given[len(self.made)] % count
        else:
            value = self._random.randrange(count) if self._random is not None else 0
        self.made.append(value)
        return first + value

    def repeat(self, most: int, chances: int) -> Iterator[int]:
        """Up to so many turns; each is followed by another but once in so many times."""
        for turn in range(most):
            start = len(self.made)
            if self.number(0, chances - 1) == 0:
                return
            yield turn
            self.spans.append((start, len(self.made)))


def draw_program(draws: Draws, ranks: int, modes: Sequence[str] = MODES) -> Program:
    """A program for so many ranks."""
    mode = _draw_mode(draws, ranks, modes)
    optimizer = _draw_optimizer(draws, mode)
    scaler = not mode.is_overlapped and not mode.masters and draws.flip(5)
    if dict(optimizer.options).get("fused") and mode.skip_nonfinite:
        scaler = False  # fused kernels that skip a step create state of zeros; what is skipped before has none
    empty = Program(ranks, mode, (), optimizer, (), scaler=scaler)
    blocks = _draw_blocks(draws, empty)
    dtype = "bfloat16" if mode.masters else draws.choose(("float32", "float32", "float64"))
    started = replace(empty, blocks=blocks, dtype=dtype, batch=draws.number(4, 6), seed=draws.number(0, 99))
    return _Loop(draws, started).draw()


def random_program(seed: int, ranks: int, modes: Sequence[str] = MODES) -> Program:
    return draw_program(Draws(random=Random(seed)), ranks, modes)


def _draw_mode(draws: Draws, ranks: int, modes: Sequence[str]) -> Mode:
    kind = draws.choose([*modes, *("shard" for name in modes if name == "shard" for _ in range(3))])
    small = draws.flip()
    if kind in ("overlap", "overlap_interleaved"):
        return Mode(kind, small_buckets=small)
    masters = kind not in ("dropin", "bucket_view") and draws.flip(6)
    wire = "bfloat16" if kind in ("shard", "ddp_hook") and draws.flip(6) else ""
    mode = Mode(kind, small_buckets=small, masters=masters, wire=wire, skip_nonfinite=draws.flip(6))
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
        whole_params=not masters and draws.flip(8),
    )


def _draw_optimizer(draws: Draws, mode: Mode) -> Optimizer:
    kinds = [kind for kind in OPTIONS if kind != "Muon + AdamW" or (mode.kind == "shard" and not mode.masters)]
    kind = draws.choose(kinds)
    lr = 0.01 if kind in ("Adam", "AdamW", "NAdam", "Adamax", "RMSprop", "Muon + AdamW") else 0.05
    options: dict[str, Any] = {"lr": lr}
    if kind != "SGD":
        options["eps"] = 1e-4  # else noise in gradients of almost zero becomes whole steps
    for name, value in OPTIONS[kind]:
        if draws.flip(3):
            options.setdefault(name, value)
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
    if mode.masters:  # the oracle averages without DDP, which would broadcast buffers
        kinds = [kind for kind in kinds if kind not in ("BatchNorm", "Centre", "Complex", "Mixed")]
    if program.optimizer.kind == "Muon + AdamW":
        kinds = [kind for kind in kinds if kind not in ("Complex", "Mixed")]
    if options.get("fused") or program.optimizer.kind in ("NAdam", "Adamax"):
        kinds = [kind for kind in kinds if kind not in ("Complex", "Mixed")]
    if mode.wire:  # a last bit of 16-bit weights would become many on the wire
        kinds = [kind for kind in kinds if kind != "Mixed"]
    if program.scaler or mode.wire:  # DDP's buckets do not say which floats are parts of complex numbers
        kinds = [kind for kind in kinds if kind != "Complex"]
    blocks = [Block("MLP", draws.number(0, 2))]
    for _ in draws.repeat(3, 4):
        kind = draws.choose(kinds)
        variants = VARIANTS[kind]
        if kind == "Mixed" and (mode.is_flat or mode.shards_grads):
            variants = 1  # a last bit of a 16-bit weight is too much for what follows from it
        if kind == "Transposed" and options.get("fused"):
            variants = 1  # torch's fused kernels on the CPU take no account of gaps
        if kind == "Parametrized" and mode.masters:
            variants = 2  # the third has buffers
        block = Block(kind, draws.number(0, variants - 1), checkpointed=draws.choose(CHECKPOINTING))
        if kind == "Embedding" and block.checkpointed:
            block = replace(block, checkpointed="non-reentrant")  # once frozen, none of its outputs has a gradient
        if kind != "LoRA" and not mode.is_overlapped and draws.flip(6):
            block = replace(block, frozen=True)
        elif kind != "LoRA" and _takes_groups(program) and draws.flip(8):
            block = replace(block, late=True)
        blocks.append(block)
    if any(block.kind in UNUSED for block in blocks):
        # DDP that looks for unused parameters does not see those that reentrant checkpointing uses.
        return tuple(replace(block, checkpointed=block.checkpointed and "non-reentrant") for block in blocks)
    return tuple(blocks)


def _takes_groups(program: Program) -> bool:
    plain = not program.mode.masters and program.optimizer.kind != "Muon + AdamW"
    return plain and not program.mode.is_overlapped and not program.optimizer.scheduler


class _Loop:
    """Draws cycles of passes, step and clearing, each with some extras before, within and after it."""

    def __init__(self, draws: Draws, program: Program) -> None:
        self.draws, self.program, self.mode = draws, program, program.mode
        self.ops: list[Op] = []
        self.added: set[int] = set()
        self.frozen = {number for number, block in enumerate(program.blocks) if block.frozen}
        self.is_exact = not self.mode.wire and not self.mode.masters
        """Gradients may add up over several synchronized passes."""

    def draw(self) -> Program:
        if self.mode.is_overlapped:
            self.ops += [Backward(), Step(), ZeroGrad()] * 2
        self._draw_cycle()
        for _ in self.draws.repeat(4, 5):
            self._draw_between()
            self._draw_cycle()
        return replace(self.program, loop=tuple(self.ops))

    def _draw_cycle(self) -> None:
        draws, mode = self.draws, self.mode
        poisons = (self.program.scaler or mode.skip_nonfinite) and draws.flip(4)
        if not mode.is_overlapped and not self.program.scaler and not poisons and draws.flip(8):
            self.ops += [Step(closure=True, look=self._looks()), self._draw_clearing()]
            return
        passes = draws.choose((1, 1, 2, 3)) if self.is_exact and not mode.is_overlapped else 1
        for number in range(passes):
            is_last = number == passes - 1
            self.ops.append(self._draw_pass(alone=passes == 1, poisons=poisons and is_last))
            if not mode.is_overlapped and (is_last or not self.program.scaler) and draws.flip(4):
                self.ops.append(self._draw_clip())
        if mode.shards_grads and self._was_sent() and draws.flip(8):
            if mode.kind == "shard" and mode.stage == 2:
                self.ops.append(Refuse(draws.choose(("torch clip", "read grad"))))
            elif not self.program.scaler:
                self.ops += [Refuse("step after torch clip"), ZeroGrad()]  # the refusal clears all gradients, too
                return
        if mode.is_overlapped:
            self.ops += [Step(look=self._looks()), ZeroGrad()]
            return
        if mode.kind in ("dropin", "bucket_view", "flat") and draws.flip(6):
            self.ops.append(ScaleGrads())
        if not draws.flip(8) or self.program.scaler:
            self.ops.append(Step(look=self._looks()))
        self.ops.append(ZeroGrad() if poisons else self._draw_clearing())

    def _was_sent(self) -> bool:
        """The last pass was outside of `no_sync()`: gradients are in slices."""
        return [op.synced for op in self.ops if isinstance(op, Backward)][-1]

    def _draw_pass(self, *, alone: bool, poisons: bool) -> Backward:
        draws = self.draws
        local = draws.choose([(0,), (0,), (1,), (2,), (1, 0), (0, 2, 1)])
        if poisons:
            return Backward(local, nonfinite_rank=draws.number(0, self.program.ranks - 1))
        by_step = self.mode.kind == "shard" and alone and not self.program.scaler
        # DDP counts on its own sync
        by_step = by_step and not self.program.has_buffers and not self.program.finds_unused
        if by_step and any(local) and draws.flip(4):
            return Backward(tuple(max(1, count) for count in local), synced=False)
        return Backward(local)

    def _draw_clip(self) -> Clip:
        kinds, blocks = ["inf", "norm", "value"], {block.kind for block in self.program.blocks}
        if "Empty" in blocks:
            kinds.remove("inf")  # torch has no largest element of an empty tensor
        if "Complex" in blocks:
            kinds.remove("value")
        if self.mode.wire:
            kinds.remove("norm")  # a last bit would become many on the wire
        kind = self.draws.choose(kinds)
        by_torch = self.mode.kind in ("dropin", "bucket_view", "flat") and self.draws.flip()
        return Clip(kind, {"inf": 0.05, "norm": 0.3, "value": 0.02}[kind], by_torch)

    def _draw_clearing(self) -> ZeroGrad:
        ways = [ZeroGrad(), ZeroGrad("model"), ZeroGrad("hand")]
        ways += [ZeroGrad(to_none=False), ZeroGrad("model", to_none=False)]
        return self.draws.choose(ways if self.is_exact else [way for way in ways if way.to_none])

    def _looks(self) -> bool:
        return not self.mode.overlap_param_gather or self.draws.flip(3)

    def _draw_between(self) -> None:
        """Something that happens between two cycles, mostly."""
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
        evaluated = 0 if program.has_buffers else program.ranks - 1
        found: list[Callable[[], Op]] = [
            Consolidate,
            EditOptions,
            lambda: Evaluate(draws.number(0, evaluated)),
            self._draw_refusal,
        ]
        if mode.is_overlapped:
            return found
        if not mode.masters:
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
        reshards = not self.program.scaler and self.draws.flip()  # the scale of ranks that are away would stay behind
        ranks = self.draws.number(1, self.program.ranks - 1) if reshards else 0
        return Restart(self.draws.choose(("checkpoint", "state_dict")), ranks)

    def _draw_uneven(self) -> Op:
        counts = tuple(self.draws.number(0, 3) for _ in range(self.program.ranks))
        return UnevenInputs((*counts[:-1], max(1, counts[-1])))

    def _can_join(self) -> bool:
        mode, program = self.mode, self.program
        if program.optimizer.kind == "NAdam":
            return False  # ranks that load its state on the plain side cast a part of it
        if mode.masters or program.scaler:
            return False
        # DDP takes buffers from the last rank with inputs, and counts what a rank without inputs used in its last pass
        # as used. Only where DDP itself does both on both sides is that the same.
        return not mode.shards_grads or not (program.finds_unused or program.has_buffers)

    def _draw_refusal(self) -> Op:
        calls = list(REFUSED_ANYWHERE)
        if self.mode.is_overlapped:
            calls = [*calls[2:], "add_param_group"]
        if self.mode.kind in ("dropin", "bucket_view"):
            calls.append("ddp_hook")
        if self.mode.kind in ("flat", "ddp_hook", "shard"):  # else the update comes before the comparison, and stays
            calls.append("step in which lr differs")
        if not self.mode.is_overlapped:
            calls.append("state_dict")
        return Refuse(self.draws.choose(calls))
