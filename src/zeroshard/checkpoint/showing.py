"""Values of files in errors: short, whatever they are."""

from reprlib import Repr
from typing import Any


class _SafeRepr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 2, 80, 80

    def repr_instance(self, x: Any, level: int) -> str:
        """Of a tuple of a class of its own, its values; of others not more than what they are."""
        if isinstance(x, (bool, float, type(None))):
            return repr(x)
        return self.repr_tuple(tuple(x), level) if isinstance(x, tuple) else f"a {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length()} bits"


def safe_repr(value: Any) -> str:
    """Hazard: a tuple of tuples of tuples, each twice the same, is short in a file, and without end written out."""
    return _SafeRepr().repr(value)
