"""Fixtures and rules for all tests."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

# Some CPUs advertise AMX and cannot run it: bf16 products die there. To be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not re-exported

from tests.support import RankPool
from tests.support.tiers import mark_slow_variants

settings.register_profile("zeroshard", derandomize=True, deadline=None, database=None)
settings.load_profile("zeroshard")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The worker processes behind `@ranks`."""
    with closing(RankPool()) as pool:
        yield pool


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, thread synchronization takes seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_variants(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
