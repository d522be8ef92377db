"""Count a rank's calls into process groups, where all of torch's communication APIs meet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class Calls(list[str]):
    """Names of the calls into process groups, from Python or C++, in any thread."""


@contextmanager
def count_calls() -> Iterator[Calls]:
    """Count calls in the context; the result is filled when it closes.

    Each send and each receive is one call. Barriers do not count.
    """
    calls = Calls()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silence the profiler's own log
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as record:
        yield calls
    events: list[Any] = record.profiler.kineto_results.events()
    names = (event.name() for event in events)
    calls += [name for name in names if name.startswith("c10d::") and "barrier" not in name]
