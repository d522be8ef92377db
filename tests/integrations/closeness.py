"""Compare with a framework's own training: bitwise, or up to the order of float32 sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def assert_same(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, exactly: bool = False
) -> None:
    """Check that values are equal bitwise, or up to a different summation order, which AdamW amplifies."""
    assert list(found) == list(expected)
    for name, value in found.items():
        difference = (value - expected[name]).abs().max().item()
        if exactly:
            assert torch.equal(value, expected[name]), f"{name} differs by {difference}"
        else:
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), f"{name} differs by {difference}"
