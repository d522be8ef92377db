"""What autograd's engine tells of the backward pass that runs."""

from collections.abc import Callable

import torch

NO_BACKWARD = -1


def current_backward_id() -> int:
    """A number for the backward pass that runs in this thread."""
    return torch._C._current_graph_task_id()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Queue `action` behind all that is queued for the end of the running backward; it may raise there."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
