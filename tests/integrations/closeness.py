"""What may differ from a framework's own training: nothing, or the order of sums of float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def assert_same(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, exactly: bool = False
) -> None:
    """To the last bit, or up to sums in another order and what AdamW makes of them."""
    assert list(found) == list(expected)
    for name, value in found.items():
        distance = (value - expected[name]).abs().max().item()
        if exactly:
            assert torch.equal(value, expected[name]), f"{name} differs by {distance}"
        else:
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), f"{name} differs by {distance}"
