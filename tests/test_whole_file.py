"""A file that is kept is whole or not there, however many make it and however they end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from attnquant.whole_file import write_whole


def write(path: Path, text: str) -> None:
    write_whole(path, lambda made: made.write_text(text) and None)


def test_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file.bin"
    for text in ("one", "two"):
        write(path, text)
        assert path.read_text() == text
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.bin"
    write(path, "old")

    def fail(made: Path) -> None:
        made.write_text("half")
        raise error

    with pytest.raises(error):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"

    def make(made: Path) -> None:
        made.write_text("first")
        write(path, "second")  # another maker, from beginning to end
        assert path.read_text() == "second" and made.read_text() == "first"

    write_whole(path, make)
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]


def test_what_a_killed_maker_left_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    dead, living, other = (tmp_path / f".{name}" for name in ("a.bin.x", "a.bin.y", "b.bin.z"))
    for directory in (dead, living, other):
        directory.mkdir()
        (directory / "a.bin").write_text("half")
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write(tmp_path / "a.bin", "whole")
    os.close(descriptor)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".a.bin.y", ".b.bin.z", "a.bin"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError):
        write(tmp_path / "file" / "a.bin", "x")
