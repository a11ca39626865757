"""Compiling for GPUs that are elsewhere: `max warm-cache --target`, as a user would run it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny.gemma4_drafter import DRAFTERS

ROOT = Path(__file__).resolve().parents[2]


def warm_cache(target: Path, *arguments: str, quant: str) -> None:
    """Compiles all of a checkpoint's graphs for a B200, with an environment's settings."""
    result = subprocess.run(
        [
            *(sys.executable, "run_max.py", "warm-cache", "--target", "cuda:sm_100a"),
            *("--model", str(target), "--max-length", "512"),
            *("--devices", "gpu", "--device-graph-capture", *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "ATTNQUANT_QUANT": quant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_a_checkpoint_with_images_compiles_in_bfloat16_with_capture(
    tiny_directory: Callable[[str], Path], quant: str
) -> None:
    warm_cache(tiny_directory("gemma4-shared-values"), quant=quant)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_it_compiles_with_its_drafter(
    tiny_directory: Callable[[str], Path], tmp_path: Path, quant: str
) -> None:
    case = dataclasses.replace(DRAFTERS["gemma4-shared-values"], dtype="bfloat16")
    warm_cache(
        tiny_directory("gemma4-shared-values"),
        *("--draft-model-path", str(case.write(tmp_path / "drafter"))),
        *("--speculative-method", "mtp", "--num-speculative-tokens", "3"),
        quant=quant,
    )
