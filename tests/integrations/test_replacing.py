"""`replace_torch` under Lightning's DDPStrategy: a module that uses torch's class gets the same bits with ours."""

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

TORCH_CLASS = zero_redundancy_optimizer.ZeroRedundancyOptimizer
NUM_PARAMS = 6


class UsesTorchClass(Module):
    def configure_optimizers(self) -> Any:
        cls = torch.distributed.optim.ZeroRedundancyOptimizer
        optimizer = cls(self.parameters(), torch.optim.AdamW, lr=0.02, weight_decay=0.1)
        scheduler = CosineAnnealingLR(optimizer, 9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(context: RankContext, directory: Path, epochs: int, path: Path | None = None) -> tuple[type, Any, Any]:
    """Return the class of the optimizer, the results, and on rank 0 the checkpoint that the Trainer saved."""
    module = UsesTorchClass(context.rank)
    trainer = Run(DDPStrategy(), directory, options={"max_epochs": epochs}).fit(module, path)
    optimizer: Any = trainer.optimizers[0]
    assert 0 < len(optimizer.optim.state) < NUM_PARAMS, "the state is not sharded"
    results = {"weights": dict(module.state_dict()), "losses": module.losses, "rates": module.learning_rates}
    saved = torch.load(directory / "last.ckpt", weights_only=True) if context.rank == 0 else None
    return type(optimizer), results, saved


def assert_same_checkpoint(found: Any, expected: Any) -> None:
    """Check that both files have the state of all parameters, and that it is equal."""
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert [sorted(entry) for entry in ours["state"].values()] == [["exp_avg", "exp_avg_sq", "step"]] * NUM_PARAMS
    assert_same(ours["state"], theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]  # torch orders options differently
    for key in ("lr_schedulers", "state_dict", "loops"):
        assert_same(found[key], expected[key])


@ranks(2)
def test_weights_and_saved_state_match_torchs_class(context: RankContext, tmp_path: Path) -> None:
    their_class, expected, expected_checkpoint = train(context, tmp_path / "theirs", 2)
    with zeroshard.replace_torch():
        our_class, found, saved = train(context, tmp_path / "ours", 2)
    assert (their_class, our_class) == (TORCH_CLASS, zeroshard.ZeroRedundancyOptimizer)
    assert_same(found, expected)
    if context.rank == 0:
        assert_same_checkpoint(saved, expected_checkpoint)


@ranks(2)
def test_each_class_resumes_from_a_checkpoint_of_the_other(context: RankContext, tmp_path: Path) -> None:
    _, expected, expected_checkpoint = train(context, tmp_path / "uninterrupted", 2)
    train(context, tmp_path / "theirs", 1)
    with zeroshard.replace_torch():
        train(context, tmp_path / "ours", 1)
        _, *resumed_with_ours = train(context, tmp_path / "resumed with ours", 2, tmp_path / "theirs" / "last.ckpt")
    _, *resumed_with_theirs = train(context, tmp_path / "resumed with theirs", 2, tmp_path / "ours" / "last.ckpt")
    for found, saved in (resumed_with_ours, resumed_with_theirs):
        assert_same(found["weights"], expected["weights"])
        if context.rank == 0:
            assert_same_checkpoint(saved, expected_checkpoint)


@pytest.mark.parametrize("is_replaced", [True, False])
@ranks(2)
def test_lightning_treats_our_class_as_torchs(context: RankContext, is_replaced: bool) -> None:
    """Lightning rejects model averaging with torch's class, which it detects with isinstance."""
    state: Any = PostLocalSGDState(None, dist.group.WORLD, 1)  # type: ignore[no-untyped-call]
    averaging = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)
    assert not issubclass(zeroshard.ZeroRedundancyOptimizer, TORCH_CLASS)
    rejected = pytest.raises(ValueError, match="with a distributed optimizer of type ZeroRedundancyOptimizer")
    with zeroshard.replace_torch() if is_replaced else nullcontext(), rejected:
        Run(averaging).fit(UsesTorchClass(context.rank))
