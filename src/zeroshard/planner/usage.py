"""Answers of a planner: bytes on one rank, and what travels."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that has most."""

    parameters: int
    """With the buffers of the model."""
    gradients: int
    """What stays of them until the step, as theory counts: in the dtype of the parameters."""
    state: int
    masters: int = 0
    """More precise copies of parameters."""
    backward_overhead: int = 0
    """At most beside all that, while gradients are made and sent."""
    step_overhead: int = 0
    """At most beside all that, while parameters are updated."""
    construction_peak: int = 0
    """At most while the optimizer is made: all that there is then."""
    host: int = 0
    """In host memory. State and masters that rest there are not among those above."""
    activations: int = 0
    """As the user says. They are there in backward."""

    @property
    def total(self) -> int:
        """What theory counts: parameters, gradients, state and masters."""
        return self.parameters + self.gradients + self.state + self.masters

    @property
    def buffers(self) -> int:
        """The most that comes on top."""
        return max(self.backward_overhead, self.step_overhead)

    @property
    def phase_peaks(self) -> dict[str, int]:
        return {
            "making the optimizer": self.construction_peak,
            "backward": self.total + self.backward_overhead + self.activations,
            "step": self.total + self.step_overhead,
        }

    @property
    def peak(self) -> int:
        return max(self.phase_peaks.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phase_peaks, key=lambda phase: self.phase_peaks[phase])


class Traffic(NamedTuple):
    """Of one step."""

    sent: int
    """Bytes, by each rank on the average."""
    messages: int
    """Collectives, one after the other."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Network:
    """Between any two ranks.

    bandwidth: bytes that a rank sends in a second.
    latency: seconds until a message of no length has arrived.
    within: the bandwidth inside a row of ranks that share the state, if it is another.
    """

    bandwidth: float = 50e9
    latency: float = 10e-6
    within: float | None = None

    def __post_init__(self) -> None:
        bandwidths = (self.bandwidth, self.bandwidth if self.within is None else self.within)
        if not all(0 < it < math.inf for it in bandwidths) or not 0 <= self.latency < math.inf:
            raise ConfigError(
                f"Network(...) takes bandwidths above 0 and a latency of 0 or more, not {bandwidths} and "
                f"{self.latency!r}: bytes a second, and seconds"
            )

    @property
    def shard_group_network(self) -> "Network":
        """That among the ranks of one row."""
        return Network(self.within or self.bandwidth, self.latency)

    def estimate_seconds(self, sent: float, messages: int, ranks: int) -> float:
        """Collectives of the best kind: each takes log2 N messages one after the other, and all links are busy.

        Rings take N - 1 of them: with many ranks and small buckets the truth lies above.
        """
        return messages * self.latency * (ranks - 1).bit_length() + sent / self.bandwidth


@dataclass(frozen=True)
class Estimate:
    """One way of training on so many ranks."""

    method: str
    ranks: int
    memory: MemoryEstimate
    traffic: Traffic
    state_imbalance: float = 1.0
    """State of the rank that has most, over the mean."""
    peer_checkpoint_bytes: int = 0
    """Bytes that a rank sends for a second copy."""
