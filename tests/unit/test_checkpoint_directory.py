"""A directory of checkpoints stays consistent when a save is interrupted at any point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroshard import CheckpointError
from zeroshard.checkpoint.directory import CheckpointDir


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> CheckpointDir:
    path = tmp_path / "run"
    path.mkdir()
    return CheckpointDir(path)


def publish_step(checkpoint_dir: CheckpointDir, step: int) -> Path:
    staging_dir = checkpoint_dir.create_staging_dir(step)
    (staging_dir / "data").write_text(str(step))
    return checkpoint_dir.publish(staging_dir, step)


def hidden_entries(checkpoint_dir: CheckpointDir) -> list[str]:
    return [
        entry.name for entry in checkpoint_dir.path.iterdir() if entry.name.startswith(".") and entry.name != ".lock"
    ]


def test_directory_is_created_on_demand(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path / "none" / "yet")
    assert checkpoint_dir.steps() == []
    assert checkpoint_dir.latest() is None
    with checkpoint_dir.lock():
        assert publish_step(checkpoint_dir, 7).name == "step-000000007"


def test_unpublished_checkpoint_is_invisible(checkpoint_dir: CheckpointDir) -> None:
    publish_step(checkpoint_dir, 1)
    checkpoint_dir.create_staging_dir(2)
    assert checkpoint_dir.steps() == [1]
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(1)


def test_latest_is_newest_not_highest_step(checkpoint_dir: CheckpointDir) -> None:
    """A run may restart its step count."""
    for step in (100, 200, 5):
        publish_step(checkpoint_dir, step)
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(5)


def test_rename_publishes_atomically(checkpoint_dir: CheckpointDir) -> None:
    """After a crash just before the rename the old checkpoint is the latest, after it the new one."""
    publish_step(checkpoint_dir, 100)
    publish_step(checkpoint_dir, 5)
    staging_dir = checkpoint_dir.create_staging_dir(6)
    checkpoint_dir._write_latest([checkpoint_dir.step_path(6).name, checkpoint_dir.step_path(5).name])
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(5)
    staging_dir.rename(checkpoint_dir.step_path(6))
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(6)


@pytest.mark.parametrize("text", ["", "step-000000099", "../elsewhere", "\x00\xff nothing", "step-x\n\n"])
def test_corrupt_latest_file_is_ignored(checkpoint_dir: CheckpointDir, text: str) -> None:
    publish_step(checkpoint_dir, 1)
    publish_step(checkpoint_dir, 2)
    (checkpoint_dir.path / "latest").write_text(text, encoding="latin-1")
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(2)


def test_unrelated_entries_are_left_alone(checkpoint_dir: CheckpointDir) -> None:
    unrelated = ["step-5", "step-0000000007", "step-", "notes", ".git"]
    for name in unrelated:
        (checkpoint_dir.path / name).mkdir()
    (checkpoint_dir.path / "step-000000009").write_text("a file")
    assert checkpoint_dir.latest() is None
    publish_step(checkpoint_dir, 1)
    publish_step(checkpoint_dir, 2)
    checkpoint_dir.prune(1)
    assert checkpoint_dir.steps() == [2]
    assert all((checkpoint_dir.path / name).is_dir() for name in unrelated)


def test_leftovers_of_crashes_are_removed(checkpoint_dir: CheckpointDir) -> None:
    publish_step(checkpoint_dir, 1)
    for step in (2, 3):
        (checkpoint_dir.create_staging_dir(step) / "data").write_text("half")
    (checkpoint_dir.path / ".leaving-1").mkdir()
    (checkpoint_dir.path / ".writing-file").write_text("half")
    checkpoint_dir.discard(checkpoint_dir.create_staging_dir(4))
    assert hidden_entries(checkpoint_dir) == []
    assert checkpoint_dir.steps() == [1]


def test_existing_step_is_rejected_and_kept(checkpoint_dir: CheckpointDir) -> None:
    publish_step(checkpoint_dir, 3)
    with pytest.raises(CheckpointError, match="step-000000003 already exists"):
        checkpoint_dir.create_staging_dir(3)
    assert (checkpoint_dir.step_path(3) / "data").read_text() == "3"
    assert hidden_entries(checkpoint_dir) == []


def test_discard_after_publish_does_nothing(checkpoint_dir: CheckpointDir) -> None:
    staging_dir = checkpoint_dir.create_staging_dir(1)
    checkpoint_dir.publish(staging_dir, 1)
    checkpoint_dir.discard(staging_dir)
    assert checkpoint_dir.steps() == [1]


@pytest.mark.parametrize(("keep", "remaining"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_prune_keeps_the_most_recent(checkpoint_dir: CheckpointDir, keep: int | None, remaining: list[int]) -> None:
    for step in range(1, 6):
        publish_step(checkpoint_dir, step)
    checkpoint_dir.prune(keep)
    assert checkpoint_dir.steps() == remaining
    assert hidden_entries(checkpoint_dir) == []


def test_prune_keeps_latest_with_lower_step(checkpoint_dir: CheckpointDir) -> None:
    for step in (100, 200, 300, 5):
        publish_step(checkpoint_dir, step)
    checkpoint_dir.prune(1)
    assert checkpoint_dir.latest() == checkpoint_dir.step_path(5)


def test_lock_is_exclusive(checkpoint_dir: CheckpointDir) -> None:
    with (
        checkpoint_dir.lock(),
        pytest.raises(CheckpointError, match="another process"),
        CheckpointDir(checkpoint_dir.path).lock(),
    ):
        pass
    with CheckpointDir(checkpoint_dir.path).lock():
        pass


@contextmanager
def forked_child() -> Iterator[None]:
    """Fork a child that idles until the context exits."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        os.waitpid(pid, 0)


def test_forked_child_does_not_hold_lock(checkpoint_dir: CheckpointDir) -> None:
    """DataLoader workers, for example, may be forked while a checkpoint is written."""
    with checkpoint_dir.lock():
        child = forked_child()
        child.__enter__()
    with checkpoint_dir.lock():
        pass
    child.__exit__(None, None, None)


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in ((tmp_path / "file", CheckpointError), (tmp_path / "file" / "below", OSError)):
        assert CheckpointDir(path).latest() is None
        with pytest.raises(error), CheckpointDir(path).lock():
            pass
