"""Collect what `zeroshard doctor` judges: facts about each rank, and measurements of collectives, clocks and speed.

`collect_job_info` runs on all ranks and all-gathers the results, so every rank ends up with the same `JobInfo`. The
order of measurements is the same on all ranks; a `Watchdog` ends the process if one of them hangs.
"""

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
# Facts about a rank, collected without communication.


_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_", "NVIDIA_TF32_")
_VARIABLE_NAMES = ("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class GpuInfo:
    """The GPU that a rank would use. Memory in bytes."""

    index: int
    name: str
    identity: str
    """UUID of the device, independent of the index under which a process sees it."""
    free: int
    total: int


@dataclass(frozen=True)
class RankInfo:
    """Facts about one rank that need no communication. Memory in bytes."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    backend: str
    """The requested backend, or an empty string."""
    versions: Mapping[str, str]
    gpu: GpuInfo | None
    gpu_trouble: str
    """Why the GPU could not be queried."""
    host_free: int
    host_total: int
    cores: tuple[int, ...]
    """Cores in the CPU affinity mask of the process."""
    threads: int
    environment: Mapping[str, str]
    settings: Mapping[str, str]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankInfo":
        """Rebuild it from JSON."""
        gpu = values["gpu"] and GpuInfo(**values["gpu"])
        return cls(**{**values, "gpu": gpu, "cores": tuple(values["cores"])})


def collect_rank_info(rank: int, backend: str) -> RankInfo:
    """Describe this rank. What is unavailable is recorded instead of raised, so that no rank fails alone."""
    local_rank, local_size = (_int_from_env(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpu, gpu_trouble = (None, "") if backend == "gloo" else _probe_gpu(local_rank if local_rank >= 0 else rank)
    free, total = _read_host_memory()
    return RankInfo(
        rank=rank,
        host=socket.gethostname(),
        local_rank=local_rank,
        local_size=local_size,
        backend=backend,
        versions=_collect_versions(),
        gpu=gpu,
        gpu_trouble=gpu_trouble,
        host_free=free,
        host_total=total,
        cores=_available_cores(),
        threads=torch.get_num_threads(),
        environment=_collect_environment(),
        settings=_collect_torch_settings(),
    )


def _int_from_env(name: str) -> int:
    """Return the integer value of a variable, or -1 if it is not set."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def _collect_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": __version__}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    return versions


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
    """Return available and total bytes, or zeros if /proc/meminfo is not readable."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return sizes["MemAvailable"], sizes["MemTotal"]
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
    """Return the torch settings that change numerical results."""
    return {
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "default dtype": str(torch.get_default_dtype()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Links: clock offset and bandwidth between each rank and rank 0.


_PING_ROUNDS = 8
_PAYLOAD_ROUNDS = 3
_MAX_RANKS_WITH_FULL_PAYLOAD = 64
"""Rank 0 serves one rank at a time; with more ranks than this the payload is smaller."""


@dataclass(frozen=True)
class Link:
    """The connection of a rank to rank 0.

    ahead: seconds by which this rank's clock is ahead of rank 0's, with an error of at most `give_or_take`.
    rate: bytes per second.
    """

    ahead: float
    give_or_take: float
    rate: float


def measure_link_to_rank0(comm: Comm) -> Link | None:
    """Measure clock offset and bandwidth to rank 0. Call on all ranks; returns None on rank 0."""
    ping = torch.zeros(1, dtype=torch.int64, device="cpu")
    payload = torch.zeros(
        MIB if comm.group.size <= _MAX_RANKS_WITH_FULL_PAYLOAD else MIB // 8, dtype=torch.uint8, device="cpu"
    )
    if comm.group.rank != 0:
        return _ping_rank0(comm, ping, payload)
    for rank in range(1, comm.group.size):
        _serve_pings(comm, Rank(rank), ping, payload)
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
    """Return the values of the fastest rounds. In the first round this rank waits until rank 0 serves it."""
    rounds: list[tuple[int, int]] = []
    for _ in range(_PING_ROUNDS):
        sent_at = time.time_ns()
        _round_trip(comm, ping)
        elapsed = time.time_ns() - sent_at
        rounds.append((elapsed, sent_at + elapsed // 2 - int(ping.item())))
    payload_times = []
    for _ in range(_PAYLOAD_ROUNDS):
        start = time.perf_counter_ns()
        _round_trip(comm, payload)
        payload_times.append(time.perf_counter_ns() - start)
    elapsed, ahead = min(rounds)
    return Link(ahead / 1e9, elapsed / 2e9, 2 * payload.numel() * 1e9 / max(min(payload_times), 1))


def _round_trip(comm: Comm, tensor: torch.Tensor) -> None:
    comm.send(tensor, Rank(0)).wait()
    comm.receive(tensor, Rank(0)).wait()


# ---------------------------------------------------------------------------------------------------------------------
# Speed: throughput of a rank on its own.


_SPEED_REPEATS = 5


@dataclass(frozen=True)
class RankSpeed:
    """Throughput of one rank: FLOP/s of a matrix product, and bytes per second that a copy reads and writes."""

    product: float
    copy: float


def measure_speed(device: torch.device) -> RankSpeed:
    """Measure this rank's throughput. Ranks measure at the same time, so they share host resources as in training."""
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
    """Return the median (or another `summarize`) of the seconds that a call takes, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return summarize(times[1:])


# ---------------------------------------------------------------------------------------------------------------------
# Trial: a few sharded steps of a tiny model, compared with the unsharded optimizer on the data of all ranks.


TRIAL_STEPS = 4
_TRIAL_ROWS, _TRIAL_WIDTH = 4, 8
_TRIAL_OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}


@dataclass(frozen=True)
class TrialResult:
    """The result of the trial steps on one rank.

    before, after: loss over the data of all ranks.
    difference: largest absolute difference from the unsharded optimizer's float64 parameters.
    digest: hash of the values of all parameters.
    """

    before: float
    after: float
    difference: float
    digest: str


def run_trial(group: Group, device: torch.device) -> TrialResult:
    """Train a tiny model with a sharded and an unsharded optimizer and compare. Call on all ranks of the group."""
    data, model = _make_trial_data(group.size).to(device), _make_trial_model().to(device)
    plain_model, local_data = copy.deepcopy(model), data.view(group.size, _TRIAL_ROWS, _TRIAL_WIDTH)[group.rank]
    sharded = shard(model, torch.optim.AdamW, process_group=group.process_group, **_TRIAL_OPTIONS)
    plain = torch.optim.AdamW(plain_model.parameters(), **_TRIAL_OPTIONS)
    before = _trial_loss(model, data).item()
    for _ in range(TRIAL_STEPS):
        _trial_step(model, sharded, local_data)
        _trial_step(plain_model, plain, data)
    pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return TrialResult(before, _trial_loss(model, data).item(), difference, _digest_params(model))


def _make_trial_data(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(world_size * _TRIAL_ROWS, _TRIAL_WIDTH, dtype=torch.float64, generator=generator, device="cpu")


def _make_trial_model() -> nn.Module:
    """Make the same model on all ranks, without touching the global random state."""
    empty: dict[str, Any] = {"dtype": torch.float64, "device": "meta"}
    model = nn.Sequential(nn.Linear(_TRIAL_WIDTH, 16, **empty), nn.Tanh(), nn.Linear(16, 1, **empty)).to_empty(
        device="cpu"
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64, generator=generator, device="cpu")).mul_(0.3)
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
# Watchdog: a phase that hangs ends the process with a message.


class Watchdog:
    """Context manager that ends the process if a single phase takes longer than `timeout_s`.

    Hazard: `os._exit` is the only way to interrupt a rank that waits for a GPU.
    """

    def __init__(self, timeout_s: float, process_name: str) -> None:
        self._timeout_s, self._process_name = timeout_s, process_name
        self._timer: threading.Timer | None = None

    def set_phase(self, phase: str) -> None:
        """Start a phase and restart the timer."""
        self._cancel_timer()
        self._timer = threading.Timer(self._timeout_s, self._abort, (phase,))
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
# Placement of ranks on hosts, nodes and GPUs. Pure functions of the collected facts.


def ranks_by_host(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Group ranks by host name."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for info in rank_infos:
        ranks[info.host].append(info.rank)
    return dict(ranks)


def ranks_by_node(rank_infos: Sequence[RankInfo]) -> list[list[int]]:
    """Group ranks by node: those started by one torchrun, which numbers them consecutively; else those of a host."""
    ranks: dict[tuple[str, int], list[int]] = defaultdict(list)
    for info in rank_infos:
        ranks[info.host, info.rank - info.local_rank if info.local_rank >= 0 else -1].append(info.rank)
    return list(ranks.values())


def has_equal_nodes(rank_infos: Sequence[RankInfo]) -> bool:
    """Return whether `shard_group_size="node"` is possible: several nodes with the same number of ranks, above 1."""
    nodes = ranks_by_node(rank_infos)
    sizes, local_sizes = set(map(len, nodes)), {info.local_size for info in rank_infos}
    has_local_ranks = all(info.local_rank >= 0 for info in rank_infos)
    return has_local_ranks and len(nodes) > 1 and len(sizes) == 1 and sizes == local_sizes and sizes != {1}


def find_shared_gpus(rank_infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Map each GPU that several ranks would use to these ranks."""
    users: dict[str, list[RankInfo]] = defaultdict(list)
    for info in rank_infos:
        if info.gpu is not None:
            users[info.gpu.identity].append(info)
    return {
        f"{infos[0].host} cuda:{infos[0].gpu.index}": [info.rank for info in infos]
        for infos in users.values()
        if len(infos) > 1 and infos[0].gpu is not None
    }


def choose_backend(rank_infos: Sequence[RankInfo]) -> str:
    """Return nccl if every rank has its own GPU and no rank requested gloo. The same on all ranks."""
    has_own_gpus = all(info.gpu is not None for info in rank_infos) and not find_shared_gpus(rank_infos)
    return "nccl" if has_own_gpus and all(info.backend in ("", "nccl") for info in rank_infos) else "gloo"


# ---------------------------------------------------------------------------------------------------------------------
# Collectives: latency and bandwidth over the transports that training uses.


_MEASUREMENT_BUDGET_S = 0.3
"""Time budget of one measurement."""
_MIN_MESSAGE_S = 0.02
"""Duration from which on the latency of a message is negligible."""
_MIN_REPEATS, _MAX_REPEATS = 3, 15


@dataclass(frozen=True)
class CollectiveTiming:
    """Timing of one collective.

    small: seconds of a message of a few bytes.
    large: seconds of a message of `nbytes`.
    crossing: fraction of `nbytes` that a rank receives.
    """

    verb: str
    way: str
    small: float
    large: float
    nbytes: int
    crossing: float

    @property
    def rate(self) -> float:
        """Bytes per second that a rank receives."""
        return self.nbytes * self.crossing / max(self.large, 1e-9)


@dataclass(frozen=True)
class NodeBandwidths:
    """All-gather bytes per second among the ranks of a host, and among ranks with the same local rank on all hosts."""

    within: float
    between: float


class _Collective(NamedTuple):
    name: str
    transport: str
    received_fraction: float
    call: Callable[[torch.Tensor], object]


class CollectiveBenchmark:
    """Times the collectives of a group on a device, over the transport that training uses.

    All ranks of the group must make the same calls.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device, self._world_size = comm, device, comm.group.size
        self._transport = select_transport(comm, device, Reduce(), has_equal_shards=True)

    def measure_timings(self, max_bytes: int) -> list[CollectiveTiming]:
        """Time all collectives with messages of at most `max_bytes`."""
        collectives, nbytes = self._collectives(), self.choose_message_bytes(max_bytes)
        return [self._time_collective(collective, nbytes) for collective in collectives]

    def measure_consensus_seconds(self) -> float:
        """Measure the seconds of a consensus: an all-reduce of one integer."""
        return self._measure_seconds(lambda: self._comm.all_reduce_max([0]))

    def choose_message_bytes(self, max_bytes: int) -> int:
        """Return a message size whose transfer takes long enough to measure. The same on all ranks."""
        nbytes = MIB // 4
        while nbytes * 4 <= max_bytes:
            flat = self._make_flat_tensor(nbytes)
            if self._measure_pilot_seconds(partial(self._all_gather, flat)) >= _MIN_MESSAGE_S:
                break
            nbytes *= 4
        return nbytes

    def measure_all_gather_bandwidth(self, nbytes: int) -> float:
        flat, fraction = self._make_flat_tensor(nbytes), (self._world_size - 1) / self._world_size
        return nbytes * fraction / max(self._measure_seconds(lambda: self._all_gather(flat)), 1e-9)

    def _collectives(self) -> list[_Collective]:
        fraction, transport = (self._world_size - 1) / self._world_size, type(self._transport).__name__
        return [
            _Collective("all-reduce", "native", 2 * fraction, self._comm.all_reduce_sum_),
            _Collective("reduce-scatter", transport, fraction, self._reduce_scatter),
            _Collective("all-gather", transport, fraction, self._all_gather),
            _Collective("broadcast", "native", 1.0 if self._world_size > 1 else 0.0, self._broadcast),
        ]

    def _reduce_scatter(self, flat: torch.Tensor) -> None:
        output = torch.empty_like(flat[: flat.numel() // self._world_size])
        self._transport.reduce_scatter(flat, self._equal_shards(flat), output, 1 / self._world_size).wait()

    def _all_gather(self, flat: torch.Tensor) -> None:
        self._transport.all_gather(flat, self._equal_shards(flat)).wait()

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat, Rank(0)).wait()

    def _equal_shards(self, flat: torch.Tensor) -> EqualShards:
        return EqualShards(flat.numel() // self._world_size, self._world_size, flat.numel())

    def _make_flat_tensor(self, nbytes: int) -> torch.Tensor:
        """Make a tensor of about `nbytes`, with a shard of equal length for each rank."""
        shard_numel = max(nbytes // 4 // self._world_size, 1)
        return torch.zeros(shard_numel * self._world_size, dtype=torch.float32, device=self._device)

    def _time_collective(self, collective: _Collective, nbytes: int) -> CollectiveTiming:
        tiny, flat = self._make_flat_tensor(4), self._make_flat_tensor(nbytes)
        # Take the minimum of tiny messages: slower ones are delayed by other processes, not by latency.
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
        """Return the seconds on the slowest rank, so that all ranks make the same decisions."""
        return self._comm.all_reduce_max([int(time_call(call, self._device, _MIN_REPEATS) * 1e9)])[0] / 1e9


def measure_node_bandwidths(group: Group, device: torch.device, max_bytes: int) -> NodeBandwidths:
    """Measure bandwidth within and between hosts. Call on all ranks, only if `has_equal_nodes`."""
    comm = make_comm(group.process_group, None, NODE)
    assert comm.replicas is not None, "there are several hosts"
    within, between = (CollectiveBenchmark(Comm(subgroup), device) for subgroup in (comm.group, comm.replicas))
    nbytes = comm.data_parallel.all_reduce_max(
        [within.choose_message_bytes(max_bytes), between.choose_message_bytes(max_bytes)]
    )
    return NodeBandwidths(
        within.measure_all_gather_bandwidth(nbytes[0]), between.measure_all_gather_bandwidth(nbytes[1])
    )


# ---------------------------------------------------------------------------------------------------------------------
# The whole collection, in order. Results are all-gathered, so all ranks come to the same conclusion.


_MAX_CPU_MESSAGE_BYTES, _MAX_GPU_MESSAGE_BYTES = 16 * MIB, 256 * MIB


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one rank.

    agreement: seconds of a consensus.
    rates: None unless there are several equal nodes.
    trouble: why the trial failed; `trial` is None then.
    """

    link: Link | None
    speed: RankSpeed
    timings: tuple[CollectiveTiming, ...]
    agreement: float
    rates: NodeBandwidths | None
    trial: TrialResult | None
    trouble: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankMeasurements":
        """Rebuild them from JSON."""
        classes = {"link": Link, "speed": RankSpeed, "rates": NodeBandwidths, "trial": TrialResult}
        fields = {name: values[name] and value_class(**values[name]) for name, value_class in classes.items()}
        timings = tuple(CollectiveTiming(**timing) for timing in values["timings"])
        return cls(**{**values, **fields, "timings": timings})


@dataclass(frozen=True)
class JobInfo:
    """Facts and measurements of all ranks of a job, and the measured backend."""

    backend: str
    rank_infos: Sequence[RankInfo]
    measurements: Sequence[RankMeasurements]


def collect_job_info(group: Group, backend: str, set_phase: Callable[[str], object]) -> JobInfo:
    """Collect facts and measurements of all ranks. Call on all ranks; all get the same result.

    Args:
        group: all ranks of the job.
        backend: the requested backend, or an empty string.
        set_phase: called with a description of each phase before it starts.
    """
    comm = Comm(group)
    set_phase("telling each other of themselves")
    local = collect_rank_info(group.rank, backend)
    rank_infos = [RankInfo.from_dict(values) for values in _all_gather_json(comm, asdict(local))]
    chosen = choose_backend(rank_infos)
    device = torch.device("cpu") if local.gpu is None or chosen != "nccl" else torch.device("cuda", local.gpu.index)
    with group.failure_detector.abort_on_error():
        measurements = _measure_rank(group, chosen, device, rank_infos, set_phase)
    set_phase("telling each other what they have measured")
    gathered = _all_gather_json(comm, asdict(measurements))
    return JobInfo(chosen, rank_infos, [RankMeasurements.from_dict(values) for values in gathered])


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
    data_group = with_backend(group, backend)
    set_phase("measuring collectives")
    bench, max_bytes = CollectiveBenchmark(Comm(data_group), device), _max_message_bytes(device, rank_infos)
    timings, agreement = bench.measure_timings(max_bytes), bench.measure_consensus_seconds()
    set_phase("measuring the ways within and between hosts")
    rates = measure_node_bandwidths(data_group, device, max_bytes) if has_equal_nodes(rank_infos) else None
    set_phase("making a few sharded steps")
    trial, trouble = _run_trial_or_error(data_group, device)
    return RankMeasurements(link, speed, tuple(timings), agreement, rates, trial, trouble)


def _run_trial_or_error(group: Group, device: torch.device) -> tuple[TrialResult | None, str]:
    """Run the trial; return its error as text. Such an error occurs on all ranks, except `RankLostError`."""
    try:
        return run_trial(group, device), ""
    except RankLostError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _max_message_bytes(device: torch.device, rank_infos: Sequence[RankInfo]) -> int:
    """Return the largest message size: the same on all ranks, and a small fraction of free memory."""
    if device.type == "cpu":
        return _MAX_CPU_MESSAGE_BYTES
    return max(min(_MAX_GPU_MESSAGE_BYTES, *(info.gpu.free // 16 for info in rank_infos if info.gpu)), MIB)


def _all_gather_json(comm: Comm, local: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(local)
    max_bytes = comm.all_reduce_max([len(encode_text(text))])[0]
    return [json.loads(received) for received in comm.all_gather_text(text, max_bytes=max_bytes)]
