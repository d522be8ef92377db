"""A folder of checkpoints: what is seen at any moment, whatever was interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroshard import CheckpointError
from zeroshard.checkpoint.folder import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "run"
    path.mkdir()
    return Folder(path)


def put(folder: Folder, step: int) -> Path:
    directory = folder.begin(step)
    (directory / "data").write_text(str(step))
    return folder.publish(directory, step)


def hidden(folder: Folder) -> list[str]:
    return [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]


def test_it_need_not_exist(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "none" / "yet")
    assert folder.steps() == []
    assert folder.latest() is None
    with folder.locked():
        assert put(folder, 7).name == "step-000000007"


def test_what_is_begun_is_not_seen(folder: Folder) -> None:
    put(folder, 1)
    folder.begin(2)
    assert folder.steps() == [1]
    assert folder.latest() == folder.of_step(1)


def test_the_newest_counts_and_not_the_highest(folder: Folder) -> None:
    """Steps may be counted anew."""
    for step in (100, 200, 5):
        put(folder, step)
    assert folder.latest() == folder.of_step(5)


def test_the_renaming_alone_decides(folder: Folder) -> None:
    """A crash right before it leaves the old one the latest, one right after it the new one."""
    put(folder, 100)
    put(folder, 5)
    directory = folder.begin(6)
    folder._write_latest([folder.of_step(6).name, folder.of_step(5).name])
    assert folder.latest() == folder.of_step(5)
    directory.rename(folder.of_step(6))
    assert folder.latest() == folder.of_step(6)


@pytest.mark.parametrize("text", ["", "step-000000099", "../elsewhere", "\x00\xff nothing", "step-x\n\n"])
def test_a_spoiled_name_of_the_latest_is_no_harm(folder: Folder, text: str) -> None:
    put(folder, 1)
    put(folder, 2)
    (folder.path / "latest").write_text(text, encoding="latin-1")
    assert folder.latest() == folder.of_step(2)


def test_strangers_are_left_alone(folder: Folder) -> None:
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


def test_what_crashes_have_left_is_swept(folder: Folder) -> None:
    put(folder, 1)
    for step in (2, 3):
        (folder.begin(step) / "data").write_text("half")
    (folder.path / ".leaving-1").mkdir()
    (folder.path / ".writing-file").write_text("half")
    folder.abandon(folder.begin(4))
    assert hidden(folder) == []
    assert folder.steps() == [1]


def test_a_step_that_exists_is_refused_and_kept(folder: Folder) -> None:
    put(folder, 3)
    with pytest.raises(CheckpointError, match="step-000000003 exists already"):
        folder.begin(3)
    assert (folder.of_step(3) / "data").read_text() == "3"
    assert hidden(folder) == []


def test_abandoning_what_was_published_does_nothing(folder: Folder) -> None:
    directory = folder.begin(1)
    folder.publish(directory, 1)
    folder.abandon(directory)
    assert folder.steps() == [1]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_few_stay(folder: Folder, keep: int | None, left: list[int]) -> None:
    for step in range(1, 6):
        put(folder, step)
    folder.prune(keep)
    assert folder.steps() == left
    assert hidden(folder) == []


def test_the_latest_stays_whatever_its_number(folder: Folder) -> None:
    for step in (100, 200, 300, 5):
        put(folder, step)
    folder.prune(1)
    assert folder.latest() == folder.of_step(5)


def test_one_at_a_time(folder: Folder) -> None:
    with folder.locked(), pytest.raises(CheckpointError, match="another process"), Folder(folder.path).locked():
        pass
    with Folder(folder.path).locked():
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


def test_children_do_not_keep_the_lock(folder: Folder) -> None:
    """Such as the workers of a DataLoader, started while a checkpoint is written."""
    with folder.locked():
        child = forked()
        child.__enter__()
    with folder.locked():
        pass
    child.__exit__(None, None, None)


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in ((tmp_path / "file", CheckpointError), (tmp_path / "file" / "below", OSError)):
        assert Folder(path).latest() is None
        with pytest.raises(error), Folder(path).locked():
            pass
