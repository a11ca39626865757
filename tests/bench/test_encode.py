"""The command on a tiny checkpoint: both encoders really encode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import encode
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]


def test_the_command_measures_every_encoder(
    tiny_directory: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "encode.json"
    model = str(tiny_directory(CASE.name))
    encode.main(["--model", model, "--rounds", "2", "--layers", "2", "--json", str(path)])
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert figures["projections"] == 2 * 7
    errors = figures["mean_relative_error"]
    # MAX's encoder and our abs-max one are the same function.
    assert errors["absmax"] == pytest.approx(errors[encode.PEER], rel=1e-6)
    assert 0.05 < errors["mse"] < errors["absmax"] < 0.12
    for sample in figures["seconds_per_100m"].values():
        assert len(sample["values"]) == 2 and min(sample["values"]) > 0
    assert "absmax" in capsys.readouterr().out
