"""Grouped-query attention with per-head norms, rotary embedding and MAX's paged KV cache."""

from __future__ import annotations

from max.graph import TensorValue, ops
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_ragged, rope_split_store_ragged
from max.nn.kv_cache import KVCacheParams, PagedCacheValues
from max.nn.layer import Module
from max.nn.norm import RMSNorm

from attnquant.nn.projection import GroupProjection


class Attention(Module):
    """Self-attention of one layer: fused q+k+v, q and k norms, rope, attention, o.

    Args:
        qkv_proj: the fused projection; its parts are q, k and v.
        o_proj: the output projection.
        q_norm: norm over one query head's `head_dim` elements.
        k_norm: norm over one key head's `head_dim` elements.
        kv_params: the cache that this layer's keys and values live in.
        scale: factor on the attention scores.
        window: sliding window in tokens, the current one included; None attends to everything.
    """

    def __init__(
        self,
        *,
        qkv_proj: GroupProjection,
        o_proj: GroupProjection,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        kv_params: KVCacheParams,
        scale: float,
        window: int | None,
    ) -> None:
        super().__init__()
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.kv_params = kv_params
        self.scale = scale
        self.window = window

    def __call__(
        self,
        x: TensorValue,
        kv: PagedCacheValues,
        row_offsets: TensorValue,
        freqs_cis: TensorValue,
        cache_layer: TensorValue,
    ) -> TensorValue:
        """Attends over the cache and the new tokens, which it stores.

        Args:
            x: `[tokens, hidden]`, the batch's new tokens, sequence after sequence.
            kv: the cache that `kv_params` describes.
            row_offsets: uint32 `[batch + 1]`, where each sequence begins in `x`.
            freqs_cis: `[positions, head_dim]`, the layer's rotary table (`rotary_table`).
            cache_layer: uint32 scalar on the host, this layer's index within its cache.

        Returns:
            `[tokens, hidden]`.
        """
        head_dim = self.kv_params.head_dim
        rows = self.qkv_proj.rows
        q, k, v = ops.split(self.qkv_proj(x), rows, axis=-1)
        q = _per_head(self.q_norm, q, head_dim)
        k = _per_head(self.k_norm, k, head_dim)

        heads = rows[0] // head_dim
        q = rope_split_store_ragged(
            self.kv_params,
            ops.concat((q, k, v), axis=-1),
            row_offsets,
            freqs_cis,
            kv,
            cache_layer,
            n_heads=heads,
            interleaved=False,
        )
        attended = flash_attention_ragged(
            self.kv_params,
            input=q.reshape((-1, heads, head_dim)),
            kv_collection=kv,
            layer_idx=cache_layer,
            input_row_offsets=row_offsets,
            mask_variant=(
                MHAMaskVariant.CAUSAL_MASK
                if self.window is None
                else MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
            ),
            scale=self.scale,
            local_window_size=-1 if self.window is None else self.window,
        )
        return self.o_proj(attended.reshape((-1, rows[0])))


def _per_head(norm: RMSNorm, x: TensorValue, head_dim: int) -> TensorValue:
    width = int(x.shape[-1])
    return norm(x.reshape((-1, width // head_dim, head_dim))).reshape((-1, width))
