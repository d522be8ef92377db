"""Rows of ranks that hold the same, until an update fails in one of them and the others have made it."""

from collections.abc import Callable

from ..comm.collectives import Comm
from ..errors import ReplicaMismatchError


class ReplicaGuard:
    """Whether rows can still be the same, known alike on all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._has_replicas = comm.replicas is not None
        self._failed_call = ""
        """The step since which they are not."""
        self.needs_param_check = False
        """State was loaded since, the same in all rows; whether parameters were is to be looked at."""

    def mark_diverged(self, call: str) -> None:
        """An update has failed on a rank, and was made by its replicas, if there are any."""
        if self._has_replicas:
            self._failed_call, self.needs_param_check = call, False

    def mark_loaded(self) -> Callable[[], None]:
        """All rows have the state that was loaded; returns how to undo it."""
        undo = self.snapshot()
        self._failed_call, self.needs_param_check = "", self.needs_param_check or bool(self._failed_call)
        return undo

    def snapshot(self) -> Callable[[], None]:
        """Returns how to know again what is known now."""
        before = self._failed_call, self.needs_param_check

        def restore() -> None:
            self._failed_call, self.needs_param_check = before

        return restore

    def check_not_diverged(self, step: int) -> None:
        if self._failed_call:
            raise ReplicaMismatchError(
                f"rows of ranks need no longer be the same: {self._failed_call} failed on a rank, and its row has not "
                "made "
                "all of it. Nothing was updated. Load a checkpoint, or state dicts of the model and the optimizer, on "
                "all ranks, and call zero_grad().",
                step=step,
            )
