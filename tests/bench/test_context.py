"""Decode steps of a batch, and the bytes that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attnquant.checkpoint.json_file import read_json_object
from attnquant.decoder_shapes import DecoderShapes
from bench.context import Batch, cache_bytes, load
from tests.configs import gemma4_31b


def test_sliding_layers_read_their_window() -> None:
    shapes = DecoderShapes.from_config(gemma4_31b())
    short = 2 * 4 * 100 * (50 * 16 * 256 + 10 * 4 * 512)
    assert cache_bytes(shapes, 1024, 100) == short
    assert cache_bytes(shapes, 100, 1000) == short + 2 * 4 * 900 * 10 * 4 * 512


def test_a_batch_decodes_step_after_step(tiny_directory: Callable[[str], Path]) -> None:
    directory = tiny_directory("pattern2-scalar")
    vocab = DecoderShapes.from_config(read_json_object(directory / "config.json")).vocab
    loaded = load(directory, {}, batch=2, context=140)
    for _ in range(2):  # the cache's pages are given back
        batch = Batch(loaded, 2, 140, vocab)
        for _ in range(3):
            batch.step()
        batch.close()
