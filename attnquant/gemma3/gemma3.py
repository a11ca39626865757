"""The Gemma 3 graph: what sets it apart from the decoder that `attnquant.nn` wires."""

from __future__ import annotations

from attnquant.gemma3.model_config import Gemma3Config
from attnquant.nn import RaggedDecoder, build_decoder
from attnquant.nn.tensors import State


def build_gemma3(config: Gemma3Config, weights: State) -> RaggedDecoder:
    """Builds the decoder; see `build_decoder`."""
    return build_decoder(config, weights)
