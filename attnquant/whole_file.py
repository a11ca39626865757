"""Files that are made once and kept: whole, or not there.

A file is made in a directory beside its place and moved there by a rename. The maker holds a lock
on that directory, which the kernel drops when it dies, however it dies: whoever gets the lock of
one that lies there knows that it was abandoned, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def write_whole(path: Path, make: Callable[[Path], None]) -> None:
    """Makes a file beside its place, under its own name, and moves it there when it is whole.

    Args:
        path: where the file is kept; its directory is made.
        make: writes the file at the path that it is given.

    Raises:
        OSError: the directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}."
    for left in path.parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as staging,
        _locked(Path(staging)),
    ):
        made = Path(staging) / path.name
        make(made)
        with open(made, "rb") as file:
            os.fsync(file.fileno())  # a power cut may keep a name and lose the content
        os.replace(made, path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds a directory for this process.

    Raises:
        OSError: another one holds it, or it is gone.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
