"""`restore`: an optimizer and its model as they were when the last copy was taken, from what ranks hold in memory."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._types import Rank, Span
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..engine.base import Engine
from ..errors import CheckpointError
from ..layout.layout import Layout
from ..optimizer import ZeroRedundancyOptimizer
from ..profiling import Phase
from ..state.serialization import StateSender, check_types_allowed, receive_state, unpack_from_buffers
from ..state.state_dict import MASTER_KEY
from ..state.tensor_utils import snapshot_to_host
from .snapshot import (
    SHARED_STATE,
    AssembledShard,
    NamedBuffers,
    PeerSnapshots,
    ShardAssembler,
    Snapshot,
    describe_params,
    slice_shard,
)

_CALL_NAME = "restore"
SliceForRank = Callable[[int, Rank], Any]
"""What a rank gets of a share: of its number, and the rank."""


def restore_from_peers(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> int:
    """Put `optimizer`, and the model of `shard`, back to the last step of which all is left in the copies.

    Called on all ranks of a new process group, as many as there are now, with an optimizer made anew over the same
    model. No file is read. Each rank gives what it holds, `peer_checkpoint` of its former optimizer; a process that has
    just begun gives None. Gradients are dropped. Either all ranks are put back or nothing changes.

    Returns the number of steps after which the copy was taken, from which the new optimizer counts on. If it makes
    copies itself, the first of them is whole by then, and held by `copies`, where there were any.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # nor are there ranks to tell of it
        raise TypeError(f"restore() takes a sharded optimizer, not a {type(optimizer).__name__}")
    with optimizer._engine.comm.profiler.phase(Phase.RESTORE_FROM_PEERS):
        return _restore(optimizer, snapshots)


def _restore(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> int:
    engine, comm = optimizer._engine, optimizer._engine.comm
    generations = prepare_all(comm, _CALL_NAME, lambda: Prepared(_collect_local_snapshots(optimizer, snapshots)))
    exchange = _ShardExchange(comm, _take_inventory(comm, generations), generations)
    common = exchange.run([SHARED_STATE], lambda share, _: exchange.local_shards[share])[0]
    prepare_all(comm, _CALL_NAME, lambda: _check_same_model(common, engine, optimizer._model_buffers()))
    rebuilt = _assemble_local_shard(exchange, engine)
    state_dict = {"state": rebuilt.state | common["others"], "param_groups": common["groups"], **common["extra"]}
    optimizer.load_state_dict(state_dict, assign=True)
    _write_params_and_buffers(engine, rebuilt, optimizer._model_buffers(), common["buffers"])
    engine.steps = exchange.inventory.step
    optimizer.zero_grad()
    if optimizer._peer_checkpointer is not None:  # of the old copies the next loss might leave too little
        # Hazard: until all ranks have the new copy the old one is all there is, also for those that never return here.
        optimizer._peer_checkpointer.snapshots = snapshots or optimizer._peer_checkpointer.snapshots
        optimizer._peer_checkpointer.snapshots.mark_complete(exchange.inventory.optimizer_id, exchange.inventory.step)
        optimizer._peer_checkpointer.capture(engine, optimizer.param_groups, optimizer._model_buffers)
        optimizer._peer_checkpointer.wait()
    return exchange.inventory.step


def _collect_local_snapshots(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> list[Snapshot]:
    """What this rank brings."""
    if snapshots is not None and not isinstance(snapshots, PeerSnapshots):
        raise TypeError(
            f"restore() takes what a former optimizer has as peer_snapshots, or None, not a {type(snapshots).__name__}"
        )
    optimizer._require_final_layout(_CALL_NAME)
    optimizer._engine.check_groups(optimizer.param_groups)
    optimizer._engine.wait_until_idle()
    return [] if snapshots is None else snapshots.list_snapshots()


class SnapshotInventory(NamedTuple):
    """The generation that all ranks together can put together."""

    optimizer_id: int
    step: int
    num_shards: int
    shard_holders: dict[int, list[Rank]]
    """The ranks that hold each share."""
    shard_ranks: list[Rank]
    """Of all ranks: their places in the new layout."""

    def select_source(self, shard: int, target: Rank) -> Rank:
        """Who gives a share to a rank: itself, if it can."""
        holders = self.shard_holders[shard]
        return target if target in holders else holders[0]


def _take_inventory(comm: Comm, snapshots: Sequence[Snapshot]) -> SnapshotInventory:
    """All ranks find, or raise, the same."""
    mine = [f"{it.optimizer_id} {it.step} {it.num_shards} {' '.join(map(str, sorted(it.shards)))}" for it in snapshots]
    seats, found = [], defaultdict[tuple[int, int, int], dict[int, list[Rank]]](lambda: defaultdict(list))
    for rank, text in enumerate(_all_gather_text(comm.data_parallel, "\n".join([str(comm.group.rank), *mine]))):
        seat, *lines = text.splitlines()
        seats.append(Rank(int(seat)))
        for line in lines:
            step, tag, places, *shares = (int(number) for number in _reorder_step_first(line))
            for share in shares:
                found[step, tag, places][share].append(Rank(rank))
    newest_first = sorted(found, reverse=True)
    for step, tag, places in newest_first:
        if found[step, tag, places].keys() >= {SHARED_STATE, *range(places)}:
            return SnapshotInventory(tag, step, places, found[step, tag, places], seats)
    raise CheckpointError(_format_missing_shards(newest_first, found))


def _all_gather_text(data_parallel: Comm, text: str) -> list[str]:
    if data_parallel.is_single_rank:
        return [text]
    return data_parallel.all_gather_text(text, max_bytes=data_parallel.all_reduce_max([len(text.encode())])[0])


def _reorder_step_first(line: str) -> list[str]:
    tag, step, *rest = line.split()
    return [step, tag, *rest]


def _format_missing_shards(
    newest_first: list[tuple[int, int, int]], holders_by_snapshot: dict[tuple[int, int, int], dict[int, list[Rank]]]
) -> str:
    if not newest_first:
        return "restore: no rank holds a copy. Load a checkpoint, or begin anew."
    step, _, places = newest_first[0]
    lost = sorted(({SHARED_STATE, *range(places)}) - holders_by_snapshot[newest_first[0]].keys())
    ranks = sorted({max(it, 0) for it in lost})
    return (
        f"restore: of the copy of step {step}, which {places} ranks had divided, nobody here holds the share of "
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: it was lost with those who held it, "
        "and no older copy is whole. Nothing was changed. Load a checkpoint."
    )


class _ShardExchange:
    """Shares of one generation go to where they are wanted, in the same order on all ranks."""

    def __init__(self, comm: Comm, inventory: SnapshotInventory, snapshots: Sequence[Snapshot]) -> None:
        self._comm, self.inventory = comm, inventory
        chosen = [it for it in snapshots if (it.optimizer_id, it.step) == (inventory.optimizer_id, inventory.step)]
        shares = [item for it in chosen for item in it.shards.items()]
        self.local_shards: dict[int, Any] = {number: unpack_from_buffers(share) for number, share in shares}

    def run(self, shards: Sequence[int], slice_for_rank: SliceForRank) -> list[Any]:
        """What this rank gets, as values of its own. What cannot be given is raised on all ranks before it is sent."""
        everyone = self._comm.data_parallel
        me, targets = everyone.group.rank, [Rank(rank) for rank in range(everyone.group.size)]
        plan = [(share, self.inventory.select_source(share, target), target) for share in shards for target in targets]

        def prepare() -> Prepared[dict[tuple[int, Rank], Any]]:
            mine = [(share, target) for share, source, target in plan if source == me]
            return Prepared(
                {
                    it: snapshot_to_host(slice_for_rank(*it)) if it[1] == me else StateSender(slice_for_rank(*it))
                    for it in mine
                }
            )

        ready = prepare_all(self._comm, _CALL_NAME, prepare)
        types = {name for it in ready.values() if isinstance(it, StateSender) for name in it.custom_types}
        check_types_allowed(self._comm, _CALL_NAME, sorted(types))
        received = []
        for share, source, target in plan:
            if target == me:
                received.append(ready[share, me] if source == me else receive_state(everyone, source))
            elif source == me:
                ready.pop((share, target)).send(everyone, target)
        return received


def _assemble_local_shard(exchange: _ShardExchange, engine: Engine) -> AssembledShard:
    """What this rank is going to hold. On all ranks."""
    layout, seats = engine.layout, exchange.inventory.shard_ranks

    def slice_for_rank(shard: int, target: Rank) -> Any:
        return slice_shard(exchange.local_shards[shard], layout.params, _owned_spans(layout, seats[target]))

    parts = exchange.run(range(exchange.inventory.num_shards), slice_for_rank)

    def prepare() -> Prepared[AssembledShard]:
        rebuilding = ShardAssembler(layout.params, _owned_spans(layout, engine.comm.group.rank))
        while parts:
            rebuilding.add(parts.pop())
        rebuilt = rebuilding.assemble()
        for index, state in rebuilt.state.items():
            if not engine.owns_state(index, MASTER_KEY):
                state.pop(MASTER_KEY, None)
        return Prepared(rebuilt)

    return prepare_all(engine.comm, _CALL_NAME, prepare)


def _owned_spans(layout: Layout, rank: Rank) -> dict[int, Span]:
    """What a rank owns of which parameters."""
    return {piece.param: piece.in_param for bucket in layout.buckets for piece in bucket.param_shards_of_rank(rank)}


def _check_same_model(shared_state: dict[str, Any], engine: Engine, buffers: NamedBuffers) -> Prepared[None]:
    """Raises if the copies are not of this model."""
    ours = [*describe_params(engine), *(f"buffer {name}: shape {tuple(it.shape)}" for name, it in buffers.items())]
    theirs = [
        *shared_state["params"],
        *(f"buffer {name}: shape {tuple(it.shape)}" for name, it in shared_state["buffers"].items()),
    ]
    ours, theirs = [*ours, "nothing more"], [*theirs, "nothing more"]
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            raise CheckpointError(
                f"restore: the copies are of another model, or of parameters in another order. They have {other}, and "
                f"this optimizer has {mine}. Nothing was changed."
            )
    return Prepared(None)


@torch.no_grad()
def _write_params_and_buffers(
    engine: Engine, assembled: AssembledShard, buffers: NamedBuffers, buffer_values: NamedBuffers
) -> None:
    """Parameters and buffers. On all ranks."""
    for index, flat in assembled.weights.items():
        engine.shard_tensor(index).local.copy_(flat)
        copy = engine.master_shard_tensor(index)
        if copy is not None and MASTER_KEY not in assembled.state.get(index, {}):
            copy.local.copy_(flat)
    for name, value in buffer_values.items():
        buffers[name].copy_(value)
    engine.broadcast_params()()
