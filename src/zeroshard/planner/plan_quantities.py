"""Numbers with units, as people write them and as they read them."""

import re
from decimal import Decimal

from ..errors import ConfigError

_BYTE_UNITS = {
    "": Decimal(1),
    "b": Decimal(1),
    **{f"{letter}b": Decimal(1000) ** power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": Decimal(1024) ** power for power, letter in enumerate("kmgt", 1)},
}
_BIT_UNITS = {
    f"{letter}{word}": Decimal(1000) ** power / 8 for power, letter in enumerate("kmgt", 1) for word in ("bit", "bps")
}
_SHORT_BITS_PATTERN = re.compile(r"(?<=\d)(\s*[KkMmGgTt])b(?=\s*(/s)?\s*$)")
"""400Gb/s are bits: there a small b is no slip of the hand."""
_TIME_UNITS = {
    "s": Decimal(1),
    **{f"{letter}s": Decimal(1000) ** -power for letter, power in zip("muµn", (1, 2, 2, 3), strict=True)},
}
_QUANTITY_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([a-zµ]*)\s*", re.IGNORECASE)
_MAX_RANKS = 65_536


def parse_bytes(option: str, text: str) -> int:
    """80GB, 80GiB, 512MB."""
    return round(_parse_quantity(option, text, _BYTE_UNITS, "80GB or 80GiB"))


def parse_bandwidth(option: str, text: str) -> float:
    """Bytes a second: 50GB/s, 400Gbit/s, 400Gb/s."""
    text = _SHORT_BITS_PATTERN.sub(r"\1bit", text)
    found = _parse_quantity(option, text.removesuffix("/s"), {**_BYTE_UNITS, **_BIT_UNITS}, "50GB/s or 400Gbit/s")
    if not found:
        raise ConfigError(f"{option} {text}: expected more than nothing, such as 50GB/s")
    return found


def parse_seconds(option: str, text: str) -> float:
    """10us, 1ms."""
    return _parse_quantity(option, text, _TIME_UNITS, "10us or 1ms")


def _parse_quantity(option: str, text: str, units: dict[str, Decimal], example: str) -> float:
    match = _QUANTITY_PATTERN.fullmatch(text)
    bare = match is not None and not match[2] and float(match[1]) > 0
    if match is None or bare or match[2].lower() not in units:
        raise ConfigError(f"{option} {text!r} is no quantity: expected a number and a unit, such as {example}")
    return float(Decimal(match[1]) * units[match[2].lower()])


def parse_ranks(text: str) -> list[int]:
    """8,64,512; 1-4096 are the powers of two from the one to the other."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ConfigError(f"--ranks {text!r} has {part!r}: expected numbers such as 8,64,512, or 1-4096")
        found |= _powers_of_two(int(first), int(last)) if dash else {int(first)}
    if not found or min(found) < 1 or max(found) > _MAX_RANKS:
        raise ConfigError(
            f"--ranks {text!r}: expected numbers from 1 to {_MAX_RANKS:,}; a range such as 1-4096 stands for the "
            "powers of two in it, of which there must be one"
        )
    return sorted(found)


def _powers_of_two(first: int, last: int) -> set[int]:
    return {2**power for power in range(40) if first <= 2**power <= last}


def format_bytes(nbytes: float) -> str:
    """Short, in decimal units: 31.4 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            value = nbytes / size
            return f"{value:,.0f} {unit}" if value >= 999.5 or value == round(value) else f"{value:.3g} {unit}"
    return f"{nbytes:,.0f} B"


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0" if not seconds else f"{seconds * 1e9:.3g} ns"
