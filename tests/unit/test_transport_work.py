"""In-flight transport work, and how contributions are summed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zeroshard.comm.nccl import BackendSumWork
from zeroshard.comm.process_group import SingleRankGroup
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.comm.work import PendingWork, WorkList


class CompletedWork:
    """Work that has already completed."""

    def wait(self) -> None:
        pass


def test_work_list_waits_for_all() -> None:
    waited: list[int] = []

    class RecordingWork(CompletedWork):
        def wait(self) -> None:
            waited.append(id(self))

    works = [RecordingWork(), RecordingWork(), RecordingWork()]
    WorkList(works).wait()
    assert waited == list(map(id, works))


def test_work_list_raises_first_error_after_all_finish() -> None:
    waited: list[str] = []

    class FailingWork(CompletedWork):
        def __init__(self, text: str) -> None:
            self._text = text

        def wait(self) -> None:
            waited.append(self._text)
            if self._text != "fine":
                raise RuntimeError(self._text)

    with pytest.raises(RuntimeError, match="first"):
        WorkList([FailingWork("first"), FailingWork("fine"), FailingWork("second")]).wait()
    assert waited == ["first", "fine", "second"]


def test_pending_work_releases_tensor_after_wait() -> None:
    tensor = torch.ones(3)
    pending = PendingWork(CompletedWork(), tensor, nullcontext())
    assert any(value is tensor for value in vars(pending).values())
    pending.wait()
    pending.wait()
    assert not any(value is tensor for value in vars(pending).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("output_dtype", [None, torch.float64])
def test_sum_in_rank_order(dtype: torch.dtype, output_dtype: torch.dtype | None) -> None:
    """A large value, a small one and the negated large one: the sum depends on order and precision."""
    values = [2.0**9, 1.0, -(2.0**9)]
    contributions = [torch.full((4,), value).to(dtype) for value in values]
    output = torch.full((4,), 9.0).to(dtype if output_dtype is None or dtype.is_complex else output_dtype)
    sum_in_rank_order(contributions, output, 1 / 3)
    sum_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros(4, dtype=sum_dtype)
    for contribution in contributions:
        total = total + contribution.to(sum_dtype) * (1 / 3)
    torch.testing.assert_close(output, total.to(output.dtype), rtol=1e-3, atol=1e-4)
    assert output.abs().min() > 0.3  # the small value is not lost, as it would be in bfloat16


def test_backend_sum_is_scaled_once() -> None:
    total: Any = torch.tensor([3.0, 6.0])
    output = torch.zeros(2, dtype=torch.bfloat16)
    BackendSumWork(total, CompletedWork(), output, 1 / 3, keep_alive=total).wait()
    assert output.tolist() == [1.0, 2.0]


def test_single_rank_group_propagates_errors_unchanged() -> None:
    with pytest.raises(RuntimeError, match="its own"), SingleRankGroup().failure_detector:
        raise RuntimeError("something of its own")
