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

_DCP_MODULE = "torch.distributed.checkpoint"
_STATE_DICT_MODULE = f"{_DCP_MODULE}.state_dict"
_LOAD_FUNCTION = "_load_optim_state_dict"
_MAX_FRAMES = 16
"""Frames outside this package: the helpers are not farther away than that."""


class StateDictType(Enum):
    """What a helper can make use of."""

    SHARDED = auto()
    """This rank's part."""
    LOAD_TARGET = auto()
    """This rank's part, to be loaded into."""
    FULL = auto()
    """Whole tensors on all ranks."""
    FULL_ON_RANK0 = auto()
    """Whole tensors on rank 0 of the job."""


class DcpRequest(NamedTuple):
    state_dict_type: StateDictType
    needs_param_names: bool
    """With the names of parameters in the groups. Most helpers write them in the place of numbers instead, and what
    has both could not be loaded by an optimizer without names."""


def detect_dcp_call() -> DcpRequest | None:
    """Called by `state_dict()`: what the caller of that wants; None if it is no helper of torch's."""
    frames = list(_outer_frames())
    helpers = [frame for frame in frames if _module_name(frame) == _STATE_DICT_MODULE]
    if helpers:
        return _parse_helper_frames(helpers)
    if any(_module_name(frame) == f"{_DCP_MODULE}.state_dict_loader" for frame in frames):
        return DcpRequest(StateDictType.LOAD_TARGET, needs_param_names=True)
    return (
        DcpRequest(StateDictType.SHARDED, needs_param_names=True)
        if any(_module_name(frame).startswith(_DCP_MODULE) for frame in frames)
        else None
    )


def _parse_helper_frames(frames: Sequence[FrameType]) -> DcpRequest:
    info = next((frame.f_locals["info"] for frame in frames if "info" in frame.f_locals), None)
    if info is None:
        raise RuntimeError(
            f"torch {torch.__version__} calls state_dict() in a way that is not known here: use "
            "optimizer.sharded_state_dict() or optimizer.full_state_dict() instead"
        )
    loads = any(frame.f_code.co_name == _LOAD_FUNCTION for frame in frames)
    wanted = StateDictType.SHARDED
    if loads:  # it is about to put whole tensors in their place
        wanted = StateDictType.FULL
    elif info.full_state_dict:
        wanted = StateDictType.FULL_ON_RANK0 if info.cpu_offload else StateDictType.FULL
    return DcpRequest(wanted, needs_param_names=info.flatten_optimizer_state_dict)


def is_dcp_initializing_state() -> bool:
    """Called by the getter of `state`: whether torch asks if there is any, in order to step with zeros if not."""
    return any(
        _module_name(frame) == _STATE_DICT_MODULE and frame.f_code.co_name == "_init_optim_state"
        for frame in _outer_frames()
    )


def is_dcp_loading_flattened() -> bool:
    """Called by the getter of `state`: whether torch will look there for the keys to take from a flattened dict."""
    frames = [
        frame
        for frame in _outer_frames()
        if _module_name(frame) == _STATE_DICT_MODULE and frame.f_code.co_name == _LOAD_FUNCTION
    ]
    return any("state" not in frame.f_locals.get("state_dict", ()) for frame in frames)


def _outer_frames() -> Iterator[FrameType]:
    """Frames outside this package, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    package = __name__.partition(".")[0] + "."
    seen = 0
    while frame is not None and seen < _MAX_FRAMES:
        if not _module_name(frame).startswith(package):
            seen += 1
            yield frame
        frame = frame.f_back


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
