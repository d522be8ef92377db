"""Every learning-rate scheduler of torch drives the drop-in as it drives the plain optimizer.

Schedulers write into `param_groups` of their own process, so one rank is enough here;
`tests/distributed/test_training_loop.py` follows a few of them on several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import optim
from torch.optim import lr_scheduler

from tests.support.oracles import SCHEDULERS, Twins, follow, two_groups

MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def test_every_scheduler_is_here() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers(name: str) -> None:
    for bucket_view in (False, True):
        zero_only = {"parameters_as_bucket_view": bucket_view}
        sgd = Twins(optim.SGD, handed=two_groups, zero_only=zero_only, **MOMENTUM)
        adam = Twins(optim.AdamW, handed=two_groups, zero_only=zero_only, lr=0.1)
        for twins in (sgd, adam):
            assert len(follow(twins, SCHEDULERS[name])) > 1
