"""How often a rank speaks to others, counted where all of torch's ways to do so come together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class Calls(list[str]):
    """Names of the calls into process groups, from Python or C++, in any thread."""


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Filled when the context closes. Sending and receiving are calls of their own; barriers do not count."""
    calls = Calls()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # says nothing of its own
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as record:
        yield calls
    events: list[Any] = record.profiler.kineto_results.events()
    names = (event.name() for event in events)
    calls += [name for name in names if name.startswith("c10d::") and "barrier" not in name]
