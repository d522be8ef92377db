"""Check sums over the bits of tensors, made where these lie and in integers, so that they do not depend on any order.

Bits are read as words of 32. Each word is multiplied by an odd number that depends on its place, and the products are
added up modulo 2^64. One flipped bit changes its word by a power of 2 below 2^32, and the sum by that times an odd
number: always by something. Bits are bits, those of a NaN, too. Words of 64 bits would be fewer, but two flips of their
highest bit would cancel out modulo 2^64: a negated parameter in double precision would pass for the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch

WORD_BYTES = 4
"""Bytes."""
CHUNK_WORDS = {"cpu": 1 << 17}
"""What is widened at once: on the CPU so many that they stay in its cache."""
DEFAULT_CHUNK_WORDS = 1 << 22
COALESCE_MAX_BYTES = 64 * 1024
"""Bytes of a tensor that is put together with its neighbours: one sum for many."""
_HASH_MULTIPLIERS = -0x61C8864680B583EB, 0x2545F4914F6CDD1D


class Checksums:
    """Makes check sums, and keeps what it needs for that: memory of a few MiB, whatever the size of the tensors."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._int64_buffers: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def compute(self, tensors: Iterable[torch.Tensor]) -> int:
        """One sum over all of them, in their order. The host waits once."""
        filled = sorted((it.detach() for it in tensors if it.numel()), key=_device_key)
        if not filled:
            return 0
        by_device = [
            self._checksum_on_device(device, list(some)) for device, some in groupby(filled, attrgetter("device"))
        ]
        sums = torch.stack([it.to(by_device[0].device) for it in by_device])
        return int((sums * make_odd_weights(len(sums), sums.device)).sum().item())

    def _checksum_on_device(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        most = CHUNK_WORDS.get(device.type, DEFAULT_CHUNK_WORDS)
        sums = torch.stack([self._checksum_chunk(raw) for raw in _iter_chunks(tensors, most * WORD_BYTES)])
        return (sums * make_odd_weights(len(sums), device)).sum()

    def _checksum_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Of a run of bytes. The last few, if they make no word, count as one each."""
        count, rest = divmod(chunk.numel(), WORD_BYTES)
        self._ensure_capacity(chunk.device, count + rest)
        wide = self._int64_buffers[chunk.device][: count + rest]
        words = chunk[: count * WORD_BYTES]
        # torch reads words only where they would lie in an array of such.
        wide[:count].copy_((words if words.storage_offset() % WORD_BYTES == 0 else words.clone()).view(torch.int32))
        wide[count:].copy_(chunk[count * WORD_BYTES :])
        return wide.mul_(self._weights[chunk.device][: count + rest]).sum()

    def _ensure_capacity(self, device: torch.device, num_words: int) -> None:
        if device not in self._int64_buffers or len(self._int64_buffers[device]) < num_words:
            self._weights[device] = make_odd_weights(num_words, device)
            self._int64_buffers[device] = torch.empty_like(self._weights[device])


def make_odd_weights(count: int, device: torch.device) -> torch.Tensor:
    """The same ones everywhere, each at its place: as if drawn by chance, so that no regular change cancels out."""
    numbers = torch.arange(1, count + 1, device=device, dtype=torch.int64) * _HASH_MULTIPLIERS[0]
    numbers ^= numbers >> 31
    return (numbers * _HASH_MULTIPLIERS[1]) ^ (numbers >> 29) | 1


def _device_key(tensor: torch.Tensor) -> tuple[str, int]:
    return tensor.device.type, tensor.device.index or 0


def _iter_chunks(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    """All bytes of tensors on one device, at most so many at once. Equal ones are cut in the same way."""
    for small, some in groupby(tensors, lambda it: _nbytes(it) <= COALESCE_MAX_BYTES):
        if small:
            yield from _coalesce(some, max_bytes)
        else:
            for tensor in some:
                yield from _split_tensor(tensor, max_bytes)


def _coalesce(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[torch.Tensor]:
    lot: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if lot and size + _nbytes(tensor) > max_bytes:
            yield torch.cat(lot)
            lot, size = [], 0
        lot.append(_flat_bytes(tensor))
        size += _nbytes(tensor)
    yield torch.cat(lot)


def _split_tensor(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """A tensor whose elements lie in another order than its own is copied, piece by piece."""
    if tensor.is_contiguous():
        yield from torch.split(_flat_bytes(tensor), max_bytes)
    elif _nbytes(tensor) <= max_bytes:
        yield _flat_bytes(tensor)
    else:
        rows = max_bytes // _nbytes(tensor[0])
        for piece in torch.split(tensor, rows) if rows > 1 else tensor:
            yield from _split_tensor(piece, max_bytes)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
