"""What the options of `ZeroConfig` stand for: frozen objects that check themselves."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .errors import ConfigError


@dataclass(frozen=True)
class ZeroStage1:
    """ZeRO-1: `param.grad` stays and holds the sum of this rank's own backward passes, not the average.

    Reduced gradients must not be changed there: the step raises on all ranks. To edit gradients, accumulate them inside
    `no_sync()` and edit them before the step.
    """

    frees: ClassVar[bool] = False


@dataclass(frozen=True)
class ZeroStage2:
    """ZeRO-2: a gradient is freed when its bucket is sent, and each owner keeps its shard of the average.

    Further backward passes add to that shard: every pass is reduced, and gradients never take more than 1/N. Inside
    `no_sync()` they accumulate in `param.grad` at full size, and nothing is sent.
    """

    frees: ClassVar[bool] = True


ZeroStage = ZeroStage1 | ZeroStage2


@dataclass(frozen=True)
class Reduce:
    """How the gradients of all ranks become their average: `reduce_dtype` and `deterministic_reduce` of `ZeroConfig`.

    dtype: gradients are rounded to it and sent in it; sums are made in float32 at least. By default the dtype of the
        parameter, whatever its `grad_dtype`. Partial sums that are reduced across replicas keep the precision in which
        they were made.
    fixed_order: always add in rank order.
    """

    dtype: torch.dtype | None = None
    fixed_order: bool = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are sent. Complex and small ones are sent as they are."""
        if self.dtype is None or not dtype.is_floating_point or dtype.itemsize <= self.dtype.itemsize:
            return dtype
        return self.dtype


@dataclass(frozen=True)
class MasterWeights:
    """Parameters of lower precision are updated in `dtype`, sharded across ranks, and rounded once."""

    dtype: torch.dtype = torch.float32

    def covers(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize


@dataclass(frozen=True)
class CPUOffload:
    """State and master weights rest in host memory, and come to the GPU bucket by bucket when they are updated.

    pin: in memory that the GPU can reach by itself, so that copies and updates overlap.
    """

    device: str = "cpu"
    pin: bool = True

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise ConfigError(f'CPUOffload(device=...) takes "cpu", not {self.device!r}')
        if not isinstance(self.pin, bool):
            raise ConfigError(f"CPUOffload(pin=...) takes True or False, not {self.pin!r}")


@dataclass(frozen=True)
class ConsistencyCheck:
    """Every so many steps all ranks compare all bits of all parameters, before the step updates anything.

    A difference raises `ReplicaMismatchError` on all ranks, which names ranks and parameters. It costs one pass over
    the parameters and one small message.

    A difference lasts until a step sends the parameter: what its owner has then comes to all, right or wrong. So
    `every=1` sees each bit that a parameter loses; a larger number sees what has happened since the last step, what
    happens again and again, and what no step has sent since. Never seen is what a rank computes wrongly of its own
    part, or loses of state, master weights and gradients that it alone has: the result is the same on all ranks.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"ConsistencyCheck(every=...) takes a number of steps, 1 or more, not {self.every!r}")


@dataclass(frozen=True)
class NonFiniteGrads:
    """What becomes of a step whose averaged gradients are not all finite, on any rank: all ranks do the same.

    then: "skip" leaves the step out: parameters, state, step counts and options stay, and `step()` returns None.
        "raise" raises `NonFiniteError` on all ranks, and nothing has changed. "warn" makes the step with them.
    most: with "skip", so many in a row raise `NonFiniteError`.

    They are counted in `optimizer.nonfinite`, and the first, second, fourth, ... is warned of. A step that a GradScaler
    leaves out is not among them. A closure is called before any code of the optimizer runs.
    """

    action: Literal["skip", "raise", "warn"]
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, str) or self.action not in ("skip", "raise", "warn"):
            raise ConfigError(f'NonFiniteGrads(...) takes "skip", "raise" or "warn", not {self.action!r}')
        if self.max_consecutive is None:
            return
        if (
            isinstance(self.max_consecutive, bool)
            or not isinstance(self.max_consecutive, int)
            or self.max_consecutive < 1
        ):
            raise ConfigError(
                f"NonFiniteGrads(max_consecutive=...) takes a number of steps, 1 or more, not {self.max_consecutive!r}"
            )
        if self.action != "skip":
            raise ConfigError(
                'NonFiniteGrads(max_consecutive=...) counts steps that are left out: it goes with "skip", not '
                f"{self.action!r}"
            )


@dataclass(frozen=True)
class PeerCheckpoint:
    """Each rank's share of the state is also kept in the memory of a rank of another failure domain.

    After the loss of a rank `zeroshard.peer_checkpoint.restore_from_peers` rebuilds everything from these copies, without a file.

    every: so many steps lie between two copies.
    apart: how many consecutive ranks fail together. By default those that run on one host do; where there is but one,
        each rank is on its own.
    """

    every: int = 10
    failure_domain_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(f"PeerCheckpoint(every=...) takes a number of steps from 1 on, not {self.every!r}")
        if self.failure_domain_size is not None and (
            type(self.failure_domain_size) is not int or self.failure_domain_size < 1
        ):
            raise ConfigError(
                "PeerCheckpoint(failure_domain_size=...) takes a number of ranks from 1 on, or None, not "
                f"{self.failure_domain_size!r}"
            )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of this dtype are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
