"""Peer snapshots: a copy of each rank's shard in the host memory of another rank.

A snapshot is the state of all ranks after one step. A background thread exchanges shards with the peers.

Invariant: a snapshot is committed only when every rank has its own shard and those that it stores for others, and the
previous snapshot is kept until then. So after losing a rank, the others hold at least one complete snapshot.
"""

import random
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from .._logging import warn_at_caller
from .._types import Rank, Span
from ..comm.collectives import BackgroundComm, Comm
from ..comm.consensus import Prepared, prepare_all
from ..comm.failure import FailureDetector, join_at_exit
from ..config import PeerCheckpoint
from ..engine.base import Engine
from ..engine.inner import ParamGroup
from ..errors import CheckpointError, RankFailedError
from ..layout.spec import ParamSpec
from ..profiling import Phase
from ..state.serialization import PackedValue, StateSender, check_types_allowed, pack_into_buffers, receive_state
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import MASTER_KEY, StateShard, pack_param_groups, slice_span
from ..state.tensor_utils import collect_plain_tensors, inner_tensors, is_wrapper_subclass, slice_subclass
from .placement import assign_peers, ranks_stored_on

# ---------------------------------------------------------------------------------------------------------------------
# Shard data: a rank's state and parameters as a value that can be resharded.


ShardData = dict[str, Any]
"""Plain containers and tensors, which can be sent without conversion."""
STATE_KEY, WEIGHTS_KEY = "records", "weights"


def make_shard_data(state_shards: Sequence[StateShard], weights: Mapping[int, ShardTensor]) -> ShardData:
    """Return one rank's state and weights, by parameter. Weights are omitted where the state has master weights."""
    state = {state_shard.param: state_shard.to_portable() for state_shard in state_shards}
    has_master = {state_shard.param for state_shard in state_shards if MASTER_KEY in state_shard.state}
    flat_weights = {index: (weight.start, weight.local) for index, weight in weights.items() if index not in has_master}
    return {STATE_KEY: state, WEIGHTS_KEY: flat_weights}


def slice_shard(shard: ShardData, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> ShardData:
    """Return the part of a shard that a rank with `spans`, by parameter, needs. Uses views where possible."""
    sliced: dict[int, Any] = {}
    for param, (span, sharded_keys, shared_inner_names, state) in shard[STATE_KEY].items():
        if param in spans:
            target, spec = spans[param], specs[param]
            if span is None:
                sliced[param] = (
                    (None, sharded_keys, shared_inner_names, state)
                    if _is_full_span(target, spec)
                    else _shard_full_state(spec, target, state)
                )
            elif (overlap := _intersect_spans(Span(*span), target)) is not None:
                sliced[param] = (
                    list(overlap),
                    sharded_keys,
                    shared_inner_names,
                    _slice_state(state, Span(*span), overlap, sharded_keys, frozenset(shared_inner_names)),
                )
    weights: dict[int, Any] = {}
    for param, (start, flat) in shard[WEIGHTS_KEY].items():
        overlap = _intersect_spans(Span(start, start + flat.numel()), spans[param]) if param in spans else None
        if overlap is not None:
            weights[param] = (overlap.start, flat[overlap.start - start : overlap.stop - start])
    return {STATE_KEY: sliced, WEIGHTS_KEY: weights}


class AssembledShard(NamedTuple):
    """One rank's state and weights in the new layout."""

    state: dict[int, Any]
    """In the format of `sharded_state_dict`."""
    weights: dict[int, torch.Tensor]
    """Flat; master weights where there are any."""


class ShardAssembler:
    """Joins slices of shards, in any order, to one rank's shard in the new layout."""

    def __init__(self, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> None:
        self._specs, self._spans = specs, spans
        self._state: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._shared_inner_names: dict[int, frozenset[str]] = {}
        self._state_slices: dict[tuple[int, Any], list[tuple[Span, torch.Tensor]]] = defaultdict(list)
        self._weight_slices: dict[int, list[tuple[Span, torch.Tensor]]] = defaultdict(list)

    def add(self, shard: ShardData) -> None:
        for param, (span, sharded_keys, shared_inner_names, state) in shard[STATE_KEY].items():
            self._shared_inner_names[param] = frozenset(shared_inner_names)
            for key, value in state.items():
                if span is None or key not in sharded_keys:
                    self._state[param].setdefault(key, value)
                else:
                    self._state[param].setdefault(key, None)  # keeps the order of keys
                    self._state_slices[param, key].append((Span(*span), value))
        for param, (start, flat) in shard[WEIGHTS_KEY].items():
            self._weight_slices[param].append((Span(start, start + flat.numel()), flat))

    def assemble(self) -> AssembledShard:
        """Return the joined shard. Raises `CheckpointError` if elements are missing."""
        for (param, key), slices in self._state_slices.items():
            self._state[param][key] = self._join_slices(
                param, key, sorted(slices, key=lambda span_and_value: span_and_value[0])
            )
        weights = {param: self._concat_flat(param, "values", slices) for param, slices in self._weight_slices.items()}
        for param, state in self._state.items():
            if MASTER_KEY in state:
                weights[param] = slice_span(state[MASTER_KEY], self._specs[param], self._spans[param])
        for param in self._spans.keys() - weights.keys():
            raise CheckpointError(f"the snapshots have no values of {self._specs[param].label}. Load a checkpoint.")
        return AssembledShard(dict(self._state), weights)

    def _join_slices(self, param: int, key: Any, slices: list[tuple[Span, torch.Tensor]]) -> Any:
        spec, values = self._specs[param], [value for _, value in slices]
        if is_wrapper_subclass(values[0]):
            return _concat_inner_tensors(values, self._shared_inner_names[param])
        shard = ShardTensor(
            self._concat_flat(param, f"'{key}'", slices), spec.shape, spec.stride, self._spans[param].start
        )
        return shard.to_full().clone() if shard.is_full and spec.storage_numel > spec.numel else shard

    def _concat_flat(self, param: int, label: str, slices: list[tuple[Span, torch.Tensor]]) -> torch.Tensor:
        """Concatenate slices to a flat tensor. Slices may overlap: replicas hold equal values."""
        owned = self._spans[param]
        flat = slices[0][1].new_empty(owned.length)
        covered = owned.start
        for span, value in sorted(slices, key=lambda span_and_value: span_and_value[0]):
            flat[span.start - owned.start : span.stop - owned.start] = value
            covered = max(covered, span.stop) if span.start <= covered else covered
        if covered != owned.stop:
            raise CheckpointError(
                f"the snapshots of {label} of {self._specs[param].label} are incomplete: expected elements up to "
                f"{owned.stop}, got {covered}. Load a checkpoint."
            )
        return flat


def _is_full_span(span: Span, spec: ParamSpec) -> bool:
    return span.length == spec.storage_numel


def _intersect_spans(one: Span, other: Span) -> Span | None:
    """Return the intersection; None if it is empty, unless both spans are empty."""
    overlap = Span(max(one.start, other.start), min(one.stop, other.stop))
    return overlap if overlap.length > 0 or one.length == other.length == 0 else None


def _slice_state(
    state: ShardData, span: Span, overlap: Span, sharded_keys: Sequence[str], shared_inner_names: frozenset[str]
) -> ShardData:
    start, stop = overlap.start - span.start, overlap.stop - span.start

    def slice_value(value: torch.Tensor) -> torch.Tensor:
        return (
            slice_subclass(value, start, stop, shared_inner_names) if is_wrapper_subclass(value) else value[start:stop]
        )

    return {key: slice_value(value) if key in sharded_keys else value for key, value in state.items()}


def _shard_full_state(spec: ParamSpec, span: Span, state: ShardData) -> Any:
    """Return a portable shard of the state of a full parameter. The loading rank slices wrapper subclasses."""
    sharded_keys = [key for key, value in state.items() if _is_param_shaped(value, spec)]
    values = {key: slice_span(value, spec, span) if key in sharded_keys else value for key, value in state.items()}
    return list(span), sharded_keys, [], values


def _is_param_shaped(value: Any, spec: ParamSpec) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapper_subclass(value) and tuple(value.shape) == spec.shape


def _concat_inner_tensors(
    tensors: Sequence[torch.Tensor], shared_inner_names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Return the flat inner tensors of adjacent slices, concatenated."""
    inner_by_slice = [inner_tensors(tensor) for tensor in tensors]
    return {
        name: first if name in shared_inner_names else torch.cat([inner[name].reshape(-1) for inner in inner_by_slice])
        for name, first in inner_by_slice[0].items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Snapshots that this rank stores, for itself and for others.


SHARED_STATE = -1
"""The index of a shard that rank 0 provides, with what is equal on all ranks: options, buffers, parameter names."""
_MAX_OPTIMIZER_ID = 1 << 62

NamedBuffers = Mapping[str, torch.Tensor]


@dataclass
class Snapshot:
    """What this rank holds of one snapshot."""

    optimizer_id: int
    """Equal for all snapshots of one optimizer."""
    step: int
    num_shards: int
    """World size of the layout, not counting `SHARED_STATE`."""
    shards: dict[int, PackedValue] = field(default_factory=dict)
    """By rank in the layout, or `SHARED_STATE`."""


class PeerSnapshots:
    """The snapshots that this rank holds: of its own shard, and of those that it stores for others.

    They are values in host memory, and outlive the process group and the optimizer. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: Snapshot | None = None
        self._incoming: Snapshot | None = None
        self.bytes_sent = 0
        """Bytes that this rank sent for the last snapshot."""

    @property
    def step(self) -> int | None:
        """The step of the last complete snapshot; None if there is none yet."""
        with self._lock:
            return None if self._complete is None else self._complete.step

    @property
    def nbytes(self) -> int:
        """Host memory that the snapshots take on this rank, including incomplete ones."""
        return sum(
            tensor.nbytes for snapshot in self._list_snapshots() for tensor in collect_plain_tensors(snapshot.shards)
        )

    def _list_snapshots(self) -> list[Snapshot]:
        """Return all snapshots, including an incomplete one."""
        with self._lock:
            snapshots = [snapshot for snapshot in (self._complete, self._incoming) if snapshot is not None]
            return [
                Snapshot(snapshot.optimizer_id, snapshot.step, snapshot.num_shards, dict(snapshot.shards))
                for snapshot in snapshots
            ]

    def _begin(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._incoming = snapshot

    def _mark_complete(self, optimizer_id: int, step: int) -> None:
        """Keep only the snapshot of this step, which the ranks together found to be complete."""
        with self._lock:
            for snapshot in (self._complete, self._incoming):
                if snapshot is not None and (snapshot.optimizer_id, snapshot.step) == (optimizer_id, step):
                    self._complete, self._incoming = snapshot, None
                    return

    def _clear(self) -> None:
        """Drop all snapshots, including an incomplete one."""
        with self._lock:
            self._complete = self._incoming = None

    def _add_shards(self, snapshot: Snapshot, shards: Mapping[int, Any]) -> None:
        with self._lock:
            snapshot.shards.update(shards)

    def _commit(self, snapshot: Snapshot) -> None:
        """Replace the complete snapshot by `snapshot`, unless that was cleared. Call when all ranks have it."""
        with self._lock:
            if self._incoming is snapshot:
                self._complete, self._incoming = snapshot, None


# ---------------------------------------------------------------------------------------------------------------------
# Taking snapshots and exchanging them with peers.


class PeerCheckpointer:
    """Takes snapshots of an optimizer's shard and exchanges them with peers in a background thread."""

    def __init__(self, comm: Comm, policy: PeerCheckpoint) -> None:
        """Choose peers. Call on all ranks."""
        self._comm, self._policy = comm, policy
        self.snapshots = PeerSnapshots()
        self._last_step, self._is_due = 0, False
        self._exchange: _CopyThread | None = None
        data_parallel = comm.data_parallel
        self._rank = data_parallel.group.rank
        if comm.is_single_rank:
            warn_at_caller("PeerCheckpoint(...) has no effect on one rank: its snapshot is lost with this process")
            self._peers, self._optimizer_id = [0], random.SystemRandom().randrange(_MAX_OPTIMIZER_ID)
            return
        self._background_comm = BackgroundComm(data_parallel.group)
        self._peers = assign_peers(_failure_domains(data_parallel, policy.failure_domain_size))
        self._optimizer_id = data_parallel.all_reduce_max([random.SystemRandom().randrange(_MAX_OPTIMIZER_ID)])[0]

    def after_step(self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]) -> None:
        """Take a snapshot if one is due. Call on all ranks."""
        if engine.steps != self._last_step and (self._is_due or engine.steps % self._policy.every == 0):
            with engine.profiler.phase(Phase.PEER_CHECKPOINT):
                self.capture(engine, groups, get_buffers)

    def invalidate_snapshots(self) -> None:
        """Drop all snapshots, after a load, and take a new one after the next step. Call on all ranks."""
        self.snapshots._clear()
        self._is_due = True

    def capture(self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]) -> None:
        """Copy this rank's shard to host memory and start to send it to its peer. Call on all ranks.

        Waits for the previous exchange first, and raises its error if it failed.
        """

        def prepare() -> Prepared[tuple[Snapshot, StateSender]]:
            self.wait()
            packed_shards = {
                index: pack_into_buffers(shard)
                for index, shard in self._collect_shards(engine, groups, get_buffers).items()
            }
            snapshot = Snapshot(self._optimizer_id, engine.steps, engine.layout.world_size, packed_shards)
            return Prepared((snapshot, StateSender(packed_shards)))

        self._last_step, self._is_due = engine.steps, False
        call = f"the peer checkpoint of step {engine.steps}"
        snapshot, sender = prepare_all(self._comm, call, prepare)
        types = {name for packed in snapshot.shards.values() for name in packed["types"]}
        check_types_allowed(self._comm, call, sorted(types))
        self.snapshots._begin(snapshot)
        if self._comm.is_single_rank:
            self.snapshots._commit(snapshot)
            return
        # Hazard: start both threads here. Once the interpreter shuts down, neither could start the other.
        detector = self._background_comm.group.failure_detector
        send_thread = _CopyThread(partial(self._send_shards, sender), detector)
        self._exchange = _CopyThread(partial(self._run_exchange, snapshot, send_thread), detector)
        self.snapshots.bytes_sent = sender.nbytes

    def wait(self) -> None:
        """Wait for the exchange in flight. Raises its error, once."""
        if self._exchange is not None:
            failure = self._exchange.join()
            self._exchange = None
            if failure is not None:
                raise failure

    def _collect_shards(
        self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]
    ) -> dict[int, dict[str, Any]]:
        shard_rank = engine.comm.group.rank
        weights = {index: engine.params.shard_tensor(index) for index in engine.params.owned_by(shard_rank)}
        shards = {int(shard_rank): make_shard_data(engine.state.shards(), weights)}
        if self._rank == 0:
            shards[SHARED_STATE] = collect_shared_state(engine, groups, get_buffers())
        return shards

    def _run_exchange(self, snapshot: Snapshot, send_thread: "_CopyThread") -> None:
        """Receive shards while `send_thread` sends, and commit the snapshot if all ranks succeeded.

        Ranks must send and receive at the same time: peers form a ring, where sending first would deadlock.
        """
        failure: BaseException | None = None
        try:
            self._receive_shards(snapshot)
        except BaseException as error:
            failure = error
        failure, succeeded = send_thread.join() or failure, False
        try:
            succeeded = self._background_comm.all_succeeded(succeeded=failure is None)
        except BaseException as error:
            failure = failure or error
        if not succeeded:
            raise failure or RankFailedError(f"another rank did not receive its snapshot of step {snapshot.step}")
        self.snapshots._commit(snapshot)

    def _send_shards(self, sender: StateSender) -> None:
        with self._background_comm.group.failure_detector.abort_on_error():
            sender.send(self._background_comm, Rank(self._peers[self._rank]))

    def _receive_shards(self, snapshot: Snapshot) -> None:
        """Receive the shards that this rank stores for others."""
        with self._background_comm.group.failure_detector.abort_on_error():
            for source in ranks_stored_on(self._peers, self._rank):
                self.snapshots._add_shards(snapshot, receive_state(self._background_comm, Rank(source)))


class _CopyThread:
    """A thread that runs an action once. The interpreter waits for it at exit."""

    def __init__(self, action: Callable[[], None], failure_detector: FailureDetector) -> None:
        self._failure: BaseException | None = None
        # Hazard: an attribute would keep what the action refers to, such as copies of the state, after it has run.
        self._thread = threading.Thread(target=self._run, args=(action,), name="zeroshard-copy", daemon=True)
        self._thread.start()
        join_at_exit(self._thread, failure_detector=failure_detector)

    def join(self) -> BaseException | None:
        """Wait for the thread. Return the error of the action, if any."""
        self._thread.join()
        return self._failure

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._failure = error


def make_peer_checkpointer(comm: Comm, policy: PeerCheckpoint | None) -> PeerCheckpointer | None:
    """Return a checkpointer if the config has a policy. Call on all ranks."""
    return None if policy is None else PeerCheckpointer(comm, policy)


def collect_shared_state(engine: Engine, groups: Sequence[ParamGroup], buffers: NamedBuffers) -> dict[str, Any]:
    """Return what is equal on all ranks: options, buffers, state that belongs to no parameter."""
    others = {
        key: value
        for optimizer in engine.params.inner.local_optimizers
        for key, value in optimizer.shared_state().items()
    }
    return {
        "params": describe_params(engine),
        "groups": pack_param_groups(groups),
        "extra": engine.params.inner.extra_state(),
        "others": others,
        "buffers": dict(buffers),
    }


def describe_params(engine: Engine) -> list[str]:
    """Return one line per parameter, by which a restored optimizer checks that it has the same parameters."""
    return [f"{spec.label}: shape {spec.shape}, strides {spec.stride}, {spec.dtype}" for spec in engine.layout.params]


def _failure_domains(data_parallel: Comm, failure_domain_size: int | None) -> list[str] | list[int]:
    if failure_domain_size is not None:
        return [rank // failure_domain_size for rank in range(data_parallel.group.size)]
    return data_parallel.all_gather_text(socket.gethostname(), max_bytes=256)
