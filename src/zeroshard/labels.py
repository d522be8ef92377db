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


PREFIX = "zeroshard: "


class Label(Enum):
    """A part of the work. In traces its name may go on: of which bucket, or of which class."""

    STEP = "step", "all that `step()` does; as a time, what no other part has"
    CLOSURE = "closure", "the closure that was given to `step()`"
    PACK = "pack gradients", "gradients of a bucket are copied to where they are sent from"
    SEND_GRADS = "send gradients", "messages with slices of them start, each to its owner"
    WAIT_GRADS = "wait for gradients", "much is under way, or all must be known: wait for a bucket, but not for long"
    RECEIVE = "receive gradients", "wait for the sum of a bucket's slices, and keep it; on GPUs also add up"
    WAIT_DDP = "wait for DDP", "wait for gradients that DDP reduces in its bucket of that number"
    SETTLE = "settle gradients", "parameters of the last step are there, ranks agree, and all gradients arrive"
    AGREE = "agree", "one small message: do all ranks do the same, and did one fail?"
    CLIP = "clip gradients", "`clip_grad_norm_` or `clip_grad_value_`, with what settles gradients"
    UNSCALE = "unscale gradients", "for a GradScaler"
    DRIFT = "look for drift", "check sums of all parameters, compared"
    NONFINITE = "look for non-finite gradients", "for `NonFinite(...)`"
    HAND_OVER = "hand over gradients", "slices become gradients of what the inner optimizer holds"
    INNER_STEP = "inner step", "the step of the class that was given, on what this rank owns"
    FETCH = "fetch state", "state of a bucket starts coming from host memory, for `Offload()`"
    STOW = "stow state", "it starts going back"
    ROUND = "round master weights", "into the parameters, with `master_dtype`"
    SEND_PARAMS = "send parameters", "messages with updated parameters start"
    WAIT_PARAMS = "wait for parameters", "those of the others arrive"
    GATE = "pass a gate", "a forward pass, or whoever looks at parameters, waits for those of a module"
    EQUAL = "make equal", "buffers become those of rank 0, after a step or before a pass; at the start, parameters do"
    COPY = "copy to another rank", "this rank's share is copied for `SecondCopy(...)`, and starts going to its keeper"
    GATHER = "gather state", "`full_state_dict` or `consolidate_state_dict`"
    LOAD = "load state", "`load_state_dict`"
    SAVE_COLLECT = "save: collect", "`checkpoint.save` finds what this rank saves; in the background it is copied"
    SAVE_WRITE = "save: write", "a rank's part is written to its file"
    SAVE_PUBLISH = "save: publish", "rank 0 makes the checkpoint visible, and removes old ones"
    LOAD_LOOK = "load: look", "`checkpoint.load` looks at names, shapes, check sums"
    LOAD_READ = "load: read", "values are read to where they belong"
    RESTORE = "restore", "`zeroshard.recovery.restore`"

    def __init__(self, text: str, means: str) -> None:
        self.text, self.means = text, means

    def of(self, what: int | str | None = None) -> str:
        """What it is called in a trace; `what`: the number of a bucket, or the name of a class."""
        if what is None:
            return PREFIX + self.text
        return f"{PREFIX}{self.text} of {what if isinstance(what, str) else f'bucket {what}'}"


class Spent(NamedTuple):
    """How often a part was done, and the seconds of the host in it and in no part inside it."""

    calls: int
    in_step: float
    outside: float
    """Of `step()`: in backward and forward passes, and between."""


class Times(NamedTuple):
    """Of one step, and of all since the one before: the backward passes that belong to it, and the forward ones."""

    parts: Mapping[Label, Spent] = {}
    iteration: float = 0.0
    """From the end of the step before to the end of this one."""

    @property
    def step(self) -> float:
        return sum(it.in_step for it in self.parts.values())


class Clock:
    """Labels and times the work of one optimizer."""

    def __init__(self) -> None:
        self.last = Times()
        """Of the last step that has ended."""
        self.is_stepping = False
        self.running: Running | None = None
        self._tallies: dict[Label, list[float]] = {}
        self._begun = perf_counter()

    def part(self, part: Label, of: int | str | None = None) -> "Running":
        """As a context: that part is done inside. `of`: the number of a bucket, or the name of a class."""
        return Running(self, part, of)

    def step(self) -> "Running":
        """As a context: a step is made inside."""
        return _Step(self, Label.STEP, None)

    def turn(self) -> None:
        """A step is over."""
        now = perf_counter()
        parts = {part: Spent(int(calls), inside, outside) for part, (calls, outside, inside) in self._tallies.items()}
        self.last = Times(parts, now - self._begun)
        self._tallies, self._begun = {}, now

    def add(self, part: Label, seconds: float) -> None:
        tally = self._tallies.setdefault(part, [0, 0.0, 0.0])
        tally[0] += 1
        tally[1 + self.is_stepping] += seconds


class Running:
    """A part that is being done.

    Autograd's threads do parts of their own only while the one that called backward waits: so all share one notion of
    what runs inside what. Should two threads meet nevertheless, only times are less exact.
    """

    __slots__ = ("_clock", "_label", "_of", "_outer", "_part", "_start", "inside")

    def __init__(self, clock: Clock, part: Label, of: int | str | None) -> None:
        self._clock, self._part, self._of = clock, part, of
        self.inside = 0.0
        self._label: Any = None

    def __enter__(self) -> None:
        clock = self._clock
        self._outer, clock.running = clock.running, self
        if _profiler_enabled():
            self._label = record_function(self._part.of(self._of))
            self._label.__enter__()
        self._start = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = perf_counter() - self._start
        if self._label is not None:
            self._label.__exit__(kind, error, trace)
        if self._outer is not None:
            self._outer.inside += spent
        self._clock.running = self._outer
        self._clock.add(self._part, spent - self.inside)


class _Step(Running):
    __slots__ = ()

    def __enter__(self) -> None:
        self._clock.is_stepping = True
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._clock.is_stepping = False
        self._clock.turn()


class Unrecorded:
    """As a context: torch's profiler records nothing inside.

    Hazard: what it records of a message of gloo ends with that. After the end of the profile it would be written to
    memory that others have by then.
    """

    __slots__ = ("_profiled",)

    def __enter__(self) -> None:
        self._profiled = _profiler_enabled()
        if self._profiled:
            _enable_record_function(False)

    def __exit__(self, *_: object) -> None:
        if self._profiled:
            _enable_record_function(True)
