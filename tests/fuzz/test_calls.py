"""Odd arguments of collective calls on one rank only: all ranks raise or none does, and training continues correctly.

Process groups and the optimizer argument of `restore_from_peers` are not fuzzed: a rank without them cannot report it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fuzz.test_options import assert_helpful_error, attach_note, catch_error, failed_on_all_ranks, is_torch_error
from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, TrainingRun, dropin, train
from tests.support.fuzzing import ODD, rounds, time_limit
from tests.support.oracles import assert_same
from zeroshard import (
    FlatShards,
    PeerCheckpoint,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    broadcast_object,
    checkpoint,
    shard,
)
from zeroshard.peer_checkpoint.restore import restore_from_peers
from zeroshard.rules import profile_step_cost

pytestmark = pytest.mark.filterwarnings("ignore")


def with_peer_checkpoint(model: torch.nn.Module, group: Any = None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(partition=FlatShards(bucket_bytes=160), peer_checkpoint=PeerCheckpoint(every=1))
    return shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


class Case:
    """A training run and a directory with its checkpoints."""

    def __init__(self, directory: Path, make_optimizer: Any) -> None:
        self.run, self.directory, self._num_saves = TrainingRun(make_optimizer=make_optimizer), directory, 0
        self.optimizer: Any = self.run.optimizer

    def save(self, **changed: Any) -> object:
        self._num_saves += 1
        path = changed.pop("path", self.directory / f"save{self._num_saves}")
        return checkpoint.save(path, **{"step": 2, **self.run.parts(), **changed})

    def load(self, **changed: Any) -> object:
        return checkpoint.load(changed.pop("path", self.directory / "good"), **{**self.run.parts(), **changed})

    def measure(self, **changed: Any) -> object:
        arguments = {"model": self.run.model, "optimizer_class": torch.optim.SGD, **changed}
        return profile_step_cost(arguments.pop("model"), arguments.pop("optimizer_class"), **arguments)


Call = Callable[[Case, Any], object]
VALID_ARGUMENTS: dict[str, Any] = {
    "max_norm": 1.0,
    "norm_type": 2.0,
    "error_if_nonfinite": False,
    "clip_value": 0.5,
    "closure": None,
    "to": 0,
    "obj": [1],
    "src_rank": 0,
    "device": "cpu",
    "step": 2,
    "extra": None,
    "keep": 3,
    "progress": None,
    "strict": True,
    "optimizer_class": torch.optim.SGD,
    "selector": None,
    "lr": 0.1,
}
"""Arguments that the other ranks pass; the rest come from the training run."""
CALLS: dict[str, Call] = {
    "clip_grad_norm_ max_norm": lambda case, value: case.optimizer.clip_grad_norm_(value),
    "clip_grad_norm_ norm_type": lambda case, value: case.optimizer.clip_grad_norm_(1.0, value),
    "clip_grad_norm_ error_if_nonfinite": lambda case, value: case.optimizer.clip_grad_norm_(1.0, 2.0, value),
    "clip_grad_value_ clip_value": lambda case, value: case.optimizer.clip_grad_value_(value),
    "step closure": lambda case, value: case.optimizer.step(value),
    "full_state_dict to": lambda case, value: case.optimizer.full_state_dict(value),
    "consolidate_state_dict to": lambda case, value: case.optimizer.consolidate_state_dict(value),
    "restore snapshots": lambda case, value: restore_from_peers(case.optimizer, value),
    "broadcast_object obj": lambda _, value: broadcast_object(value, 0),
    "broadcast_object src_rank": lambda _, value: broadcast_object([1], value),
    "broadcast_object device": lambda _, value: broadcast_object(torch.ones(2), 0, device=value),
    **{
        f"{call} {name}": lambda case, value, call=call, name=name: getattr(case, call)(**{name: value})  # type: ignore[misc]
        for call, names in {
            "save": ("path", "step", "model", "optimizer", "scheduler", "extra", "keep", "progress"),
            "load": ("path", "model", "optimizer", "scheduler", "strict", "progress"),
            "measure": ("model", "optimizer_class", "selector", "lr"),
        }.items()
        for name in names
    },
}


def get_valid_argument(case: Case, call: str, name: str) -> Any:
    run_arguments = {
        "path": case.directory / ("good" if call == "load" else "other"),
        "snapshots": getattr(case.optimizer, "peer_snapshots", None),
        **case.run.parts(),
    }
    return run_arguments[name] if name in run_arguments else VALID_ARGUMENTS[name]


def call_with_odd_argument(case: Case, call: str, odd_argument: Any, odd_rank: int) -> Exception | None:
    """Call on all ranks, with the odd argument on `odd_rank` only. Gradients are present, as in a script."""
    argument = odd_argument if dist.get_rank() == odd_rank else get_valid_argument(case, *call.split())
    case.run.model.eval()  # in train mode the model would count this pass
    torch.autograd.backward(case.run.model(torch.ones(4, 5)).square().mean())
    case.run.model.train()
    failure = catch_error(lambda: CALLS[call](case, argument))
    case.optimizer.zero_grad()
    return failure


DROPIN_CALLS = [call for call in CALLS if call.startswith(("full", "consolidate", "save", "load"))]
"""The drop-in lacks the others, clips locally as torch does, or compares ranks after its update."""


@pytest.mark.sampled("make_optimizer")
@pytest.mark.parametrize(
    ("call", "make_optimizer"), [*product(CALLS, [with_peer_checkpoint]), *product(DROPIN_CALLS, [dropin])]
)
@ranks(2, 3, timeout=time_limit(40))
def test_odd_argument_on_one_rank(ctx: RankContext, tmp_path: Path, call: str, make_optimizer: Any) -> None:
    case = Case(tmp_path, make_optimizer)
    case.save(path=tmp_path / "good")
    for number in sample_indices(ODD, call):
        rank = number % ctx.world_size
        try:
            failure = call_with_odd_argument(case, call, ODD[number](), rank)
            if failed_on_all_ranks(failure):
                if not is_torch_error(failure) and not isinstance(failure, OverflowError):
                    assert_helpful_error(failure)
            elif call.startswith(("step", "load", "restore")):
                case = Case(tmp_path, make_optimizer)
        except BaseException as error:
            attach_note(error, f"{call} with {ODD[number]()!r:.100} on rank {rank}")
            raise
    assert_training_continues(case, Case(tmp_path, make_optimizer))


def sample_indices(values: list[Any], call: str) -> list[int]:
    """Return a few indices, different ones for each call; `make fuzz` uses all of them."""
    return Random(call).sample(range(len(values)), min(len(values), rounds(8)))


def assert_training_continues(case: Case, untouched: Case) -> None:
    for each in (case, untouched):
        train(each.run.model, each.optimizer, 1, first=2)
    assert_same(case.run.capture(), untouched.run.capture(), "an untouched run")
