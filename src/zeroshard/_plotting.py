"""Matplotlib figures; matplotlib is an optional dependency."""

from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import ConfigError


def new_figure(feature: str, **options: Any) -> Any:
    """Return a new figure. `feature` names the caller in the error if matplotlib is missing.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figure_class: Any = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            f"{feature} needs matplotlib, which is not installed. Run: pip install 'zeroshard[plot]'"
        ) from error
    return figure_class(layout="constrained", **options)


def save_figure(figure: Any, path: Path) -> Path:
    """Write `figure` in the format of the file extension (PNG without one) and return the path of the file."""
    target = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        figure.savefig(target)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{target} could not be written: {error}") from error
    return target
