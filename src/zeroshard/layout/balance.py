"""How evenly the ranks are loaded."""

from typing import NamedTuple

from .layout import Layout
from .partition import Cost
from .specs import ParamSpec


class Balance(NamedTuple):
    elements: tuple[int, ...]
    """Trained elements of each rank: its state is as large."""
    work: tuple[float, ...]
    """What each rank's update takes, in the unit of the costs."""

    def __str__(self) -> str:
        return f"Balance(fullest={self.fullest:.3f}, slowest={self.slowest:.3f})"

    @property
    def fullest(self) -> float:
        """The elements of the rank with most, over the mean."""
        return _peak(self.elements)

    @property
    def slowest(self) -> float:
        """The work of the rank with most, over the mean."""
        return _peak(self.work)


def balance(layout: Layout, cost: Cost) -> Balance:
    """Of all that is trained. A rank that owns a part of a parameter has that part of its cost."""

    def work(spec: ParamSpec, elements: int) -> float:
        return cost(spec) * elements / spec.extent if spec.trainable and spec.extent else 0.0

    return Balance(tuple(layout.loads(trainable=True)), tuple(layout.tally(work)))


def _peak(loads: tuple[float, ...]) -> float:
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
