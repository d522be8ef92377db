"""`restore`: an optimizer and its model as they were when the last copy was taken, from what ranks hold in memory."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .comm.agreement import Proposal, agreed
from .comm.collectives import Comm
from .errors import CheckpointError
from .labels import Label
from .layout.layout import Layout
from .optimizer import ZeroRedundancyOptimizer
from .runtime.step import Engine
from .second_copy import COMMON, Buffers, Copies, Generation, names_of
from .state.copies import Rebuilding, Rebuilt, portion
from .state.exchange import Outbox, receive
from .state.parcels import unpacked
from .state.readers import require_readers
from .state.records import MASTER
from .state.trees import snapshot
from .units import Rank, Span

CALL = "restore"
Give = Callable[[int, Rank], Any]
"""What a rank gets of a share: of its number, and the rank."""


def restore(optimizer: ZeroRedundancyOptimizer, copies: Copies | None) -> int:
    """Put `optimizer`, and the model of `shard`, back to the last step of which all is left in the copies.

    Called on all ranks of a new process group, as many as there are now, with an optimizer made anew over the same
    model. No file is read. Each rank gives what it holds, `second_copy` of its former optimizer; a process that has
    just begun gives None. Gradients are dropped. Either all ranks are put back or nothing changes.

    Returns the number of steps after which the copy was taken, from which the new optimizer counts on. If it makes
    copies itself, the first of them is whole by then, and held by `copies`, where there were any.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # nor are there ranks to tell of it
        raise TypeError(f"restore() takes a sharded optimizer, not a {type(optimizer).__name__}")
    with optimizer.engine.comm.clock.part(Label.RESTORE):
        return _restored(optimizer, copies)


def _restored(optimizer: ZeroRedundancyOptimizer, copies: Copies | None) -> int:
    engine, comm = optimizer.engine, optimizer.engine.comm
    generations = agreed(comm, CALL, lambda: Proposal(_given(optimizer, copies)))
    exchange = _Exchange(comm, _survey(comm, generations), generations)
    common = exchange.run([COMMON], lambda share, _: exchange.held[share])[0]
    agreed(comm, CALL, lambda: _fitting(common, engine, optimizer.model_buffers()))
    rebuilt = _rebuilt(exchange, engine)
    state_dict = {"state": rebuilt.state | common["others"], "param_groups": common["groups"], **common["extra"]}
    optimizer.load_state_dict(state_dict, assign=True)
    _fill(engine, rebuilt, optimizer.model_buffers(), common["buffers"])
    engine.steps = exchange.survey.step
    optimizer.zero_grad()
    if optimizer.copying is not None:  # of the old copies the next loss might leave too little
        # Hazard: until all ranks have the new copy the old one is all there is, also for those that never return here.
        optimizer.copying.held = copies or optimizer.copying.held
        optimizer.copying.held.keep(exchange.survey.tag, exchange.survey.step)
        optimizer.copying.take(engine, optimizer.param_groups, optimizer.model_buffers)
        optimizer.copying.settle()
    return exchange.survey.step


def _given(optimizer: ZeroRedundancyOptimizer, copies: Copies | None) -> list[Generation]:
    """What this rank brings."""
    if copies is not None and not isinstance(copies, Copies):
        raise TypeError(
            f"restore() takes what a former optimizer has as second_copy, or None, not a {type(copies).__name__}"
        )
    optimizer.require_settled(CALL)
    optimizer.engine.check_groups(optimizer.param_groups)
    optimizer.engine.at_rest()
    return [] if copies is None else copies.generations()


class Survey(NamedTuple):
    """The generation that all ranks together can put together."""

    tag: int
    step: int
    places: int
    holders: dict[int, list[Rank]]
    """The ranks that hold each share."""
    seats: list[Rank]
    """Of all ranks: their places in the new layout."""

    def source(self, share: int, target: Rank) -> Rank:
        """Who gives a share to a rank: itself, if it can."""
        holders = self.holders[share]
        return target if target in holders else holders[0]


def _survey(comm: Comm, generations: Sequence[Generation]) -> Survey:
    """All ranks find, or raise, the same."""
    mine = [f"{it.tag} {it.step} {it.places} {' '.join(map(str, sorted(it.shares)))}" for it in generations]
    seats, found = [], defaultdict[tuple[int, int, int], dict[int, list[Rank]]](lambda: defaultdict(list))
    for rank, text in enumerate(_told(comm.everyone, "\n".join([str(comm.group.rank), *mine]))):
        seat, *lines = text.splitlines()
        seats.append(Rank(int(seat)))
        for line in lines:
            step, tag, places, *shares = (int(number) for number in _in_order(line))
            for share in shares:
                found[step, tag, places][share].append(Rank(rank))
    newest_first = sorted(found, reverse=True)
    for step, tag, places in newest_first:
        if found[step, tag, places].keys() >= {COMMON, *range(places)}:
            return Survey(tag, step, places, found[step, tag, places], seats)
    raise CheckpointError(_what_is_missing(newest_first, found))


def _told(everyone: Comm, text: str) -> list[str]:
    if everyone.is_alone:
        return [text]
    return everyone.share(text, most=everyone.maximum([len(text.encode())])[0])


def _in_order(line: str) -> list[str]:
    tag, step, *rest = line.split()
    return [step, tag, *rest]


def _what_is_missing(
    newest_first: list[tuple[int, int, int]], found: dict[tuple[int, int, int], dict[int, list[Rank]]]
) -> str:
    if not newest_first:
        return "restore: no rank holds a copy. Load a checkpoint, or begin anew."
    step, _, places = newest_first[0]
    lost = sorted(({COMMON, *range(places)}) - found[newest_first[0]].keys())
    ranks = sorted({max(it, 0) for it in lost})
    return (
        f"restore: of the copy of step {step}, which {places} ranks had divided, nobody here holds the share of "
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: it was lost with those who held it, "
        "and no older copy is whole. Nothing was changed. Load a checkpoint."
    )


class _Exchange:
    """Shares of one generation go to where they are wanted, in the same order on all ranks."""

    def __init__(self, comm: Comm, survey: Survey, generations: Sequence[Generation]) -> None:
        self._comm, self.survey = comm, survey
        chosen = [it for it in generations if (it.tag, it.step) == (survey.tag, survey.step)]
        shares = [item for it in chosen for item in it.shares.items()]
        self.held: dict[int, Any] = {number: unpacked(share) for number, share in shares}

    def run(self, shares: Sequence[int], give: Give) -> list[Any]:
        """What this rank gets, as values of its own. What cannot be given is raised on all ranks before it is sent."""
        everyone = self._comm.everyone
        me, targets = everyone.group.rank, [Rank(rank) for rank in range(everyone.group.size)]
        plan = [(share, self.survey.source(share, target), target) for share in shares for target in targets]

        def propose() -> Proposal[dict[tuple[int, Rank], Any]]:
            mine = [(share, target) for share, source, target in plan if source == me]
            return Proposal({it: snapshot(give(*it)) if it[1] == me else Outbox(give(*it)) for it in mine})

        ready = agreed(self._comm, CALL, propose)
        types = {name for it in ready.values() if isinstance(it, Outbox) for name in it.types}
        require_readers(self._comm, CALL, sorted(types))
        received = []
        for share, source, target in plan:
            if target == me:
                received.append(ready[share, me] if source == me else receive(everyone, source))
            elif source == me:
                ready.pop((share, target)).send(everyone, target)
        return received


def _rebuilt(exchange: _Exchange, engine: Engine) -> Rebuilt:
    """What this rank is going to hold. On all ranks."""
    layout, seats = engine.layout, exchange.survey.seats

    def give(share: int, target: Rank) -> Any:
        return portion(exchange.held[share], layout.params, _spans(layout, seats[target]))

    parts = exchange.run(range(exchange.survey.places), give)

    def propose() -> Proposal[Rebuilt]:
        rebuilding = Rebuilding(layout.params, _spans(layout, engine.comm.group.rank))
        while parts:
            rebuilding.add(parts.pop())
        rebuilt = rebuilding.result()
        for index, state in rebuilt.state.items():
            if not engine.holds(index, MASTER):
                state.pop(MASTER, None)
        return Proposal(rebuilt)

    return agreed(engine.comm, CALL, propose)


def _spans(layout: Layout, rank: Rank) -> dict[int, Span]:
    """What a rank owns of which parameters."""
    return {piece.param: piece.in_param for bucket in layout.buckets for piece in bucket.pieces_of(rank)}


def _fitting(common: dict[str, Any], engine: Engine, buffers: Buffers) -> Proposal[None]:
    """Raises if the copies are not of this model."""
    ours = [*names_of(engine), *(f"buffer {name}: shape {tuple(it.shape)}" for name, it in buffers.items())]
    theirs = [*common["params"], *(f"buffer {name}: shape {tuple(it.shape)}" for name, it in common["buffers"].items())]
    ours, theirs = [*ours, "nothing more"], [*theirs, "nothing more"]
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            raise CheckpointError(
                f"restore: the copies are of another model, or of parameters in another order. They have {other}, and "
                f"this optimizer has {mine}. Nothing was changed."
            )
    return Proposal(None)


@torch.no_grad()
def _fill(engine: Engine, rebuilt: Rebuilt, buffers: Buffers, values: Buffers) -> None:
    """Parameters and buffers. On all ranks."""
    for index, flat in rebuilt.weights.items():
        engine.part(index).local.copy_(flat)
        copy = engine.precise_part(index)
        if copy is not None and MASTER not in rebuilt.state.get(index, {}):
            copy.local.copy_(flat)
    for name, value in values.items():
        buffers[name].copy_(value)
    engine.spread()()
