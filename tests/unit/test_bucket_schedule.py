"""The bucket schedule: each backward pass sends one round of buckets, and only complete rounds are cleared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from zeroshard.engine.grad_reducer import BucketSchedule


def make_schedule(num_buckets: int, *, trainable: bool = True, params_per_bucket: int = 1) -> BucketSchedule:
    params = [torch.zeros(1, requires_grad=trainable) for _ in range(num_buckets * params_per_bucket)]
    slots = [SimpleNamespace(spec=SimpleNamespace(trainable=trainable))]
    buckets: list[Any] = [
        SimpleNamespace(
            index=index, params=[*range(index * params_per_bucket, (index + 1) * params_per_bucket)], slots=slots
        )
        for index in range(num_buckets)
    ]
    schedule = BucketSchedule()
    schedule.extend(buckets, params)
    schedule.reset()
    return schedule


def send_remaining(schedule: BucketSchedule) -> list[int]:
    sent = []
    while schedule.has_remaining:
        sent.append(schedule.next_bucket.index)
        schedule.advance()
    return sent


def test_backward_pass_sends_one_round() -> None:
    schedule = make_schedule(3)
    assert not schedule.has_remaining
    for pass_index in range(2):
        schedule.open_round()
        assert send_remaining(schedule) == [0, 1, 2]
        schedule.open_round()  # a late gradient of the same backward pass
        assert not schedule.has_remaining
        schedule.close_round()
        assert (schedule.rounds_sent, schedule.sent_in_round, schedule.num_sent) == (
            pass_index + 1,
            0,
            3 * pass_index + 3,
        )


def test_complete_rounds_are_cleared() -> None:
    schedule = make_schedule(2)
    schedule.open_round()
    schedule.advance()
    assert schedule.has_uncleared
    assert (schedule.rounds_sent, schedule.sent_in_round) == (0, 1)
    assert send_remaining(schedule) == [1]
    schedule.close_round()
    schedule.mark_cleared()
    assert not schedule.has_uncleared
    assert schedule.rounds_cleared == 1


def test_catching_up_completes_an_open_round() -> None:
    """Catching up may advance a rank past the round that its own backward pass opened."""
    schedule = make_schedule(2)
    schedule.open_round()
    for _ in range(3):
        schedule.advance()
    assert (schedule.rounds_sent, schedule.sent_in_round) == (1, 1)
    assert not schedule.has_remaining
    schedule.reset()
    assert not schedule.has_uncleared
    assert schedule.num_sent == 0


def test_a_bucket_is_ready_when_its_expected_grads_are() -> None:
    schedule = make_schedule(2)
    schedule.open_round()
    assert schedule.mark_ready(1)
    assert not schedule.is_next_ready
    assert schedule.mark_ready(0)
    assert schedule.is_next_ready
    schedule.advance()
    assert schedule.is_next_ready


def test_a_bucket_sent_early_waits_for_all_its_grads_again() -> None:
    """A bucket is sent with zeros after a backward pass that failed when some of its gradients were ready."""
    schedule = make_schedule(1, params_per_bucket=2)
    schedule.open_round()
    assert not schedule.mark_ready(0)
    schedule.advance()
    schedule.close_round()
    schedule.open_round()
    assert schedule.is_missing(0)
    assert not schedule.mark_ready(0)
    assert schedule.mark_ready(1)
    assert schedule.is_next_ready


def test_frozen_buckets_send_nothing() -> None:
    schedule = make_schedule(2, trainable=False)
    schedule.open_round()
    assert send_remaining(schedule) == []
    schedule.close_round()
    assert schedule.num_sent == 0
