"""Tiny Qwen3 checkpoints: as Gemma 3's, with Qwen3's fields, norms and names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny import tokenizer
from tests.tiny.checkpoint import TinyCheckpoint


@dataclass(frozen=True, kw_only=True)
class TinyQwen3(TinyCheckpoint):
    """One tiny Qwen3: every layer attends to everything."""

    head_dim: int = 128
    pattern: int = 1

    def config(self) -> dict[str, Any]:
        """config.json, as transformers 5 writes it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": tokenizer.BOS,
            "dtype": self.dtype,
            "eos_token_id": tokenizer.EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_types": self.layer_types,
            "max_position_embeddings": 2048,
            "max_window_layers": self.layers,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": tokenizer.PAD,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.12.1",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every tensor of the checkpoint by name."""
        return self.text_values()


CASES = {
    case.name: case
    for case in (
        TinyQwen3(
            name="qwen3",
            layers=3,
            hidden=128,
            intermediate=256,
            heads=4,
            kv_heads=2,
            vocab=640,
        ),
        TinyQwen3(
            name="qwen3-untied",
            seed=1,
            layers=2,
            hidden=144,
            intermediate=320,
            heads=2,
            kv_heads=2,
            vocab=512,
            rope_theta=10_000.0,
            tied=False,
            dtype="float32",
        ),
    )
}
