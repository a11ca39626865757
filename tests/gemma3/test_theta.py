"""Below passthrough: fewer blocks than layers, rebuilt on the host, through the same graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from attnquant.decoder_shapes import DecoderShapes
from attnquant.theta import decompose_decoder, effective_weight
from tests.golden.data import load_tiny, relative_error
from tests.models import load_model
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
PROMPTS = [prompt.tokens for prompt in load_tiny(CASE.name).prompts]
BLOCKS, RANK = 2, 8


def logits(directory: Path) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits."""
    with load_model(directory) as model:
        rows = model.generate(PROMPTS, max_new_tokens=1, output_logits=True).logits
    return np.stack([row[0] for row in rows])


def test_shared_blocks_give_the_logits_of_the_rebuilt_weights(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: value.astype(np.float32) for name, value in CASE.tensors().items()}
    shapes = DecoderShapes.from_config(CASE.config()).projections
    for bundles in decompose_decoder(
        shapes, lambda key: tensors[f"model.{key.module}.weight"], blocks=BLOCKS, rank=RANK
    ):
        for key, bundle in bundles.items():
            assert not bundle.is_passthrough
            tensors[f"model.{key.module}.weight"] = effective_weight(bundle)
    save_file(tensors, tmp_path / "model.safetensors")
    for path in tiny_directory(CASE.name).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = CASE.config() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = logits(tmp_path)

    monkeypatch.setenv("ATTNQUANT_BLOCKS", str(BLOCKS))
    monkeypatch.setenv("ATTNQUANT_RANK", str(RANK))
    shared = logits(tiny_directory(CASE.name))
    for row, expected in zip(shared, reference, strict=True):
        assert relative_error(row, expected) < 1e-4
    dense = np.stack([prompt.last for prompt in load_tiny(CASE.name).prompts])
    assert relative_error(shared, dense) > 1e-2
