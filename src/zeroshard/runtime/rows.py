"""Rows of ranks that hold the same, until an update fails in one of them and the others have made it."""

from collections.abc import Callable

from ..comm.collectives import Comm
from ..errors import DriftError


class Rows:
    """Whether rows can still be the same, known alike on all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._are_there = comm.replicas is not None
        self._failed = ""
        """The step since which they are not."""
        self.in_doubt = False
        """State was loaded since, the same in all rows; whether parameters were is to be looked at."""

    def part(self, call: str) -> None:
        """An update has failed on a rank, and was made by its replicas, if there are any."""
        if self._are_there:
            self._failed, self.in_doubt = call, False

    def load(self) -> Callable[[], None]:
        """All rows have the state that was loaded; returns how to undo it."""
        undo = self.kept()
        self._failed, self.in_doubt = "", self.in_doubt or bool(self._failed)
        return undo

    def kept(self) -> Callable[[], None]:
        """Returns how to know again what is known now."""
        before = self._failed, self.in_doubt

        def put_back() -> None:
            self._failed, self.in_doubt = before

        return put_back

    def require_equal_state(self, step: int) -> None:
        if self._failed:
            raise DriftError(
                f"rows of ranks need no longer be the same: {self._failed} failed on a rank, and its row has not made "
                "all of it. Nothing was updated. Load a checkpoint, or state dicts of the model and the optimizer, on "
                "all ranks, and call zero_grad().",
                step=step,
            )
