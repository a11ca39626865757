"""Batches contexts into Gemma 4's inputs, whose `buffers` are the graph's inputs in order."""

from __future__ import annotations

from attnquant.nn.batch import DecoderBatchProcessor, DecoderInputs

Gemma4Inputs = DecoderInputs


class Gemma4BatchProcessor(DecoderBatchProcessor):
    """Ragged batches for one device. MAX adds the images' embeddings, or no rows of them."""
