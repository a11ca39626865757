"""Tiny Gemma 3 checkpoints: the real file format, and weights that forgive no mistake.

A mistake that trained weights or plain Gaussians would hide must change the logits here. So q, k
and v differ in magnitude (1, 0.1, 0.3), rows differ by up to 4, norm gains 1 + w lie in 0.3..3, and
attention is uneven without being saturated. Post-norm gains lie in 1..10, so that the layers and
not the last token's tied embedding decide what comes next. Weights depend on the case's name and
seed and on the tensor's name and shape only: `dataclasses.replace` makes the same weights under
another config. Nothing here imports torch, transformers or attnquant.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.tiny import tokenizer
from tests.tiny.checkpoint import TinyCheckpoint


@dataclass(frozen=True, kw_only=True)
class TinyGemma3(TinyCheckpoint):
    """One tiny Gemma 3: dimensions beside the heads' are multiples of 16, as NVFP4 wants it."""

    query_pre_attn_scalar: int = 256
    rope_linear_factor: float | None = None
    config_style: Literal["nested", "flat"] = "nested"
    final_logit_softcapping: float | None = None
    max_position_embeddings: int = 2048

    def config(self) -> dict[str, Any]:
        """config.json: "flat" as transformers 4.50 wrote it, "nested" as transformers 5 does."""
        common: dict[str, Any] = {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": tokenizer.BOS,
            "eos_token_id": [tokenizer.EOS, tokenizer.END_OF_TURN],
            "final_logit_softcapping": self.final_logit_softcapping,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "gemma3_text",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": tokenizer.PAD,
            "query_pre_attn_scalar": self.query_pre_attn_scalar,
            "rms_norm_eps": self.rms_norm_eps,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "vocab_size": self.vocab,
        }
        linear = {"rope_type": "linear", "factor": self.rope_linear_factor}
        scaling = None if self.rope_linear_factor is None else linear
        if self.config_style == "flat":
            return common | {
                "cache_implementation": "hybrid",
                "rope_local_base_freq": self.rope_local_theta,
                "rope_scaling": scaling,
                "rope_theta": self.rope_theta,
                "sliding_window_pattern": self.pattern,
                "torch_dtype": self.dtype,
                "transformers_version": "4.50.0",
            }
        full = {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})}
        sliding = {"rope_theta": self.rope_local_theta, "rope_type": "default"}
        return common | {
            "_sliding_window_pattern": self.pattern,
            "dtype": self.dtype,
            "layer_types": self.layer_types,
            "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
            "sliding_window_pattern": self.pattern,
            "transformers_version": "5.12.1",
            "use_bidirectional_attention": False,
        }

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every tensor of the checkpoint by name; a norm multiplies by one more than its weight."""
        norms = {
            "pre_feedforward_layernorm": self.hidden,
            "post_feedforward_layernorm": self.hidden,
        }
        return self.text_values(norms, offset=1.0)


_PATTERN2 = TinyGemma3(
    name="pattern2-scalar",
    layers=4,
    hidden=128,
    intermediate=256,
    heads=2,
    kv_heads=1,
    pattern=2,
    vocab=640,
    query_pre_attn_scalar=144,
    rope_theta=500_000.0,
    rope_local_theta=20_000.0,
)

CASES = {
    case.name: case
    for case in (
        _PATTERN2,
        # The same graph, since rotary tables are bound like weights, from an old config.
        dataclasses.replace(
            _PATTERN2,
            name="linear-rope-old-config",
            seed=3,
            rope_theta=1_000_000.0,
            rope_local_theta=10_000.0,
            rope_linear_factor=8.0,
            config_style="flat",
        ),
        TinyGemma3(
            name="pattern6-mha",
            layers=7,
            hidden=192,
            intermediate=384,
            heads=4,
            kv_heads=2,
            pattern=6,
            vocab=512,
        ),
        TinyGemma3(
            name="untied-sharded",
            seed=1,
            layers=2,
            hidden=144,
            intermediate=320,
            heads=2,
            kv_heads=2,
            pattern=2,
            vocab=768,
            dtype="float32",
            tied=False,
            shards=3,
            final_logit_softcapping=15.0,
        ),
    )
}
