"""The exceptions of zeroshard.

    ZeroError
    ├── ConfigError (ValueError)             an invalid argument
    ├── LayoutError                          an inconsistent layout: a bug in a partitioner
    ├── BindingError (RuntimeError)          a parameter was replaced, moved or reshaped after construction
    ├── CheckpointError (ValueError)         a state dict or checkpoint that does not fit
    ├── RankMismatchError (RuntimeError)     the ranks are about to do different things
    ├── RankFailedError (RuntimeError)       another rank failed; its message is part of this one
    ├── RankLostError (RuntimeError)         another rank died, or did not answer in time
    ├── ReplicaMismatchError (RuntimeError)  parameters are no longer identical on all ranks
    └── NonFiniteError (RuntimeError)        non-finite gradients, where the config asks for an error

Wrong types raise ``TypeError``, as in torch.
"""


class ZeroError(Exception):
    """Base class of all errors of this package."""


class ConfigError(ZeroError, ValueError):
    """An invalid argument; raised before anything is changed."""


class LayoutError(ZeroError):
    """An inconsistent layout."""


class BindingError(ZeroError, RuntimeError):
    """A parameter changed its dtype, device or shape after the optimizer was built on it."""


class CheckpointError(ZeroError, ValueError):
    """A state dict or checkpoint does not fit this optimizer, or state cannot be serialized safely."""


class RankMismatchError(ZeroError, RuntimeError):
    """The ranks make different calls, or the same call with different arguments; raised on every rank."""


class RankFailedError(ZeroError, RuntimeError):
    """Another rank failed in the same call; raised on every rank that did not fail itself."""


class RankLostError(ZeroError, RuntimeError):
    """Other ranks are lost: one died or did not answer in time; raised on all surviving ranks.

    failed: ranks that reported an error of their own.
    exited: ranks whose connections are closed and that left no error report.
    unresponsive: ranks that were connected, at least until the timeout, and left no error report.

    `exited` and `unresponsive` are empty if the job's store does not answer: nothing is known about other ranks then.
    """

    def __init__(
        self,
        message: str,
        failed: tuple[int, ...] = (),
        exited: tuple[int, ...] = (),
        unresponsive: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.failed, self.exited, self.unresponsive = failed, exited, unresponsive

    def copy(self) -> "RankLostError":
        """Return a new, equal exception: raising the same object again would extend its traceback."""
        copied = RankLostError(str(self), self.failed, self.exited, self.unresponsive)
        vars(copied).update(vars(self))
        return copied


class ReplicaMismatchError(ZeroError, RuntimeError):
    """Parameters are no longer identical on all ranks; raised on every rank, before anything is updated.

    step: the step that found the mismatch; None if `check_consistency()` did.
    ranks: data-parallel ranks that differ from the majority (from the owner if there is none) in the first few
        parameters.
    params: names of all parameters that differ, or their indices if they have no names.
    """

    def __init__(
        self, message: str, *, step: int | None = None, ranks: tuple[int, ...] = (), params: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.step, self.ranks, self.params = step, ranks, params


class NonFiniteError(ZeroError, RuntimeError):
    """The gradients of a step are not finite; raised on every rank, before anything is updated."""
