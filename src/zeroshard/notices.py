"""Warnings that point at the user's own line."""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_INSIDE = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the nearest line that is neither in this package nor in torch, however deep the call is."""
    level, frame = 2, sys._getframe(1)
    while _is_inside(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INSIDE)
