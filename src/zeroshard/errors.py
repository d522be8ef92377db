"""Everything zeroshard raises on its own account.

    ZeroError
    ├── ConfigError (ValueError)          an argument that cannot work
    ├── LayoutError                       an inconsistent layout: a bug in a partitioner
    ├── BindingError (RuntimeError)       parameters are no longer what the optimizer was built on
    ├── CheckpointError (ValueError)      a state dict that does not fit
    ├── RankMismatchError (RuntimeError)  the ranks are about to do different things
    └── RankFailedError (RuntimeError)    another rank failed; its message is in this one

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
