"""NVFP4 at load: the packed graph's logits equal those of the same weights, dequantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.checkpoint.export import export_nvfp4
from attnquant.kernels.codec import encode
from attnquant.projections import ProjectionKey
from tests.gemma3.dequantized import dequantize
from tests.golden.data import load_tiny, relative_error
from tests.models import load_model
from tests.tiny.gemma3 import CASES

CASE = "pattern2-scalar"
LAYERS = CASES[CASE].layers
PROMPTS = [prompt.tokens for prompt in load_tiny(CASE).prompts]

# Activations are quantized to int8 on the CPU.
TOLERANCE = 5e-3


def logits(directory: Path) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits."""
    with load_model(directory) as model:
        rows = model.generate(PROMPTS, max_new_tokens=1, output_logits=True).logits
    return np.stack([row[0] for row in rows])


@pytest.fixture(scope="module")
def packed(tiny_directory: Callable[[str], Path]) -> NDArray[np.float32]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ATTNQUANT_QUANT", "nvfp4")
        return logits(tiny_directory(CASE))


def test_packed_logits_equal_the_dequantized_models(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = logits(dequantize(tiny_directory(CASE), tmp_path / "reference", LAYERS))
    for row, expected in zip(packed, reference, strict=True):
        assert relative_error(row, expected) < TOLERANCE
    # The weights are other weights: without quantization the logits are far from these.
    dense = np.stack([prompt.last for prompt in load_tiny(CASE).prompts])
    assert relative_error(packed, dense) > 10 * TOLERANCE


def test_an_exported_checkpoint_gives_the_logits_of_quantizing_at_load(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    export_nvfp4(tiny_directory(CASE), tmp_path / "exported", encode=encode, recipe={})
    assert np.array_equal(logits(tmp_path / "exported"), packed)


def test_a_pattern_that_splits_groups_leaves_them_unfused(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantized(key: ProjectionKey) -> bool:
        return key.role not in ("k_proj", "up_proj") and key.layer != 1

    source = tiny_directory(CASE)
    reference = logits(dequantize(source, tmp_path / "reference", LAYERS, quantized))
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    monkeypatch.setenv("ATTNQUANT_QUANT_IGNORE", "k_proj,up_proj,model.layers.1.*")
    for row, expected in zip(logits(source), reference, strict=True):
        assert relative_error(row, expected) < TOLERANCE
