"""`python -m attnquant`: the subcommands as users type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnquant import __version__
from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.cli import main
from tests.configs import gemma4_31b


@pytest.fixture
def flagship(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(gemma4_31b()))
    return path


def test_inspect_of_the_flagship(flagship: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flagship)]) == 0
    shown = capsys.readouterr().out
    for figure in ("410", "61.395 GB", "19.295 GB", "3.18x", "31.482 GB", "1.63x"):
        assert figure in shown


def test_inspect_as_json(flagship: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flagship), "--json", "--ignore", "self_attn"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["quantized"], report["left"]) == (180, 230)


def test_inspect_does_not_import_max(flagship: Path) -> None:
    code = f"import sys; from attnquant.cli import main; main(['inspect', {str(flagship)!r}]); "
    code += "sys.exit('max' in sys.modules)"
    # Kernels that ran in this process set variables, below Python, that mislead another one.
    environ = dict(os.environ)
    result = subprocess.run([sys.executable, "-c", code], env=environ, check=False)
    assert result.returncode == 0


def test_export_writes_what_can_be_opened_and_never_over_anything(
    tiny_directory: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tiny_directory("pattern2-scalar"), tmp_path / "exported"
    assert main(["export", str(source), str(target), "--quant", "nvfp4"]) == 0
    assert "28 of 28 projections in NVFP4" in capsys.readouterr().out
    checkpoint = Checkpoint.open(target)
    assert checkpoint.config["quantization_config"]["quant_algo"] == "NVFP4"
    assert main(["export", str(source), str(target), "--quant", "nvfp4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnquant: ") and str(target) in line


def test_what_the_user_can_mend_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no/such/config.json"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"attnquant {__version__}\n"
