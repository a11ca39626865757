"""Shapes from config.json: those of real checkpoints, and one clear error for any that is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import AttnquantError, CheckpointError, UnsupportedError
from attnquant.projections import ProjectionKey
from tests.configs import gemma3_270m, gemma4_31b


def test_gemma3_270m() -> None:
    shapes = DecoderShapes.from_config(gemma3_270m())
    assert (shapes.architecture, shapes.vocab, shapes.hidden) == ("Gemma3ForCausalLM", 262144, 640)
    assert (shapes.heads, shapes.tied, len(shapes.layers)) == (4, True, 18)
    layer = shapes.layers[0]
    assert (layer.kind, layer.head_dim, layer.kv_heads) == ("sliding_attention", 256, 1)
    assert dict(layer.projections) == {
        "q_proj": (1024, 640),
        "k_proj": (256, 640),
        "v_proj": (256, 640),
        "o_proj": (640, 1024),
        "gate_proj": (2048, 640),
        "up_proj": (2048, 640),
        "down_proj": (640, 2048),
    }
    assert "layer_scalar" not in layer.vectors
    assert len(shapes.projections) == 126
    assert sum(out * columns for out, columns in shapes.projections.values()) == 100_270_080


def test_gemma4_31b() -> None:
    shapes = DecoderShapes.from_config(gemma4_31b())
    sliding, full = shapes.layers[4], shapes.layers[5]
    assert (sliding.head_dim, sliding.kv_heads) == (256, 16)
    assert (full.head_dim, full.kv_heads) == (512, 4)
    assert sliding.projections["v_proj"] == (4096, 5376)
    assert "v_proj" not in full.projections
    assert full.projections["k_proj"] == (2048, 5376)
    assert full.projections["o_proj"] == (5376, 16384)
    assert full.vectors["self_attn.q_norm.weight"] == 512
    assert full.vectors["layer_scalar"] == 1
    attention = mlp = 0
    for key, (out, columns) in shapes.projections.items():
        if ".mlp." in key.module:
            mlp += out * columns
        else:
            attention += out * columns
    assert (attention, mlp) == (8_477_736_960, 20_808_990_720)
    assert math.prod(shapes.head) == 1_409_286_144


def test_tensors_are_those_of_transformers_checkpoints() -> None:
    tensors = DecoderShapes.from_config(gemma4_31b()).tensors
    assert tensors["embed_tokens.weight"] == (262144, 5376)
    assert tensors["norm.weight"] == (5376,)
    assert tensors["layers.59.layer_scalar"] == (1,)
    assert tensors["layers.5.self_attn.q_proj.weight"] == (16384, 5376)
    assert "lm_head.weight" not in tensors
    # 60 layers of 4 + 2 norms and a scalar, 410 projections, the embedding and the last norm.
    assert len(tensors) == 60 * 7 + 410 + 2


def test_untied_head_is_a_tensor() -> None:
    shapes = DecoderShapes.from_config(gemma3_270m(tie_word_embeddings=False))
    assert shapes.tensors["lm_head.weight"] == (262144, 640)


def test_outer_config_decides_about_the_head() -> None:
    config = gemma4_31b(tie_word_embeddings=True) | {"tie_word_embeddings": False}
    assert not DecoderShapes.from_config(config).tied


def test_text_config_alone() -> None:
    config = gemma4_31b()["text_config"]
    shapes = DecoderShapes.from_config(config)
    assert shapes == DecoderShapes.from_config(gemma4_31b())
    shapes = DecoderShapes.from_config(gemma3_270m(architectures=None))
    assert shapes.architecture == "Gemma3ForCausalLM"


def test_unified() -> None:
    config = gemma4_31b(model_type="gemma4_unified_text")
    config["architectures"] = ["Gemma4UnifiedForConditionalGeneration"]
    assert len(DecoderShapes.from_config(config).projections) == 410


def test_gemma4_without_shared_keys_and_values() -> None:
    """Then full layers have a v_proj, and as many key-value heads as the others."""
    layer = DecoderShapes.from_config(gemma4_31b(attention_k_eq_v=False)).layers[5]
    assert layer.projections["v_proj"] == layer.projections["k_proj"] == (16 * 512, 5376)
    layer = DecoderShapes.from_config(gemma4_31b(num_global_key_value_heads=None)).layers[5]
    assert layer.kv_heads == 16


@pytest.mark.parametrize(
    ("changes", "full"), [({}, [5]), ({"sliding_window_pattern": 2}, [1, 3, 5])]
)
def test_layer_types_from_the_pattern(changes: dict[str, Any], full: list[int]) -> None:
    config = gemma3_270m(num_hidden_layers=7, layer_types=None, **changes)
    layers = DecoderShapes.from_config(config).layers
    assert [index for index, layer in enumerate(layers) if layer.kind == "full_attention"] == full


def test_keys_name_the_modules() -> None:
    keys = DecoderShapes.from_config(gemma3_270m()).projections
    assert ProjectionKey(layer=17, role="down_proj") in keys
    assert ProjectionKey(layer=18, role="down_proj") not in keys


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "640", True])
def test_sizes_must_be_whole_numbers(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*above 0") as raised:
        DecoderShapes.from_config(gemma3_270m(**{field: value}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, CheckpointError, "architectures is None"),
        ({"architectures": "Gemma3ForCausalLM"}, CheckpointError, "architectures is 'Gemma3"),
        ({"architectures": None, "model_type": ["x"]}, CheckpointError, "architectures is None"),
        ({"architectures": [["x"]]}, CheckpointError, r"architectures is \[\['x'\]\]"),
        (gemma3_270m(num_hidden_layers=10**9), CheckpointError, "expected at most 10000"),
        ({"architectures": []}, CheckpointError, r"architectures is \[\]"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedError, "attnquant serves Gemma3For"),
        (gemma3_270m(num_key_value_heads=3), CheckpointError, "num_key_value_heads is 3"),
        (gemma4_31b(num_global_key_value_heads=5), CheckpointError, "num_global_key_value_heads"),
        (gemma4_31b(global_head_dim=None), CheckpointError, "global_head_dim is missing"),
        (gemma3_270m(layer_types=["full_attention"]), CheckpointError, "layer_types has 1 entries"),
        (gemma3_270m(layer_types=7), CheckpointError, "layer_types is 7"),
        (
            gemma3_270m(layer_types=["sliding_attention"] * 17 + ["chunked_attention"]),
            CheckpointError,
            r"layer_types\[17\] is 'chunked_attention'",
        ),
        (
            gemma4_31b(layer_types=["sliding_attention"] * 60),
            CheckpointError,
            "layer_types ends in 'sliding_attention'",
        ),
        (gemma3_270m(tie_word_embeddings="yes"), CheckpointError, "tie_word_embeddings is 'yes'"),
        (gemma3_270m(attention_bias=True), UnsupportedError, "attention_bias is True"),
        (
            gemma4_31b(hidden_size_per_layer_input=256),
            UnsupportedError,
            "hidden_size_per_layer_input is 256; attnquant does not serve per-layer input",
        ),
        (gemma4_31b(num_kv_shared_layers=20), UnsupportedError, "num_kv_shared_layers is 20"),
        (gemma4_31b(enable_moe_block=True), UnsupportedError, "enable_moe_block is True"),
        (gemma4_31b() | {"text_config": [1]}, CheckpointError, "text_config is"),
    ],
)
def test_refuses(config: dict[str, Any], error: type[AttnquantError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        DecoderShapes.from_config(config)
    assert "\n" not in str(raised.value)
