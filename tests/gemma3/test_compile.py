"""Compiling for GPUs that are elsewhere: `max warm-cache --target`, as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_100a"])
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_a_checkpoint_compiles_in_bfloat16_with_capture(
    tiny_directory: Callable[[str], Path], target: str, quant: str
) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "run_max.py", "warm-cache", "--target", target, "--devices", "gpu"),
            *("--model", str(tiny_directory("pattern2-scalar")), "--max-length", "512"),
            "--device-graph-capture",
        ],
        cwd=ROOT,
        env={**os.environ, "ATTNQUANT_QUANT": quant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
