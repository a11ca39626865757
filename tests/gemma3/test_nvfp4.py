"""NVFP4 at load: the packed graph's logits equal those of the same weights, dequantized.

Scales are searched with a profile, as they are by default, of few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export import export_nvfp4
from attnquant.encoder import Encoder, encoder_of
from attnquant.projections import ProjectionKey
from tests.dequantized import dequantize
from tests.golden.data import load_tiny, relative_error
from tests.models import load_model

CASE = "pattern2-scalar"
PROMPTS = [prompt.tokens for prompt in load_tiny(CASE).prompts]

TOLERANCE = 1e-4

TOKENS = 100
AT_LOAD = {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_PROFILE_TOKENS": str(TOKENS)}


def logits(directory: Path) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits."""
    with load_model(directory) as model:
        rows = model.generate(PROMPTS, max_new_tokens=1, output_logits=True).logits
    return np.stack([row[0] for row in rows])


@pytest.fixture(scope="module")
def packed(tiny_directory: Callable[[str], Path]) -> NDArray[np.float32]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in AT_LOAD.items():
            environment.setenv(name, value)
        return logits(tiny_directory(CASE))


@pytest.fixture(scope="module")
def encoder(tiny_directory: Callable[[str], Path]) -> Encoder:
    return encoder_of(tiny_directory(CASE), None, tokens=TOKENS)


def test_packed_logits_equal_the_dequantized_models(
    packed: NDArray[np.float32],
    encoder: Encoder,
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = tiny_directory(CASE)
    reference = logits(dequantize(source, tmp_path / "reference", encode=encoder))
    for row, expected in zip(packed, reference, strict=True):
        assert relative_error(row, expected) < TOLERANCE
    # The weights are other weights: without quantization the logits are far from these.
    dense = np.stack([prompt.last for prompt in load_tiny(CASE).prompts])
    assert relative_error(packed, dense) > 1e-2


def test_an_exported_checkpoint_gives_the_logits_of_quantizing_at_load(
    packed: NDArray[np.float32],
    encoder: Encoder,
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    exported = tmp_path / "exported"
    export_nvfp4(
        tiny_directory(CASE),
        exported,
        encode=encoder,
        input_scale=encoder.input_scale,
        recipe=encoder.recipe,
    )
    assert np.array_equal(logits(exported), packed)
    # For kernels that quantize activations, the profile says of what size they are.
    scales = Checkpoint.open(exported).array("model.layers.1.mlp.down_proj.input_scale")
    assert encoder.profile is not None
    assert scales == np.float32(encoder.profile.input_scale("layers.1.mlp.down_proj")) != 1


@pytest.mark.slow
def test_a_pattern_that_splits_groups_leaves_them_unfused(
    encoder: Encoder,
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def quantized(key: ProjectionKey) -> bool:
        return key.role not in ("k_proj", "up_proj") and key.layer != 1

    source = tiny_directory(CASE)
    reference = logits(dequantize(source, tmp_path / "reference", quantized, encoder))
    for name, value in AT_LOAD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ATTNQUANT_QUANT_IGNORE", "k_proj,up_proj,model.layers.1.*")
    for row, expected in zip(logits(source), reference, strict=True):
        assert relative_error(row, expected) < TOLERANCE
