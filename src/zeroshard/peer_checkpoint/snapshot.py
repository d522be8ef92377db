"""A second copy of every rank's share, in the memory of another rank.

A generation is what all ranks had after one step. It counts when every rank has its own share and those that it keeps
for others; until then the one before stays. So whenever a rank is lost, those that are left have one generation whole.
"""

import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..comm.consensus import Prepared, prepare_all
from ..comm.aside import BackgroundComm
from ..comm.collectives import Comm
from ..comm.ending import join_at_exit
from ..comm.failure import FailureDetector
from ..errors import RankFailedError
from ..profiling import Phase
from .placement import assign_peers, ranks_stored_on
from .._logging import warn_at_caller
from ..policies import PeerCheckpoint
from ..engine.inner import ParamGroup
from ..engine.base import Engine
from ..state.state_dict import pack_param_groups
from .copies import make_shard_data
from ..state.serialization import StateSender, receive_state
from ..state.parcels import PackedValue, pack_into_buffers
from ..state.readers import check_types_allowed
from ..state.trees import collect_plain_tensors
from .._types import Rank

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
