"""Batches contexts into Qwen3's inputs, whose `buffers` are the graph's inputs in order."""

from __future__ import annotations

from attnquant.nn.batch import DecoderBatchProcessor


class Qwen3BatchProcessor(DecoderBatchProcessor):
    """Ragged batches for one device."""
