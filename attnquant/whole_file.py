"""Files that are made once and kept: whole, or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
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
    with tempfile.TemporaryDirectory(dir=path.parent) as staging:
        made = Path(staging) / path.name
        make(made)
        with open(made, "rb") as file:
            # Lest a power cut keep the name and lose the content.
            os.fsync(file.fileno())
        os.replace(made, path)
