"""Gemma 3's configuration, from the Hugging Face config and MAX's pipeline config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from attnquant.nn.config import DecoderConfig, Rope, refuse_fields, refuse_rope_type


@dataclass(kw_only=True)
class Gemma3Config(DecoderConfig):
    """What the Gemma 3 graph is built from."""

    # Gemma 3 stores norm weights less one.
    norm_offset: ClassVar[float] = 1.0

    @override
    @classmethod
    def check(cls, huggingface_config: Any) -> None:
        refuse_fields(
            huggingface_config,
            ("attention_bias", "attn_logit_softcapping", "use_bidirectional_attention"),
            "Gemma 3",
        )
        for kind, rope in huggingface_config.rope_parameters.items():
            refuse_rope_type(kind, rope, "default", "linear")

    @override
    @classmethod
    def own_fields(cls, huggingface_config: Any) -> dict[str, Any]:
        return {
            "attention_scale": huggingface_config.query_pre_attn_scalar**-0.5,
            "ropes": {
                kind: Rope(theta=rope["rope_theta"], factor=rope.get("factor", 1.0))
                for kind, rope in huggingface_config.rope_parameters.items()
            },
        }
