"""Where a parameter may be cut: anywhere, or where the blocks of an optimizer begin."""

from typing import NamedTuple

from ..units import align_up
from .specs import ParamSpec


class Grain(NamedTuple):
    """Pieces of a parameter that is cut have a multiple of `align` elements, and at least `least` of them."""

    align: int = 1
    least: int = 1

    @property
    def is_fine(self) -> bool:
        """Parameters may be cut anywhere."""
        return self == Grain()

    @property
    def shortest(self) -> int:
        """Elements of the shortest piece."""
        return align_up(self.least, self.align)

    def suits(self, needed: "Grain") -> bool:
        """Whether all that is cut so is cut as `needed` wants it."""
        return self.align % needed.align == 0 and self.shortest >= needed.shortest

    def cuts(self, spec: ParamSpec) -> bool:
        """Whether a parameter may be cut at all. Blocks count its elements in order, so they must lie in order."""
        if self.is_fine:
            return True
        return spec.is_contiguous and spec.numel % self.align == 0 and spec.numel >= 2 * self.shortest

    def nearest(self, place: int, spec: ParamSpec, shard: int) -> int:
        """The end of a piece that is nearest to a place in the parameter's memory; its own ends are such, too.

        `shard`: elements from one such place to the next. Where they are few, cuts are so far apart that no piece
        between two of them is too short.
        """
        if self.is_fine:
            return place
        if not self.cuts(spec):
            return _nearer(place, 0, spec.extent)
        step = self.align if shard >= 2 * self.shortest else self.shortest
        first, last = self.shortest, (spec.extent - self.shortest) // step * step
        if place < first:
            return _nearer(place, 0, first)
        if place > last:
            return _nearer(place, last, spec.extent)
        return _nearer(place, place // step * step, align_up(place, step))


def _nearer(place: int, low: int, high: int) -> int:
    return low if place - low <= high - place else high
