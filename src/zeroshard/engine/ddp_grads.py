"""Gradients from DDP's buckets, whatever those are, to their owners."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..errors import ConfigError
from .grad_reducer import GradReducer
from .ddp import CommHook, split_bucket
from .engine_events import NO_BACKWARD, current_backward_id, queue_after_backward


def make_comm_hook(reducer: GradReducer, params: Sequence[torch.Tensor]) -> CommHook:
    """A communication hook that hands gradients to `sync`, and to DDP what it gave. More `params` may be added."""
    index: dict[int, int] = {}
    handed: list[int] = []

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        members = bucket.parameters()
        for added in range(len(index), len(params)):
            index[id(params[added])] = added
        for param, grad in zip(members, split_bucket(bucket.buffer(), members), strict=True):
            if id(param) not in index:
                raise ConfigError(
                    f"DDP reduces a parameter of shape {tuple(param.shape)} that the optimizer does not have. Give it "
                    "all parameters that DDP reduces, or freeze the others before DDP wraps the model."
                )
            # Hazard: inside Join a rank without inputs is given zeros here, while old gradients are in `param.grad`.
            reducer.mark_ready(index[id(param)], grad)
            handed.append(index[id(param)])
        if bucket.is_last():
            reducer.finish_backward()
            _queue_after_ddp_backward(partial(reducer.record_param_grads, tuple(handed)))
            handed.clear()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


def _queue_after_ddp_backward(action: Callable[[], None]) -> None:
    """Inside Join, on a rank without inputs, there is no backward pass, and `param.grad` is none of what was given."""
    if current_backward_id() != NO_BACKWARD:
        # Hazard: DDP writes `param.grad` at the end of backward, which it queues after the last bucket's hook.
        queue_after_backward(lambda: queue_after_backward(action))
