"""What an unpickler may hand out: classes that nothing in a file can change."""

import pickle
from collections.abc import Callable
from typing import Any


class Sealed(type):
    # Pickle sets attributes of whatever it was handed, by its opcode BUILD: also of classes and functions, and of
    # objects that the process shares, like members of enums. They would stay changed for the whole process.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes '{name}' of {cls.__name__}")


def sealed(make: Callable[..., Any]) -> type:
    """In a file it is a class or a function; it makes what `make` returns, which must be a new object or unchangeable.

    Pickle makes objects by `__new__` alone, and takes them whatever they are.
    """
    return Sealed("a sealed class", (), {"__slots__": (), "__new__": lambda _, *given: make(*given)})
