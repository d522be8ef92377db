"""Where a parameter may be cut: anywhere, or where the blocks of an optimizer begin."""

from typing import NamedTuple

from .._types import align_up
from .spec import ParamSpec


class ShardGranularity(NamedTuple):
    """Pieces of a parameter that is cut have a multiple of `align` elements, and at least `least` of them."""

    align: int = 1
    min_numel: int = 1

    @property
    def is_elementwise(self) -> bool:
        """Parameters may be cut anywhere."""
        return self == ShardGranularity()

    @property
    def min_shard_numel(self) -> int:
        """Elements of the shortest piece."""
        return align_up(self.min_numel, self.align)

    def satisfies(self, required: "ShardGranularity") -> bool:
        """Whether all that is cut so is cut as `needed` wants it."""
        return self.align % required.align == 0 and self.min_shard_numel >= required.min_shard_numel

    def can_split(self, spec: ParamSpec) -> bool:
        """Whether a parameter may be cut at all. Blocks count its elements in order, so they must lie in order."""
        if self.is_elementwise:
            return True
        return spec.is_contiguous and spec.numel % self.align == 0 and spec.numel >= 2 * self.min_shard_numel

    def nearest_boundary(self, offset: int, spec: ParamSpec, shard_numel: int) -> int:
        """The end of a piece that is nearest to a place in the parameter's memory; its own ends are such, too.

        `shard`: elements from one such place to the next. Where they are few, cuts are so far apart that no piece
        between two of them is too short.
        """
        if self.is_elementwise:
            return offset
        if not self.can_split(spec):
            return _nearer_of(offset, 0, spec.storage_numel)
        step = self.align if shard_numel >= 2 * self.min_shard_numel else self.min_shard_numel
        first, last = self.min_shard_numel, (spec.storage_numel - self.min_shard_numel) // step * step
        if offset < first:
            return _nearer_of(offset, 0, first)
        if offset > last:
            return _nearer_of(offset, last, spec.storage_numel)
        return _nearer_of(offset, offset // step * step, align_up(offset, step))


def _nearer_of(offset: int, low: int, high: int) -> int:
    return low if offset - low <= high - offset else high
