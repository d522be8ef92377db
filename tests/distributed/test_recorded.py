"""Checkpoints and training runs recorded by earlier versions: they load and repeat bit by bit.

`python -m tests.recorded.write` records them again. Only intended changes of results or of the file format need that.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.recorded import values
from tests.recorded.modes import (
    ADAMW,
    DROP_IN,
    MODES,
    SAVED,
    SAVED_AT,
    Training,
    environment,
    extra,
    loads_as,
    saved_by,
    two_groups,
)
from tests.support import RankContext, RankPool, ranks
from zeroshard import checkpoint

# ---- Training runs


def repeat_run(ctx: RankContext, name: str) -> None:
    """Bit by bit in the recorded environment, otherwise within `Mode.tolerance`: other kernels round differently."""
    recorded = values.read(values.runs_file(ctx.world_size))
    is_recorded = recorded["environment"] == environment()
    with MODES[name].training() as training:
        training.train()
        found = {key: values.write_out(value) for key, value in training.values().items()}
    assert_matches_recording(
        ctx, found, recorded["runs"][name], 0.0 if is_recorded else MODES[name].tolerance, recorded["environment"]
    )


def assert_matches_recording(
    ctx: RankContext,
    found: dict[str, str],
    expected: dict[str, str],
    tolerance: float = 0.0,
    recorded_environment: dict[str, str] | None = None,
) -> None:
    if ctx.rank:  # only rank 0 has more than parameters
        expected = {key: expected[key] for key in found}
    differences = values.list_differences(found, expected, tolerance)
    if recorded_environment is not None and recorded_environment["torch"] != torch.__version__:
        # torch versions differ in the options of optimizers.
        options = "optimizer.param_groups["
        differences = [
            difference
            for difference in differences
            if not (difference.startswith(options) and difference.endswith((" new", " missing")))
        ]
    assert not differences, "\n".join(differences)


@ranks(2)
@pytest.mark.parametrize("name", [name for name in MODES if 2 in MODES[name].world_sizes])
def test_recorded_run_repeats_on_two_ranks(ctx: RankContext, name: str) -> None:
    repeat_run(ctx, name)


@ranks(4)
def test_recorded_hybrid_run_repeats(ctx: RankContext) -> None:
    repeat_run(ctx, "hybrid")


@pytest.mark.slow
@ranks(1, 3, 4)
@pytest.mark.parametrize("name", [name for name in MODES if 2 in MODES[name].world_sizes])
def test_recorded_run_repeats_at_other_world_sizes(ctx: RankContext, name: str) -> None:
    repeat_run(ctx, name)


def read_environment(ctx: RankContext) -> dict[str, str]:
    return environment()


def test_warns_if_recorded_runs_are_compared_with_tolerance(rank_pool: RankPool) -> None:
    """Warn if results are not compared bit by bit."""
    recorded, (found,) = values.read(values.runs_file(2))["environment"], rank_pool.run(read_environment, 1)
    if recorded != found:
        message = f"recorded runs are compared with a tolerance: recorded with {recorded}, got {found}"
        warnings.warn(message, stacklevel=1)


# ---- Checkpoints


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    shutil.unpack_archive(values.checkpoint_file(name, "zip"), tmp_path)
    return tmp_path


def overwrite_values(model: nn.Module) -> None:
    """Values that loading must replace."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(3)


def change_options(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group.update({key: 0.9 for key in ("lr", "weight_decay") if key in group})


def load_checkpoint(ctx: RankContext, name: str, folder: Path) -> None:
    if name == "quantized state":
        pytest.importorskip("torchao.optim")
    with loads_as(name, ctx.world_size).training(overwrite_values) as training, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random states of other ranks stay unused
        change_options(training)
        result = checkpoint.load(folder, **training.parts())
        assert_matches_recording(ctx, training.digests(), values.read(values.checkpoint_file(name, "json")))
        saved_world_size = saved_by(name)
        assert (result.step, result.world_size) == (SAVED_AT, saved_world_size)
        assert result.extra_by_rank == {rank: extra(rank) for rank in range(saved_world_size)}
        if ctx.world_size == saved_world_size:
            assert result.extra == extra(ctx.rank)
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(ctx.rank).get_state())
        step_and_check_params_move(ctx, training)


def step_and_check_params_move(ctx: RankContext, training: Training) -> None:
    """All parameters with gradients move, to the same finite values on all ranks."""
    before = {name: param.detach().clone() for name, param in training.model.named_parameters()}
    training.step(SAVED_AT)
    after = {name: param.detach() for name, param in training.model.named_parameters()}
    assert [name for name in before if torch.equal(before[name], after[name])] == ["unused"]
    assert all(value.isfinite().all() for value in after.values())
    assert len(set(ctx.gather(str([values.digest(value) for value in after.values()])))) == 1


@ranks(2)
@pytest.mark.parametrize("name", SAVED)
def test_recorded_checkpoint_loads_on_two_ranks(ctx: RankContext, name: str, folder: Path) -> None:
    load_checkpoint(ctx, name, folder)


@pytest.mark.slow
@ranks(1, 3, 4)
@pytest.mark.parametrize("name", SAVED)
def test_recorded_checkpoint_loads_at_other_world_sizes(ctx: RankContext, name: str, folder: Path) -> None:
    load_checkpoint(ctx, name, folder)


@ranks(1, 2, 3)
def test_recorded_drop_in_state_dict_loads(ctx: RankContext) -> None:
    saved = torch.load(values.checkpoint_file(DROP_IN, "pt"), weights_only=True)
    expected = values.read(values.checkpoint_file(DROP_IN, "json"))
    with MODES[DROP_IN].training(overwrite_values) as training:
        change_options(training)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        assert_matches_recording(ctx, {key: values.digest(value) for key, value in training.values().items()}, expected)
        step_and_check_params_move(ctx, training)
    plain = torch.optim.AdamW(two_groups(training.model), **ADAMW)
    plain.load_state_dict(saved["optimizer"])
    found = values.flatten(plain.state_dict(), "optimizer")
    expected_state = {key: value for key, value in expected.items() if key.startswith("optimizer.")}
    assert_matches_recording(
        RankContext(0, 1), {key: values.digest(value) for key, value in found.items()}, expected_state
    )
