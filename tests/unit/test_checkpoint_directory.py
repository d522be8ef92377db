"""A directory of checkpoints is consistent at any moment, whatever was interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroshard import CheckpointError
from zeroshard.checkpoint.directory import CheckpointDir


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    path = tmp_path / "run"
    path.mkdir()
    return CheckpointDir(path)


def publish_step(folder: CheckpointDir, step: int) -> Path:
    directory = folder.create_staging_dir(step)
    (directory / "data").write_text(str(step))
    return folder.publish(directory, step)


def hidden_entries(folder: CheckpointDir) -> list[str]:
    return [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]


def test_directory_is_created_on_demand(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path / "none" / "yet")
    assert folder.steps() == []
    assert folder.latest() is None
    with folder.lock():
        assert publish_step(folder, 7).name == "step-000000007"


def test_unpublished_checkpoint_is_invisible(folder: CheckpointDir) -> None:
    publish_step(folder, 1)
    folder.create_staging_dir(2)
    assert folder.steps() == [1]
    assert folder.latest() == folder.step_path(1)


def test_latest_is_newest_not_highest_step(folder: CheckpointDir) -> None:
    """A run may restart its step count."""
    for step in (100, 200, 5):
        publish_step(folder, step)
    assert folder.latest() == folder.step_path(5)


def test_rename_publishes_atomically(folder: CheckpointDir) -> None:
    """After a crash just before the rename the old checkpoint is the latest, after it the new one."""
    publish_step(folder, 100)
    publish_step(folder, 5)
    directory = folder.create_staging_dir(6)
    folder._write_latest([folder.step_path(6).name, folder.step_path(5).name])
    assert folder.latest() == folder.step_path(5)
    directory.rename(folder.step_path(6))
    assert folder.latest() == folder.step_path(6)


@pytest.mark.parametrize("text", ["", "step-000000099", "../elsewhere", "\x00\xff nothing", "step-x\n\n"])
def test_corrupt_latest_file_is_ignored(folder: CheckpointDir, text: str) -> None:
    publish_step(folder, 1)
    publish_step(folder, 2)
    (folder.path / "latest").write_text(text, encoding="latin-1")
    assert folder.latest() == folder.step_path(2)


def test_unrelated_entries_are_left_alone(folder: CheckpointDir) -> None:
    unrelated = ["step-5", "step-0000000007", "step-", "notes", ".git"]
    for name in unrelated:
        (folder.path / name).mkdir()
    (folder.path / "step-000000009").write_text("a file")
    assert folder.latest() is None
    publish_step(folder, 1)
    publish_step(folder, 2)
    folder.prune(1)
    assert folder.steps() == [2]
    assert all((folder.path / name).is_dir() for name in unrelated)


def test_leftovers_of_crashes_are_removed(folder: CheckpointDir) -> None:
    publish_step(folder, 1)
    for step in (2, 3):
        (folder.create_staging_dir(step) / "data").write_text("half")
    (folder.path / ".leaving-1").mkdir()
    (folder.path / ".writing-file").write_text("half")
    folder.discard(folder.create_staging_dir(4))
    assert hidden_entries(folder) == []
    assert folder.steps() == [1]


def test_existing_step_is_rejected_and_kept(folder: CheckpointDir) -> None:
    publish_step(folder, 3)
    with pytest.raises(CheckpointError, match="step-000000003 exists already"):
        folder.create_staging_dir(3)
    assert (folder.step_path(3) / "data").read_text() == "3"
    assert hidden_entries(folder) == []


def test_discard_after_publish_does_nothing(folder: CheckpointDir) -> None:
    directory = folder.create_staging_dir(1)
    folder.publish(directory, 1)
    folder.discard(directory)
    assert folder.steps() == [1]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_prune_keeps_the_most_recent(folder: CheckpointDir, keep: int | None, left: list[int]) -> None:
    for step in range(1, 6):
        publish_step(folder, step)
    folder.prune(keep)
    assert folder.steps() == left
    assert hidden_entries(folder) == []


def test_prune_keeps_latest_with_lower_step(folder: CheckpointDir) -> None:
    for step in (100, 200, 300, 5):
        publish_step(folder, step)
    folder.prune(1)
    assert folder.latest() == folder.step_path(5)


def test_lock_is_exclusive(folder: CheckpointDir) -> None:
    with folder.lock(), pytest.raises(CheckpointError, match="another process"), CheckpointDir(folder.path).lock():
        pass
    with CheckpointDir(folder.path).lock():
        pass


@contextmanager
def forked_child() -> Iterator[None]:
    """Fork a child that idles until the context exits."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_forked_child_does_not_hold_lock(folder: CheckpointDir) -> None:
    """For example DataLoader workers that start while a checkpoint is written."""
    with folder.lock():
        child = forked_child()
        child.__enter__()
    with folder.lock():
        pass
    child.__exit__(None, None, None)


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in ((tmp_path / "file", CheckpointError), (tmp_path / "file" / "below", OSError)):
        assert CheckpointDir(path).latest() is None
        with pytest.raises(error), CheckpointDir(path).lock():
            pass
