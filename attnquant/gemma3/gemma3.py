"""The Gemma 3 graph: `attnquant.nn`'s layers, wired as the configuration says."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from max.graph import ops
from max.nn.norm import RMSNorm

from attnquant.gemma3.model_config import Gemma3Config
from attnquant.nn import (
    Attention,
    DecoderLayer,
    GatedMLP,
    Projection,
    RaggedDecoder,
    ScaledEmbedding,
    Storage,
    TiedHead,
    layer_projections,
    rotary_table,
)

ACTIVATIONS = {
    "gelu_pytorch_tanh": partial(ops.gelu, approximate="tanh"),
    "silu": ops.silu,
}

# A step may look past the longest sequence: drafted tokens, and a step that overlaps the last.
POSITIONS_BEYOND = 64


def build_gemma3(config: Gemma3Config, weights: Collection[str]) -> RaggedDecoder:
    """Builds the decoder.

    Args:
        config: the configuration.
        weights: names of the loaded tensors; they say how each projection is stored, and whether
            the head is tied.
    """
    hidden, (device,) = config.shapes.hidden, config.devices
    ropes = {
        kind: rotary_table(
            theta=config.rope_theta[kind],
            head_dim=config.kv_params.children[kind].head_dim,
            positions=config.max_seq_len + POSITIONS_BEYOND,
            factor=config.rope_factor[kind],
        )
        for kind in set(config.layer_types)
    }
    # Gemma stores norm weights less one.
    norm = partial(RMSNorm, dtype=config.dtype, eps=config.rms_norm_eps, weight_offset=1.0)
    layers = []
    for index, kind in enumerate(config.layer_types):
        projections = layer_projections(config.shapes, index, weights, config.dtype, device)
        kv_params = config.kv_params.children[kind]
        layer = DecoderLayer(
            self_attn=Attention(
                qkv_proj=projections["qkv_proj"],
                o_proj=projections["o_proj"],
                q_norm=norm(kv_params.head_dim),
                k_norm=norm(kv_params.head_dim),
                kv_params=kv_params,
                scale=config.attention_scale,
                window=config.window if kind == "sliding_attention" else None,
            ),
            mlp=GatedMLP(
                gate_up_proj=projections["gate_up_proj"],
                down_proj=projections["down_proj"],
                activation=ACTIVATIONS[config.hidden_activation],
            ),
            input_layernorm=norm(hidden),
            post_attention_layernorm=norm(hidden),
            pre_feedforward_layernorm=norm(hidden),
            post_feedforward_layernorm=norm(hidden),
        )
        layers.append((layer, kind))

    embed_tokens = ScaledEmbedding(
        vocab=config.shapes.vocab,
        hidden=hidden,
        dtype=config.dtype,
        device=device,
        scale=hidden**0.5,
    )
    tied = not any(name.startswith("lm_head.") for name in weights)
    lm_head = (
        TiedHead(embed_tokens)
        if tied
        else Projection(
            roles=("lm_head",),
            rows=(config.shapes.vocab,),
            columns=hidden,
            dtype=config.dtype,
            device=device,
            storage=Storage.of(weights, "lm_head", ("lm_head",)),
        )
    )
    return RaggedDecoder(
        embed_tokens=embed_tokens,
        layers=layers,
        norm=norm(hidden),
        lm_head=lm_head,
        kv_params=config.kv_params,
        ropes=ropes,
        return_logits=config.return_logits,
        softcap=config.softcap,
        device=device,
    )
