"""Graph layers that every decoder shares. They know shapes, dtypes and devices, and no model."""

from attnquant.nn.attention import Attention
from attnquant.nn.build import build_decoder
from attnquant.nn.decoder import RaggedDecoder
from attnquant.nn.embedding import ScaledEmbedding, TiedHead
from attnquant.nn.layer import DecoderLayer
from attnquant.nn.mlp import GatedMLP
from attnquant.nn.projection import Projection, Storage, layer_projections
from attnquant.nn.rotary import rotary_table

__all__ = [
    "Attention",
    "DecoderLayer",
    "GatedMLP",
    "Projection",
    "RaggedDecoder",
    "ScaledEmbedding",
    "Storage",
    "TiedHead",
    "build_decoder",
    "layer_projections",
    "rotary_table",
]
