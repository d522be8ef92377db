"""What torch's checkpoint helpers want when they call an optimizer, which they do not say.

They call `state_dict()` of any optimizer and expect its own tensors, whole or in parts that they know to gather. Ours
cannot be gathered by them, so it looks at who asks. All that is known of torch's frames is in this file;
tests/ranks/test_dcp.py fails where a version of torch changes them.
"""

import sys
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from types import FrameType
from typing import NamedTuple

import torch

_DCP = "torch.distributed.checkpoint"
_HELPERS = f"{_DCP}.state_dict"
_LOADS = "_load_optim_state_dict"
_DEEP = 16
"""Frames outside this package: the helpers are not farther away than that."""


class Wanted(Enum):
    """What a helper can make use of."""

    PART = auto()
    """This rank's part."""
    ROOM = auto()
    """This rank's part, to be loaded into."""
    EVERYTHING = auto()
    """Whole tensors on all ranks."""
    EVERYTHING_ON_ONE = auto()
    """Whole tensors on rank 0 of the job."""


class Asked(NamedTuple):
    wanted: Wanted
    names: bool
    """With the names of parameters in the groups. Most helpers write them in the place of numbers instead, and what
    has both could not be loaded by an optimizer without names."""


def asked() -> Asked | None:
    """Called by `state_dict()`: what the caller of that wants; None if it is no helper of torch's."""
    frames = list(_callers())
    helpers = [frame for frame in frames if _module(frame) == _HELPERS]
    if helpers:
        return _asked_by_helpers(helpers)
    if any(_module(frame) == f"{_DCP}.state_dict_loader" for frame in frames):
        return Asked(Wanted.ROOM, names=True)
    return Asked(Wanted.PART, names=True) if any(_module(frame).startswith(_DCP) for frame in frames) else None


def _asked_by_helpers(frames: Sequence[FrameType]) -> Asked:
    info = next((frame.f_locals["info"] for frame in frames if "info" in frame.f_locals), None)
    if info is None:
        raise RuntimeError(
            f"torch {torch.__version__} calls state_dict() in a way that is not known here: use "
            "optimizer.sharded_state_dict() or optimizer.full_state_dict() instead"
        )
    loads = any(frame.f_code.co_name == _LOADS for frame in frames)
    wanted = Wanted.PART
    if loads:  # it is about to put whole tensors in their place
        wanted = Wanted.EVERYTHING
    elif info.full_state_dict:
        wanted = Wanted.EVERYTHING_ON_ONE if info.cpu_offload else Wanted.EVERYTHING
    return Asked(wanted, names=info.flatten_optimizer_state_dict)


def is_about_to_fake_a_step() -> bool:
    """Called by the getter of `state`: whether torch asks if there is any, in order to step with zeros if not."""
    return any(_module(frame) == _HELPERS and frame.f_code.co_name == "_init_optim_state" for frame in _callers())


def is_about_to_load_flattened() -> bool:
    """Called by the getter of `state`: whether torch will look there for the keys to take from a flattened dict."""
    frames = [frame for frame in _callers() if _module(frame) == _HELPERS and frame.f_code.co_name == _LOADS]
    return any("state" not in frame.f_locals.get("state_dict", ()) for frame in frames)


def _callers() -> Iterator[FrameType]:
    """Frames outside this package, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    package = __name__.partition(".")[0] + "."
    seen = 0
    while frame is not None and seen < _DEEP:
        if not _module(frame).startswith(package):
            seen += 1
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
