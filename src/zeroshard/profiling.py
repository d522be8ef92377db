"""What the parts of the work are called, in traces of `torch.profiler` and in reports, and how long they take.

`with clock.part(Label.PACK, bucket):` gives both, the label and the time. No name is made while nobody profiles. Times
are those of the host: on a GPU work goes on behind it.
"""

from collections.abc import Mapping
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from torch.autograd.profiler import record_function

try:
    from torch._C._autograd import _enable_record_function, _profiler_enabled
except ImportError:  # of another torch: there are no labels then

    def _profiler_enabled() -> bool:
        return False

    def _enable_record_function(enable: bool) -> None:
        pass


TRACE_PREFIX = "zeroshard: "


class Phase(Enum):
    """A part of the work. In traces its name may go on: of which bucket, or of which class."""

    STEP = "step", "all that `step()` does; as a time, what no other part has"
    CLOSURE = "closure", "the closure that was given to `step()`"
    PACK_GRADS = "pack gradients", "gradients of a bucket are copied to where they are sent from"
    SEND_GRADS = "send gradients", "messages with slices of them start, each to its owner"
    WAIT_GRADS = "wait for gradients", "much is under way, or all must be known: wait for a bucket, but not for long"
    RECEIVE_GRADS = "receive gradients", "wait for the sum of a bucket's slices, and keep it; on GPUs also add up"
    WAIT_DDP = "wait for DDP", "wait for gradients that DDP reduces in its bucket of that number"
    SYNC_GRADS = "settle gradients", "parameters of the last step are there, ranks agree, and all gradients arrive"
    CONSENSUS = "agree", "one small message: do all ranks do the same, and did one fail?"
    CLIP_GRADS = "clip gradients", "`clip_grad_norm_` or `clip_grad_value_`, with what settles gradients"
    UNSCALE_GRADS = "unscale gradients", "for a GradScaler"
    CHECK_CONSISTENCY = "look for drift", "check sums of all parameters, compared"
    CHECK_NONFINITE = "look for non-finite gradients", "for `NonFiniteGrads(...)`"
    ASSIGN_GRADS = "hand over gradients", "slices become gradients of what the inner optimizer holds"
    INNER_STEP = "inner step", "the step of the class that was given, on what this rank owns"
    PREFETCH_STATE = "fetch state", "state of a bucket starts coming from host memory, for `CPUOffload()`"
    OFFLOAD_STATE = "stow state", "it starts going back"
    ROUND_MASTER_WEIGHTS = "round master weights", "into the parameters, with `master_dtype`"
    SEND_PARAMS = "send parameters", "messages with updated parameters start"
    WAIT_PARAMS = "wait for parameters", "those of the others arrive"
    WAIT_MODULE_PARAMS = "pass a gate", "a forward pass, or whoever looks at parameters, waits for those of a module"
    BROADCAST_BUFFERS = (
        "make equal",
        "buffers become those of rank 0, after a step or before a pass; at the start, parameters do",
    )
    PEER_CHECKPOINT = (
        "copy to another rank",
        "this rank's share is copied for `PeerCheckpoint(...)`, and starts going to its keeper",
    )
    GATHER_STATE = "gather state", "`full_state_dict` or `consolidate_state_dict`"
    LOAD_STATE = "load state", "`load_state_dict`"
    SAVE_COLLECT = "save: collect", "`checkpoint.save` finds what this rank saves; in the background it is copied"
    SAVE_WRITE = "save: write", "a rank's part is written to its file"
    SAVE_PUBLISH = "save: publish", "rank 0 makes the checkpoint visible, and removes old ones"
    LOAD_VALIDATE = "load: look", "`checkpoint.load` looks at names, shapes, check sums"
    LOAD_READ = "load: read", "values are read to where they belong"
    RESTORE_FROM_PEERS = "restore", "`zeroshard.peer_checkpoint.restore_from_peers`"

    def __init__(self, text: str, description: str) -> None:
        self.text, self.description = text, description

    def trace_name(self, detail: int | str | None = None) -> str:
        """What it is called in a trace; `what`: the number of a bucket, or the name of a class."""
        if detail is None:
            return TRACE_PREFIX + self.text
        return f"{TRACE_PREFIX}{self.text} of {detail if isinstance(detail, str) else f'bucket {detail}'}"


class PhaseTime(NamedTuple):
    """How often a part was done, and the seconds of the host in it and in no part inside it."""

    num_calls: int
    in_step_s: float
    outside_step_s: float
    """Of `step()`: in backward and forward passes, and between."""


class StepTimes(NamedTuple):
    """Of one step, and of all since the one before: the backward passes that belong to it, and the forward ones."""

    phases: Mapping[Phase, PhaseTime] = {}
    iteration_s: float = 0.0
    """From the end of the step before to the end of this one."""

    @property
    def step_s(self) -> float:
        return sum(it.in_step_s for it in self.phases.values())


class StepProfiler:
    """Labels and times the work of one optimizer."""

    def __init__(self) -> None:
        self.last_step = StepTimes()
        """Of the last step that has ended."""
        self.is_in_step = False
        self.current_timer: PhaseTimer | None = None
        self._totals: dict[Phase, list[float]] = {}
        self._iteration_start = perf_counter()

    def phase(self, phase: Phase, detail: int | str | None = None) -> "PhaseTimer":
        """As a context: that part is done inside. `of`: the number of a bucket, or the name of a class."""
        return PhaseTimer(self, phase, detail)

    def step(self) -> "PhaseTimer":
        """As a context: a step is made inside."""
        return _StepTimer(self, Phase.STEP, None)

    def end_step(self) -> None:
        """A step is over."""
        now = perf_counter()
        parts = {
            part: PhaseTime(int(calls), inside, outside) for part, (calls, outside, inside) in self._totals.items()
        }
        self.last_step = StepTimes(parts, now - self._iteration_start)
        self._totals, self._iteration_start = {}, now

    def record(self, phase: Phase, seconds: float) -> None:
        tally = self._totals.setdefault(phase, [0, 0.0, 0.0])
        tally[0] += 1
        tally[1 + self.is_in_step] += seconds


class PhaseTimer:
    """A part that is being done.

    Autograd's threads do parts of their own only while the one that called backward waits: so all share one notion of
    what runs inside what. Should two threads meet nevertheless, only times are less exact.
    """

    __slots__ = ("_detail", "_parent", "_phase", "_profiler", "_start", "_trace_range", "inner_s")

    def __init__(self, profiler: StepProfiler, phase: Phase, detail: int | str | None) -> None:
        self._profiler, self._phase, self._detail = profiler, phase, detail
        self.inner_s = 0.0
        self._trace_range: Any = None

    def __enter__(self) -> None:
        clock = self._profiler
        self._parent, clock.current_timer = clock.current_timer, self
        if _profiler_enabled():
            self._trace_range = record_function(self._phase.trace_name(self._detail))
            self._trace_range.__enter__()
        self._start = perf_counter()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        spent = perf_counter() - self._start
        if self._trace_range is not None:
            self._trace_range.__exit__(error_type, error, traceback)
        if self._parent is not None:
            self._parent.inner_s += spent
        self._profiler.current_timer = self._parent
        self._profiler.record(self._phase, spent - self.inner_s)


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
    """As a context: torch's profiler records nothing inside.

    Hazard: what it records of a message of gloo ends with that. After the end of the profile it would be written to
    memory that others have by then.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = _profiler_enabled()
        if self._was_enabled:
            _enable_record_function(False)

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            _enable_record_function(True)
