"""What the verbs between ranks take here, through the ways that training takes."""

import copy
import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nccl

from .. import __version__
from .._types import MIB, Rank
from ..comm.collectives import Comm, encode_text
from ..comm.mesh import NODE, make_comm
from ..comm.process_group import Group, with_backend
from ..comm.transport_cache import select_transport
from ..config import Reduce
from ..errors import RankLostError
from ..layout.layout import EqualShards
from ..shard import shard

# ---------------------------------------------------------------------------------------------------------------------
# What a rank knows of itself, before it has said a word to others.


_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_", "NVIDIA_TF32_")
_VARIABLE_NAMES = ("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class GpuInfo:
    """The one that a rank would use."""

    index: int
    name: str
    identity: str
    """Of the thing itself, whatever a process calls it."""
    free: int
    total: int


@dataclass(frozen=True)
class RankInfo:
    """Of one rank. Memory in bytes."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    backend: str
    """The one that was asked for, or nothing."""
    versions: Mapping[str, str]
    gpu: GpuInfo | None
    gpu_trouble: str
    """Why it could not be looked at."""
    host_free: int
    host_total: int
    cores: tuple[int, ...]
    """Those that the process may run on."""
    threads: int
    environment: Mapping[str, str]
    settings: Mapping[str, str]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankInfo":
        """From JSON."""
        gpu = values["gpu"] and GpuInfo(**values["gpu"])
        return cls(**{**values, "gpu": gpu, "cores": tuple(values["cores"])})


def collect_rank_info(rank: int, backend: str) -> RankInfo:
    """`backend`: what was asked for. Fails on no rank alone: what cannot be found out is said instead."""
    local_rank, local_size = (_int_from_env(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpu, trouble = (None, "") if backend == "gloo" else _probe_gpu(local_rank if local_rank >= 0 else rank)
    free, total = _read_host_memory()
    return RankInfo(
        rank=rank,
        host=socket.gethostname(),
        local_rank=local_rank,
        local_size=local_size,
        backend=backend,
        versions=_collect_versions(),
        gpu=gpu,
        gpu_trouble=trouble,
        host_free=free,
        host_total=total,
        cores=_available_cores(),
        threads=torch.get_num_threads(),
        environment=_collect_environment(),
        settings=_collect_torch_settings(),
    )


def _int_from_env(name: str) -> int:
    """-1 where it is not set."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def _collect_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": __version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _probe_gpu(local_rank: int) -> tuple[GpuInfo | None, str]:
    if not torch.cuda.is_available():
        return None, ""
    index = local_rank % torch.cuda.device_count()
    try:
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        return GpuInfo(index, properties.name, str(properties.uuid), free, total), ""
    except (RuntimeError, AssertionError) as error:
        return None, f"cuda:{index}: {error}".partition("\n")[0]


def _read_host_memory() -> tuple[int, int]:
    """Free and total; zeros where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            said = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return said["MemAvailable"], said["MemTotal"]
    except (OSError, KeyError, ValueError):
        return 0, 0


def _available_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _collect_environment() -> dict[str, str]:
    chosen = (name for name in os.environ if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES)
    return {name: os.environ[name] for name in sorted(chosen)}


def _collect_torch_settings() -> dict[str, str]:
    """Those of torch that change what it computes."""
    return {
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "default dtype": str(torch.get_default_dtype()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Each rank and rank 0: how far their clocks are apart, and how fast the way between them is.


_PING_ROUNDS = 8
_PAYLOAD_ROUNDS = 3
_MAX_RANKS_WITH_FULL_PAYLOAD = 64
"""Rank 0 talks to one rank at a time. To more than so many it says less."""


@dataclass(frozen=True)
class Link:
    """To rank 0. Seconds, and bytes a second.

    ahead: how much later this rank's clock is, give or take `give_or_take`.
    """

    ahead: float
    give_or_take: float
    rate: float


def measure_link_to_rank0(comm: Comm) -> Link | None:
    """On all ranks, which rank 0 serves in their order; it has none itself."""
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    load = torch.zeros(
        MIB if comm.group.size <= _MAX_RANKS_WITH_FULL_PAYLOAD else MIB // 8, dtype=torch.uint8, device="cpu"
    )
    if comm.group.rank != 0:
        return _ping_rank0(comm, word, load)
    for rank in range(1, comm.group.size):
        _serve_pings(comm, Rank(rank), word, load)
    return None


def _serve_pings(comm: Comm, rank: Rank, ping: torch.Tensor, payload: torch.Tensor) -> None:
    for _ in range(_PING_ROUNDS):
        comm.receive(ping, rank).wait()
        ping[0] = time.time_ns()
        comm.send(ping, rank).wait()
    for _ in range(_PAYLOAD_ROUNDS):
        comm.receive(payload, rank).wait()
        comm.send(payload, rank).wait()


def _ping_rank0(comm: Comm, ping: torch.Tensor, payload: torch.Tensor) -> Link:
    """Of several rounds the fastest counts. In the first this rank waits for its turn."""
    rounds: list[tuple[int, int]] = []
    for _ in range(_PING_ROUNDS):
        asked = time.time_ns()
        _round_trip(comm, ping)
        took = time.time_ns() - asked
        rounds.append((took, asked + took // 2 - int(ping.item())))
    echoes = []
    for _ in range(_PAYLOAD_ROUNDS):
        start = time.perf_counter_ns()
        _round_trip(comm, payload)
        echoes.append(time.perf_counter_ns() - start)
    took, ahead = min(rounds)
    return Link(ahead / 1e9, took / 2e9, 2 * payload.numel() * 1e9 / max(min(echoes), 1))


def _round_trip(comm: Comm, tensor: torch.Tensor) -> None:
    comm.send(tensor, Rank(0)).wait()
    comm.receive(tensor, Rank(0)).wait()


# ---------------------------------------------------------------------------------------------------------------------
# How fast a rank is by itself.


_SPEED_REPEATS = 5


@dataclass(frozen=True)
class RankSpeed:
    """Of one rank: operations of a matrix product, and bytes that a copy reads and writes, a second."""

    product: float
    copy: float


def measure_speed(device: torch.device) -> RankSpeed:
    """All ranks measure at the same time, as they would work."""
    size, nbytes = (512, 32 * MIB) if device.type == "cpu" else (4096, 256 * MIB)
    matrix = torch.ones(size, size, dtype=torch.float32, device=device)
    product, source = torch.empty_like(matrix), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = time_call(lambda: torch.mm(matrix, matrix, out=product), device, _SPEED_REPEATS)
    copy = time_call(lambda: target.copy_(source), device, _SPEED_REPEATS)
    return RankSpeed(2 * size**3 / multiply, 2 * nbytes / copy)


def time_call(
    call: Callable[[], object], device: torch.device, repeats: int, summarize: Callable[[list[float]], float] = median
) -> float:
    """Seconds: the median, or what `of` makes of them, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return summarize(times[1:])


# ---------------------------------------------------------------------------------------------------------------------
# A few sharded steps of a tiny model, beside those of the unsharded optimizer on the data of all ranks.


TRIAL_STEPS = 4
_TRIAL_ROWS, _TRIAL_WIDTH = 4, 8
_TRIAL_OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}


@dataclass(frozen=True)
class TrialResult:
    """What a rank has seen.

    before, after: the loss over the data of all ranks.
    difference: the largest to the unsharded optimizer's parameters, which are of float64.
    digest: of all bits of all parameters.
    """

    before: float
    after: float
    difference: float
    digest: str


def run_trial(group: Group, device: torch.device) -> TrialResult:
    """On all ranks of the group."""
    data, model = _make_trial_data(group.size).to(device), _make_trial_model().to(device)
    plain_model, mine = copy.deepcopy(model), data.view(group.size, _TRIAL_ROWS, _TRIAL_WIDTH)[group.rank]
    sharded = shard(model, torch.optim.AdamW, process_group=group.process_group, **_TRIAL_OPTIONS)
    plain = torch.optim.AdamW(plain_model.parameters(), **_TRIAL_OPTIONS)
    before = _trial_loss(model, data).item()
    for _ in range(TRIAL_STEPS):
        _trial_step(model, sharded, mine)
        _trial_step(plain_model, plain, data)
    pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return TrialResult(before, _trial_loss(model, data).item(), difference, _digest_params(model))


def _make_trial_data(world_size: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(world_size * _TRIAL_ROWS, _TRIAL_WIDTH, dtype=torch.float64, generator=draw, device="cpu")


def _make_trial_model() -> nn.Module:
    """The same on all ranks; no random numbers are drawn that others count on."""
    empty: dict[str, Any] = {"dtype": torch.float64, "device": "meta"}
    model = nn.Sequential(nn.Linear(_TRIAL_WIDTH, 16, **empty), nn.Tanh(), nn.Linear(16, 1, **empty)).to_empty(
        device="cpu"
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64, generator=draw, device="cpu")).mul_(0.3)
    return model


def _trial_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))


def _trial_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    torch.autograd.backward(_trial_loss(model, inputs))
    optimizer.step()
    optimizer.zero_grad()


def _digest_params(model: nn.Module) -> str:
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()]).cpu()
    return hashlib.sha256(repr(flat.tolist()).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Nothing takes for ever: who has waited too long says where, and ends the process.


class Watchdog:
    """As a context it ends the process when one thing takes longer than `seconds`.

    Hazard: a rank that waits for a GPU cannot be interrupted in any other way.
    """

    def __init__(self, timeout_s: float, process_name: str) -> None:
        self._timeout_s, self._process_name = timeout_s, process_name
        self._timer: threading.Timer | None = None

    def set_phase(self, phase: str) -> None:
        """Something new begins."""
        self._cancel_timer()
        self._timer = threading.Timer(self._timeout_s, self._abort, (phase,))
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _abort(self, phase: str) -> None:
        sys.stderr.write(
            f"zeroshard doctor: {self._process_name} gives up {phase}, after {self._timeout_s:g} seconds\n"
        )
        sys.stderr.flush()
        os._exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# Where the ranks of a job are: pure, from what all of them have told.


def ranks_by_host(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """The ranks of each host, by its name."""
    found: dict[str, list[int]] = defaultdict(list)
    for it in rank_infos:
        found[it.host].append(it.rank)
    return dict(found)


def ranks_by_node(rank_infos: Sequence[RankInfo]) -> list[list[int]]:
    """Ranks that one torchrun has started, which numbers them one after the other; else those of a host."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for it in rank_infos:
        found[it.host, it.rank - it.local_rank if it.local_rank >= 0 else -1].append(it.rank)
    return list(found.values())


def has_equal_nodes(rank_infos: Sequence[RankInfo]) -> bool:
    """Whether state can be shared within each of several nodes: all have as many ranks, and more than one."""
    found = ranks_by_node(rank_infos)
    sizes, stated = set(map(len, found)), {it.local_size for it in rank_infos}
    starts = all(it.local_rank >= 0 for it in rank_infos)
    return starts and len(found) > 1 and len(sizes) == 1 and sizes == stated and sizes != {1}


def find_shared_gpus(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """GPUs that several ranks would use, by name, with these ranks."""
    users: dict[str, list[RankInfo]] = defaultdict(list)
    for it in rank_infos:
        if it.gpu is not None:
            users[it.gpu.identity].append(it)
    return {
        f"{them[0].host} cuda:{them[0].gpu.index}": [it.rank for it in them]
        for them in users.values()
        if len(them) > 1 and them[0].gpu is not None
    }


def choose_backend(rank_infos: Sequence[RankInfo]) -> str:
    """NCCL where every rank has a GPU of its own and nobody has asked for gloo. The same on all ranks."""
    own = all(it.gpu is not None for it in rank_infos) and not find_shared_gpus(rank_infos)
    return "nccl" if own and all(it.backend in ("", "nccl") for it in rank_infos) else "gloo"


# ---------------------------------------------------------------------------------------------------------------------
# What the verbs between ranks take here, through the ways that training takes.


_MEASUREMENT_BUDGET_S = 0.3
"""That one measurement may take."""
_MIN_MESSAGE_S = 0.02
"""Seconds of a message whose latency no longer counts."""
_MIN_REPEATS, _MAX_REPEATS = 3, 15


@dataclass(frozen=True)
class CollectiveTiming:
    """Of one verb: seconds of a tiny message, and of one of `nbytes`, of which the part `crossing` reaches a rank."""

    verb: str
    way: str
    small: float
    large: float
    nbytes: int
    crossing: float

    @property
    def rate(self) -> float:
        """Bytes a second that reach a rank."""
        return self.nbytes * self.crossing / max(self.large, 1e-9)


@dataclass(frozen=True)
class NodeBandwidths:
    """Bytes a second of an all-gather: among the ranks of a host, and among those of one place on all hosts."""

    within: float
    between: float


class _Collective(NamedTuple):
    name: str
    transport: str
    received_fraction: float
    call: Callable[[torch.Tensor], object]


class CollectiveBenchmark:
    """Measures verbs of a group on tensors that lie on a device. All ranks make the same calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device, self._world_size = comm, device, comm.group.size
        self._transport = select_transport(comm, device, Reduce(), has_equal_shards=True)

    def measure_timings(self, max_bytes: int) -> list[CollectiveTiming]:
        """Of all verbs, with messages of no more than `most` bytes."""
        verbs, nbytes = self._collectives(), self.choose_message_bytes(max_bytes)
        return [self._time_collective(verb, nbytes) for verb in verbs]

    def measure_consensus_seconds(self) -> float:
        """Seconds that ranks take to agree on something."""
        return self._measure_seconds(lambda: self._comm.all_reduce_max([0]))

    def choose_message_bytes(self, max_bytes: int) -> int:
        """Bytes of a message that takes long enough to be measured."""
        nbytes = MIB // 4
        while nbytes * 4 <= max_bytes:
            flat = self._make_flat_tensor(nbytes)
            if self._measure_pilot_seconds(partial(self._all_gather, flat)) >= _MIN_MESSAGE_S:
                break
            nbytes *= 4
        return nbytes

    def measure_all_gather_bandwidth(self, nbytes: int) -> float:
        flat, share = self._make_flat_tensor(nbytes), (self._world_size - 1) / self._world_size
        return nbytes * share / max(self._measure_seconds(lambda: self._all_gather(flat)), 1e-9)

    def _collectives(self) -> list[_Collective]:
        share, way = (self._world_size - 1) / self._world_size, type(self._transport).__name__
        return [
            _Collective("all-reduce", "native", 2 * share, self._comm.all_reduce_sum_),
            _Collective("reduce-scatter", way, share, self._reduce_scatter),
            _Collective("all-gather", way, share, self._all_gather),
            _Collective("broadcast", "native", 1.0 if self._world_size > 1 else 0.0, self._broadcast),
        ]

    def _reduce_scatter(self, flat: torch.Tensor) -> None:
        into = torch.empty_like(flat[: flat.numel() // self._world_size])
        self._transport.reduce_scatter(flat, self._equal_shards(flat), into, 1 / self._world_size).wait()

    def _all_gather(self, flat: torch.Tensor) -> None:
        self._transport.all_gather(flat, self._equal_shards(flat)).wait()

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat, Rank(0)).wait()

    def _equal_shards(self, flat: torch.Tensor) -> EqualShards:
        return EqualShards(flat.numel() // self._world_size, self._world_size, flat.numel())

    def _make_flat_tensor(self, nbytes: int) -> torch.Tensor:
        """About so many: a slice of equal length for each rank."""
        each = max(nbytes // 4 // self._world_size, 1)
        return torch.zeros(each * self._world_size, dtype=torch.float32, device=self._device)

    def _time_collective(self, collective: _Collective, nbytes: int) -> CollectiveTiming:
        tiny, flat = self._make_flat_tensor(4), self._make_flat_tensor(nbytes)
        # The quickest of tiny messages: what holds up others is another process, and no latency.
        small, large = (
            self._measure_seconds(lambda: collective.call(tiny), min),
            self._measure_seconds(lambda: collective.call(flat)),
        )
        return CollectiveTiming(
            collective.name, collective.transport, small, large, flat.nbytes, collective.received_fraction
        )

    def _measure_seconds(self, call: Callable[[], object], summarize: Callable[[list[float]], float] = median) -> float:
        repeats = int(_MEASUREMENT_BUDGET_S / max(self._measure_pilot_seconds(call), 1e-6))
        return time_call(call, self._device, min(max(repeats, _MIN_REPEATS), _MAX_REPEATS), summarize)

    def _measure_pilot_seconds(self, call: Callable[[], object]) -> float:
        """Seconds on the slowest rank, so that all do the same afterwards."""
        return self._comm.all_reduce_max([int(time_call(call, self._device, _MIN_REPEATS) * 1e9)])[0] / 1e9


def measure_node_bandwidths(group: Group, device: torch.device, max_bytes: int) -> NodeBandwidths:
    """On all ranks, where there are several on each of several hosts."""
    comm = make_comm(group.process_group, None, NODE)
    assert comm.replicas is not None, "there are several hosts"
    row, column = (CollectiveBenchmark(Comm(it), device) for it in (comm.group, comm.replicas))
    nbytes = comm.data_parallel.all_reduce_max(
        [row.choose_message_bytes(max_bytes), column.choose_message_bytes(max_bytes)]
    )
    return NodeBandwidths(row.measure_all_gather_bandwidth(nbytes[0]), column.measure_all_gather_bandwidth(nbytes[1]))


# ---------------------------------------------------------------------------------------------------------------------
# All that is looked at, in its order. Every rank tells all others, so that they come to the same end.


_MAX_CPU_MESSAGE_BYTES, _MAX_GPU_MESSAGE_BYTES = 16 * MIB, 256 * MIB


@dataclass(frozen=True)
class RankMeasurements:
    """By one rank. `trouble`: why the trial could not be made."""

    link: Link | None
    speed: RankSpeed
    timings: tuple[CollectiveTiming, ...]
    agreement: float
    rates: NodeBandwidths | None
    trial: TrialResult | None
    trouble: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankMeasurements":
        """From JSON."""
        kinds = {"link": Link, "speed": RankSpeed, "rates": NodeBandwidths, "trial": TrialResult}
        parts = {name: values[name] and kind(**values[name]) for name, kind in kinds.items()}
        timings = tuple(CollectiveTiming(**it) for it in values["timings"])
        return cls(**{**values, **parts, "timings": timings})


@dataclass(frozen=True)
class JobInfo:
    """Of a whole job: what each rank knows and has measured, over which backend."""

    backend: str
    rank_infos: Sequence[RankInfo]
    measurements: Sequence[RankMeasurements]


def collect_job_info(group: Group, backend: str, set_phase: Callable[[str], object]) -> JobInfo:
    """On all ranks. `backend`: the one that was asked for; `at` hears what is done next."""
    words = Comm(group)
    set_phase("telling each other of themselves")
    mine = collect_rank_info(group.rank, backend)
    facts = [RankInfo.from_dict(it) for it in _all_gather_json(words, asdict(mine))]
    chosen = choose_backend(facts)
    device = torch.device("cpu") if mine.gpu is None or chosen != "nccl" else torch.device("cuda", mine.gpu.index)
    with group.failure_detector.abort_on_error():
        measured = _measure_rank(group, chosen, device, facts, set_phase)
    set_phase("telling each other what they have measured")
    return JobInfo(chosen, facts, [RankMeasurements.from_dict(it) for it in _all_gather_json(words, asdict(measured))])


def _measure_rank(
    group: Group, backend: str, device: torch.device, rank_infos: Sequence[RankInfo], set_phase: Callable[[str], object]
) -> RankMeasurements:
    set_phase("comparing clocks with rank 0")
    link = measure_link_to_rank0(Comm(group))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_phase("measuring how fast each rank is")
    speed = measure_speed(device)
    set_phase(f"making a group of all ranks over {backend}")
    data = with_backend(group, backend)
    set_phase("measuring collectives")
    bench, most = CollectiveBenchmark(Comm(data), device), _max_message_bytes(device, rank_infos)
    timings, agreement = bench.measure_timings(most), bench.measure_consensus_seconds()
    set_phase("measuring the ways within and between hosts")
    rates = measure_node_bandwidths(data, device, most) if has_equal_nodes(rank_infos) else None
    set_phase("making a few sharded steps")
    trial, trouble = _run_trial_or_error(data, device)
    return RankMeasurements(link, speed, tuple(timings), agreement, rates, trial, trouble)


def _run_trial_or_error(group: Group, device: torch.device) -> tuple[TrialResult | None, str]:
    """What fails there fails on all ranks, unless one is lost."""
    try:
        return run_trial(group, device), ""
    except RankLostError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _max_message_bytes(device: torch.device, rank_infos: Sequence[RankInfo]) -> int:
    """Of a message: the same on all ranks, and a small part of what is free."""
    if device.type == "cpu":
        return _MAX_CPU_MESSAGE_BYTES
    return max(min(_MAX_GPU_MESSAGE_BYTES, *(it.gpu.free // 16 for it in rank_infos if it.gpu)), MIB)


def _all_gather_json(comm: Comm, local: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(local)
    most = comm.all_reduce_max([len(encode_text(text))])[0]
    return [json.loads(it) for it in comm.all_gather_text(text, max_bytes=most)]
