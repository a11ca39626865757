"""A directory that is made once: either all of it exists under its name, or none of it.

The work happens in `<name>.partial` beside the target, under an exclusive `flock` on
`<name>.lock`, and ends with a rename. The kernel drops the lock when its holder dies, however it
dies, so whoever gets the lock knows that a `.partial` it finds was abandoned and removes it. A
second process waits for the first and then finds the finished directory. The lock file stays: to
remove it would let a third process lock a new file of the same name beside a live holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def make_once(
    target: Path,
    files: Sequence[str],
    build: Callable[[Path], None],
    on_wait: Callable[[], None] = lambda: None,
) -> bool:
    """Makes `target` with `build`, unless it is complete already.

    Args:
        target: the directory; its parents are created.
        files: what a complete directory holds. One that lacks a file is made again; one that
            holds anything else besides is left alone.
        build: writes these files into the empty directory it is given.
        on_wait: called once if another process holds the lock.

    Returns:
        Whether this call made it.

    Raises:
        OSError: a directory or file cannot be written; what was begun is removed.
        Exception: whatever `build` raises; likewise.
    """
    if _complete(target, files):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), on_wait):
        if _complete(target, files):
            return False
        if target.exists() and not {path.name for path in target.iterdir()} <= set(files):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        partial = target.with_name(target.name + ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            build(partial)
            for path in (*partial.iterdir(), partial):
                _sync(path)
            for name in files:
                (target / name).unlink(missing_ok=True)
            partial.rename(target)  # replaces an empty directory, and no other
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(target.parent)
    return True


def _complete(target: Path, files: Sequence[str]) -> bool:
    return all((target / name).is_file() for name in files)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    """Puts a file or directory on the disk, lest a power cut keep the rename and lose the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
