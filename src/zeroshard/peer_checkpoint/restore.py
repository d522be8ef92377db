"""`restore_from_peers`: restore an optimizer and its model from the snapshots that the remaining ranks hold in memory.

All ranks agree on the newest snapshot whose shards are all still held, exchange slices of them according to the new
layout, and load the result. The world size may differ from that of the snapshot.
"""

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

_CALL_NAME = "restore_from_peers"
SliceForRank = Callable[[int, Rank], Any]
"""Takes a shard index and a rank; returns the slice of that shard that the rank needs."""


def restore_from_peers(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> int:
    """Restore `optimizer`, its parameters and, with `shard`, the model's buffers from the newest complete snapshot.

    Call on all ranks of a new process group of any size, with a new optimizer over the same model. No file is read.
    Gradients are dropped. Either all ranks are restored or nothing changes.

    Args:
        optimizer: The new optimizer.
        snapshots: `peer_snapshots` of this process's previous optimizer; None in a process that has just started.

    Returns:
        The step of the snapshot, from which the new optimizer continues to count. If the optimizer takes peer
        checkpoints itself, the first of them is complete by then; `snapshots` holds it, unless that is None.

    Raises:
        CheckpointError: Shards of every snapshot were lost, or the snapshots belong to another model.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # without one, there is no group to report the error to
        raise TypeError(f"restore_from_peers() expects a sharded optimizer, got {type(optimizer).__name__}")
    with optimizer._engine.profiler.phase(Phase.RESTORE_FROM_PEERS):
        return _restore(optimizer, snapshots)


def _restore(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> int:
    engine, comm = optimizer._engine, optimizer._engine.comm
    local_snapshots = prepare_all(comm, _CALL_NAME, lambda: Prepared(_collect_local_snapshots(optimizer, snapshots)))
    exchange = _ShardExchange(comm, _take_inventory(comm, local_snapshots), local_snapshots)
    shared = exchange.run([SHARED_STATE], lambda shard, _: exchange.local_shards[shard])[0]
    prepare_all(comm, _CALL_NAME, lambda: _check_same_model(shared, engine, optimizer._model_binding.buffers()))
    assembled = _assemble_local_shard(exchange, engine)
    state_dict = {"state": assembled.state | shared["others"], "param_groups": shared["groups"], **shared["extra"]}
    optimizer.load_state_dict(state_dict, assign=True)
    _write_params_and_buffers(engine, assembled, optimizer._model_binding.buffers(), shared["buffers"])
    engine.restore_step_count(exchange.inventory.step)
    optimizer.zero_grad()
    if optimizer._peer_checkpointer is not None:  # the old snapshot might not survive the loss of another rank
        # Hazard: until all ranks have the new snapshot, the old one is the only complete one, also for ranks that fail
        # here and never return. Keep it.
        optimizer._peer_checkpointer.snapshots = snapshots or optimizer._peer_checkpointer.snapshots
        optimizer._peer_checkpointer.snapshots._mark_complete(exchange.inventory.optimizer_id, exchange.inventory.step)
        optimizer._peer_checkpointer.capture(engine, optimizer.param_groups, optimizer._model_binding.buffers)
        optimizer._peer_checkpointer.wait()
    return exchange.inventory.step


def _collect_local_snapshots(optimizer: ZeroRedundancyOptimizer, snapshots: PeerSnapshots | None) -> list[Snapshot]:
    """Return the snapshots on this rank, after checking the arguments and waiting for the engine."""
    if snapshots is not None and not isinstance(snapshots, PeerSnapshots):
        raise TypeError(
            f"restore_from_peers() expects the peer_snapshots of the previous optimizer or None, got "
            f"{type(snapshots).__name__}"
        )
    optimizer._require_final_layout(_CALL_NAME)
    optimizer._engine.params.groups.check(optimizer.param_groups)
    optimizer._engine.param_sync.wait_until_idle()
    return [] if snapshots is None else snapshots._list_snapshots()


class SnapshotInventory(NamedTuple):
    """The newest snapshot whose shards the ranks hold between them."""

    optimizer_id: int
    step: int
    num_shards: int
    shard_holders: dict[int, list[Rank]]
    """The ranks that hold each shard, of `comm.data_parallel`."""
    shard_ranks: list[Rank]
    """For each rank of `comm.data_parallel`, its rank in the new layout."""

    def select_source(self, shard: int, target: Rank) -> Rank:
        """Return the rank that sends `shard` to `target`: itself if it holds the shard."""
        holders = self.shard_holders[shard]
        return target if target in holders else holders[0]


def _take_inventory(comm: Comm, snapshots: Sequence[Snapshot]) -> SnapshotInventory:
    """Choose the newest complete snapshot. Call on all ranks; all return, or raise, the same."""
    local_lines = [
        f"{snapshot.optimizer_id} {snapshot.step} {snapshot.num_shards} {' '.join(map(str, sorted(snapshot.shards)))}"
        for snapshot in snapshots
    ]
    shard_ranks: list[Rank] = []
    holders = defaultdict[tuple[int, int, int], dict[int, list[Rank]]](lambda: defaultdict(list))
    own_text = "\n".join([str(comm.group.rank), *local_lines])
    for rank, text in enumerate(comm.data_parallel.all_gather_text(own_text, max_bytes=None)):
        shard_rank, *lines = text.splitlines()
        shard_ranks.append(Rank(int(shard_rank)))
        for line in lines:
            step, optimizer_id, num_shards, *shards = (int(number) for number in _reorder_step_first(line))
            for shard in shards:
                holders[step, optimizer_id, num_shards][shard].append(Rank(rank))
    newest_first = sorted(holders, reverse=True)
    for step, optimizer_id, num_shards in newest_first:
        shard_holders = holders[step, optimizer_id, num_shards]
        if shard_holders.keys() >= {SHARED_STATE, *range(num_shards)}:
            return SnapshotInventory(optimizer_id, step, num_shards, shard_holders, shard_ranks)
    raise CheckpointError(_format_missing_shards(newest_first, holders))


def _reorder_step_first(line: str) -> list[str]:
    optimizer_id, step, *rest = line.split()
    return [step, optimizer_id, *rest]


def _format_missing_shards(
    newest_first: list[tuple[int, int, int]], holders_by_snapshot: dict[tuple[int, int, int], dict[int, list[Rank]]]
) -> str:
    if not newest_first:
        return f"{_CALL_NAME}: no rank holds a snapshot. Load a checkpoint, or start from scratch."
    step, _, num_shards = newest_first[0]
    lost = sorted(({SHARED_STATE, *range(num_shards)}) - holders_by_snapshot[newest_first[0]].keys())
    ranks = sorted({max(shard, 0) for shard in lost})  # rank 0 provides the shared state
    return (
        f"{_CALL_NAME}: the snapshot of step {step} is incomplete: no remaining rank holds the shards of "
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} of {num_shards}, and no older snapshot "
        "is complete. Nothing was changed. Load a checkpoint."
    )


class _ShardExchange:
    """Sends shards of one snapshot to the ranks that need them, in the same order on all ranks."""

    def __init__(self, comm: Comm, inventory: SnapshotInventory, snapshots: Sequence[Snapshot]) -> None:
        self._comm, self.inventory = comm, inventory
        chosen = [
            snapshot
            for snapshot in snapshots
            if (snapshot.optimizer_id, snapshot.step) == (inventory.optimizer_id, inventory.step)
        ]
        packed_shards = [item for snapshot in chosen for item in snapshot.shards.items()]
        self.local_shards: dict[int, Any] = {index: unpack_from_buffers(packed) for index, packed in packed_shards}

    def run(self, shards: Sequence[int], slice_for_rank: SliceForRank) -> list[Any]:
        """Return this rank's slice of each shard, as copies. Call on all ranks.

        If a rank cannot slice or serialize a shard, all ranks raise before anything is sent.
        """
        data_parallel = self._comm.data_parallel
        this_rank, targets = data_parallel.group.rank, [Rank(rank) for rank in range(data_parallel.group.size)]
        plan = [(shard, self.inventory.select_source(shard, target), target) for shard in shards for target in targets]

        def prepare() -> Prepared[dict[tuple[int, Rank], Any]]:
            return Prepared(
                {
                    (shard, target): snapshot_to_host(slice_for_rank(shard, target))
                    if target == this_rank
                    else StateSender(slice_for_rank(shard, target))
                    for shard, source, target in plan
                    if source == this_rank
                }
            )

        slices = prepare_all(self._comm, _CALL_NAME, prepare)
        types = {name for item in slices.values() if isinstance(item, StateSender) for name in item.custom_types}
        check_types_allowed(self._comm, _CALL_NAME, sorted(types))
        received = []
        for shard, source, target in plan:
            if target == this_rank:
                is_local = source == this_rank
                received.append(slices[shard, this_rank] if is_local else receive_state(data_parallel, source))
            elif source == this_rank:  # drop the sender once it is done, to free its memory
                slices.pop((shard, target)).send(data_parallel, target)
        return received


def _assemble_local_shard(exchange: _ShardExchange, engine: Engine) -> AssembledShard:
    """Return this rank's shard in the new layout. Call on all ranks."""
    layout, shard_ranks = engine.layout, exchange.inventory.shard_ranks

    def slice_for_rank(shard: int, target: Rank) -> Any:
        return slice_shard(exchange.local_shards[shard], layout.params, _owned_spans(layout, shard_ranks[target]))

    slices = exchange.run(range(exchange.inventory.num_shards), slice_for_rank)

    def prepare() -> Prepared[AssembledShard]:
        assembler = ShardAssembler(layout.params, _owned_spans(layout, engine.comm.group.rank))
        while slices:
            assembler.add(slices.pop())
        assembled = assembler.assemble()
        for index, state in assembled.state.items():
            if not engine.state.owns(index, MASTER_KEY):
                state.pop(MASTER_KEY, None)
        return Prepared(assembled)

    return prepare_all(engine.comm, _CALL_NAME, prepare)


def _owned_spans(layout: Layout, rank: Rank) -> dict[int, Span]:
    """Return the span that `rank` owns of each of its parameters."""
    return {shard.param: shard.in_param for bucket in layout.buckets for shard in bucket.param_shards_of_rank(rank)}


def _check_same_model(shared_state: dict[str, Any], engine: Engine, buffers: NamedBuffers) -> Prepared[None]:
    """Raise `CheckpointError` if the snapshots belong to another model."""
    current = [*describe_params(engine), *_describe_buffers(buffers), "nothing more"]
    saved = [*shared_state["params"], *_describe_buffers(shared_state["buffers"]), "nothing more"]
    for current_line, saved_line in zip(current, saved, strict=False):
        if current_line != saved_line:
            raise CheckpointError(
                f"{_CALL_NAME}: the snapshots belong to another model, or to parameters in another order: expected "
                f"{current_line}, got {saved_line}. Nothing was changed. Create the optimizer over the same model."
            )
    return Prepared(None)


def _describe_buffers(buffers: NamedBuffers) -> list[str]:
    return [f"buffer {name}: shape {tuple(buffer.shape)}" for name, buffer in buffers.items()]


@torch.no_grad()
def _write_params_and_buffers(
    engine: Engine, assembled: AssembledShard, buffers: NamedBuffers, buffer_values: NamedBuffers
) -> None:
    """Write this rank's parameter shards and all buffers, and broadcast the parameters. Call on all ranks."""
    for index, flat in assembled.weights.items():
        engine.params.shard_tensor(index).local.copy_(flat)
        master = engine.params.master_shard_tensor(index)
        if master is not None and MASTER_KEY not in assembled.state.get(index, {}):
            master.local.copy_(flat)
    for name, value in buffer_values.items():
        buffers[name].copy_(value)
    engine.param_sync.sync_all()
