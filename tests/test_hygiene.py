"""What holds for every source file: short enough to read at one sitting, and finished."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    ROOT / "run_max.py",
    *(
        path
        for folder in ("attnquant", "tests", "bench", "fuzz")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".mojo"}
    ),
]
LONGEST = 400

# Put together here, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")


def test_no_file_is_too_long():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert {str(path): count for path, count in lines.items() if count > LONGEST} == {}


def test_nothing_is_left_undone():
    assert [
        f"{path}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line)
    ] == []
