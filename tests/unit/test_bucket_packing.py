"""Packing the gradients of a bucket into one flat buffer."""

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


def make_bucket(params: Sequence[ParamSpec], ranks: int) -> tuple[Layout, Bucket]:
    layout = FlatShards(MIB).extend(Layout.empty(ranks), params)
    (bucket,) = layout.buckets
    return layout, bucket


def make_packer(
    params: Sequence[ParamSpec], ranks: int = 2, *, dtype: torch.dtype = torch.float32, padded: bool = False
) -> BucketPacker:
    return BucketPacker(*make_bucket(params, ranks), dtype, include_padding=padded)


def make_buffer(packer: BucketPacker, dtype: torch.dtype = torch.float32) -> BucketBuffer:
    return BucketBuffer(torch.full((packer.numel,), GARBAGE, dtype=dtype))


def make_grads(packer: BucketPacker) -> list[torch.Tensor | None]:
    """Distinct values in the shapes and strides of the parameters."""
    grads: list[torch.Tensor | None] = []
    for slot in packer.slots:
        values = torch.arange(slot.spec.numel, dtype=torch.float32).add(100 * (slot.param + 1))
        grad = torch.empty_strided(slot.spec.shape, slot.spec.stride)
        grads.append(grad.copy_(values.view(slot.spec.shape)))
    return grads


MIXED_PARAMS = [
    spec(0, (3, 5)),
    spec(1, ()),
    spec(2, (2, 3, 4), stride=(12, 1, 3)),  # channels last
    spec(3, (0, 4)),
    spec(4, (4, 3), stride=(1, 4)),
    spec(5, (3, 3), stride=(5, 1)),  # gaps between rows
    spec(6, (17,)),
]


def test_early_copy_of_narrower_gradient_rounds_like_pack() -> None:
    """PyTorch multiplies in the dtype of the gradient, even if `out` is wider."""
    layout, bucket = make_bucket([spec(0, (64,)), spec(1, (64,))], 3)
    packer = BucketPacker(layout, bucket, torch.float32, include_padding=False, scale=1 / 3)
    grads = [torch.randn(64).bfloat16() for _ in packer.slots]
    copied, packed = make_buffer(packer), make_buffer(packer)
    for slot_index, grad in enumerate(grads):
        packer.copy_in(slot_index, grad, copied)
    assert torch.equal(packer.pack([None, None], copied, {0, 1}), packer.pack(grads, packed))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_pack_puts_each_gradient_in_its_slot(ranks: int, padded: bool) -> None:
    layout, bucket = make_bucket(MIXED_PARAMS, ranks)
    packer = BucketPacker(layout, bucket, torch.float32, include_padding=padded)
    grads = make_grads(packer)
    flat = packer.pack(grads, make_buffer(packer))
    starts = {slot.param: slot.span.start for slot in bucket.slots}
    for slot, grad in zip(packer.slots, grads, strict=True):
        assert slot.span.start == starts[slot.param]
        assert grad is not None
        assert torch.equal(slot.view_in(flat), grad)
        assert slot.view_in(flat).stride() == slot.spec.stride
    assert GARBAGE not in flat.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_packed_numel_and_shards(ranks: int) -> None:
    """Padding is included only where shards must have equal length; the shards cover the bucket without overlap."""
    _, bucket = make_bucket(MIXED_PARAMS, ranks)
    bare, padded = make_packer(MIXED_PARAMS, ranks), make_packer(MIXED_PARAMS, ranks, padded=True)
    assert bare.numel == max(slot.span.stop for slot in bare.slots) <= padded.numel == bucket.numel
    assert list(padded.shards) == list(bucket.shards)
    for packer in (bare, padded):
        assert [packer.shards[0].start, *(shard.stop for shard in packer.shards)] == [
            0,
            *(min(shard.stop, packer.numel) for shard in bucket.shards),
        ]
    assert sum(shard.length for shard in bare.shards) == bare.numel


def test_more_ranks_than_elements() -> None:
    packer = make_packer(specs([2]), ranks=5)
    assert [shard.length for shard in packer.shards] == [1, 1, 0, 0, 0]


def test_missing_gradients_are_packed_as_zeros() -> None:
    packer = make_packer(specs([5, 7, 3]))
    grads = make_grads(packer)
    for missing in range(3):
        partial_grads = [None if i == missing else grad for i, grad in enumerate(grads)]
        flat = packer.pack(partial_grads, make_buffer(packer))
        for slot, grad in zip(packer.slots, partial_grads, strict=True):
            expected = torch.zeros(slot.spec.shape) if grad is None else grad
            assert torch.equal(slot.view_in(flat), expected)
    assert not packer.pack([None] * 3, make_buffer(packer)).any()


def test_buffer_is_reused_by_another_bucket() -> None:
    """Cached views of one bucket must not be used for another bucket in the same buffer."""
    large, small = make_packer(specs([40, 30])), make_packer(specs([9, 4]))
    other = BucketPacker(*make_second_bucket([40, 30], [9, 4]), torch.float32, include_padding=False)
    buffer = BucketBuffer(torch.full((large.numel,), GARBAGE))
    large.pack(make_grads(large), buffer)
    grads = make_grads(other)
    flat = other.pack(grads, buffer)
    assert flat.numel() == small.numel
    for slot, grad in zip(other.slots, grads, strict=True):
        assert grad is not None
        assert torch.equal(slot.view_in(flat), grad)


def make_second_bucket(first: list[int], second: list[int]) -> tuple[Layout, Bucket]:
    layout = FlatShards(MIB).extend(Layout.empty(2), specs(first))
    layout = FlatShards(MIB).extend(layout, specs(second, first=len(first), group=1))
    return layout, layout.buckets[1]


def test_sparse_gradients_are_densified() -> None:
    packer = make_packer([spec(0, (4, 3)), spec(1, (5,))])
    dense, vector = torch.zeros(4, 3), torch.ones(5)
    dense[2] = 7
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.tensor([[3.0] * 3, [4.0] * 3]), (4, 3))
    grads: list[torch.Tensor | None] = [sparse if slot.param == 0 else vector for slot in packer.slots]
    flat = packer.pack(grads, make_buffer(packer))
    for slot in packer.slots:
        assert torch.equal(slot.view_in(flat), dense if slot.param == 0 else vector)
    packer.add(grads, buffer := BucketBuffer(flat))
    for slot in packer.slots:
        assert torch.equal(slot.view_in(buffer.flat), 2 * (dense if slot.param == 0 else vector))


def test_add_skips_missing_gradients() -> None:
    packer = make_packer(specs([5, 7]))
    first, second = make_grads(packer)
    buffer = make_buffer(packer)
    packer.pack([first, second], buffer)
    packer.add([first, None], buffer)
    packer.add([None, None], buffer)
    assert first is not None
    assert second is not None
    assert torch.equal(packer.slots[0].view_in(buffer.flat), 2 * first)
    assert torch.equal(packer.slots[1].view_in(buffer.flat), second)


def test_gradients_are_rounded_to_reduce_dtype() -> None:
    packer = make_packer(specs([5, 7]), dtype=torch.bfloat16)
    grads = [torch.full((slot.spec.numel,), 1 + 2**-12) for slot in packer.slots]
    flat = packer.pack(grads, make_buffer(packer, torch.bfloat16))
    assert flat.dtype == torch.bfloat16
    for slot in packer.slots:
        assert torch.equal(slot.view_in(flat), torch.ones(slot.spec.numel, dtype=torch.bfloat16))


class TestZeroCopyView:
    """A bucket of one parameter needs no copy if its gradient has the memory layout of the bucket."""

    @pytest.mark.parametrize("param", [spec(0, (6, 4)), spec(0, (6, 4), stride=(1, 6)), spec(0, ())])
    def test_view_shares_memory_with_gradient(self, param: ParamSpec) -> None:
        packer = make_packer([param])
        (grad,) = make_grads(packer)
        flat = packer.zero_copy_view(grad)
        assert grad is not None
        assert flat is not None
        assert flat.data_ptr() == grad.data_ptr()
        assert flat.shape == (packer.numel,)
        assert torch.equal(flat, packer.pack([grad], make_buffer(packer)))

    def test_none_for_other_strides(self) -> None:
        packer = make_packer([spec(0, (6, 4))])
        assert packer.zero_copy_view(torch.ones(4, 6).t()) is None
        assert packer.zero_copy_view(torch.ones(6, 8)[:, :4]) is None
        assert packer.zero_copy_view(torch.ones(1, 1).expand(6, 4)) is None

    def test_none_for_other_dtype_or_layout(self) -> None:
        packer = make_packer([spec(0, (6, 4))])
        assert packer.zero_copy_view(torch.ones(6, 4, dtype=torch.float64)) is None
        assert packer.zero_copy_view(torch.ones(6, 4).to_sparse()) is None
        assert make_packer([spec(0, (6, 4))], dtype=torch.bfloat16).zero_copy_view(torch.ones(6, 4)) is None

    def test_none_for_missing_gradient_or_gaps(self) -> None:
        assert make_packer([spec(0, (6, 4))]).zero_copy_view(None) is None
        gaps = spec(0, (3, 3), stride=(5, 1))
        assert make_packer([gaps]).zero_copy_view(torch.empty_strided((3, 3), (5, 1))) is None

    def test_none_with_padding(self) -> None:
        packer = make_packer([spec(0, (7,))], ranks=4, padded=True)
        assert packer.numel > 7
        assert packer.zero_copy_view(torch.ones(7)) is None


def test_pack_whole_params() -> None:
    layout = WholeParams().extend(Layout.empty(3), specs([5, 9, 2, 30]))
    (bucket,) = layout.buckets
    packer = BucketPacker(layout, bucket, torch.float32, include_padding=False)
    grads = make_grads(packer)
    flat = packer.pack(grads, make_buffer(packer))
    assert [shard.start for shard in packer.shards] == [shard.start for shard in bucket.shards]
    for slot, grad in zip(packer.slots, grads, strict=True):
        assert grad is not None
        assert torch.equal(slot.view_in(flat), grad)
        assert any(Span(*shard).contains(slot.span) for shard in packer.shards)


class TestBufferPool:
    def test_released_buffer_is_reused(self) -> None:
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

    def test_oversized_buffers_are_not_pooled(self) -> None:
        pool = BufferPool(torch.float32, CPU)
        pool.reserve(10)
        pool.release(pool.acquire(1))
        huge = pool.acquire(100)
        assert huge.flat.numel() == 100
        pool.release(huge)
        assert [pool.acquire(1).flat.numel() for _ in range(3)] == [10, 10, 10]

    def test_number_of_idle_buffers_is_limited(self) -> None:
        pool = BufferPool(torch.float32, CPU)
        pool.reserve(3)
        acquired = [pool.acquire(1) for _ in range(MAX_IDLE_BUFFERS + 2)]
        for buffer in acquired:
            pool.release(buffer)
        reacquired = [pool.acquire(1) for _ in acquired]
        assert sum(any(buffer is other for other in acquired) for buffer in reacquired) == MAX_IDLE_BUFFERS


class TestScale:
    """Gradients are scaled while they are copied, all at once or one by one."""

    def make_packer(self) -> BucketPacker:
        layout, bucket = make_bucket(MIXED_PARAMS, 2)
        return BucketPacker(layout, bucket, torch.float32, include_padding=False, scale=0.25)

    def test_pack_and_copy_in_scale_once(self) -> None:
        packer = self.make_packer()
        grads = make_grads(packer)
        expected = make_packer(MIXED_PARAMS).pack(
            [None if grad is None else grad / 4 for grad in grads], make_buffer(packer)
        )
        assert torch.equal(packer.pack(grads, make_buffer(packer)), expected)
        buffer = make_buffer(packer)
        copied = (0, 2, 4)
        for index in copied:
            grad = grads[index]
            assert grad is not None
            packer.copy_in(index, grad, buffer)
        rest = [None if index in copied else grad for index, grad in enumerate(grads)]
        assert torch.equal(packer.pack(rest, buffer, copied), expected)

    def test_add_accumulates_scaled_gradients(self) -> None:
        packer = self.make_packer()
        grads = make_grads(packer)
        doubled = make_packer(MIXED_PARAMS).pack(
            [None if grad is None else grad / 2 for grad in grads], make_buffer(packer)
        )
        buffer = make_buffer(packer)
        for index, grad in enumerate(grads):
            assert grad is not None
            packer.copy_in(index, grad, buffer)
        assert torch.equal(packer.pack(grads, buffer, range(len(grads))), doubled)
        packer.pack(grads, buffer)
        packer.add(grads, buffer)
        assert torch.equal(buffer.flat[: packer.numel], doubled)


def test_more_gradients_than_one_foreach_batch() -> None:
    """Some are missing, some were copied in before, and the gradients come from a one-shot iterator."""
    packer = make_packer([spec(index, (3,)) for index in range(2 * FOREACH_BATCH_SIZE + 7)])
    grads = make_grads(packer)
    buffer, missing, early = make_buffer(packer), set(range(0, len(grads), 5)), set(range(1, len(grads), 5))
    for index in early:
        grad = grads[index]
        assert grad is not None
        packer.copy_in(index, grad, buffer)
    late_grads = (None if index in missing | early else grad for index, grad in enumerate(grads))
    packer.pack(late_grads, buffer, early)
    packer.add(iter(grads), buffer)
    for index, (slot, grad) in enumerate(zip(packer.slots, grads, strict=True)):
        assert grad is not None
        assert torch.equal(slot.view_in(buffer.flat), grad if index in missing else 2 * grad)
