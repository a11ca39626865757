"""The Gemma 4 graphs: what sets the decoder apart from the one that `attnquant.nn` wires, and MAX's
own vision tower.

The tower is MAX's `Gemma4VisionModel`. Its attention is a GPU kernel; on a CPU the same attention
is written out here, in plain operations over all pairs of patches, which is what a few images need.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module
from max.nn.linear import Linear
from max.pipelines.architectures.gemma4.layers.rotary_embedding import apply_multidimensional_rope
from max.pipelines.architectures.gemma4.vision_model.attention import Gemma4VisionAttention
from max.pipelines.architectures.gemma4.vision_model.vision_model import Gemma4VisionModel

from attnquant.gemma4.model_config import Gemma4Config
from attnquant.nn import RaggedDecoder, build_decoder
from attnquant.nn.decoder import EMBEDDINGS_DTYPE
from attnquant.nn.tensors import State


def build_gemma4(config: Gemma4Config, weights: State) -> RaggedDecoder:
    """Builds the decoder; see `build_decoder`. It takes embeddings with or without a tower, so that
    text-only checkpoints share its graph and its buffer ABI."""
    return build_decoder(config, weights, takes_embeddings=True)


class VisionTower(Gemma4VisionModel):
    """MAX's vision tower on one device: patches of images to embeddings of their soft tokens.

    Args:
        config: of a checkpoint that has a vision tower.
    """

    def __init__(self, config: Gemma4Config) -> None:
        (device,) = config.devices
        # What MAX's classes read of a configuration.
        tower = SimpleNamespace(
            devices=config.devices,
            unquantized_dtype=config.dtype,
            vision_config=config.vision,
            text_config=SimpleNamespace(hidden_size=config.shapes.hidden),
        )
        super().__init__(tower, device)
        if device.is_cpu():
            for index, layer in enumerate(self.encoder.layers):
                layer.self_attn = HostVisionAttention(tower, index, device)

    def __call__(
        self,
        patches_flat: Sequence[TensorValue],
        pixel_position_ids: Sequence[TensorValue],
        cu_seqlens: Sequence[TensorValue],
        pool_gather_index: Sequence[TensorValue],
        max_seq_len: TensorValue,
    ) -> list[TensorValue]:
        """As MAX's, in the dtype that the decoder's graph takes."""
        embeddings = super().__call__(
            patches_flat, pixel_position_ids, cu_seqlens, pool_gather_index, max_seq_len
        )
        return [ops.cast(rows, EMBEDDINGS_DTYPE) for rows in embeddings]


class HostVisionAttention(Gemma4VisionAttention):
    """The tower's attention for a CPU: every patch attends to all patches of its own image."""

    def __call__(
        self,
        hidden_states: TensorValue,
        freqs_cis: TensorValue,
        cu_seqlens: TensorValue,
        max_seq_len: TensorValue,
    ) -> TensorValue:
        """Maps `[patches, hidden]` to `[patches, hidden]`.

        Args:
            hidden_states: the images' patches, image after image.
            freqs_cis: `[patches, head_dim / 2, 2]`, the cosine and sine of each patch's angles.
            cu_seqlens: uint32 `[images + 1]`, where each image begins.
            max_seq_len: not needed here.
        """
        patches, head_dim = hidden_states.shape[0], self.head_dim
        kv_heads = self.num_key_value_heads
        group = self.num_attention_heads // kv_heads
        freqs = ops.reshape(freqs_cis, [patches, 1, head_dim // 2, 2])

        def heads(projection: Linear, norm: Module, count: int) -> TensorValue:
            return norm(ops.reshape(projection(hidden_states), [patches, count, head_dim]))

        q = apply_multidimensional_rope(
            heads(self.q_proj, self.q_norm, kv_heads * group), freqs, ndim=2
        )
        k = apply_multidimensional_rope(heads(self.k_proj, self.k_norm, kv_heads), freqs, ndim=2)
        v = heads(self.v_proj, self.v_norm, kv_heads)
        # Heads first; the query heads that share keys and values lie side by side.
        q = ops.permute(ops.reshape(q, [patches, kv_heads, group, head_dim]), [1, 2, 0, 3])
        k = ops.unsqueeze(ops.permute(k, [1, 2, 0]), 1)
        v = ops.unsqueeze(ops.permute(v, [1, 0, 2]), 1)
        scores = q @ k + _same_image(cu_seqlens, hidden_states)
        # A softmax in its parts: MAX's compiler would take the whole for an attention kernel that
        # it has for another layout only.
        weights = ops.exp(scores - ops.max(scores, axis=-1))
        attended = ops.permute((weights @ v) / ops.sum(weights, axis=-1), [2, 0, 1, 3])
        return self.o_proj(ops.reshape(attended, [patches, kv_heads * group * head_dim]))


def _same_image(boundaries: TensorValue, patches: TensorValue) -> TensorValue:
    """`[patches, patches]`: 0 where two patches are of one image, and minus infinity elsewhere."""
    count, device = patches.shape[0], patches.device
    positions = ops.range(0, count, 1, out_dim=count, dtype=DType.int64, device=device)
    ends = ops.cast(boundaries[1:], DType.int64)
    begun = ops.unsqueeze(positions, 1) >= ops.unsqueeze(ends, 0)
    image = ops.sum(ops.cast(begun, DType.int32), axis=1)
    return ops.where(
        ops.equal(image, ops.transpose(image, 0, 1)),
        ops.constant(0.0, patches.dtype, device=device),
        ops.constant(-np.inf, patches.dtype, device=device),
    )
