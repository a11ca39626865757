"""Qwen3's graph against transformers' float32 logits: as it is, and packed to NVFP4."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.nvfp4.reference import encode
from tests.dequantized import dequantize
from tests.golden.data import fingerprint, load_tiny, relative_error
from tests.models import load_model
from tests.tiny.qwen3 import CASES

TOLERANCE = 1e-4


def next_logits(directory: Path, prompts: list[list[int]]) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits, from one batch."""
    with load_model(directory) as model:
        rows = model.generate(prompts, max_new_tokens=1, output_logits=True).logits
    return np.stack([row[0] for row in rows])


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3-untied", marks=pytest.mark.slow)])
def test_logits_and_greedy_tokens_equal_transformers(
    name: str, tiny_directory: Callable[[str], Path]
) -> None:
    assert name in CASES
    directory, golden = tiny_directory(name), load_tiny(name)
    assert fingerprint(directory) == golden.fingerprint
    with load_model(directory) as model:
        for prompt in golden.prompts:
            count = 1 if prompt.greedy is None else len(prompt.greedy)
            result = model.generate(
                [prompt.tokens],
                max_new_tokens=count,
                temperature=0,
                top_k=1,
                ignore_eos=True,
                output_logits=True,
            )
            first = result.logits[0][0]
            assert relative_error(first, prompt.last) < TOLERANCE, len(prompt.tokens)
            if prompt.greedy is not None:
                assert result.sequences[0][-count:] == prompt.greedy, len(prompt.tokens)


@pytest.mark.slow
def test_packed_logits_equal_the_dequantized_models(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_directory("qwen3")
    prompts = [prompt.tokens for prompt in load_tiny("qwen3").prompts]
    decoded = dequantize(source, tmp_path / "decoded", encode=partial(encode, scales="mse"))
    reference = next_logits(decoded, prompts)
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    packed = next_logits(source, prompts)
    assert relative_error(packed, reference) < TOLERANCE
    dense = np.stack([prompt.last for prompt in load_tiny("qwen3").prompts])
    assert relative_error(packed, dense) > 0.02  # it is quantized
