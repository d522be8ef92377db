"""Each contestant trains alone in processes of its own: does it work here, and how much memory does it take?"""

import gc

import torch.distributed as dist

from ..harness.models import RECIPES
from ..harness.ranks import run_ranks
from ..harness.resources import peak_bytes, reset_peak, return_freed_memory
from ..harness.workloads import WORKLOADS
from .peers_race import Case
from .peers_trainers import CONTESTANTS

ITERATIONS = 3


class NotHereError(RuntimeError):
    """A contestant that cannot take part on this machine."""


def peak_growth(case: Case, name: str, *, in_use: bool) -> int:
    """Bytes that the fullest rank took at the peak beyond those of the built model.

    in_use: do not count what the allocator keeps for later; by default it keeps most of what was freed.
    """
    grown: list[int | str] = run_ranks(case.world, _train_alone, case, name, in_use, start="forkserver")
    for reason in grown:
        if isinstance(reason, str):
            raise NotHereError(reason)
    return max(peak for peak in grown if isinstance(peak, int))


def _train_alone(case: Case, name: str, in_use: bool) -> int | str:
    reason = CONTESTANTS[name].why_not()
    if reason is not None:
        return reason
    if in_use:
        return_freed_memory()
    _train("tiny", case.recipe, name)  # loads and sets up what would otherwise count
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
