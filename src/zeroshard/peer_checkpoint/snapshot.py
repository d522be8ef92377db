"""A second copy of every rank's share, in the memory of another rank.

A generation is what all ranks had after one step. It counts when every rank has its own share and those that it keeps
for others; until then the one before stays. So whenever a rank is lost, those that are left have one generation whole.
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
from ..state.state_dict import MASTER_KEY, StateShard, flatten_in_memory_order, pack_param_groups
from ..state.tensor_utils import collect_plain_tensors, inner_tensors, is_wrapper_subclass, slice_subclass
from .placement import assign_peers, ranks_stored_on

# ---------------------------------------------------------------------------------------------------------------------
# A rank's share of state and parameters as a value: taken, divided anew for other ranks, put together there.


ShardData = dict[str, Any]
"""Of plain containers and tensors, to be sent as it is."""
STATE_KEY, WEIGHTS_KEY = "records", "weights"


def make_shard_data(state_shards: Sequence[StateShard], weights: Mapping[int, ShardTensor]) -> ShardData:
    """What a rank holds, by parameter. `weights` are left out where a record has a more precise copy."""
    held = {record.param: record.to_portable() for record in state_shards}
    precise = {record.param for record in state_shards if MASTER_KEY in record.state}
    plain = {index: (it.start, it.local) for index, it in weights.items() if index not in precise}
    return {STATE_KEY: held, WEIGHTS_KEY: plain}


def slice_shard(shard: ShardData, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> ShardData:
    """What of a share belongs to a rank that owns these spans of parameters; views wherever that is possible."""
    records: dict[int, Any] = {}
    for param, (span, cut, common, state) in shard[STATE_KEY].items():
        if param in spans:
            wanted, spec = spans[param], specs[param]
            if span is None:
                records[param] = (
                    (None, cut, common, state)
                    if _is_full_span(wanted, spec)
                    else _shard_full_state(spec, wanted, state)
                )
            elif (both := _intersect_spans(Span(*span), wanted)) is not None:
                records[param] = (
                    list(both),
                    cut,
                    common,
                    _slice_state(state, Span(*span), both, cut, frozenset(common)),
                )
    weights: dict[int, Any] = {}
    for param, (start, flat) in shard[WEIGHTS_KEY].items():
        both = _intersect_spans(Span(start, start + flat.numel()), spans[param]) if param in spans else None
        if both is not None:
            weights[param] = (both.start, flat[both.start - start : both.stop - start])
    return {STATE_KEY: records, WEIGHTS_KEY: weights}


class AssembledShard(NamedTuple):
    """What a rank holds, put together."""

    state: dict[int, Any]
    """In the format of `sharded_state_dict`."""
    weights: dict[int, torch.Tensor]
    """Flat, the most precise values there are."""


class ShardAssembler:
    """Puts portions together, from whichever shares they come."""

    def __init__(self, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> None:
        self._specs, self._spans = specs, spans
        self._state: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._shared_inner_names: dict[int, frozenset[str]] = {}
        self._state_slices: dict[tuple[int, Any], list[tuple[Span, torch.Tensor]]] = defaultdict(list)
        self._weight_slices: dict[int, list[tuple[Span, torch.Tensor]]] = defaultdict(list)

    def add(self, shard: ShardData) -> None:
        for param, (span, cut, common, state) in shard[STATE_KEY].items():
            self._shared_inner_names[param] = frozenset(common)
            for key, value in state.items():
                if span is None or key not in cut:
                    self._state[param].setdefault(key, value)
                else:
                    self._state[param].setdefault(key, None)  # for the order of keys
                    self._state_slices[param, key].append((Span(*span), value))
        for param, (start, flat) in shard[WEIGHTS_KEY].items():
            self._weight_slices[param].append((Span(start, start + flat.numel()), flat))

    def assemble(self) -> AssembledShard:
        for (param, key), pieces in self._state_slices.items():
            self._state[param][key] = self._join_slices(param, key, sorted(pieces, key=lambda piece: piece[0]))
        weights = {param: self._concat_flat(param, "values", pieces) for param, pieces in self._weight_slices.items()}
        for param, state in self._state.items():
            if MASTER_KEY in state:
                weights[param] = self._local_slice(param, state[MASTER_KEY])
        for param in self._spans.keys() - weights.keys():
            raise CheckpointError(f"the copies have no values of {self._specs[param].label}")
        return AssembledShard(dict(self._state), weights)

    def _join_slices(self, param: int, key: Any, slices: list[tuple[Span, torch.Tensor]]) -> Any:
        spec, values = self._specs[param], [value for _, value in slices]
        if is_wrapper_subclass(values[0]):
            return _concat_inner_tensors(values, self._shared_inner_names[param])
        whole = ShardTensor(
            self._concat_flat(param, f"'{key}'", slices), spec.shape, spec.stride, self._spans[param].start
        )
        return whole.to_full().clone() if whole.is_full and spec.storage_numel > spec.numel else whole

    def _concat_flat(self, param: int, label: str, slices: list[tuple[Span, torch.Tensor]]) -> torch.Tensor:
        """Of overlapping pieces, which replicas have, each is as good as the other."""
        mine = self._spans[param]
        flat = slices[0][1].new_empty(mine.length)
        covered = mine.start
        for span, value in sorted(slices, key=lambda piece: piece[0]):
            flat[span.start - mine.start : span.stop - mine.start] = value
            covered = max(covered, span.stop) if span.start <= covered else covered
        if covered != mine.stop:
            raise CheckpointError(
                f"the copies have {label} of {self._specs[param].label} up to element {covered} only, and not up to "
                f"{mine.stop}"
            )
        return flat

    def _local_slice(self, param: int, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, ShardTensor):
            return value.local
        return flatten_in_memory_order(value, self._specs[param])[slice(*self._spans[param])]


def _is_full_span(span: Span, spec: ParamSpec) -> bool:
    return span.length == spec.storage_numel


def _intersect_spans(one: Span, other: Span) -> Span | None:
    """None if there is none. What has no elements is in both."""
    both = Span(max(one.start, other.start), min(one.stop, other.stop))
    return both if both.length > 0 or one.length == other.length == 0 else None


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
    """A span of the state of a whole parameter. What is made of several tensors is left to the loading rank."""
    shaped = [key for key, value in state.items() if _is_param_shaped(value, spec)]
    values = {
        key: flatten_in_memory_order(it, spec)[slice(*span)] if key in shaped else it for key, it in state.items()
    }
    return list(span), shaped, [], values


def _is_param_shaped(value: Any, spec: ParamSpec) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapper_subclass(value) and tuple(value.shape) == spec.shape


def _concat_inner_tensors(
    tensors: Sequence[torch.Tensor], shared_inner_names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The plain tensors that a value is made of, flat, of neighbouring pieces of it."""
    found = [inner_tensors(piece) for piece in tensors]
    return {
        name: it if name in shared_inner_names else torch.cat([part[name].reshape(-1) for part in found])
        for name, it in found[0].items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# A second copy of every rank's share, in the memory of another rank.
#
# A generation is what all ranks had after one step. It counts when every rank has its own share and those that it keeps
# for others; until then the one before stays. So whenever a rank is lost, those that are left have one generation
# whole.


SHARED_STATE = -1
"""The share of what all ranks have alike, which rank 0 gives: options, buffers, names of parameters."""
_MAX_OPTIMIZER_ID = 1 << 62

NamedBuffers = Mapping[str, torch.Tensor]


@dataclass
class Snapshot:
    """What this rank has of one: shares by their place in the layout, and `COMMON`."""

    optimizer_id: int
    """Of all copies that one optimizer makes."""
    step: int
    num_shards: int
    """How many shares there are."""
    shards: dict[int, PackedValue] = field(default_factory=dict)


class PeerSnapshots:
    """The copies that this rank holds: of its own share, and of those that it keeps for others.

    They are values in host memory, and stay when the process group and the optimizer are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: Snapshot | None = None
        self._incoming: Snapshot | None = None
        self.bytes_sent = 0
        """Bytes that this rank has sent for the last copy."""

    @property
    def step(self) -> int | None:
        """The number of steps after which the copy was taken that all ranks have; None if there is none yet."""
        with self._lock:
            return None if self._complete is None else self._complete.step

    @property
    def nbytes(self) -> int:
        """Bytes that they take on this rank, also what is still coming."""
        return sum(tensor.nbytes for it in self.list_snapshots() for tensor in collect_plain_tensors(it.shards))

    def list_snapshots(self) -> list[Snapshot]:
        """All that is here, also of a generation that did not become whole."""
        with self._lock:
            found = [it for it in (self._complete, self._incoming) if it is not None]
            return [Snapshot(it.optimizer_id, it.step, it.num_shards, dict(it.shards)) for it in found]

    def begin(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._incoming = snapshot

    def mark_complete(self, optimizer_id: int, step: int) -> None:
        """That generation is whole, as ranks have found out together."""
        with self._lock:
            for it in (self._complete, self._incoming):
                if it is not None and (it.optimizer_id, it.step) == (optimizer_id, step):
                    self._complete, self._incoming = it, None
                    return

    def clear(self) -> None:
        """All of it, also what is coming."""
        with self._lock:
            self._complete = self._incoming = None

    def add_shards(self, snapshot: Snapshot, shards: Mapping[int, Any]) -> None:
        with self._lock:
            snapshot.shards.update(shards)

    def commit(self, snapshot: Snapshot) -> None:
        """All ranks have it."""
        with self._lock:
            if self._incoming is snapshot:
                self._complete, self._incoming = snapshot, None


class PeerCheckpointer:
    """Takes copies of an optimizer's share, and exchanges them in a thread."""

    def __init__(self, comm: Comm, policy: PeerCheckpoint) -> None:
        """On all ranks."""
        self._comm, self._policy = comm, policy
        self.snapshots = PeerSnapshots()
        self._last_step, self._is_due = 0, False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        everyone = comm.data_parallel
        self._rank = everyone.group.rank
        if comm.is_single_rank:
            warn_at_caller(
                "PeerCheckpoint(...) on one rank: there is no other to keep a copy, which is lost with this process"
            )
            self._peers, self._optimizer_id = [0], random.SystemRandom().randrange(_MAX_OPTIMIZER_ID)
            return
        self._background_comm = BackgroundComm(everyone.group)
        self._peers = assign_peers(_failure_domains(everyone, policy.failure_domain_size))
        self._optimizer_id = everyone.all_reduce_max([random.SystemRandom().randrange(_MAX_OPTIMIZER_ID)])[0]

    def after_step(self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]) -> None:
        """Take a copy if it is time for one. On all ranks."""
        if engine.steps != self._last_step and (self._is_due or engine.steps % self._policy.every == 0):
            with self._comm.profiler.phase(Phase.PEER_CHECKPOINT):
                self.capture(engine, groups, get_buffers)

    def invalidate_snapshots(self) -> None:
        """What was copied is no more: something else was loaded, and is copied after the next step. On all ranks."""
        self.snapshots.clear()
        self._is_due = True

    def capture(self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]) -> None:
        """Copy this rank's share to host memory, and start to exchange it. On all ranks.

        Waits for the exchange before, if that is still under way, and raises what failed in it.
        """

        def prepare() -> Prepared[tuple[Snapshot, StateSender]]:
            self.wait()
            mine = {
                number: pack_into_buffers(share)
                for number, share in self._collect_shards(engine, groups, get_buffers).items()
            }
            return Prepared(
                (Snapshot(self._optimizer_id, engine.steps, engine.layout.world_size, mine), StateSender(mine))
            )

        self._last_step, self._is_due = engine.steps, False
        call = f"the second copy of step {engine.steps}"
        generation, outbox = prepare_all(self._comm, call, prepare)
        types = {name for share in generation.shards.values() for name in share["types"]}
        check_types_allowed(self._comm, call, sorted(types))
        self.snapshots.begin(generation)
        if self._comm.is_single_rank:
            self.snapshots.commit(generation)
            return
        # Hazard: both start here, since no thread can once the process is about to end.
        sending = _SendThread(self._background_comm, outbox, Rank(self._peers[self._rank]))
        self._thread = _start_thread(
            partial(self._run_exchange, generation, sending), self._background_comm.group.failure_detector
        )
        self.snapshots.bytes_sent = outbox.nbytes

    def wait(self) -> None:
        """No exchange is under way. Raises what failed in the last one, once."""
        if self._thread is not None:
            self._thread.join()
        failure, self._failure, self._thread = self._failure, None, None
        if failure is not None:
            raise failure

    def _collect_shards(
        self, engine: Engine, groups: Sequence[ParamGroup], get_buffers: Callable[[], NamedBuffers]
    ) -> dict[int, dict[str, Any]]:
        place = engine.comm.group.rank
        weights = {index: engine.shard_tensor(index) for index in engine.owned_params(place)}
        shares = {int(place): make_shard_data(engine.state_shards(), weights)}
        if self._rank == 0:
            shares[SHARED_STATE] = collect_shared_state(engine, groups, get_buffers())
        return shares

    def _run_exchange(self, snapshot: Snapshot, sender: "_SendThread") -> None:
        """All ranks send and receive at once: in a ring where all only sent first, nobody would be there to receive."""
        failure = self._receive_shards(snapshot)
        failure = sender.join() or failure
        try:
            if self._background_comm.all_succeeded(succeeded=failure is None):
                self.snapshots.commit(snapshot)
            else:
                failure = failure or RankFailedError(f"another rank did not get the copy of step {snapshot.step}")
        except BaseException as error:
            failure = failure or error
        self._failure = failure

    def _receive_shards(self, snapshot: Snapshot) -> BaseException | None:
        """What others give to keep; what failed, if anything did."""
        try:
            with self._background_comm.group.failure_detector.abort_on_error():
                for ward in ranks_stored_on(self._peers, self._rank):
                    self.snapshots.add_shards(snapshot, receive_state(self._background_comm, Rank(ward)))
        except BaseException as error:
            return error
        return None


class _SendThread:
    def __init__(self, comm: BackgroundComm, sender: StateSender, destination: Rank) -> None:
        self._failure: BaseException | None = None
        self._send_args = (comm, sender, destination)
        self._thread = _start_thread(self._run, comm.group.failure_detector)

    def join(self) -> BaseException | None:
        """Wait for it; what failed, if anything did."""
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        comm, outbox, to = self._send_args
        try:
            with comm.group.failure_detector.abort_on_error():
                outbox.send(comm, to)
        except BaseException as error:
            self._failure = error


def _start_thread(target: Callable[[], None], failure_detector: FailureDetector) -> threading.Thread:
    thread = threading.Thread(target=target, name="zeroshard-copy", daemon=True)
    thread.start()
    join_at_exit(thread, failure_detector=failure_detector)
    return thread


def make_peer_checkpointer(comm: Comm, policy: PeerCheckpoint | None) -> PeerCheckpointer | None:
    """What a config asks for. On all ranks."""
    return None if policy is None else PeerCheckpointer(comm, policy)


def collect_shared_state(engine: Engine, groups: Sequence[ParamGroup], buffers: NamedBuffers) -> dict[str, Any]:
    """What all ranks have alike."""
    others = {key: value for member in engine.inner.local_optimizers for key, value in member.shared_state().items()}
    return {
        "params": describe_params(engine),
        "groups": pack_param_groups(groups),
        "extra": engine.inner.extra_state(),
        "others": others,
        "buffers": dict(buffers),
    }


def describe_params(engine: Engine) -> list[str]:
    """A line for each parameter, by which another optimizer knows that its own are the same."""
    return [f"{it.label}: shape {it.shape}, strides {it.stride}, {it.dtype}" for it in engine.layout.params]


def _failure_domains(data_parallel: Comm, failure_domain_size: int | None) -> list[str] | list[int]:
    if failure_domain_size is not None:
        return [rank // failure_domain_size for rank in range(data_parallel.group.size)]
    return data_parallel.all_gather_text(socket.gethostname(), max_bytes=256)
