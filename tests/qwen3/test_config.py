"""Qwen3's shapes are those of the checkpoint, and what its graph does not compute is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError, UnsupportedError
from attnquant.inspect import inspect
from attnquant.nn.loaded import pipeline_config
from attnquant.qwen3.model_config import Qwen3Config
from tests.tiny.qwen3 import CASES


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_the_checkpoint(name: str) -> None:
    case = CASES[name]
    shapes = DecoderShapes.from_config(case.config())
    stored = {key.removeprefix("model."): value.shape for key, value in case.tensors().items()}
    assert shapes.tensors == stored
    assert shapes.tied is case.tied
    assert {layer.kind for layer in shapes.layers} == {"full_attention"}


def test_defaults_are_transformers() -> None:
    config = CASES["qwen3"].config()
    del config["layer_types"], config["tie_word_embeddings"], config["architectures"]
    shapes = DecoderShapes.from_config(config)
    assert shapes.architecture == "Qwen3ForCausalLM" and not shapes.tied
    assert {layer.kind for layer in shapes.layers} == {"full_attention"}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"use_sliding_window": True}, UnsupportedError, "use_sliding_window is True"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"layer_types": ["sliding_attention"] * 3}, CheckpointError, "expected full_attention"),
    ],
)
def test_what_is_refused(change: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DecoderShapes.from_config(CASES["qwen3"].config() | change)


def test_inspect(tiny_directory: Callable[[str], Path]) -> None:
    report = inspect(tiny_directory("qwen3"))
    assert len(report.coverage.quantized) == 7 * CASES["qwen3"].layers
    assert report.after.total < report.before.total


def test_a_cpu_takes_heads_of_a_multiple_of_16(tmp_path: Path) -> None:
    directory = dataclasses.replace(CASES["qwen3"], head_dim=24).write(tmp_path / "odd")
    with pytest.raises(UnsupportedError, match=r"head's size is 24; .* a multiple of 16"):
        Qwen3Config.initialize(
            pipeline_config(directory, max_length=256, max_batch_size=1), max_seq_len=256
        )
