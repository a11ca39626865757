"""config.json of the models whose bytes are known, with the fields that shapes depend on."""

from __future__ import annotations

from typing import Any


def gemma3_270m(**changes: Any) -> dict[str, Any]:
    """Gemma 3 270M: a text-only config."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    } | changes


def gemma4_31b(**changes: Any) -> dict[str, Any]:
    """Gemma 4 31B: a text config inside a multimodal one; `changes` go to the text config."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "vocab_size": 262144,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    } | changes
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }


def gemma4_31b_drafter(**changes: Any) -> dict[str, Any]:
    """Gemma 4 31B's drafter, with the sizes that MAX takes where its config says nothing."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262144,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    } | changes
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 5376,
        "tie_word_embeddings": True,
        "text_config": text,
    }
