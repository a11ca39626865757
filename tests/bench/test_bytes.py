"""The bytes of the flagship are those that everything else says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bytes as command
from bench.common import RESULTS


def test_the_command_writes_what_the_repository_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bytes.json"
    command.main(["--json", str(path)])
    figures, kept = (
        json.loads(file.read_text(encoding="utf-8"))["figures"]
        for file in (path, RESULTS / "bytes.json")
    )
    assert figures == kept
    flagship = figures["bytes_per_token"]["Gemma 4 31B"]
    shown = {name: round(size["total"] / 1e9, 3) for name, size in flagship.items()}
    assert shown["nothing"] == 61.395 and shown["MLP only"] == 31.482
    assert shown["every projection"] == 19.295
    assert shown["every projection and the head"] == 17.269
    assert "3.18x" in capsys.readouterr().out
