"""Batches contexts into Gemma 3's inputs, whose `buffers` are the graph's inputs in order."""

from __future__ import annotations

from attnquant.nn.batch import DecoderBatchProcessor, DecoderInputs

Gemma3Inputs = DecoderInputs


class Gemma3BatchProcessor(DecoderBatchProcessor):
    """Ragged batches for one device."""
