"""Detect calls from `torch.distributed.checkpoint` (DCP), and what they expect.

DCP's helpers call `state_dict()` of any optimizer and expect full tensors, or shards that they can gather themselves.
They cannot gather ours, and do not say which of the two they want, so `state_dict()` inspects the call stack. This is
the only module that depends on torch's stack frames; tests/distributed/test_dcp.py fails if a torch release changes
them.
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
"""How many frames outside this package to search for a helper."""


class StateDictType(Enum):
    """The kind of state dict that a DCP helper expects."""

    SHARDED = auto()
    """This rank's shards."""
    LOAD_TARGET = auto()
    """This rank's shards, as buffers to load into."""
    FULL = auto()
    """Full tensors on all ranks."""
    FULL_ON_RANK0 = auto()
    """Full tensors on global rank 0."""


class DcpRequest(NamedTuple):
    state_dict_type: StateDictType
    needs_param_names: bool
    """Whether groups include `param_names`. Most helpers replace parameter ids by names instead, and an optimizer
    without names could not load a dict with both."""


def detect_dcp_call() -> DcpRequest | None:
    """Return what the caller of `state_dict()` expects, or None if it is not part of DCP. Called by `state_dict()`."""
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
            f"torch {torch.__version__} calls state_dict() in an unknown way. Call "
            "optimizer.sharded_state_dict() or optimizer.full_state_dict() instead."
        )
    is_loading = any(frame.f_code.co_name == _LOAD_FUNCTION for frame in frames)
    state_dict_type = StateDictType.SHARDED
    if is_loading:  # the helper replaces the values by full tensors
        state_dict_type = StateDictType.FULL
    elif info.full_state_dict:
        state_dict_type = StateDictType.FULL_ON_RANK0 if info.cpu_offload else StateDictType.FULL
    return DcpRequest(state_dict_type, needs_param_names=info.flatten_optimizer_state_dict)


def is_dcp_initializing_state() -> bool:
    """Return whether DCP reads `state` to decide if it must initialize it by a step with zero gradients."""
    return any(
        _module_name(frame) == _STATE_DICT_MODULE and frame.f_code.co_name == "_init_optim_state"
        for frame in _outer_frames()
    )


def is_dcp_loading_flattened() -> bool:
    """Return whether DCP reads `state` to find the keys that it takes from a flattened dict."""
    frames = [
        frame
        for frame in _outer_frames()
        if _module_name(frame) == _STATE_DICT_MODULE and frame.f_code.co_name == _LOAD_FUNCTION
    ]
    return any("state" not in frame.f_locals.get("state_dict", ()) for frame in frames)


def _outer_frames() -> Iterator[FrameType]:
    """Yield at most `_MAX_FRAMES` frames outside this package, innermost first."""
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
