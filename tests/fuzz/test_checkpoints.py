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
from tests.support.fuzzing import NAMES, rounds, spoil_directory, spoiled
from tests.support.monitoring import watched
from tests.support.oracles import assert_same
from zeroshard import CheckpointError, checkpoint
from zeroshard.checkpoint.directory import MANIFEST_FILE, CheckpointDir

pytestmark = pytest.mark.filterwarnings("ignore")


def corrupt(directory: Path, seed: int, marker: Path) -> str:
    """Corrupt a checkpoint, mostly without its checksums, which would catch everything first."""
    draw = Random(seed)
    if draw.random() < 0.7:
        (directory / MANIFEST_FILE).unlink()
    if draw.random() < 0.1:
        (directory / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
        return "evil"
    if draw.random() < 0.2:
        name = draw.choice(NAMES)
        edit_metadata(directory, lambda it: setattr(next(iter(it.storage_data.values())), "relative_path", name))
        return f"name {name!r}"
    return spoil_directory(directory, draw)


@ranks(1, 2, timeout=100)
def test_corrupted_checkpoints(ctx: RankContext, tmp_path: Path) -> None:
    source, run = TrainingRun(), TrainingRun(seed=5)
    saved = source.save(tmp_path / "good")
    expected, marker, refused = source.look(), tmp_path / "marker", 0
    for seed in range(rounds(40)):
        corrupted = tmp_path / f"bad{seed}" / saved.name
        on_rank_0(lambda to=corrupted: shutil.copytree(saved, to))  # type: ignore[misc]
        how: list[str | None] = [corrupt(corrupted, seed, marker) if ctx.rank == 0 else None]
        dist.broadcast_object_list(how)
        before, failure = run.look(), None
        with watched():
            try:
                checkpoint.load(corrupted.parent, **run.parts(scheduler=False))
            except Exception as error:
                failure = error
        failures: list[bool | None] = [None] * ctx.world_size
        dist.all_gather_object(failures, failure is not None)
        assert len(set(failures)) == 1, (seed, how, failure)
        if failure is not None:
            refused += 1
            assert isinstance(failure, CheckpointError), (seed, how, failure)
            assert_same(run.look(), before, f"what was running, example {seed}: {how}")
            continue
        after = run.look()
        if (saved / MANIFEST_FILE).is_file() and (corrupted / MANIFEST_FILE).is_file():
            assert_same(after["model"], expected["model"], f"the model of example {seed}: {how}")
        run = TrainingRun(seed=5)
    assert refused
    assert not marker.exists()


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    (tmp_path / "run").mkdir()
    made = CheckpointDir(tmp_path / "run")
    for step in (1, 2):
        made.publish(made.create_staging_dir(step), step)
    return made


def test_corrupted_latest_file(folder: CheckpointDir) -> None:
    good = (folder.path / "latest").read_bytes()
    for seed in range(rounds(200)):
        (folder.path / "latest").write_bytes(spoiled(good, Random(seed)))
        assert folder.latest() in (folder.step_path(1), folder.step_path(2))
    for name in (*NAMES, "step-" + "1" * 300, "step-" + "9" * 5000):
        (folder.path / "latest").write_bytes(name.encode(errors="surrogatepass"))
        assert folder.latest() in (folder.step_path(1), folder.step_path(2))


def test_symlinks_are_not_followed(folder: CheckpointDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in ("step-000000000", ".writing-1", ".leaving-2"):
        (folder.path / name).symlink_to(outside)
    (folder.path / "latest").unlink()
    (folder.path / "latest").symlink_to(tmp_path / "made")
    with watched(folder.path), folder.lock():
        folder.publish(folder.create_staging_dir(3), 3)
        folder.prune(1)
    assert [it.name for it in outside.iterdir()] == ["kept"]
    assert not (tmp_path / "made").exists()
    assert folder.latest() == folder.step_path(3)


def test_symlinked_lock_file_is_rejected(folder: CheckpointDir, tmp_path: Path) -> None:
    (folder.path / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match=r"\.lock"), folder.lock():
        pass
    assert not (tmp_path / "made").exists()
