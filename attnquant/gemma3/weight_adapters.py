"""Gemma 3's checkpoints to the graph's weights."""

from __future__ import annotations

from functools import partial

from attnquant.gemma3.model_config import Gemma3Config
from attnquant.nn.weights import checkpoint_weights

convert_safetensors = partial(checkpoint_weights, config=Gemma3Config)
"""MAX's weight adapter: a safetensors checkpoint's tensors to the graph's, by name."""
