"""What an unpickler may hand out, and what it may be told to do, so that nothing in a file can change the process."""

import pickle
from collections.abc import Callable
from typing import Any, ClassVar

_ALLOWED_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.LONG4, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)
"""What Python has written since protocol 2 for numbers, texts, plain containers and objects."""

_PICKLE_DISPATCH: dict[int, Callable[..., None]] = vars(pickle._Unpickler)["dispatch"]


class FrozenType(type):
    # Pickle sets attributes of whatever it was handed, by its opcode BUILD: also of classes and functions, and of
    # objects that the process shares, like members of enums. They would stay changed for the whole process.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes '{name}' of {cls.__name__}")


def make_frozen_type(constructor: Callable[..., Any]) -> type:
    """In a file it is a class or a function; it makes what `make` returns, which must be a new object or unchangeable.

    Pickle makes objects by `__new__` alone, and takes them whatever they are.
    """
    return FrozenType("a sealed class", (), {"__slots__": (), "__new__": lambda _, *given: constructor(*given)})


class SafeUnpickler(pickle._Unpickler):
    """Knows the opcodes that are needed, and takes no more memory than its file has.

    Hazard: the one in C makes a list as long as the largest number that a file gives to a value, 64 GB for 10 bytes.
    And a tuple of tuples of tuples that is the key of a dict is hashed without end, or until the stack overflows.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]]
    stack: list[Any]

    def is_allowed_key(self, value: Any) -> bool:
        """Whether it may be the key of a dict."""
        return type(value) in (str, int)

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _PICKLE_DISPATCH[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        _PICKLE_DISPATCH[pickle.SETITEMS[0]](self)

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is not str and not self.is_allowed_key(key):
                raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")


def _reject_opcode(opcode: int) -> Callable[..., None]:
    def reject(_: SafeUnpickler) -> None:
        raise pickle.UnpicklingError(f"it has the opcode {bytes([opcode])!r}, which nothing here needs")

    return reject


SafeUnpickler.dispatch = {
    opcode: load if bytes([opcode]) in _ALLOWED_OPCODES else _reject_opcode(opcode)
    for opcode, load in _PICKLE_DISPATCH.items()
}
SafeUnpickler.dispatch |= {
    pickle.SETITEM[0]: SafeUnpickler.load_setitem,
    pickle.SETITEMS[0]: SafeUnpickler.load_setitems,
}
