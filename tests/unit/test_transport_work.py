"""Messages under way, and how what they bring is added up."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zeroshard.comm.nccl import BackendSumWork
from zeroshard.comm.process_group import SingleRankGroup
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.comm.work import PendingWork, WorkList


class Arrived:
    """A message that is there."""

    def wait(self) -> None:
        pass


def test_several_works_are_done_when_all_are() -> None:
    waited: list[int] = []

    class Noting(Arrived):
        def wait(self) -> None:
            waited.append(id(self))

    works = [Noting(), Noting(), Noting()]
    WorkList(works).wait()
    assert waited == list(map(id, works))


def test_one_that_fails_is_raised_when_all_are_over() -> None:
    waited: list[str] = []

    class Failing(Arrived):
        def __init__(self, text: str) -> None:
            self._text = text

        def wait(self) -> None:
            waited.append(self._text)
            if self._text != "fine":
                raise RuntimeError(self._text)

    with pytest.raises(RuntimeError, match="first"):
        WorkList([Failing("first"), Failing("fine"), Failing("second")]).wait()
    assert waited == ["first", "fine", "second"]


def test_what_has_arrived_is_let_go() -> None:
    tensor = torch.ones(3)
    pending = PendingWork(Arrived(), tensor, nullcontext())
    assert any(value is tensor for value in vars(pending).values())
    pending.wait()
    pending.wait()
    assert not any(value is tensor for value in vars(pending).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("into_dtype", [None, torch.float64])
def test_slices_are_added_in_their_order(dtype: torch.dtype, into_dtype: torch.dtype | None) -> None:
    """A large value, its negative, and a small one: what is left depends on the order and the precision."""
    values = [2.0**9, 1.0, -(2.0**9)]
    slices = [torch.full((4,), value).to(dtype) for value in values]
    into = torch.full((4,), 9.0).to(dtype if into_dtype is None or dtype.is_complex else into_dtype)
    sum_in_rank_order(slices, into, 1 / 3)
    exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros(4, dtype=exact)
    for part in slices:
        total = total + part.to(exact) * (1 / 3)
    torch.testing.assert_close(into, total.to(into.dtype), rtol=1e-3, atol=1e-4)
    assert into.abs().min() > 0.3  # the small one was not lost, as it would be in bfloat16


def test_sums_are_divided_once() -> None:
    total: Any = torch.tensor([3.0, 6.0])
    into = torch.zeros(2, dtype=torch.bfloat16)
    BackendSumWork(total, Arrived(), into, 1 / 3, keep_alive=total).wait()
    assert into.tolist() == [1.0, 2.0]


def test_a_process_alone_loses_nobody() -> None:
    with pytest.raises(RuntimeError, match="its own"), SingleRankGroup().failure_detector:
        raise RuntimeError("something of its own")
