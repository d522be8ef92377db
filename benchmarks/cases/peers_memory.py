"""Train each contestant in its own processes, to find out whether it works here and how much memory it uses."""

import gc

import torch.distributed as dist

from ..harness.models import RECIPES
from ..harness.ranks import run_ranks
from ..harness.resources import peak_bytes, reset_peak, return_freed_memory
from ..harness.workloads import WORKLOADS
from .peers_race import Case
from .peers_trainers import CONTESTANTS

ITERATIONS = 3


class UnavailableError(RuntimeError):
    """A contestant cannot run on this machine."""


def peak_growth(case: Case, name: str, *, in_use: bool) -> int:
    """Return the fullest rank's peak memory beyond that of the built model, in bytes.

    `in_use`: do not count freed memory that the allocator keeps; by default it keeps most of it.
    """
    results: list[int | str] = run_ranks(case.world, _train_if_available, case, name, in_use, start="forkserver")
    for error in results:
        if isinstance(error, str):
            raise UnavailableError(error)
    return max(growth for growth in results if isinstance(growth, int))


def _train_if_available(case: Case, name: str, in_use: bool) -> int | str:
    error = CONTESTANTS[name].find_error()
    if error is not None:
        return error
    if in_use:
        return_freed_memory()
    _train("tiny", case.recipe, name)  # import modules and initialize: these must not count
    return _train(case.workload, case.recipe, name)


def _train(workload_name: str, recipe: str, name: str) -> int:
    gc.collect()
    workload = WORKLOADS[workload_name]
    model = workload.build()
    batch = workload.batch(dist.get_rank())
    before = reset_peak()
    trainer = CONTESTANTS[name].make(model, workload, RECIPES[recipe])
    for _ in range(ITERATIONS):
        trainer.iterate(batch)
    trainer.finish()
    return peak_bytes() - before
