"""Wires the layers of this package into a decoder, as its configuration and its weights say."""

from __future__ import annotations

from functools import partial

import numpy as np
from max.graph import Weight
from max.nn.kv_cache import KVCacheParams
from max.nn.layer import Module
from max.nn.norm import RMSNorm
from numpy.typing import NDArray

from attnquant.checkpoint.verify import EMBEDDING
from attnquant.decoder_shapes import LayerShapes
from attnquant.memory import POSITIONS_BEYOND
from attnquant.nn.attention import Attention
from attnquant.nn.config import DecoderConfig
from attnquant.nn.decoder import RaggedDecoder
from attnquant.nn.embedding import Head, ScaledEmbedding, TiedHead
from attnquant.nn.layer import DecoderLayer
from attnquant.nn.mlp import GatedMLP
from attnquant.nn.projection import Projection, Storage, layer_projections
from attnquant.nn.rotary import rotary_table
from attnquant.nn.tensors import State


def build_decoder(
    config: DecoderConfig, weights: State, *, takes_embeddings: bool = False
) -> RaggedDecoder:
    """Builds the decoder.

    Args:
        config: the configuration.
        weights: the loaded tensors; their names say how each projection is stored, and whether
            the head is tied.
        takes_embeddings: as in `RaggedDecoder`.
    """
    shapes, (device,) = config.shapes, config.devices
    kinds = [layer.kind for layer in shapes.layers]
    positions = config.max_seq_len + POSITIONS_BEYOND
    ropes: dict[str, NDArray[np.float32]] = {
        layer.kind: layer_rope(config, layer, positions) for layer in shapes.layers
    }
    embed_tokens = ScaledEmbedding(
        vocab=shapes.vocab,
        hidden=shapes.hidden,
        table=weights[EMBEDDING].dtype,
        dtype=config.dtype,
        device=device,
        scale=config.embedding_scale,
    )
    layers = []
    for index, kind in enumerate(kinds):
        window = config.window if kind == "sliding_attention" else None
        kv_params = config.kv_params.children[kind]
        layers.append((build_layer(config, index, weights, kv_params, window), kind))
    return RaggedDecoder(
        embed_tokens=embed_tokens,
        layers=layers,
        norm=_norm(config, shapes.hidden),
        lm_head=_head(config, embed_tokens, weights),
        kv_params=config.kv_params,
        ropes=ropes,
        return_logits=config.return_logits,
        softcap=config.softcap,
        device=device,
        takes_embeddings=takes_embeddings,
        return_hidden_states=config.return_hidden_states,
    )


def build_layer(
    config: DecoderConfig,
    index: int,
    weights: State,
    kv_params: KVCacheParams,
    window: int | None,
) -> DecoderLayer:
    """Builds one layer.

    Args:
        config: the decoder's configuration.
        index: which layer.
        weights: the loaded tensors, by their names in the whole decoder.
        kv_params: the cache that its keys and values live in.
        window: its sliding window, in tokens; None attends to everything.
    """
    (device,) = config.devices
    norm = partial(_norm, config)
    hidden, shapes = config.shapes.hidden, config.shapes.layers[index]
    norms_after = "post_feedforward_layernorm.weight" in shapes.vectors
    projections = layer_projections(config.shapes, index, weights, config.dtype, device)
    return DecoderLayer(
        self_attn=Attention(
            qkv_proj=projections["qkv_proj" if "v_proj" in shapes.projections else "qk_proj"],
            o_proj=projections["o_proj"],
            q_norm=norm(shapes.head_dim),
            k_norm=norm(shapes.head_dim),
            kv_params=kv_params,
            scale=config.attention_scale,
            window=window,
            value_eps=config.rms_norm_eps if config.normalizes_values else None,
        ),
        mlp=GatedMLP(
            gate_up_proj=projections["gate_up_proj"],
            down_proj=projections["down_proj"],
            activation=config.hidden_activation,
        ),
        input_layernorm=norm(hidden),
        post_attention_layernorm=norm(hidden),
        pre_feedforward_layernorm=norm(hidden) if norms_after else None,
        post_feedforward_layernorm=norm(hidden) if norms_after else None,
        layer_scalar=(
            Weight("layer_scalar", config.dtype, (1,), device)
            if "layer_scalar" in shapes.vectors
            else None
        ),
    )


def layer_rope(config: DecoderConfig, layer: LayerShapes, positions: int) -> NDArray[np.float32]:
    """The rotary table of a layer; see `rotary_table`."""
    rope = config.ropes[layer.kind]
    return rotary_table(
        theta=rope.theta,
        factor=rope.factor,
        rotated=rope.rotated,
        head_dim=layer.head_dim,
        positions=positions,
    )


def _norm(config: DecoderConfig, width: int) -> RMSNorm:
    return RMSNorm(
        width, dtype=config.dtype, eps=config.rms_norm_eps, weight_offset=config.norm_offset
    )


def _head(config: DecoderConfig, embed_tokens: ScaledEmbedding, weights: State) -> Module:
    (vocab, hidden), (device,) = config.shapes.head, config.devices
    if "lm_head.weight" in weights:
        table = weights["lm_head.weight"].dtype
        return Head(vocab=vocab, hidden=hidden, table=table, device=device)
    if not any(name.startswith("lm_head.") for name in weights):
        return TiedHead(embed_tokens)
    return Projection(
        roles=("lm_head",),
        rows=(vocab,),
        columns=hidden,
        dtype=config.dtype,
        device=device,
        storage=Storage.of(weights, "lm_head", ("lm_head",)),
    )
