"""Pictures, drawn by matplotlib where that is installed."""

from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import ConfigError


def new_figure(feature: str, **options: Any) -> Any:
    """`what` needs it, for the error where it is missing."""
    try:
        made: Any = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            f"{feature} draws with matplotlib, which is not installed: pip install 'zeroshard[plot]'"
        ) from error
    return made(layout="constrained", **options)


def save_figure(figure: Any, path: Path) -> Path:
    """The file that was written: a PNG, or what the ending of its name says."""
    target = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        figure.savefig(target)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{target} could not be written: {error}") from error
    return target
