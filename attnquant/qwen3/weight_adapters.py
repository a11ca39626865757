"""Qwen3's checkpoints to the graph's weights."""

from __future__ import annotations

from functools import partial

from attnquant.nn.weights import checkpoint_weights
from attnquant.qwen3.model_config import Qwen3Config

convert_safetensors = partial(checkpoint_weights, config=Qwen3Config)
"""MAX's weight adapter: a safetensors checkpoint's tensors to the graph's, by name."""
