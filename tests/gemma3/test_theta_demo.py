"""The real Gemma 3 270M with 6 blocks of rank 32: every path gives the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import attnquant.nn.weights as weights_module
from tests.golden.data import relative_error
from tests.models import load_model

PROMPT = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


def logits(directory: Path) -> NDArray[np.float32]:
    with load_model(directory, max_batch_size=1) as model:
        result = model.generate([PROMPT], max_new_tokens=4, output_logits=True, temperature=0)
    return np.stack(result.logits[0])


@pytest.fixture(scope="module")
def rebuilt(demo_directory: Path) -> NDArray[np.float32]:
    """On the host, through the graph of the dense model."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ATTNQUANT_BLOCKS", "6")
        environment.setenv("ATTNQUANT_RANK", "32")
        return logits(demo_directory)


@pytest.mark.parametrize(
    ("gemm", "fused"),
    [
        pytest.param("factored", True, id="factored"),
        pytest.param("dense", True, id="dense"),
        pytest.param("factored", False, id="unfused"),
    ],
)
def test_in_the_graph(
    gemm: str,
    fused: bool,
    rebuilt: NDArray[np.float32],
    demo_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fused:
        monkeypatch.setattr(weights_module, "can_fuse", lambda quantized: len(quantized) == 1)
    settings = {"BLOCKS": "6", "RANK": "32", "PRECOMPUTE_OUTSIDE": "0", "GEMM": gemm}
    for name, text in settings.items():
        monkeypatch.setenv(f"ATTNQUANT_{name}", text)
    for row, expected in zip(logits(demo_directory), rebuilt, strict=True):
        assert relative_error(row, expected) < TOLERANCE
