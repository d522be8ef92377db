"""A training program as data: model, optimizer, loop, mode and world size. `script.py` turns it into source text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

MUON_AMPLIFIES = "Muon orthogonalizes in bfloat16, which amplifies a difference in the last bits of a gradient"

# ---- Parts


@dataclass(frozen=True)
class Block:
    """A residual block of the model; `kind` names a class of `blocks.py`."""

    kind: str
    variant: int = 0
    checkpointed: str = ""
    """Activation checkpointing: "reentrant" or "non-reentrant"."""
    frozen: bool = False
    """Frozen until a `Freeze(block, frozen=False)`."""
    late: bool = False
    """In no parameter group until an `AddGroup`."""


@dataclass(frozen=True)
class Optimizer:
    kind: str = "SGD"
    """A class of `torch.optim`, or "Muon + AdamW" for rules."""
    options: tuple[tuple[str, Any], ...] = ()
    groups: str = "one"
    scheduler: str = ""


@dataclass(frozen=True)
class Mode:
    """The API and the options with which zeroshard is used."""

    kind: str = "shard"
    """One of `MODES`."""
    stage: int = 2
    small_buckets: bool = False
    overlap_param_gather: bool = False
    shard_group_size: int = 0
    mesh: bool = False
    """Pass the shard groups as a mesh instead of `shard_group_size`."""
    whole_params: bool = False
    offload: bool = False
    reduce_dtype: str = ""
    """The dtype in which gradients are sent."""
    master_weights: bool = False
    skip_nonfinite: bool = False

    @property
    def is_overlapped(self) -> bool:
        return self.kind.startswith("overlap")

    @property
    def is_under_ddp(self) -> bool:
        return self.kind != "shard"

    @property
    def shards_grads(self) -> bool:
        """zeroshard averages gradients; each rank averages its shard."""
        return self.kind in ("shard", "ddp_hook")

    @property
    def is_flat(self) -> bool:
        return self.kind in ("flat", "ddp_hook") or (self.kind == "shard" and not self.whole_params)


MODES = ("shard", "dropin", "bucket_view", "flat", "ddp_hook", "overlap", "overlap_interleaved")


# ---- Operations of the training loop


@dataclass(frozen=True)
class Op:
    label: ClassVar[str] = ""


@dataclass(frozen=True)
class Backward(Op):
    """Rank r runs `local[r % len(local)]` passes inside `no_sync()`, then one outside unless `synced` is False."""

    local: tuple[int, ...] = (0,)
    synced: bool = True
    nonfinite_rank: int = -1
    """The rank whose loss is infinite."""


@dataclass(frozen=True)
class Clip(Op):
    kind: str = "inf"
    """ "norm", "inf" (the largest element) or "value"."""
    limit: float = 0.05
    by_torch: bool = False
    """Use torch's function on both sides."""


@dataclass(frozen=True)
class ScaleGrads(Op):
    """Halve `param.grad`."""


@dataclass(frozen=True)
class Step(Op):
    closure: bool = False
    record: bool = True
    """Record parameters and buffers after the step, to compare them."""


@dataclass(frozen=True)
class ZeroGrad(Op):
    by: str = "optimizer"
    to_none: bool = True


@dataclass(frozen=True)
class EditState(Op):
    edit: str = "clear"


@dataclass(frozen=True)
class EditOptions(Op):
    factor: float = 0.5


@dataclass(frozen=True)
class Freeze(Op):
    block: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class AddGroup(Op):
    block: int = 0


@dataclass(frozen=True)
class Evaluate(Op):
    rank: int = 0


@dataclass(frozen=True)
class Consolidate(Op):
    """Compare the optimizer state of all ranks."""


@dataclass(frozen=True)
class UnevenInputs(Op):
    """`Join`: rank r has `counts[r]` inputs."""

    counts: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Restart(Op):
    """Save, rebuild everything with other values, load. With `ranks` the job first continues on that many ranks."""

    via: str = "checkpoint"
    ranks: int = 0


@dataclass(frozen=True)
class RejectedCall(Op):
    """A call that is documented to raise on all ranks and to change nothing."""

    call: str = "load"


OPS: dict[str, type[Op]] = {
    op.__name__: op
    for op in (
        *(Backward, Clip, ScaleGrads, Step, ZeroGrad, EditState, EditOptions, Freeze, AddGroup, Evaluate),
        *(Consolidate, UnevenInputs, Restart, RejectedCall),
    )
}


@dataclass(frozen=True)
class Program:
    ranks: int
    mode: Mode
    blocks: tuple[Block, ...]
    optimizer: Optimizer
    loop: tuple[Op, ...]
    dtype: str = "float32"
    scaler: bool = False
    batch: int = 4
    seed: int = 0

    # ---- properties of the combination of parts

    @property
    def has_buffers(self) -> bool:
        return any(block.kind in ("BatchNorm", "Centre") or _is_spectral(block) for block in self.blocks)

    @property
    def finds_unused(self) -> bool:
        """DDP needs `find_unused_parameters=True`."""
        return any(block.kind in UNUSED for block in self.blocks)

    @property
    def is_mixed(self) -> bool:
        """Parameters have several dtypes."""
        return any(block.kind in ("Mixed", "Complex") for block in self.blocks)

    def tolerances(self) -> list[str]:
        """Return the documented reasons why last bits may differ. If there are none, all bits must be equal."""
        reasons, mode = [], self.mode
        if mode.shards_grads and any(isinstance(op, Clip) and op.kind == "norm" for op in self.loop):
            reasons.append("clip_grad_norm_ sums the norm of sharded gradients in another order")
        if mode.shards_grads and _max_synced_passes(self.loop) > 1:
            reasons.append("gradients of several passes are accumulated in shards, in another order than DDP's")
        if dict(self.optimizer.options).get("fused"):
            reasons.append("fused CPU kernels round the last elements of a tensor differently")
        if mode.is_flat and (self.dtype == "float64" or any(map(_is_spectral, self.blocks))):
            reasons.append("matrix products of unaligned weights sum in another order")
        if reasons and self.optimizer.kind == "Muon + AdamW":
            reasons.append(MUON_AMPLIFIES)
        return reasons

    def parts(self) -> list[str]:
        """Return the names of all parts of this program, for counting."""
        return sorted({*self._mode_parts(), *self._model_parts(), *self._optimizer_parts(), *self._loop_parts()})

    def _mode_parts(self) -> Iterator[str]:
        mode = self.mode
        yield f"mode: {mode.kind}" + (f" stage {mode.stage}" if mode.kind == "shard" else "")
        flags = {
            "overlapped gather": mode.overlap_param_gather,
            "hybrid mesh": bool(mode.shard_group_size),
            "whole parameters": mode.whole_params,
            "offload": mode.offload,
            "skip non-finite steps": mode.skip_nonfinite,
            "small buckets": mode.small_buckets,
        }
        yield from (f"mode: {name}" for name, is_set in flags.items() if is_set)

    def _model_parts(self) -> Iterator[str]:
        for block in self.blocks:
            yield f"model: {BLOCK_NAMES[block.kind]}"
            if block.checkpointed:
                yield f"model: {block.checkpointed} checkpointing"
            if block.frozen:
                yield "model: frozen"
        yield f"model: {self.dtype}"

    def _optimizer_parts(self) -> Iterator[str]:
        yield f"optimizer: {self.optimizer.kind}"
        yield from (f"optimizer: {name}={value}" for name, value in self.optimizer.options if name in SHOWN_OPTIONS)
        if self.optimizer.groups != "one":
            yield f"optimizer: groups {self.optimizer.groups}"
        if self.optimizer.scheduler:
            yield f"optimizer: {self.optimizer.scheduler}"
        if self.mode.master_weights:
            yield "optimizer: master weights"
        if self.mode.reduce_dtype:
            yield f"optimizer: {self.mode.reduce_dtype} on the wire"

    def _loop_parts(self) -> Iterator[str]:
        if self.scaler:
            yield "loop: GradScaler"
        if _max_synced_passes(self.loop) > 1:
            yield "loop: several backward passes"
        if _skips_a_step(self.loop):
            yield "loop: skipped step"
        for op in self.loop:
            yield from _name_op(op)

    # ---- JSON

    def to_json(self) -> str:
        loop = [{"op": type(op).__name__, **asdict(op)} for op in self.loop]
        return json.dumps({**asdict(self), "loop": loop})

    @staticmethod
    def from_json(text: str) -> Program:
        fields = json.loads(text)
        fields["mode"] = Mode(**fields["mode"])
        fields["blocks"] = tuple(Block(**block) for block in fields["blocks"])
        fields["optimizer"] = Optimizer(**_to_tuples(fields["optimizer"]))
        fields["loop"] = tuple(OPS[op.pop("op")](**_to_tuples(op)) for op in fields["loop"])
        return Program(**fields)


BLOCK_NAMES = {
    "MLP": "MLP",
    "Conv": "conv",
    "Embedding": "embedding",
    "Tied": "tied weights",
    "Shared": "shared module",
    "Experts": "experts chosen by data",
    "RankExperts": "experts chosen by rank",
    "Unused": "unused parameters",
    "LoRA": "LoRA",
    "BatchNorm": "BatchNorm",
    "Centre": "buffer that forward changes and uses",
    "Listed": "ParameterList",
    "Parametrized": "parametrization",
    "Complex": "complex",
    "Mixed": "mixed dtypes",
    "Empty": "zero-size parameter",
    "Scalar": "0-dim parameter",
    "Transposed": "transposed parameter",
}
UNUSED = ("Experts", "RankExperts", "Unused")
"""Blocks with parameters that a pass may not use."""
SHOWN_OPTIONS = (
    "amsgrad",
    "foreach",
    "maximize",
    "momentum",
    "nesterov",
    "centered",
    "fused",
    "decoupled_weight_decay",
)


def _to_tuples(value: Any) -> Any:
    """Convert lists, also nested ones, to tuples. `value` is a dict of fields."""

    def convert(item: Any) -> Any:
        return tuple(map(convert, item)) if isinstance(item, list) else item

    return {key: convert(item) for key, item in value.items()}


def _is_spectral(block: Block) -> bool:
    return block.kind == "Parametrized" and block.variant == 2


def _max_synced_passes(loop: tuple[Op, ...]) -> int:
    """Return the largest number of synchronized backward passes whose gradients accumulate."""
    largest = count = 0
    for op in loop:
        if isinstance(op, Backward) and op.synced:
            count += 1
        elif (isinstance(op, Step) and op.closure) or isinstance(op, (UnevenInputs, Restart)):
            count = 0  # these clear gradients first
        elif isinstance(op, ZeroGrad):
            count = 0
        largest = max(largest, count)
    return largest


def _skips_a_step(loop: tuple[Op, ...]) -> bool:
    has_grads = False
    for op in loop:
        if isinstance(op, Backward):
            has_grads = True
        elif isinstance(op, Step):
            has_grads = False
        elif isinstance(op, ZeroGrad) and has_grads:
            return True
    return False


def _name_op(op: Op) -> Iterator[str]:
    match op:
        case Backward(local, synced, nonfinite_rank):
            if any(local):
                yield "loop: uneven no_sync" if len(set(local)) > 1 else "loop: no_sync"
            if not synced:
                yield "loop: no_sync only"
            if nonfinite_rank >= 0:
                yield "loop: non-finite gradients on one rank"
        case Clip(kind, _, by_torch):
            yield f"loop: clip {kind}" + (" by torch" if by_torch else "")
        case Step(closure, _):
            if closure:
                yield "loop: closure"
        case ZeroGrad(by, to_none):
            yield f"loop: {by}.zero_grad" + ("" if to_none else "(set_to_none=False)")
        case EditState(edit):
            yield f"loop: edit state, {edit}"
        case Restart(via, ranks):
            yield f"loop: restart by {via}"
            if ranks:
                yield "loop: reshard"
        case Freeze(_, frozen):
            yield "loop: freeze" if frozen else "loop: unfreeze"
        case RejectedCall(call):
            yield f"refused: {call}"
        case _:
            yield f"loop: {type(op).__name__}"
