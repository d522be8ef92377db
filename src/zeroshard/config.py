"""Options beyond torch's signature, in one frozen object."""

from dataclasses import dataclass, field, is_dataclass

from .errors import ConfigError
from .layout.partition import Partitioner, WholeParams


@dataclass(frozen=True)
class ZeroConfig:
    """How to shard. The defaults are the contract of torch's class.

    partition: who owns what.
    mixed_dtypes: allow parameters of several dtypes in one optimizer.
    """

    partition: Partitioner = field(default_factory=WholeParams)
    mixed_dtypes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.partition, type) or not callable(getattr(self.partition, "extend", None)):
            raise ConfigError(
                f"ZeroConfig(partition=...) takes a partitioner such as WholeParams(), not {self.partition!r}"
            )
        if not isinstance(self.mixed_dtypes, bool):
            raise ConfigError(f"ZeroConfig(mixed_dtypes=...) takes True or False, not {self.mixed_dtypes!r}")

    def describe(self) -> str:
        """One line that is equal on ranks with equal options; a plain object's repr would hold its address."""
        partition = repr(self.partition) if is_dataclass(self.partition) else type(self.partition).__qualname__
        return f"partition {partition}, mixed dtypes {self.mixed_dtypes}"
