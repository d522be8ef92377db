"""Check sums over bits: what is equal, and what is told apart."""

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


def drawn(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, those of NaNs among them."""
    draw = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    return torch.randint(limit, (numel * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """One bit of a contiguous tensor."""
    raw = tensor.view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def total(*tensors: torch.Tensor) -> int:
    return Checksums().compute(tensors)


def reference(data: bytes) -> int:
    """Of a run that is made at once, in plain numbers."""
    count, rest = divmod(len(data), 4)
    words = [*struct.unpack(f"<{count}i", data[: 4 * count]), *data[4 * count :]]
    weights = make_odd_weights(count + rest, torch.device("cpu")).tolist()
    products = sum(word * weight for word, weight in zip(words, weights, strict=True))
    first = make_odd_weights(1, torch.device("cpu")).item()
    modulo = int(products * first * first) % 2**64
    return modulo - 2**64 if modulo >= 2**63 else modulo


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 4, 61])
def test_it_is_a_sum_of_words_by_their_places(dtype: torch.dtype, numel: int) -> None:
    tensor = drawn(numel, dtype)
    assert total(tensor) == reference(bytes(tensor.view(torch.uint8).tolist()))


@given(
    dtype=st.sampled_from([it for it in DTYPES if it != torch.bool]),
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_every_bit_counts(dtype: torch.dtype, numels: list[int], seed: int, data: st.DataObject) -> None:
    tensors = [drawn(numel, dtype, seed + i) for i, numel in enumerate(numels)]
    before = total(*tensors)
    assert before == total(*(tensor.clone() for tensor in tensors))
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        chosen = data.draw(st.sampled_from(range(len(filled))))
        flip(filled[chosen], data.draw(st.integers(0, filled[chosen].numel() * dtype.itemsize * 8 - 1)))
        assert total(*tensors) != before


def test_every_bit_of_a_small_one_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = drawn(9, dtype)
        before = total(tensor)
        for bit in range(9 * dtype.itemsize * 8):
            flip(tensor, bit)
            assert total(tensor) != before, bit
            flip(tensor, bit)
        assert total(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_flips_of_the_same_bit_do_not_cancel_out(dtype: torch.dtype) -> None:
    """Signs, above all: a negated tensor differs, whatever the number of its elements."""
    tensor = torch.randn(64, dtype=torch.float64).to(dtype)
    assert total(tensor) != total(-tensor)
    sign = dtype.itemsize * 8
    for other in range(1, 64):
        changed = tensor.clone()
        flip(changed, sign - 1)
        flip(changed, other * sign + sign - 1)
        assert total(changed) != total(tensor), other


def test_places_count() -> None:
    tensor = torch.arange(1000.0)
    assert len({total(tensor.roll(by)) for by in range(1000)}) == 1000
    assert total(torch.zeros(3), torch.ones(3)) != total(torch.ones(3), torch.zeros(3))
    rows = torch.randn(30, 30)
    assert total(rows) != total(rows.t().contiguous())


def test_regular_changes_do_not_cancel_out() -> None:
    tensor = torch.zeros(64, 64, dtype=torch.int32)
    rectangle, slope = tensor.clone(), tensor.clone()
    rectangle[3, 5] = rectangle[7, 9] = 1
    rectangle[3, 9] = rectangle[7, 5] = -1
    slope[0, :3] = torch.tensor([1, -2, 1])
    assert len({total(it) for it in (tensor, rectangle, slope)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_sums_are_those_of_values_and_not_of_where_they_lie(dtype: torch.dtype) -> None:
    """Also where a tensor begins in the middle of a word."""
    for numel in (7, COALESCE_MAX_BYTES // dtype.itemsize + 5):
        tensor = drawn(numel, dtype)
        for offset in (1, 2, 3):
            moved = torch.zeros(numel + offset, dtype=dtype)[offset:]
            moved.copy_(tensor)
            assert total(moved) == total(tensor)


def test_other_orders_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.CHUNK_WORDS, "cpu", 512)
    monkeypatch.setattr(checks, "COALESCE_MAX_BYTES", 64)
    images = torch.randn(9, 8, 7, 6).to(memory_format=torch.channels_last)
    shapes = {
        "channels": images,
        "turned over": torch.randn(70, 90).t(),
        "with gaps": torch.randn(40, 200)[:, ::2],
        "one row": torch.randn(1, 5000)[:, ::2],
        "small": torch.randn(3, 5).t(),
    }
    for name, tensor in shapes.items():
        assert not tensor.is_contiguous()
        same = torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        before = total(tensor)
        assert total(same) == before, name
        for place in torch.randint(tensor.numel(), (40,), generator=torch.Generator().manual_seed(1)).tolist():
            index = tuple(int(it) for it in torch.unravel_index(torch.tensor(place), tensor.shape))
            kept = same[index].clone()
            same[index] = torch.nextafter(kept, torch.tensor(9.0))
            assert total(same) != before, (name, index)
            same[index] = kept


def test_long_ones_are_cut_and_short_ones_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit at the seams counts, in any place."""
    monkeypatch.setitem(checks.CHUNK_WORDS, "cpu", 64)
    monkeypatch.setattr(checks, "COALESCE_MAX_BYTES", 100)
    tensors = [drawn(numel, torch.bfloat16, numel) for numel in (3, 5, 1000, 129, 50, 50, 50, 0, 7)]
    before = total(*tensors)
    for tensor in tensors:
        for bit in range(0, tensor.numel() * 16, 61):
            flip(tensor, bit)
            assert total(*tensors) != before
            flip(tensor, bit)
    assert total(*tensors) == before


def test_little_memory_is_taken() -> None:
    """A few MiB for words that are widened, whatever the size of a tensor."""
    sums = Checksums()
    sums.compute([torch.zeros(5_000_000)])
    assert sum(it.nbytes for kept in (sums._weights, sums._int64_buffers) for it in kept.values()) <= 2 * 8 * (1 << 17)


def test_nothing_and_nan() -> None:
    assert total() == total(torch.empty(0)) == 0
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan().all()
    assert other.isnan().all()
    assert total(quiet) != total(other)
    assert total(torch.tensor(0.0)) != total(torch.tensor(-0.0))


def test_weights_are_odd_and_of_their_places_only() -> None:
    numbers = make_odd_weights(100_000, torch.device("cpu"))
    assert (numbers % 2 == 1).all()
    assert len(set(numbers.tolist())) == 100_000
    assert torch.equal(make_odd_weights(10, torch.device("cpu")), numbers[:10])
