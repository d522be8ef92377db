"""Gradients from DDP's buckets, whatever those are, to their owners."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..errors import ConfigError
from ..runtime.grad_sync import GradSync
from .ddp import CommHook


def hand_over(sync: GradSync, params: Sequence[torch.Tensor]) -> CommHook:
    """A communication hook that hands gradients to `sync`, and to DDP what it gave."""
    index = {id(param): i for i, param in enumerate(params)}

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        for param, grad in zip(bucket.parameters(), _gradients(bucket), strict=True):
            if id(param) not in index:
                raise ConfigError(f"DDP reduces a parameter of shape {tuple(param.shape)} that the optimizer has not")
            # Hazard: inside Join a rank without inputs is given zeros here, while old gradients are in `param.grad`.
            sync.ready(index[id(param)], grad)
        if bucket.is_last():
            sync.end_round()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


def _gradients(bucket: GradBucket) -> list[torch.Tensor]:
    """DDP gives every sparse gradient a bucket of its own, which is that gradient."""
    buffer = bucket.buffer()
    return bucket.gradients() if buffer.layout == torch.strided else [buffer]
