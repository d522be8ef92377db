"""Phases of the work: their labels in `torch.profiler` traces and their times in reports.

`with profiler.phase(Phase.PACK_GRADS, bucket):` does both: it labels the phase in a trace and times it. Label strings
are built only while a profiler is active. Times are host times: on a GPU the device runs asynchronously.
"""

from collections.abc import Mapping
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from torch.autograd.profiler import record_function

from ._torch_compat import enable_record_function, profiler_enabled

TRACE_PREFIX = "zeroshard: "


class Phase(Enum):
    """A phase of the work: its label, and its description in docs/profiling.md."""

    STEP = "step", "total of `step()`; as an exclusive time, what no other phase covers"
    CLOSURE = "closure", "the closure passed to `step()`"
    PACK_GRADS = "pack gradients", "copy a bucket's gradients into its send buffer"
    SEND_GRADS = "send gradients", "start the reduce-scatter of a bucket"
    WAIT_GRADS = "wait for gradients", "bounded wait for a bucket: too many are in flight, or all are needed"
    RECEIVE_GRADS = "receive gradients", "wait for the reduced shard of a bucket and store it; on GPUs also sum it"
    WAIT_DDP = "wait for DDP", "wait for the gradients of a DDP bucket"
    SYNC_GRADS = "synchronize gradients", "finish the last all-gather, reach consensus, wait for all gradients"
    CONSENSUS = "consensus", "one small all-reduce: do all ranks make the same call, and did one fail?"
    CLIP_GRADS = "clip gradients", "`clip_grad_norm_` or `clip_grad_value_`, including gradient synchronization"
    UNSCALE_GRADS = "unscale gradients", "unscale for a GradScaler"
    CHECK_CONSISTENCY = "check consistency", "compare checksums of all parameters across ranks"
    CHECK_NONFINITE = "check for non-finite gradients", "the check of `NonFiniteGrads(...)`"
    ASSIGN_GRADS = "assign gradients", "set gradient shards as `.grad` of the inner optimizer's parameters"
    INNER_STEP = "inner step", "step of the given optimizer class on this rank's shard"
    PREFETCH_STATE = "prefetch state", "start copying a bucket's state from host memory, for `CPUOffload()`"
    OFFLOAD_STATE = "offload state", "start copying it back"
    ROUND_MASTER_WEIGHTS = "round master weights", "round them into the parameters, with `master_dtype`"
    SEND_PARAMS = "send parameters", "start the all-gather of updated parameters"
    WAIT_PARAMS = "wait for parameters", "wait for the parameters that other ranks updated"
    WAIT_MODULE_PARAMS = (
        "wait for module parameters",
        "a forward pass, or code that reads parameters, waits for those of one module",
    )
    BROADCAST_BUFFERS = (
        "broadcast buffers",
        "broadcast rank 0's buffers after a step or before a forward pass, and its parameters at construction",
    )
    PEER_CHECKPOINT = (
        "peer checkpoint",
        "copy this rank's shard for `PeerCheckpoint(...)` and start sending it to a peer",
    )
    GATHER_STATE = "gather state", "`full_state_dict` or `consolidate_state_dict`"
    LOAD_STATE = "load state", "`load_state_dict`"
    SAVE_COLLECT = "save: collect", "`checkpoint.save` collects this rank's tensors; `async_save` also copies them"
    SAVE_WRITE = "save: write", "write this rank's file"
    SAVE_PUBLISH = "save: publish", "rank 0 makes the checkpoint visible and removes old ones"
    LOAD_VALIDATE = "load: validate", "`checkpoint.load` checks names, shapes and checksums"
    LOAD_READ = "load: read", "read values into their tensors"
    RESTORE_FROM_PEERS = "restore from peers", "`zeroshard.peer_checkpoint.restore_from_peers`"

    def __init__(self, text: str, description: str) -> None:
        self.text, self.description = text, description

    def trace_name(self, detail: int | str | None = None) -> str:
        """Return the label in traces. `detail` is a bucket index or the name of an optimizer class."""
        if detail is None:
            return TRACE_PREFIX + self.text
        return f"{TRACE_PREFIX}{self.text} of {detail if isinstance(detail, str) else f'bucket {detail}'}"


class PhaseTime(NamedTuple):
    """Number of calls of a phase, and its exclusive host time: without the phases nested in it."""

    num_calls: int
    in_step_s: float
    outside_step_s: float
    """In forward and backward passes, and between them and `step()`."""


class StepTimes(NamedTuple):
    """Times of one iteration: a step, and the forward and backward passes since the previous step."""

    phases: Mapping[Phase, PhaseTime] = {}
    iteration_s: float = 0.0
    """From the end of the previous step to the end of this one."""

    @property
    def step_s(self) -> float:
        return sum(time.in_step_s for time in self.phases.values())


class StepProfiler:
    """Labels and times the phases of one optimizer."""

    def __init__(self) -> None:
        self.last_step = StepTimes()
        """Times of the last step that has ended."""
        self.is_in_step = False
        self.current_timer: PhaseTimer | None = None
        self._totals: dict[Phase, list[float]] = {}
        self._iteration_start = perf_counter()

    def phase(self, phase: Phase, detail: int | str | None = None) -> "PhaseTimer":
        """Return a context manager for one phase. `detail` is a bucket index or the name of an optimizer class."""
        return PhaseTimer(self, phase, detail)

    def step(self) -> "PhaseTimer":
        """Return a context manager for one optimizer step."""
        return _StepTimer(self, Phase.STEP, None)

    def end_step(self) -> None:
        """Publish the times of this iteration as `last_step` and start the next one."""
        now = perf_counter()
        phases = {
            phase: PhaseTime(int(num_calls), in_step_s, outside_step_s)
            for phase, (num_calls, outside_step_s, in_step_s) in self._totals.items()
        }
        self.last_step = StepTimes(phases, now - self._iteration_start)
        self._totals, self._iteration_start = {}, now

    def record(self, phase: Phase, seconds: float) -> None:
        totals = self._totals.setdefault(phase, [0, 0.0, 0.0])
        totals[0] += 1
        totals[1 + self.is_in_step] += seconds


def label_phase(phase: Phase) -> "PhaseTimer":
    """Return a context manager that labels a phase in traces, for work that belongs to no step."""
    return StepProfiler().phase(phase)


class PhaseTimer:
    """Context manager that labels and times one call of a phase.

    All threads share one nesting: autograd's threads run phases only while the thread that called backward waits. If
    two threads do overlap, only the times get less exact.
    """

    __slots__ = ("_detail", "_parent", "_phase", "_profiler", "_start", "_trace_range", "inner_s")

    def __init__(self, profiler: StepProfiler, phase: Phase, detail: int | str | None) -> None:
        self._profiler, self._phase, self._detail = profiler, phase, detail
        self.inner_s = 0.0
        self._trace_range: Any = None

    def __enter__(self) -> None:
        self._parent, self._profiler.current_timer = self._profiler.current_timer, self
        if profiler_enabled():
            self._trace_range = record_function(self._phase.trace_name(self._detail))
            self._trace_range.__enter__()
        self._start = perf_counter()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        elapsed = perf_counter() - self._start
        if self._trace_range is not None:
            self._trace_range.__exit__(error_type, error, traceback)
        if self._parent is not None:
            self._parent.inner_s += elapsed
        self._profiler.current_timer = self._parent
        self._profiler.record(self._phase, elapsed - self.inner_s)


class _StepTimer(PhaseTimer):
    __slots__ = ()

    def __enter__(self) -> None:
        self._profiler.is_in_step = True
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._profiler.is_in_step = False
        self._profiler.end_step()


class ProfilerPaused:
    """Context manager inside which `torch.profiler` records nothing.

    Hazard: the profiler's record of a gloo message ends when the message completes. After the end of the profile that
    would write to memory that has been freed and reused.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = profiler_enabled()
        if self._was_enabled:
            enable_record_function(False)

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            enable_record_function(True)
