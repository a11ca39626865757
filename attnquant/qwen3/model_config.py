"""Qwen3's configuration, from the Hugging Face config and MAX's pipeline config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from attnquant.nn.config import DecoderConfig, Rope, refuse_fields, refuse_rope_type


@dataclass(kw_only=True)
class Qwen3Config(DecoderConfig):
    """What the Qwen3 graph is built from."""

    scales_embeddings: ClassVar[bool] = False

    @override
    @classmethod
    def check(cls, huggingface_config: Any) -> None:
        refuse_fields(huggingface_config, ("attention_bias", "use_sliding_window"), "Qwen3")
        refuse_rope_type("full_attention", huggingface_config.rope_parameters, "default")

    @override
    @classmethod
    def own_fields(cls, huggingface_config: Any) -> dict[str, Any]:
        theta = huggingface_config.rope_parameters["rope_theta"]
        return {
            "attention_scale": huggingface_config.head_dim**-0.5,
            "ropes": {"full_attention": Rope(theta=theta)},
        }
