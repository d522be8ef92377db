"""Wrapper tensor subclasses are copied, sliced, concatenated and serialized bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zeroshard.errors import CheckpointError
from zeroshard.state.serialization import dumps, extract_tensors, loads
from zeroshard.state.shard_tensor import ShardTensor
from zeroshard.state.tensor_utils import (
    clone_tensor,
    concat_subclass_shards,
    inner_tensors,
    is_wrapper_subclass,
    slice_subclass,
    snapshot_to_host,
)

SHAPE = (48, 256)
CLASSES = ["OptimState8bit", "OptimState4bit", "OptimStateFp8"]


def make_quantized(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    cls: Any = getattr(pytest.importorskip(f"torchao.optim.subclass_{name[10:].lower()}"), name)
    tensor: Tensor = cls.zeros(SHAPE, dtype=dtype)
    tensor.copy_(torch.linspace(-1, 3, SHAPE[0] * SHAPE[1]).sin().view(SHAPE))
    return tensor


def is_bitwise_equal(actual: Tensor, expected: Tensor) -> bool:
    assert (type(actual), actual.shape, actual.dtype) == (type(expected), expected.shape, expected.dtype)
    return all(
        torch.equal(inner.view(torch.uint8), inner_tensors(actual)[name].view(torch.uint8))
        for name, inner in inner_tensors(expected).items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_slice_and_concat_round_trip(name: str, dtype: torch.dtype) -> None:
    value, shared_keys = make_quantized(name, dtype), frozenset({"qmap"})
    shards = [
        slice_subclass(value, start, stop, shared_keys) for start, stop in [(0, 4096), (4096, 8448), (8448, 12288)]
    ]
    assert [shard.shape for shard in shards] == [(4096,), (4352,), (3840,)]
    assert is_bitwise_equal(concat_subclass_shards(shards, SHAPE, shared_keys), value)


@pytest.mark.parametrize("name", CLASSES)
def test_copies_do_not_share_memory(name: str) -> None:
    value = make_quantized(name, torch.bfloat16)
    for copied in (clone_tensor(value), snapshot_to_host(value)):
        assert is_bitwise_equal(copied, value)
        inner_tensors(copied)["scale"].zero_()
        assert inner_tensors(value)["scale"].any()


@pytest.mark.parametrize("name", CLASSES)
def test_skeleton_excludes_tensor_data(name: str) -> None:
    """The skeleton holds only the structure, and loading it executes no code."""
    value = make_quantized(name)
    skeleton, tensors = extract_tensors({"state": value})
    assert [tuple(inner.shape) for inner in tensors] == [tuple(inner.shape) for inner in inner_tensors(value).values()]
    loaded = loads(dumps(skeleton))["state"]
    assert type(loaded) is type(value)
    assert all(inner.is_meta for inner in inner_tensors(loaded).values())


def test_other_values_are_not_wrapper_subclasses() -> None:
    assert not is_wrapper_subclass(torch.ones(3))
    assert not is_wrapper_subclass(ShardTensor(torch.ones(3), (4,), (1,), 0))
    assert not is_wrapper_subclass([1])


def test_slice_inside_block_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="multiples of 256, the block size"):
        slice_subclass(make_quantized("OptimState8bit"), 0, 4100, frozenset({"qmap"}))
