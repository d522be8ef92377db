"""All that is looked at, in its order. Every rank tells all others, so that they come to the same end."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..comm.collectives import Comm, encoded
from ..comm.group import Group
from ..comm.joining import over
from ..errors import RankLostError
from ..units import MIB
from .facts import Facts, facts_of_this_rank
from .links import Link, link_to_first
from .measure import Bench, Rates, Timing, rates_of_rows
from .places import backend_for, equal_nodes
from .speed import Speed, speed_of
from .trial import Trial, try_steps

_MOST_ON_CPU, _MOST_ON_GPU = 16 * MIB, 256 * MIB


@dataclass(frozen=True)
class Measured:
    """By one rank. `trouble`: why the trial could not be made."""

    link: Link | None
    speed: Speed
    timings: tuple[Timing, ...]
    agreement: float
    rates: Rates | None
    trial: Trial | None
    trouble: str = ""

    @classmethod
    def told(cls, values: Mapping[str, Any]) -> "Measured":
        """From JSON."""
        kinds = {"link": Link, "speed": Speed, "rates": Rates, "trial": Trial}
        parts = {name: values[name] and kind(**values[name]) for name, kind in kinds.items()}
        timings = tuple(Timing(**it) for it in values["timings"])
        return cls(**{**values, **parts, "timings": timings})


@dataclass(frozen=True)
class Checkup:
    """Of a whole job: what each rank knows and has measured, over which backend."""

    backend: str
    facts: Sequence[Facts]
    measured: Sequence[Measured]


def examine(group: Group, backend: str, at: Callable[[str], object]) -> Checkup:
    """On all ranks. `backend`: the one that was asked for; `at` hears what is done next."""
    words = Comm(group)
    at("telling each other of themselves")
    mine = facts_of_this_rank(group.rank, backend)
    facts = [Facts.told(it) for it in _shared(words, asdict(mine))]
    chosen = backend_for(facts)
    device = torch.device("cpu") if mine.gpu is None or chosen != "nccl" else torch.device("cuda", mine.gpu.index)
    with group.line.relied_on():
        measured = _measure(group, chosen, device, facts, at)
    at("telling each other what they have measured")
    return Checkup(chosen, facts, [Measured.told(it) for it in _shared(words, asdict(measured))])


def _measure(
    group: Group, backend: str, device: torch.device, facts: Sequence[Facts], at: Callable[[str], object]
) -> Measured:
    at("comparing clocks with rank 0")
    link = link_to_first(Comm(group))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    at("measuring how fast each rank is")
    speed = speed_of(device)
    at(f"making a group of all ranks over {backend}")
    data = over(group, backend)
    at("measuring collectives")
    bench, most = Bench(Comm(data), device), _most_bytes(device, facts)
    timings, agreement = bench.timings(most), bench.agreement()
    at("measuring the ways within and between hosts")
    rates = rates_of_rows(data, device, most) if equal_nodes(facts) else None
    at("making a few sharded steps")
    trial, trouble = _tried(data, device)
    return Measured(link, speed, tuple(timings), agreement, rates, trial, trouble)


def _tried(data: Group, device: torch.device) -> tuple[Trial | None, str]:
    """What fails there fails on all ranks, unless one is lost."""
    try:
        return try_steps(data, device), ""
    except RankLostError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _most_bytes(device: torch.device, facts: Sequence[Facts]) -> int:
    """Of a message: the same on all ranks, and a small part of what is free."""
    if device.type == "cpu":
        return _MOST_ON_CPU
    return max(min(_MOST_ON_GPU, *(it.gpu.free // 16 for it in facts if it.gpu)), MIB)


def _shared(comm: Comm, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(mine)
    most = comm.maximum([len(encoded(text))])[0]
    return [json.loads(it) for it in comm.share(text, most=most)]
