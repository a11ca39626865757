"""Gemma 4's configuration, from the Hugging Face config and MAX's pipeline config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from max.dtype import DType
from max.pipelines.architectures.gemma4.model_config import Gemma4VisionConfig
from max.pipelines.lib.interfaces.arch_config import ArchConfigWithVisionCache
from typing_extensions import override

from attnquant.errors import UnsupportedError
from attnquant.nn.config import (
    DecoderConfig,
    Rope,
    refuse_fields,
    refuse_rope_type,
    text_config,
)
from attnquant.nn.decoder import EMBEDDINGS_DTYPE

# The 12B line's vision embedder is another one, which MAX has not: it is served as text.
_UNIFIED = "gemma4_unified"


@dataclass(kw_only=True)
class Gemma4Config(DecoderConfig, ArchConfigWithVisionCache):
    """What the Gemma 4 graphs are built from.

    Attributes:
        vision: the vision tower's configuration, or None where the checkpoint is served as text.
    """

    normalizes_values: ClassVar[bool] = True

    vision: Gemma4VisionConfig | None

    @override
    @classmethod
    def check(cls, huggingface_config: Any) -> None:
        text = text_config(huggingface_config)
        refuse_fields(text, ("attention_bias",), "Gemma 4")
        if text.use_bidirectional_attention == "all":
            raise UnsupportedError(
                "config.json: use_bidirectional_attention is 'all', an encoder's attention; "
                "attnquant serves decoders"
            )
        ropes = text.rope_parameters
        refuse_rope_type("sliding_attention", ropes["sliding_attention"], "default")
        refuse_rope_type("full_attention", ropes["full_attention"], "proportional")
        if (vision := vision_config(huggingface_config)) is not None:
            refuse_fields(vision, ("use_clipped_linears",), "served Gemma 4")

    @override
    @classmethod
    def own_fields(cls, huggingface_config: Any) -> dict[str, Any]:
        ropes = text_config(huggingface_config).rope_parameters
        vision = vision_config(huggingface_config)
        return {
            # Queries and keys are normalised per head, and their norms' weights hold the scale.
            "attention_scale": 1.0,
            "ropes": {
                kind: Rope(
                    theta=rope["rope_theta"],
                    factor=rope.get("factor", 1.0),
                    rotated=rope.get("partial_rotary_factor", 1.0),
                )
                for kind, rope in ropes.items()
            },
            "vision": (
                None if vision is None else Gemma4VisionConfig.initialize_from_config(vision)
            ),
        }

    @override
    @classmethod
    def estimate_vision_cache_entry_bytes(cls, huggingface_config: Any) -> int:
        """Bytes of the largest image's embeddings in MAX's cache of them; 0 without a tower."""
        vision = vision_config(huggingface_config)
        row = cls.get_vision_cache_row_spec(huggingface_config)
        if vision is None or row is None:
            return 0
        hidden, dtype = row
        soft_tokens = vision.position_embedding_size // vision.pooling_kernel_size**2
        return int(soft_tokens * hidden * dtype.size_in_bytes)

    @override
    @classmethod
    def get_vision_cache_row_spec(cls, huggingface_config: Any) -> tuple[int, DType] | None:
        """Width and dtype of one soft token's embedding; None without a tower."""
        if vision_config(huggingface_config) is None:
            return None
        return text_config(huggingface_config).hidden_size, EMBEDDINGS_DTYPE


def vision_config(huggingface_config: Any) -> Any | None:
    """The vision tower's config, or None where a checkpoint has none that is served."""
    if getattr(huggingface_config, "model_type", None) == _UNIFIED:
        return None
    return getattr(huggingface_config, "vision_config", None)
