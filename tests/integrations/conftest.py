"""These tests need the extra `integrations`. If a package is missing, only `make test-integrations` fails."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pool import preload

PACKAGES = ("accelerate", "lightning", "peft", "transformers")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
REQUIRED = "ZEROSHARD_INTEGRATIONS"

FAST = {
    "test_results_match_ddp",
    "test_resume_at_another_world_size",
}
"""The fast tier has one training run and one resume per framework."""

if not MISSING or os.environ.get(REQUIRED):
    # Imported once, before the ranks are forked: the import would take each rank several seconds.
    preload(["lightning.pytorch", "accelerate", "transformers.trainer", "peft"])
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    for item in items:
        if item.path.parent == directory and getattr(item, "originalname", "") not in FAST:
            item.add_marker(pytest.mark.slow)
