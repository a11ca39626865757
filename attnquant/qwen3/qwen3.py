"""The Qwen3 graph: what sets it apart from the decoder that `attnquant.nn` wires."""

from __future__ import annotations

from attnquant.nn import RaggedDecoder, build_decoder
from attnquant.nn.tensors import State
from attnquant.qwen3.model_config import Qwen3Config


def build_qwen3(config: Qwen3Config, weights: State) -> RaggedDecoder:
    """Builds the decoder; see `build_decoder`."""
    return build_decoder(config, weights)
