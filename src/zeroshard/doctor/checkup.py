"""All that is looked at, in its order. Every rank tells all others, so that they come to the same end."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..comm.collectives import Comm, encode_text
from ..comm.process_group import Group
from ..comm.joining import with_backend
from ..errors import RankLostError
from .._types import MIB
from .facts import RankInfo, collect_rank_info
from .links import Link, measure_link_to_rank0
from .collect import CollectiveBenchmark, CollectiveTiming, NodeBandwidths, measure_node_bandwidths
from .places import choose_backend, has_equal_nodes
from .speed import RankSpeed, measure_speed
from .trial import TrialResult, run_trial

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
