"""Every torch learning-rate scheduler drives the drop-in optimizer exactly as it drives the plain one.

Schedulers write to `param_groups` in their own process, so one rank is enough here;
`tests/distributed/test_training_loop.py` runs a few of them on several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import optim
from torch.optim import lr_scheduler

from tests.support.oracles import SCHEDULERS, ParityRun, train_with_scheduler, two_groups

SGD_OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def test_all_torch_schedulers_are_covered() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_scheduler_matches_plain_optimizer(name: str) -> None:
    for bucket_view in (False, True):
        zero_only = {"parameters_as_bucket_view": bucket_view}
        sgd = ParityRun(optim.SGD, get_params=two_groups, zero_only=zero_only, **SGD_OPTIONS)
        adam = ParityRun(optim.AdamW, get_params=two_groups, zero_only=zero_only, lr=0.1)
        for parity in (sgd, adam):
            assert len(train_with_scheduler(parity, SCHEDULERS[name])) > 1
