"""Checksums over the bits of tensors: equal for equal values, different after any change."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.engine import checks
from zeroshard.engine.checks import COALESCE_MAX_BYTES, Checksums, make_odd_weights

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.int64, torch.bool),
]


def random_bits(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Arbitrary bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    return torch.randint(limit, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def flip_bit(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a contiguous tensor."""
    raw = tensor.view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def checksum(*tensors: torch.Tensor) -> int:
    return Checksums().compute(tensors)


def reference_checksum(data: bytes) -> int:
    """Checksum of a single chunk, computed with Python integers."""
    count, rest = divmod(len(data), 4)
    words = [*struct.unpack(f"<{count}i", data[: 4 * count]), *data[4 * count :]]
    weights = make_odd_weights(count + rest, torch.device("cpu")).tolist()
    products = sum(word * weight for word, weight in zip(words, weights, strict=True))
    first = make_odd_weights(1, torch.device("cpu")).item()
    modulo = int(products * first * first) % 2**64
    return modulo - 2**64 if modulo >= 2**63 else modulo


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 4, 61])
def test_checksum_is_weighted_sum_of_words(dtype: torch.dtype, numel: int) -> None:
    tensor = random_bits(numel, dtype)
    assert checksum(tensor) == reference_checksum(bytes(tensor.view(torch.uint8).tolist()))


@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]),
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_flipped_bit_changes_checksum(dtype: torch.dtype, numels: list[int], seed: int, data: st.DataObject) -> None:
    tensors = [random_bits(numel, dtype, seed + i) for i, numel in enumerate(numels)]
    before = checksum(*tensors)
    assert before == checksum(*(tensor.clone() for tensor in tensors))
    non_empty = [tensor for tensor in tensors if tensor.numel()]
    if non_empty:
        chosen = data.draw(st.sampled_from(range(len(non_empty))))
        flip_bit(non_empty[chosen], data.draw(st.integers(0, non_empty[chosen].numel() * dtype.itemsize * 8 - 1)))
        assert checksum(*tensors) != before


def test_each_bit_of_a_small_tensor_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = random_bits(9, dtype)
        before = checksum(tensor)
        for bit in range(9 * dtype.itemsize * 8):
            flip_bit(tensor, bit)
            assert checksum(tensor) != before, bit
            flip_bit(tensor, bit)
        assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_flips_of_the_same_bit_do_not_cancel_out(dtype: torch.dtype) -> None:
    """Sign bits above all: a negated tensor differs, whatever its number of elements."""
    tensor = torch.randn(64, dtype=torch.float64).to(dtype)
    assert checksum(tensor) != checksum(-tensor)
    element_bits = dtype.itemsize * 8
    for other in range(1, 64):
        changed = tensor.clone()
        flip_bit(changed, element_bits - 1)
        flip_bit(changed, other * element_bits + element_bits - 1)
        assert checksum(changed) != checksum(tensor), other


def test_order_matters() -> None:
    tensor = torch.arange(1000.0)
    assert len({checksum(tensor.roll(shift)) for shift in range(1000)}) == 1000
    assert checksum(torch.zeros(3), torch.ones(3)) != checksum(torch.ones(3), torch.zeros(3))
    rows = torch.randn(30, 30)
    assert checksum(rows) != checksum(rows.t().contiguous())


def test_regular_changes_do_not_cancel_out() -> None:
    tensor = torch.zeros(64, 64, dtype=torch.int32)
    rectangle, slope = tensor.clone(), tensor.clone()
    rectangle[3, 5] = rectangle[7, 9] = 1
    rectangle[3, 9] = rectangle[7, 5] = -1
    slope[0, :3] = torch.tensor([1, -2, 1])
    assert len({checksum(variant) for variant in (tensor, rectangle, slope)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_independent_of_memory_offset(dtype: torch.dtype) -> None:
    """Including tensors that start in the middle of a word."""
    for numel in (7, COALESCE_MAX_BYTES // dtype.itemsize + 5):
        tensor = random_bits(numel, dtype)
        for offset in (1, 2, 3):
            moved = torch.zeros(numel + offset, dtype=dtype)[offset:]
            moved.copy_(tensor)
            assert checksum(moved) == checksum(tensor)


def test_non_contiguous_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.CHUNK_WORDS, "cpu", 512)
    monkeypatch.setattr(checks, "COALESCE_MAX_BYTES", 64)
    images = torch.randn(9, 8, 7, 6).to(memory_format=torch.channels_last)
    tensors = {
        "channels last": images,
        "transposed": torch.randn(70, 90).t(),
        "with gaps": torch.randn(40, 200)[:, ::2],
        "one row": torch.randn(1, 5000)[:, ::2],
        "small": torch.randn(3, 5).t(),
    }
    for name, tensor in tensors.items():
        assert not tensor.is_contiguous()
        same = torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        before = checksum(tensor)
        assert checksum(same) == before, name
        for position in torch.randint(tensor.numel(), (40,), generator=torch.Generator().manual_seed(1)).tolist():
            index = tuple(int(coordinate) for coordinate in torch.unravel_index(torch.tensor(position), tensor.shape))
            original = same[index].clone()
            same[index] = torch.nextafter(original, torch.tensor(9.0))
            assert checksum(same) != before, (name, index)
            same[index] = original


def test_chunked_and_coalesced_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits at the boundaries of chunks count too."""
    monkeypatch.setitem(checks.CHUNK_WORDS, "cpu", 64)
    monkeypatch.setattr(checks, "COALESCE_MAX_BYTES", 100)
    tensors = [random_bits(numel, torch.bfloat16, numel) for numel in (3, 5, 1000, 129, 50, 50, 50, 0, 7)]
    before = checksum(*tensors)
    for tensor in tensors:
        for bit in range(0, tensor.numel() * 16, 61):
            flip_bit(tensor, bit)
            assert checksum(*tensors) != before
            flip_bit(tensor, bit)
    assert checksum(*tensors) == before


def test_memory_use_is_bounded() -> None:
    """A few MiB for words widened to int64, whatever the size of the tensor."""
    sums = Checksums()
    sums.compute([torch.zeros(5_000_000)])
    assert sum(
        tensor.nbytes for cache in (sums._weights, sums._int64_buffers) for tensor in cache.values()
    ) <= 2 * 8 * (1 << 17)


def test_empty_nan_and_signed_zero() -> None:
    assert checksum() == checksum(torch.empty(0)) == 0
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan().all()
    assert other.isnan().all()
    assert checksum(quiet) != checksum(other)
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


def test_weights_are_odd_distinct_and_fixed() -> None:
    weights = make_odd_weights(100_000, torch.device("cpu"))
    assert (weights % 2 == 1).all()
    assert len(set(weights.tolist())) == 100_000
    assert torch.equal(make_odd_weights(10, torch.device("cpu")), weights[:10])


def test_strides_do_not_change_checksum() -> None:
    """Strides can differ between ranks whose parameters are equal."""
    tensor = torch.randn(1000, 1000)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
