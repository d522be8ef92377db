"""These tests need the extra `integrations`. Where a package is missing, only `make test-integrations` fails."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.support.pool import preload

NEEDED = ("accelerate", "lightning", "transformers")
MISSING = [name for name in NEEDED if find_spec(name) is None]
REQUIRED = "ZEROSHARD_INTEGRATIONS"

if not MISSING or os.environ.get(REQUIRED):
    # Loaded once, before the ranks are forked: each would take seconds for it.
    preload(["lightning.pytorch", "accelerate", "transformers.trainer"])
else:
    collect_ignore_glob = ["test_*.py"]
