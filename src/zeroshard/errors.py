"""Everything zeroshard raises on its own account.

    ZeroError
    ├── ConfigError (ValueError)          an argument that cannot work
    ├── LayoutError                       an inconsistent layout: a bug in a partitioner
    ├── BindingError (RuntimeError)       parameters are no longer what the optimizer was built on
    ├── CheckpointError (ValueError)      a state dict that does not fit
    ├── RankMismatchError (RuntimeError)  the ranks are about to do different things
    ├── RankFailedError (RuntimeError)    another rank failed; its message is in this one
    ├── RankLostError (RuntimeError)      another rank died, or did not answer in time
    ├── ReplicaMismatchError (RuntimeError)         parameters are no longer the same on all ranks
    └── NonFiniteError (RuntimeError)     gradients that are not finite, where that was to be an error

Wrong types raise ``TypeError`` as in torch.
"""


class ZeroError(Exception):
    """Base of all errors of this package."""


class ConfigError(ZeroError, ValueError):
    """An argument that cannot work, found before anything was changed."""


class LayoutError(ZeroError):
    """A layout that contradicts itself."""


class BindingError(ZeroError, RuntimeError):
    """A parameter changed its dtype, device or shape after the optimizer was built on it."""


class CheckpointError(ZeroError, ValueError):
    """A state dict that does not fit this optimizer, or state that cannot be sent safely."""


class RankMismatchError(ZeroError, RuntimeError):
    """The ranks of the group disagree about what they are doing; raised on every rank."""


class RankFailedError(ZeroError, RuntimeError):
    """Another rank of the group failed in the same call; raised on every rank that did not."""


class RankLostError(ZeroError, RuntimeError):
    """The connection to other ranks is lost, since one died or did not answer in time; raised on all that are left.

    failed: ranks that have said by which error of their own they ended.
    gone: ranks that have no connection any more and have left no word.
    silent: ranks that have a connection, or had one until time was up, and have not said a word.
    Both are empty where the store through which ranks hear of each other does not answer: nothing is known then.
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
        """The same, to be raised anew."""
        return RankLostError(str(self), self.failed, self.exited, self.unresponsive)


class ReplicaMismatchError(ZeroError, RuntimeError):
    """Parameters are no longer the same on all ranks; raised on every rank, before anything is updated.

    step: the step that found it, None if `check_consistency()` did.
    ranks: those that differ from the majority or, without one, from the owner, in the first few parameters. They count
        in all ranks that train together.
    params: names of all parameters that differ, or their numbers where they have no names.
    """

    def __init__(
        self, message: str, *, step: int | None = None, ranks: tuple[int, ...] = (), params: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.step, self.ranks, self.params = step, ranks, params


class NonFiniteError(ZeroError, RuntimeError):
    """Gradients of a step are not finite; raised on every rank, before anything is updated."""
