"""Lightning's own DDPStrategy around a module that knows torch's class alone: with ours in its place, the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import zero_redundancy_optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroshard
from tests.integrations.lightning_runs import Module, Run
from tests.support import RankContext, ranks
from tests.support.oracles import assert_same

THEIRS = zero_redundancy_optimizer.ZeroRedundancyOptimizer
PARAMETERS = 6


class Borrowing(Module):
    def configure_optimizers(self) -> Any:
        kind = torch.distributed.optim.ZeroRedundancyOptimizer
        optimizer = kind(self.parameters(), torch.optim.AdamW, lr=0.02, weight_decay=0.1)
        schedule = CosineAnnealingLR(optimizer, 9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(context: RankContext, folder: Path, epochs: int, path: Path | None = None) -> tuple[type, Any, Any]:
    """The class of the optimizer, what was trained, and on the first rank what the Trainer saved."""
    module = Borrowing(context.rank)
    trainer = Run(DDPStrategy(), folder, options={"max_epochs": epochs}).fit(module, path)
    optimizer: Any = trainer.optimizers[0]
    assert 0 < len(optimizer.optim.state) < PARAMETERS, "each rank has a part"
    trained = {"weights": dict(module.state_dict()), "losses": module.losses, "rates": module.rates}
    saved = torch.load(folder / "last.ckpt", weights_only=True) if context.rank == 0 else None
    return type(optimizer), trained, saved


def assert_saved(found: Any, expected: Any) -> None:
    """State of all parameters is in both files, and it is the same."""
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert [sorted(entry) for entry in ours["state"].values()] == [["exp_avg", "exp_avg_sq", "step"]] * PARAMETERS
    assert_same(ours["state"], theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]  # in which torch has options in another order
    for part in ("lr_schedulers", "state_dict", "loops"):
        assert_same(found[part], expected[part])


@ranks(2)
def test_weights_and_saved_state_are_those_of_torchs_class(context: RankContext, tmp_path: Path) -> None:
    theirs, expected, reference = train(context, tmp_path / "theirs", 2)
    with zeroshard.replace_torch():
        ours, found, saved = train(context, tmp_path / "ours", 2)
    assert (theirs, ours) == (THEIRS, zeroshard.ZeroRedundancyOptimizer)
    assert_same(found, expected)
    if context.rank == 0:
        assert_saved(saved, reference)


@ranks(2)
def test_each_goes_on_from_what_the_other_has_saved(context: RankContext, tmp_path: Path) -> None:
    _, expected, reference = train(context, tmp_path / "straight", 2)
    train(context, tmp_path / "theirs", 1)
    with zeroshard.replace_torch():
        train(context, tmp_path / "ours", 1)
        _, *of_theirs = train(context, tmp_path / "on with ours", 2, tmp_path / "theirs" / "last.ckpt")
    _, *of_ours = train(context, tmp_path / "on with theirs", 2, tmp_path / "ours" / "last.ckpt")
    for found, saved in (of_theirs, of_ours):
        assert_same(found["weights"], expected["weights"])
        if context.rank == 0:
            assert_saved(saved, reference)


@pytest.mark.parametrize("replaced", [True, False])
@ranks(2)
def test_lightning_knows_ours_for_torchs_class(context: RankContext, replaced: bool) -> None:
    """It refuses to average models where torch's class trains them, and asks with isinstance."""
    state: Any = PostLocalSGDState(None, dist.group.WORLD, 1)  # type: ignore[no-untyped-call]
    averaging = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)
    assert not issubclass(zeroshard.ZeroRedundancyOptimizer, THEIRS)
    refused = pytest.raises(ValueError, match="with a distributed optimizer of type ZeroRedundancyOptimizer")
    with zeroshard.replace_torch() if replaced else nullcontext(), refused:
        Run(averaging).fit(Borrowing(context.rank))
