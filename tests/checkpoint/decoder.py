"""A decoder small enough for tests of files: Gemma 3, or Gemma 4 with its towers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LAYERS, HIDDEN, INNER, HEADS, HEAD_DIM = 2, 32, 48, 2, 16
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "vocab_size": 40,
    "sliding_window": 128,
}
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        **CONFIG,
        "architectures": None,
        "model_type": "gemma4_text",
        "global_head_dim": HEAD_DIM,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def weights(prefix: str = "model.", *, gemma4: bool = False) -> dict[str, NDArray[Any]]:
    """Gaussian weights in bfloat16, always the same."""
    generator = np.random.default_rng(5)

    def make(*shape: int, sigma: float = 1.0) -> NDArray[Any]:
        return (generator.standard_normal(shape) * sigma).astype(ml_dtypes.bfloat16)

    tensors = {f"{prefix}embed_tokens.weight": make(40, HIDDEN)}
    for layer in range(LAYERS):
        module = f"{prefix}layers.{layer}."
        for index, (name, shape) in enumerate(SHAPES.items()):
            tensors[f"{module}{name}.weight"] = make(*shape, sigma=0.1 ** (index % 3))
        tensors |= {f"{module}{name}_layernorm.weight": make(HIDDEN) for name in NORMS}
        tensors |= {f"{module}self_attn.{name}_norm.weight": make(HEAD_DIM) for name in "qk"}
        if gemma4:
            tensors[f"{module}layer_scalar"] = make(1)
    return tensors | {f"{prefix}norm.weight": make(HIDDEN)}
