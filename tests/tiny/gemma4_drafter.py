"""A tiny drafter beside a tiny Gemma 4: the real file format, for the target of its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny.checkpoint import MAGNITUDE, TinyCheckpoint
from tests.tiny.gemma4 import CASES, TinyGemma4


@dataclass(frozen=True, kw_only=True)
class TinyDrafter(TinyCheckpoint):
    """One tiny drafter. Its layers have queries only, as many heads as it likes."""

    target: TinyGemma4
    scalars: tuple[float, ...]

    @property
    def layer_types(self) -> list[str]:
        """Sliding layers, then one that attends to everything, as Gemma 4's drafters have them."""
        return ["sliding_attention"] * (self.layers - 1) + ["full_attention"]

    def config(self) -> dict[str, Any]:
        """config.json, as transformers 5 writes it."""
        text = self.target.config()["text_config"] | {
            "dtype": self.dtype,
            "final_logit_softcapping": None,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "layer_types": self.layer_types,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_kv_shared_layers": self.layers,
            "tie_word_embeddings": self.tied,
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 0,
        }
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "backbone_hidden_size": self.target.hidden,
            "dtype": self.dtype,
            "model_type": "gemma4_assistant",
            "text_config": text,
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.12.1",
            "use_ordered_embeddings": False,
        }

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every tensor of the checkpoint by name."""
        hidden, inner, backbone = self.hidden, self.intermediate, self.target.hidden
        values = {
            "model.embed_tokens.weight": self.table("embed_tokens", hidden),
            "model.norm.weight": 4 * self.gain("norm.weight", hidden),
            "pre_projection.weight": self.projection("pre", (hidden, 2 * backbone), 1.0),
            "post_projection.weight": self.projection("post", (backbone, hidden), 1.0),
        }
        if not self.tied:
            values["lm_head.weight"] = self.table("lm_head", hidden)
        for layer, kind in enumerate(self.layer_types):
            full = kind == "full_attention"
            head_dim = self.target.global_head_dim if full else self.target.head_dim
            prefix = f"model.layers.{layer}."
            shapes = {
                "self_attn.q_proj": (self.heads * head_dim, hidden),
                "self_attn.o_proj": (hidden, self.heads * head_dim),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            for module, shape in shapes.items():
                name = f"{prefix}{module}"
                magnitude = MAGNITUDE[module.split(".")[1]]
                values[f"{name}.weight"] = self.projection(name, shape, magnitude)
            for norm in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ):
                name = f"{prefix}{norm}.weight"
                values[name] = self.gain(name, hidden)
            name = f"{prefix}self_attn.q_norm.weight"
            values[name] = 0.25 * self.gain(name, head_dim)
            values[f"{prefix}layer_scalar"] = np.array([self.scalars[layer]])
        return values


_TARGET = CASES["gemma4-shared-values"]

DRAFTERS = {
    _TARGET.name: TinyDrafter(
        name="gemma4-drafter",
        target=_TARGET,
        vocab=_TARGET.vocab,
        layers=3,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=_TARGET.kv_heads,
        pattern=3,
        scalars=(0.4, 0.8, 0.6),
        dtype=_TARGET.dtype,
    )
}
"""By the names of their targets."""
