"""Device graph capture changes no token. The CPU twins are tests/gemma3/test_abi.py and
tests/gemma4/test_abi.py, which hold the buffers that capture records against the graph's inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from max.driver import accelerator_count

pytestmark = pytest.mark.skipif(not accelerator_count(), reason="needs a GPU that MAX supports")

ROOT = Path(__file__).resolve().parents[2]


def generate(directory: Path, option: str, quant: str) -> str:
    command = [sys.executable, "run_max.py", "generate", "--model", str(directory), "--top-k", "1"]
    command += ["--prompt", "one two three", "--max-new-tokens", "48", "--max-length", "512"]
    done = subprocess.run(
        [*command, "--max-batch-size", "4", "--ignore-eos", option],
        cwd=ROOT,
        env={**os.environ, "ATTNQUANT_QUANT": quant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.partition("Prompt size")[0]


@pytest.mark.parametrize("case", ["pattern2-scalar", "gemma4-shared-values"])
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_capture_changes_no_token(
    case: str, quant: str, tiny_directory: Callable[[str], Path]
) -> None:
    directory = tiny_directory(case)
    captured = generate(directory, "--device-graph-capture", quant)
    assert captured == generate(directory, "--no-device-graph-capture", quant)
