"""How evenly the ranks are loaded."""

from typing import NamedTuple

from .layout import Layout
from .partition import CostFn
from .spec import ParamSpec


class Balance(NamedTuple):
    numel_per_rank: tuple[int, ...]
    """Trained elements of each rank: its state is as large."""
    cost_per_rank: tuple[float, ...]
    """What each rank's update takes, in the unit of the costs."""

    def __str__(self) -> str:
        return f"Balance(memory_imbalance={self.memory_imbalance:.3f}, compute_imbalance={self.compute_imbalance:.3f})"

    @property
    def memory_imbalance(self) -> float:
        """The elements of the rank with most, over the mean."""
        return _max_over_mean(self.numel_per_rank)

    @property
    def compute_imbalance(self) -> float:
        """The work of the rank with most, over the mean."""
        return _max_over_mean(self.cost_per_rank)


def compute_balance(layout: Layout, cost: CostFn) -> Balance:
    """Of all that is trained. A rank that owns a part of a parameter has that part of its cost."""

    def cost_of(spec: ParamSpec, numel: int) -> float:
        return cost(spec) * numel / spec.storage_numel if spec.trainable and spec.storage_numel else 0.0

    return Balance(tuple(layout.numel_per_rank(trainable=True)), tuple(layout.sum_per_rank(cost_of)))


def _max_over_mean(loads: tuple[float, ...]) -> float:
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
