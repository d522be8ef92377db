"""A report as text: plain, no wider than 100 characters, short however large the model is."""

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import TypeVar

from ..units import MIB
from .values import BucketShare, Facts, RankShare

WIDTH = 100
FIRST, LAST = 5, 2
"""Of many, those are shown."""

T = TypeVar("T")


def written(facts: Facts) -> str:
    parts = (_head, _how, _owners, _buckets, _memory, _wire, _times, _counters)
    return "\n\n".join("\n".join(part(facts)) for part in parts)


def in_bytes(nbytes: float) -> str:
    """With a unit that leaves three digits or so."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def in_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _head(facts: Facts) -> Iterator[str]:
    rows = f", in {facts.rows} rows that hold the same" if facts.rows > 1 else ""
    yield f"zeroshard: rank {facts.rank}, after {count(facts.counters.steps, 'step')}"
    what = f"{facts.elements:,} elements of {count(len(facts.layout.params), 'parameter')}"
    who = f"shared by {count(facts.world_size, 'rank')}{rows}"
    yield from wrap(f"{' and '.join(facts.classes)} on {what}, {who}", WIDTH)
    if not facts.settled:
        yield "DDP's buckets are not known yet: owners will change"


def _how(facts: Facts) -> Iterator[str]:
    yield "How"
    for line in facts.config:
        yield from wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _owners(facts: Facts) -> Iterator[str]:
    yield f"{'Who owns what':<16}{'elements':>16}{'share':>9}{'pieces':>10}{'work':>9}{'state':>13}"
    total = sum(it.elements for it in facts.ranks) or 1

    def line(it: RankShare) -> str:
        known = "?" if it.state_bytes is None else in_bytes(it.state_bytes)
        state = known if it.rank == facts.place or it.state_bytes is None else f"~{known}"
        share, work = f"{100 * it.elements / total:.1f} %", f"{100 * it.work:.1f} %"
        return f"  rank {it.rank:<9}{it.elements:>16,}{share:>9}{it.parameters:>10,}{work:>9}{state:>13}"

    yield from _some(facts.ranks, line, "ranks")
    peaks = f"{facts.balance.fullest:.3f} of the mean, of work {facts.balance.slowest:.3f}"
    yield f"  the fullest rank has {peaks}"


def _buckets(facts: Facts) -> Iterator[str]:
    yield f"{'Buckets':<10}{'dtype':<10}{'device':<9}{'size':>11}{'padding':>10}  shards, parameters"
    yield from _some(facts.buckets, _bucket, "buckets")


def _bucket(it: BucketShare) -> str:
    head = f"  {it.number:<8}{it.dtype:<10}{it.device:<9}{in_bytes(it.nbytes):>11}{it.padding:>10,}  "
    names = ", ".join(it.parameters[:3]) + ("" if len(it.parameters) <= 3 else ", ...")
    return head + _short(f"{it.kind}, {count(len(it.parameters), 'parameter')}: {names}", WIDTH - len(head))


def _memory(facts: Facts) -> Iterator[str]:
    yield "Memory of this rank"
    for it in facts.memory:
        yield f"  {it.what:<18}{in_bytes(it.nbytes):>12}  {it.device}"
    yield f"  {'in all':<18}{in_bytes(sum(it.nbytes for it in facts.memory)):>12}"


def _wire(facts: Facts) -> Iterator[str]:
    yield "Sent by this rank, each time that gradients travel and parameters come back"
    grads = "by DDP" if facts.wire.gradients is None else in_bytes(facts.wire.gradients)
    yield f"  {'gradients':<18}{grads:>12}"
    yield f"  {'parameters':<18}{in_bytes(facts.wire.parameters):>12}"


def _times(facts: Facts) -> Iterator[str]:
    times = facts.times
    if not times.parts:
        yield "Times of the last step: there was none yet"
        return
    yield f"The last step took {in_seconds(times.step)}, and {in_seconds(times.iteration)} since the one before"
    yield f"  {'time of the host':<34}{'calls':>8}{'in step()':>14}{'outside it':>14}"
    ordered = sorted(times.parts.items(), key=lambda it: -(it[1].in_step + it[1].outside))
    for label, it in ordered:
        inside, outside = (in_seconds(value) if value else "-" for value in (it.in_step, it.outside))
        name = "all else in step()" if label.text == "step" else label.text
        yield f"  {name:<34}{it.calls:>8,}{inside:>14}{outside:>14}"


def _counters(facts: Facts) -> Iterator[str]:
    it = facts.counters
    yield f"Counted: {count(it.steps, 'step')}"
    if it.nonfinite_found:
        skipped = f"of which {it.nonfinite_skipped:,} were left out"
        yield f"  {it.nonfinite_found:,} with gradients that were not finite, {skipped}"
    if it.looks_for_drift:
        yield f"  {count(it.looks_for_drift, 'look')} for drift"
    if it.second_copy_step is not None:
        yield f"  second copy: of step {it.second_copy_step:,}, for which {in_bytes(it.second_copy_sent)} were sent"


def _some(values: Sequence[T], line: Callable[[T], str], what: str) -> Iterator[str]:
    """Lines for all of them, or for the first and the last."""
    between = len(values) - FIRST - LAST
    if between < 2:
        yield from map(line, values)
        return
    yield from map(line, values[:FIRST])
    yield f"  ... and {between:,} more {what} ..."
    yield from map(line, values[-LAST:])


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
