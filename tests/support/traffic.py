"""A record of what a rank says to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

TALK = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv"),
    *("isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)


class Traffic(list[tuple[str, int]]):
    """Calls into `torch.distributed`, each with the bytes of its first tensor."""

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self]

    def sizes(self, verb: str) -> list[int]:
        return [size for made, size in self if made == verb]


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Record this rank's calls while the context is open."""
    traffic = Traffic()
    with pytest.MonkeyPatch.context() as patch:
        for verb in TALK:
            patch.setattr(dist, verb, _recorder(verb, getattr(dist, verb), traffic))
        yield traffic


def _recorder(verb: str, call: Any, traffic: Traffic) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        traffic.append((verb, tensors[0].nbytes if tensors else 0))
        return call(*args, **kwargs)

    return record
