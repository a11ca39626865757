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


def test_what_fits(flagship: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--memory 80gb --max-length 4096 --batch 3 --max-batch-input-tokens 1024"
    options += " --device-memory-utilization 0.8"
    assert main(["inspect", str(flagship), *options.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["memory"]
    assert report["usable"] == 64 * 10**9
    assert (report["max_length"], report["batch"], report["fits"]) == (4096, 3, True)
    assert main(["inspect", str(flagship), *options.split()]) == 0
    assert "cache of 3 x 4096 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--memory 32", "argument --memory: '32' is not a size above 0 with its unit"),
        ("--memory 0GB", "argument --memory: '0GB' is not a size above 0"),
        ("--memory 32GB --batch 0", "argument --batch: '0' is not a whole number, 1 or more"),
        ("--memory 32GB --batch 1.5", "argument --batch: '1.5' is not a whole number"),
        ("--memory 32GB --max-length -5", "argument --max-length: '-5' is not a whole number"),
        ("--memory 32GB --max-batch-input-tokens x", "--max-batch-input-tokens: 'x' is not a"),
        ("--memory 1GB --device-memory-utilization nan", "'nan' is not a number above 0, 1 at"),
        ("--memory 1GB --device-memory-utilization 90", "'90' is not a number above 0, 1 at most"),
        ("--batch 2 --max-length 9", "--max-length, --batch: expected --memory too"),
        ("--memory 9GB --max-length 999999", "--max-length=999999 is beyond config.json's"),
        ("--memroy 9GB", "unrecognized arguments: --memroy 9GB"),
        ("--quant fp8", "argument --quant: invalid choice: 'fp8'"),
    ],
)
def test_what_is_wrong_is_one_line(
    flagship: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    try:
        status = main(["inspect", str(flagship), *options.split()])
    except SystemExit as error:
        status = error.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("attnquant: ") and words in line


def test_inspect_does_not_import_max(flagship: Path) -> None:
    code = (
        "import sys; from attnquant.cli import main; "
        f"main(['inspect', {str(flagship)!r}, '--memory', '32GiB']); "
    )
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


def test_export_of_bundles(
    tiny_directory: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tiny_directory("pattern2-scalar")), tmp_path / "exported"
    assert main(["export", source, str(target), "--blocks", "2", "--rank", "8"]) == 0
    assert "2 blocks of rank 8, 0 of 28 projections in NVFP4" in capsys.readouterr().out
    assert Checkpoint.open(target).config["attnquant"]["blocks"] == 2
    packed = str(tmp_path / "packed")
    assert main(["export", source, packed, "--blocks", "2", "--quant", "nvfp4"]) == 0
    assert "2 blocks of rank 0, 28 of 28 projections in NVFP4" in capsys.readouterr().out
    for options, words in (
        ([], "nothing to write"),
        (["--quant", "nvfp4", "--rank", "8"], "--rank 8 corrects shared blocks; give --blocks too"),
        (["--blocks", "4"], "--blocks 4 is a block for each layer"),
    ):
        assert main(["export", source, str(tmp_path / "none"), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attnquant: ") and words in line
