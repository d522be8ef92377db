"""These tests need the extra `integrations`. Where a package is missing, only `make test-integrations` fails."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pool import preload

NEEDED = ("accelerate", "lightning", "transformers")
MISSING = [name for name in NEEDED if find_spec(name) is None]
REQUIRED = "ZEROSHARD_INTEGRATIONS"

FAST = {
    "test_the_same_numbers_as_ddp",
    "test_the_same_numbers_as_with_ddp",
    "test_who_is_stopped_goes_on_at_another_number_of_ranks",
}
"""The fast tier has one training run and one resume per framework."""

if not MISSING or os.environ.get(REQUIRED):
    # Loaded once, before the ranks are forked: each would take seconds for it.
    preload(["lightning.pytorch", "accelerate", "transformers.trainer"])
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and getattr(item, "originalname", "") not in FAST:
            item.add_marker(pytest.mark.slow)
