"""What config.json says about the vision tower beside a Gemma 4 decoder: its weights and its work.

The tower is MAX's own. It is a transformer over patches of pixels, full attention in every layer,
whose output is pooled, `pooling_kernel_size²` patches to a soft token, and projected to the
decoder's width. Field names and defaults are those of transformers' `Gemma4VisionConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any

from attnquant.decoder_shapes import MOST_LAYERS, ConfigFields, text_config
from attnquant.errors import CheckpointError

# Gemma 4's text-only line has a `vision_config` of another kind, whose weights are not loaded.
_TOWER_OF = "Gemma4ForConditionalGeneration"

# The most soft tokens that MAX's image processor makes of one image, whatever its settings.
MOST_SOFT_TOKENS = 1120

_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class VisionShapes:
    """A vision tower's sizes.

    Attributes:
        layers: of the encoder.
        hidden: width of its residual stream.
        inner: width of its feed-forward blocks.
        queries: rows of `q_proj`.
        keys: rows of `k_proj`, and of `v_proj`.
        head_dim: size of a head.
        pixels: values of one patch.
        positions: rows of the two position tables.
        pooled: patches that become one soft token.
        standardized: soft tokens are shifted and scaled by stored vectors.
        text_hidden: width of the decoder.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    head_dim: int
    pixels: int
    positions: int
    pooled: int
    standardized: bool
    text_hidden: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VisionShapes | None:
        """Reads config.json's `vision_config`; None where no tower is loaded.

        Raises:
            CheckpointError: a field is impossible; names it.
        """
        values = config.get("vision_config")
        if values is None or _TOWER_OF not in (config.get("architectures") or ()):
            return None
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"config.json: vision_config is {repr(values)}, expected an object"
            )
        vision = ConfigFields(values, "vision_config.")
        if (layers := vision.positive("num_hidden_layers", 16)) > MOST_LAYERS:
            raise CheckpointError(
                f"config.json: vision_config.num_hidden_layers is {layers}, expected at most "
                f"{MOST_LAYERS}"
            )
        head_dim = vision.positive("head_dim", 64)
        return cls(
            layers=layers,
            hidden=vision.positive("hidden_size", 768),
            inner=vision.positive("intermediate_size", 3072),
            queries=vision.positive("num_attention_heads", 12) * head_dim,
            keys=vision.positive("num_key_value_heads", 12) * head_dim,
            head_dim=head_dim,
            pixels=_CHANNELS * vision.positive("patch_size", 16) ** 2,
            positions=vision.positive("position_embedding_size", 10 * 1024),
            pooled=vision.positive("pooling_kernel_size", 3) ** 2,
            standardized=bool(vision.get("standardize", False)),
            text_hidden=ConfigFields(text_config(config)).positive("hidden_size"),
        )

    @property
    def fused_weights(self) -> int:
        """Weights of q, k and v, and of gate and up, of all layers: MAX's tower stacks them."""
        rows = self.queries + 2 * self.keys + 2 * self.inner
        return self.layers * rows * self.hidden

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the tower, by its name in the checkpoint below its prefix.

        A linear layer that could clip its input wraps the one with the weight; the `linear.` that
        this puts into names is left out here.
        """
        tower = "vision_tower."
        shapes: dict[str, tuple[int, ...]] = {
            f"{tower}patch_embedder.position_embedding_table": (2, self.positions, self.hidden),
            f"{tower}patch_embedder.input_proj.weight": (self.hidden, self.pixels),
            "embed_vision.embedding_projection.weight": (self.text_hidden, self.hidden),
        }
        if self.standardized:
            shapes |= {f"{tower}std_{name}": (self.hidden,) for name in ("bias", "scale")}
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (self.queries, self.hidden),
            "self_attn.k_proj": (self.keys, self.hidden),
            "self_attn.v_proj": (self.keys, self.hidden),
            "self_attn.o_proj": (self.hidden, self.queries),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "pre_feedforward_layernorm": (self.hidden,),
            "post_feedforward_layernorm": (self.hidden,),
        }
        for index in range(self.layers):
            prefix = f"{tower}encoder.layers.{index}."
            shapes |= {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
        return shapes

    @property
    def weights(self) -> int:
        """All stored values: encoder, patch embedding, position tables, projection to the text."""
        # o_proj and down_proj; four norms of a layer, and its q and k norms.
        others = (self.queries + self.inner) * self.hidden + 4 * self.hidden + 2 * self.head_dim
        embedding = (self.pixels + 2 * self.positions) * self.hidden
        standard = 2 * self.hidden if self.standardized else 0
        projection = self.hidden * self.text_hidden
        return self.fused_weights + self.layers * others + embedding + standard + projection

    @property
    def patch_values(self) -> int:
        """The most values that are alive at once for one patch.

        Its pixels, and the largest of: attention (residual, q+k+v, all three after their norms, q
        and k after rope); feed-forward (residual, gate and up, their product); pooling, which
        holds the hidden state beside three float32 copies of it, each worth two values.
        """
        attention = self.hidden + 3 * self.queries + 5 * self.keys
        feed_forward = self.hidden + 3 * self.inner
        pooling = 7 * self.hidden
        return self.pixels + max(attention, feed_forward, pooling)

    def patches(self, tokens: int) -> int:
        """The most patches that a step of so many input tokens encodes.

        A soft token is an input token, and an image that reaches over an end of the step is
        encoded whole: two images more.
        """
        return (tokens + 2 * MOST_SOFT_TOKENS) * self.pooled
