"""Corrupted checkpoints: every rank rejects them with an error and changes nothing, or loads what was saved."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist

from tests.support import RankContext, ranks
from tests.support.checkpoints import Evil, TrainingRun, edit_metadata, on_rank_0
from tests.support.fuzzing import NAMES, corrupt_bytes, corrupt_directory, rounds, time_limit
from tests.support.monitoring import forbid_side_effects
from tests.support.oracles import assert_same
from zeroshard import CheckpointError, checkpoint
from zeroshard.checkpoint.directory import MANIFEST_FILE, CheckpointDir

pytestmark = pytest.mark.filterwarnings("ignore")


def corrupt(directory: Path, seed: int, marker: Path) -> str:
    """Corrupt a checkpoint, mostly without its checksums, which would catch everything first."""
    rng = Random(seed)
    if rng.random() < 0.7:
        (directory / MANIFEST_FILE).unlink()
    if rng.random() < 0.1:
        (directory / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
        return "evil"
    if rng.random() < 0.2:
        name = rng.choice(NAMES)
        edit_metadata(
            directory, lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", name)
        )
        return f"name {name!r}"
    return corrupt_directory(directory, rng)


@ranks(1, 2, timeout=time_limit(100))
def test_corrupted_checkpoints(ctx: RankContext, tmp_path: Path) -> None:
    source, run = TrainingRun(), TrainingRun(seed=5)
    saved = source.save(tmp_path / "good")
    expected, marker, num_rejected = source.capture(), tmp_path / "marker", 0
    for seed in range(rounds(40)):
        corrupted = tmp_path / f"bad{seed}" / saved.name
        on_rank_0(lambda target=corrupted: shutil.copytree(saved, target))  # type: ignore[misc]
        damage: list[str | None] = [corrupt(corrupted, seed, marker) if ctx.rank == 0 else None]
        dist.broadcast_object_list(damage)
        before, failure = run.capture(), None
        with forbid_side_effects():
            try:
                checkpoint.load(corrupted.parent, **run.parts(scheduler=False))
            except Exception as error:
                failure = error
        failures: list[bool | None] = [None] * ctx.world_size
        dist.all_gather_object(failures, failure is not None)
        assert len(set(failures)) == 1, (seed, damage, failure)
        if failure is not None:
            num_rejected += 1
            assert isinstance(failure, CheckpointError), (seed, damage, failure)
            assert_same(run.capture(), before, f"the run after example {seed}: {damage}")
            continue
        after = run.capture()
        if (saved / MANIFEST_FILE).is_file() and (corrupted / MANIFEST_FILE).is_file():
            assert_same(after["model"], expected["model"], f"the model of example {seed}: {damage}")
        run = TrainingRun(seed=5)
    assert num_rejected
    assert not marker.exists()


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> CheckpointDir:
    (tmp_path / "run").mkdir()
    checkpoint_dir = CheckpointDir(tmp_path / "run")
    for step in (1, 2):
        checkpoint_dir.publish(checkpoint_dir.create_staging_dir(step), step)
    return checkpoint_dir


def test_corrupted_latest_file(checkpoint_dir: CheckpointDir) -> None:
    good = (checkpoint_dir.path / "latest").read_bytes()
    for seed in range(rounds(200)):
        (checkpoint_dir.path / "latest").write_bytes(corrupt_bytes(good, Random(seed)))
        assert checkpoint_dir.latest() in (checkpoint_dir.step_path(1), checkpoint_dir.step_path(2))
    for name in (*NAMES, "step-" + "1" * 300, "step-" + "9" * 5000):
        (checkpoint_dir.path / "latest").write_bytes(name.encode(errors="surrogatepass"))
        assert checkpoint_dir.latest() in (checkpoint_dir.step_path(1), checkpoint_dir.step_path(2))


def test_symlinks_are_not_followed(checkpoint_dir: CheckpointDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in ("step-000000000", ".writing-1", ".leaving-2"):
        (checkpoint_dir.path / name).symlink_to(outside)
    (checkpoint_dir.path / "latest").unlink()
    (checkpoint_dir.path / "latest").symlink_to(tmp_path / "made")
    with forbid_side_effects(checkpoint_dir.path), checkpoint_dir.lock():
        checkpoint_dir.publish(checkpoint_dir.create_staging_dir(3), 3)
        checkpoint_dir.prune(1)
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert not (tmp_path / "made").exists()
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(3)


def test_symlinked_lock_file_is_rejected(checkpoint_dir: CheckpointDir, tmp_path: Path) -> None:
    (checkpoint_dir.path / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match=r"\.lock"), checkpoint_dir.lock():
        pass
    assert not (tmp_path / "made").exists()
