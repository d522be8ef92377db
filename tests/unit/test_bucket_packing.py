"""Gradients of a bucket as one flat run of memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.oracles import spec, specs
from zeroshard._types import MIB, Span
from zeroshard.engine.grad_bucket import FOREACH_BATCH_SIZE, MAX_IDLE_BUFFERS, BucketBuffer, BucketPacker, BufferPool
from zeroshard.layout.layout import Bucket, Layout
from zeroshard.layout.partition import FlatShards, WholeParams
from zeroshard.layout.spec import ParamSpec

CPU = torch.device("cpu")
GARBAGE = 77.0


def bucket_of(params: Sequence[ParamSpec], ranks: int) -> tuple[Layout, Bucket]:
    layout = FlatShards(MIB).extend(Layout.empty(ranks), params)
    (bucket,) = layout.buckets
    return layout, bucket


def packing_of(
    params: Sequence[ParamSpec], ranks: int = 2, *, dtype: torch.dtype = torch.float32, padded: bool = False
) -> BucketPacker:
    return BucketPacker(*bucket_of(params, ranks), dtype, include_padding=padded)


def buffer_for(packing: BucketPacker, dtype: torch.dtype = torch.float32) -> BucketBuffer:
    return BucketBuffer(torch.full((packing.numel,), GARBAGE, dtype=dtype))


def grads_for(packing: BucketPacker) -> list[torch.Tensor | None]:
    """Numbers that all differ, in the shapes and strides of the parameters."""
    grads: list[torch.Tensor | None] = []
    for place in packing.slots:
        values = torch.arange(place.spec.numel, dtype=torch.float32).add(100 * (place.param + 1))
        grad = torch.empty_strided(place.spec.shape, place.spec.stride)
        grads.append(grad.copy_(values.view(place.spec.shape)))
    return grads


MIXED = [
    spec(0, (3, 5)),
    spec(1, ()),
    spec(2, (2, 3, 4), stride=(12, 1, 3)),  # channels last
    spec(3, (0, 4)),
    spec(4, (4, 3), stride=(1, 4)),
    spec(5, (3, 3), stride=(5, 1)),  # its rows leave gaps
    spec(6, (17,)),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_gradient_comes_back_from_where_the_bucket_has_its_parameter(ranks: int, padded: bool) -> None:
    layout, bucket = bucket_of(MIXED, ranks)
    packing = BucketPacker(layout, bucket, torch.float32, include_padding=padded)
    grads = grads_for(packing)
    flat = packing.pack(grads, buffer_for(packing))
    starts = {room.param: room.span.start for room in bucket.slots}
    for place, grad in zip(packing.slots, grads, strict=True):
        assert place.span.start == starts[place.param]
        assert grad is not None
        assert torch.equal(place.view_in(flat), grad)
        assert place.view_in(flat).stride() == place.spec.stride
    assert GARBAGE not in flat.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_what_travels(ranks: int) -> None:
    """Everything but the padding at the end, unless shards must be equally long; slices cover it without overlap."""
    _, bucket = bucket_of(MIXED, ranks)
    bare, padded = packing_of(MIXED, ranks), packing_of(MIXED, ranks, padded=True)
    assert bare.numel == max(place.span.stop for place in bare.slots) <= padded.numel == bucket.numel
    assert list(padded.shards) == list(bucket.shards)
    for packing in (bare, padded):
        assert [packing.shards[0].start, *(shard.stop for shard in packing.shards)] == [
            0,
            *(min(shard.stop, packing.numel) for shard in bucket.shards),
        ]
    assert sum(shard.length for shard in bare.shards) == bare.numel


def test_more_ranks_than_elements() -> None:
    packing = packing_of(specs([2]), ranks=5)
    assert [shard.length for shard in packing.shards] == [1, 1, 0, 0, 0]


def test_what_is_missing_becomes_zeros() -> None:
    packing = packing_of(specs([5, 7, 3]))
    grads = grads_for(packing)
    for lacking in range(3):
        given = [None if i == lacking else grad for i, grad in enumerate(grads)]
        flat = packing.pack(given, buffer_for(packing))
        for place, grad in zip(packing.slots, given, strict=True):
            expected = torch.zeros(place.spec.shape) if grad is None else grad
            assert torch.equal(place.view_in(flat), expected)
    assert not packing.pack([None] * 3, buffer_for(packing)).any()


def test_a_used_buffer_leaves_nothing_behind() -> None:
    """The views of one bucket are no use to another in the same buffer."""
    large, small = packing_of(specs([40, 30])), packing_of(specs([9, 4]))
    other = BucketPacker(*_second_bucket([40, 30], [9, 4]), torch.float32, include_padding=False)
    buffer = BucketBuffer(torch.full((large.numel,), GARBAGE))
    large.pack(grads_for(large), buffer)
    grads = grads_for(other)
    flat = other.pack(grads, buffer)
    assert flat.numel() == small.numel
    for place, grad in zip(other.slots, grads, strict=True):
        assert grad is not None
        assert torch.equal(place.view_in(flat), grad)


def _second_bucket(first: list[int], second: list[int]) -> tuple[Layout, Bucket]:
    layout = FlatShards(MIB).extend(Layout.empty(2), specs(first))
    layout = FlatShards(MIB).extend(layout, specs(second, first=len(first), group=1))
    return layout, layout.buckets[1]


def test_sparse_gradients_become_dense() -> None:
    packing = packing_of([spec(0, (4, 3)), spec(1, (5,))])
    dense, vector = torch.zeros(4, 3), torch.ones(5)
    dense[2] = 7
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.tensor([[3.0] * 3, [4.0] * 3]), (4, 3))
    grads: list[torch.Tensor | None] = [sparse if place.param == 0 else vector for place in packing.slots]
    flat = packing.pack(grads, buffer_for(packing))
    for place in packing.slots:
        assert torch.equal(place.view_in(flat), dense if place.param == 0 else vector)
    packing.add(grads, buffer := BucketBuffer(flat))
    for place in packing.slots:
        assert torch.equal(place.view_in(buffer.flat), 2 * (dense if place.param == 0 else vector))


def test_adding_skips_what_is_missing() -> None:
    packing = packing_of(specs([5, 7]))
    first, second = grads_for(packing)
    buffer = buffer_for(packing)
    packing.pack([first, second], buffer)
    packing.add([first, None], buffer)
    packing.add([None, None], buffer)
    assert first is not None
    assert second is not None
    assert torch.equal(packing.slots[0].view_in(buffer.flat), 2 * first)
    assert torch.equal(packing.slots[1].view_in(buffer.flat), second)


def test_another_dtype_on_the_wire_is_rounded_to() -> None:
    packing = packing_of(specs([5, 7]), dtype=torch.bfloat16)
    grads = [torch.full((place.spec.numel,), 1 + 2**-12) for place in packing.slots]
    flat = packing.pack(grads, buffer_for(packing, torch.bfloat16))
    assert flat.dtype == torch.bfloat16
    for place in packing.slots:
        assert torch.equal(place.view_in(flat), torch.ones(place.spec.numel, dtype=torch.bfloat16))


class TestAsItLies:
    """A bucket of one parameter needs no copy, if its gradient lies as the bucket does."""

    @pytest.mark.parametrize("it", [spec(0, (6, 4)), spec(0, (6, 4), stride=(1, 6)), spec(0, ())])
    def test_the_gradient_itself(self, it: ParamSpec) -> None:
        packing = packing_of([it])
        (grad,) = grads_for(packing)
        flat = packing.zero_copy_view(grad)
        assert grad is not None
        assert flat is not None
        assert flat.data_ptr() == grad.data_ptr()
        assert flat.shape == (packing.numel,)
        assert torch.equal(flat, packing.pack([grad], buffer_for(packing)))

    def test_not_with_other_strides(self) -> None:
        packing = packing_of([spec(0, (6, 4))])
        assert packing.zero_copy_view(torch.ones(4, 6).t()) is None
        assert packing.zero_copy_view(torch.ones(6, 8)[:, :4]) is None
        assert packing.zero_copy_view(torch.ones(1, 1).expand(6, 4)) is None

    def test_not_another_dtype_or_layout(self) -> None:
        packing = packing_of([spec(0, (6, 4))])
        assert packing.zero_copy_view(torch.ones(6, 4, dtype=torch.float64)) is None
        assert packing.zero_copy_view(torch.ones(6, 4).to_sparse()) is None
        assert packing_of([spec(0, (6, 4))], dtype=torch.bfloat16).zero_copy_view(torch.ones(6, 4)) is None

    def test_not_where_something_is_missing_or_in_between(self) -> None:
        assert packing_of([spec(0, (6, 4))]).zero_copy_view(None) is None
        gaps = spec(0, (3, 3), stride=(5, 1))
        assert packing_of([gaps]).zero_copy_view(torch.empty_strided((3, 3), (5, 1))) is None

    def test_not_with_padding(self) -> None:
        packing = packing_of([spec(0, (7,))], ranks=4, padded=True)
        assert packing.numel > 7
        assert packing.zero_copy_view(torch.ones(7)) is None


def test_whole_parameters_are_packed_by_the_same_rules() -> None:
    layout = WholeParams().extend(Layout.empty(3), specs([5, 9, 2, 30]))
    (bucket,) = layout.buckets
    packing = BucketPacker(layout, bucket, torch.float32, include_padding=False)
    grads = grads_for(packing)
    flat = packing.pack(grads, buffer_for(packing))
    assert [shard.start for shard in packing.shards] == [shard.start for shard in bucket.shards]
    for place, grad in zip(packing.slots, grads, strict=True):
        assert grad is not None
        assert torch.equal(place.view_in(flat), grad)
        assert any(Span(*shard).contains(place.span) for shard in packing.shards)


class TestPool:
    def test_a_buffer_that_was_given_back_is_used_again(self) -> None:
        pool = BufferPool(torch.float32, CPU)
        pool.reserve(10)
        first, second = pool.acquire(1), pool.acquire(1)
        assert first is not second
        pool.release(first)
        assert pool.acquire(1) is first

    def test_buffers_fit_the_largest_bucket(self) -> None:
        pool = BufferPool(torch.bfloat16, CPU)
        pool.reserve(10)
        pool.reserve(4)
        outgrown = pool.acquire(1)
        assert outgrown.flat.numel() == 10
        assert outgrown.flat.dtype == torch.bfloat16
        pool.reserve(20)
        pool.release(outgrown)
        assert pool.acquire(1).flat.numel() == 20

    def test_what_is_larger_than_that_is_made_and_dropped(self) -> None:
        pool = BufferPool(torch.float32, CPU)
        pool.reserve(10)
        pool.release(pool.acquire(1))
        huge = pool.acquire(100)
        assert huge.flat.numel() == 100
        pool.release(huge)
        assert [pool.acquire(1).flat.numel() for _ in range(3)] == [10, 10, 10]

    def test_few_idle_buffers_are_kept(self) -> None:
        pool = BufferPool(torch.float32, CPU)
        pool.reserve(3)
        taken = [pool.acquire(1) for _ in range(MAX_IDLE_BUFFERS + 2)]
        for buffer in taken:
            pool.release(buffer)
        again = [pool.acquire(1) for _ in taken]
        assert sum(any(one is other for other in taken) for one in again) == MAX_IDLE_BUFFERS


class TestShares:
    """Gradients may be multiplied while they are copied, and one by one before the others are there."""

    def packing(self) -> BucketPacker:
        layout, bucket = bucket_of(MIXED, 2)
        return BucketPacker(layout, bucket, torch.float32, include_padding=False, scale=0.25)

    def test_each_way_in_multiplies_once(self) -> None:
        packing = self.packing()
        grads = grads_for(packing)
        expected = packing_of(MIXED).pack([None if it is None else it / 4 for it in grads], buffer_for(packing))
        assert torch.equal(packing.pack(grads, buffer_for(packing)), expected)
        buffer = buffer_for(packing)
        there = (0, 2, 4)
        for place in there:
            grad = grads[place]
            assert grad is not None
            packing.copy_in(place, grad, buffer)
        rest = [None if place in there else grad for place, grad in enumerate(grads)]
        assert torch.equal(packing.pack(rest, buffer, there), expected)

    def test_what_comes_on_top_is_added(self) -> None:
        packing = self.packing()
        grads = grads_for(packing)
        twice = packing_of(MIXED).pack([None if it is None else it / 2 for it in grads], buffer_for(packing))
        buffer = buffer_for(packing)
        for place, grad in enumerate(grads):
            assert grad is not None
            packing.copy_in(place, grad, buffer)
        assert torch.equal(packing.pack(grads, buffer, range(len(grads))), twice)
        packing.pack(grads, buffer)
        packing.add(grads, buffer)
        assert torch.equal(buffer.flat[: packing.numel], twice)


def test_more_gradients_than_are_copied_at_once() -> None:
    """Some missing, some put in before, from an iterator that can be read once."""
    packing = packing_of([spec(index, (3,)) for index in range(2 * FOREACH_BATCH_SIZE + 7)])
    grads = grads_for(packing)
    buffer, missing, early = buffer_for(packing), set(range(0, len(grads), 5)), set(range(1, len(grads), 5))
    for place in early:
        grad = grads[place]
        assert grad is not None
        packing.copy_in(place, grad, buffer)
    given = (None if place in missing | early else grad for place, grad in enumerate(grads))
    packing.pack(given, buffer, early)
    packing.add(iter(grads), buffer)
    for number, (home, grad) in enumerate(zip(packing.slots, grads, strict=True)):
        assert grad is not None
        assert torch.equal(home.view_in(buffer.flat), grad if number in missing else 2 * grad)
