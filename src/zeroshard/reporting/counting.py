"""A report of an optimizer: all that is counted, on this rank alone. Nothing is sent."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..assembly import Assembly
from ..layout.layout import Layout
from ..layout.specs import ParamSpec
from ..runtime.flat import FlatEngine
from ..runtime.inner import ParamGroup
from ..runtime.step import Engine
from ..second_copy import Copies
from ..state.trees import plain_tensors
from ..units import Rank
from .report import Report
from .values import Counters, Held, Wire
from .words import in_words


def report_of(
    assembly: Assembly, engine: Engine, groups: Sequence[ParamGroup], copies: Copies | None, *, settled: bool
) -> Report:
    """`settled`: owners will not change any more."""
    comm, states = engine.comm, dict(_states(engine))
    held = {**engine.held(), "state": [tensor for tensors in states.values() for tensor in tensors]}
    return Report(
        rank=comm.everyone.group.rank,
        place=comm.group.rank,
        world_size=comm.group.size,
        rows=comm.everyone.group.size // comm.group.size,
        classes=tuple(kind.name for kind in assembly.kinds),
        config=in_words(assembly),
        settled=settled,
        balance=assembly.balance(engine.layout, groups),
        state_bytes=_state_bytes(engine.layout, comm.group.rank, states),
        memory=(*_memory(held), *([] if copies is None else [Held("second copies", "cpu", copies.memory)])),
        wire=Wire(*engine.bytes_to_send()),
        times=comm.clock.last,
        counters=_counters(engine, copies),
        layout=engine.layout,
    )


def _states(engine: Engine) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Tensors of this rank's state, by the number of their group; -1 for those that belong to no parameter."""
    alone = [(list(range(len(it.optimizer.param_groups))), it) for it in engine.inner.members]
    parts = [(part.numbers, part.inner) for part in engine.parts] if isinstance(engine, FlatEngine) else alone
    others: list[Any] = []
    for numbers, inner in parts:
        others += plain_tensors(inner.shared())
        for number, group in zip(numbers, inner.optimizer.param_groups, strict=True):
            state = [inner.optimizer.state.get(param, {}) for param in group["params"]]
            yield number, plain_tensors([dict(it) if isinstance(it, Mapping) else it for it in state])
    yield -1, others


def _state_bytes(layout: Layout, me: Rank, states: Mapping[int, list[torch.Tensor]]) -> tuple[int | None, ...]:
    """Of each rank: as many bytes for each element of a group as there are here, if there are elements of it here."""
    mine: Counter[int] = Counter()
    for bucket in layout.buckets:
        for piece in bucket.pieces_of(me):
            mine[layout.params[piece.param].group] += _trained(layout.params[piece.param], piece.in_param.length)
    sizes = {group: sum(it.nbytes for it in tensors) for group, tensors in states.items()}
    rates = {group: sizes.get(group, 0) / elements for group, elements in mine.items() if elements}
    found = layout.tally(lambda spec, elements: rates.get(spec.group, 0.0) * _trained(spec, elements))
    unknown = layout.tally(lambda spec, elements: 0 if spec.group in rates else _trained(spec, elements))
    estimates = [None if lacking else round(size) for size, lacking in zip(found, unknown, strict=True)]
    estimates[me] = sum(sizes.values())
    return tuple(estimates)


def _trained(spec: ParamSpec, elements: int) -> int:
    """Gaps that strides leave do not count."""
    return elements * spec.numel // spec.extent if spec.trainable and spec.extent else 0


def _memory(held: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[Held]:
    order = ("parameters", "gradients", "state", "master weights", "staging")
    for what in order:
        sizes: Counter[str] = Counter()
        for tensor in held.get(what, ()):
            sizes[tensor.device.type] += tensor.nbytes
        for device, nbytes in sorted(sizes.items()):
            yield Held(what, device, nbytes)


def _counters(engine: Engine, copies: Copies | None) -> Counters:
    nonfinite = engine.looks.nonfinite
    return Counters(
        engine.steps,
        nonfinite.found,
        nonfinite.skipped,
        engine.looks.for_drift,
        None if copies is None else copies.step,
        0 if copies is None else copies.traffic,
    )
