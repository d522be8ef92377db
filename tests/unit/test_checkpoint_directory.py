"""A folder of checkpoints: what is seen at any moment, whatever was interrupted."""

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


def put(folder: CheckpointDir, step: int) -> Path:
    directory = folder.create_staging_dir(step)
    (directory / "data").write_text(str(step))
    return folder.publish(directory, step)


def hidden(folder: CheckpointDir) -> list[str]:
    return [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]


def test_it_need_not_exist(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path / "none" / "yet")
    assert folder.steps() == []
    assert folder.latest() is None
    with folder.lock():
        assert put(folder, 7).name == "step-000000007"


def test_what_is_begun_is_not_seen(folder: CheckpointDir) -> None:
    put(folder, 1)
    folder.create_staging_dir(2)
    assert folder.steps() == [1]
    assert folder.latest() == folder.step_path(1)


def test_the_newest_counts_and_not_the_highest(folder: CheckpointDir) -> None:
    """Steps may be counted anew."""
    for step in (100, 200, 5):
        put(folder, step)
    assert folder.latest() == folder.step_path(5)


def test_the_renaming_alone_decides(folder: CheckpointDir) -> None:
    """A crash right before it leaves the old one the latest, one right after it the new one."""
    put(folder, 100)
    put(folder, 5)
    directory = folder.create_staging_dir(6)
    folder._write_latest([folder.step_path(6).name, folder.step_path(5).name])
    assert folder.latest() == folder.step_path(5)
    directory.rename(folder.step_path(6))
    assert folder.latest() == folder.step_path(6)


@pytest.mark.parametrize("text", ["", "step-000000099", "../elsewhere", "\x00\xff nothing", "step-x\n\n"])
def test_a_spoiled_name_of_the_latest_is_no_harm(folder: CheckpointDir, text: str) -> None:
    put(folder, 1)
    put(folder, 2)
    (folder.path / "latest").write_text(text, encoding="latin-1")
    assert folder.latest() == folder.step_path(2)


def test_strangers_are_left_alone(folder: CheckpointDir) -> None:
    strangers = ["step-5", "step-0000000007", "step-", "notes", ".git"]
    for name in strangers:
        (folder.path / name).mkdir()
    (folder.path / "step-000000009").write_text("a file")
    assert folder.latest() is None
    put(folder, 1)
    put(folder, 2)
    folder.prune(1)
    assert folder.steps() == [2]
    assert all((folder.path / name).is_dir() for name in strangers)


def test_what_crashes_have_left_is_swept(folder: CheckpointDir) -> None:
    put(folder, 1)
    for step in (2, 3):
        (folder.create_staging_dir(step) / "data").write_text("half")
    (folder.path / ".leaving-1").mkdir()
    (folder.path / ".writing-file").write_text("half")
    folder.discard(folder.create_staging_dir(4))
    assert hidden(folder) == []
    assert folder.steps() == [1]


def test_a_step_that_exists_is_refused_and_kept(folder: CheckpointDir) -> None:
    put(folder, 3)
    with pytest.raises(CheckpointError, match="step-000000003 exists already"):
        folder.create_staging_dir(3)
    assert (folder.step_path(3) / "data").read_text() == "3"
    assert hidden(folder) == []


def test_abandoning_what_was_published_does_nothing(folder: CheckpointDir) -> None:
    directory = folder.create_staging_dir(1)
    folder.publish(directory, 1)
    folder.discard(directory)
    assert folder.steps() == [1]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_few_stay(folder: CheckpointDir, keep: int | None, left: list[int]) -> None:
    for step in range(1, 6):
        put(folder, step)
    folder.prune(keep)
    assert folder.steps() == left
    assert hidden(folder) == []


def test_the_latest_stays_whatever_its_number(folder: CheckpointDir) -> None:
    for step in (100, 200, 300, 5):
        put(folder, step)
    folder.prune(1)
    assert folder.latest() == folder.step_path(5)


def test_one_at_a_time(folder: CheckpointDir) -> None:
    with folder.lock(), pytest.raises(CheckpointError, match="another process"), CheckpointDir(folder.path).lock():
        pass
    with CheckpointDir(folder.path).lock():
        pass


@contextmanager
def forked() -> Iterator[None]:
    """A child that does nothing until the end."""
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


def test_children_do_not_keep_the_lock(folder: CheckpointDir) -> None:
    """Such as the workers of a DataLoader, started while a checkpoint is written."""
    with folder.lock():
        child = forked()
        child.__enter__()
    with folder.lock():
        pass
    child.__exit__(None, None, None)


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in ((tmp_path / "file", CheckpointError), (tmp_path / "file" / "below", OSError)):
        assert CheckpointDir(path).latest() is None
        with pytest.raises(error), CheckpointDir(path).lock():
            pass
