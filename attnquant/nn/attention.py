"""Grouped-query attention with per-head norms, rotary embedding and MAX's paged KV cache.

On a GPU it is made of MAX's operations; on a CPU it is one of ours (`cpu_attention`), and the
others are its twin in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from max.graph import TensorValue, ops
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_ragged, rope_ragged, rope_split_store_ragged
from max.nn.kv_cache import KVCacheParams, PagedCacheValues
from max.nn.layer import Module
from max.nn.norm import RMSNorm

from attnquant.kernels.attention import AttentionInputs, HeadNorms, cpu_attention
from attnquant.nn.projection import GroupProjection


class Attention(Module):
    """Self-attention of one layer: fused q+k+v, per-head norms, rope, attention, o.

    Args:
        qkv_proj: the fused projection; its parts are q, k and v. With two parts, q and k, the
            values are what k's part gives, before its norm and rope.
        o_proj: the output projection.
        q_norm: norm over one query head's `head_dim` elements.
        k_norm: norm over one key head's `head_dim` elements.
        kv_params: the cache that this layer's keys and values live in.
        scale: factor on the attention scores.
        window: sliding window in tokens, the current one included; None attends to everything.
        value_eps: values are divided by their heads' root mean square, to whose square this is
            added; None leaves values as they are.
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
        value_eps: float | None = None,
    ) -> None:
        super().__init__()
        # An attribute's name is its weights' prefix, and so what `group_module` calls the group.
        self._rows = qkv_proj.rows
        self._group = "qkv_proj" if len(self._rows) == 3 else "qk_proj"
        setattr(self, self._group, qkv_proj)
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.kv_params = kv_params
        self.scale = scale
        self.window = window
        self.value_eps = value_eps

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
        inputs = self.inputs(kv, row_offsets, freqs_cis, cache_layer)
        see = self.see_on_cpu if x.device.is_cpu() else self.see
        return self.o_proj(see(self.qkv(x), inputs))

    @property
    def qkv(self) -> GroupProjection:
        """The fused projection, of queries and keys at least."""
        projection: GroupProjection = getattr(self, self._group)
        return projection

    def inputs(
        self,
        kv: PagedCacheValues,
        row_offsets: TensorValue,
        freqs_cis: TensorValue,
        cache_layer: TensorValue,
    ) -> AttentionInputs:
        """What attention reads besides its projection; for the arguments, see the call's."""
        return AttentionInputs(
            kv_params=self.kv_params,
            kv=kv,
            row_offsets=row_offsets,
            freqs_cis=freqs_cis,
            cache_layer=cache_layer,
            norms=HeadNorms(
                query_gain=self.q_norm.weight,
                key_gain=self.k_norm.weight,
                gain_offset=self.q_norm.weight_offset,
                eps=self.q_norm.eps,
                value_eps=self.value_eps,
            ),
            scale=self.scale,
            window=self.window,
        )

    def see_on_cpu(self, projected: TensorValue, inputs: AttentionInputs) -> TensorValue:
        """As `see`, in an operation of our own."""
        return cpu_attention(projected, inputs, self._rows[0] // self.kv_params.head_dim)

    def see(self, projected: TensorValue, inputs: AttentionInputs) -> TensorValue:
        """What queries see, `[tokens, heads * head_dim]`; `projected` is `[tokens, rows]`."""
        head_dim, rows = self.kv_params.head_dim, self._rows
        q, k, *values = ops.split(projected, rows, axis=-1)
        v = values[0] if values else k
        q = _per_head(self.q_norm, q, head_dim)
        k = _per_head(self.k_norm, k, head_dim)
        if self.value_eps is not None:
            v = _per_head(partial(unit_norm, eps=self.value_eps), v, head_dim)

        heads = rows[0] // head_dim
        q = rope_split_store_ragged(
            self.kv_params,
            ops.concat((q, k, v), axis=-1),
            inputs.row_offsets,
            inputs.freqs_cis,
            inputs.kv,
            inputs.cache_layer,
            n_heads=heads,
            interleaved=False,
        )
        return _attended(
            self.kv_params,
            q,
            inputs.kv,
            inputs.row_offsets,
            inputs.cache_layer,
            scale=self.scale,
            window=self.window,
        )


class QueryAttention(Module):
    """Attention of one layer over keys and values that another decoder's layer has stored.

    Args:
        q_proj: the queries' projection.
        o_proj: the output projection.
        q_norm: norm over one query head's `head_dim` elements.
        kv_params: the cache that the keys and values live in.
        scale: factor on the attention scores.
        window: as in `Attention`.
    """

    def __init__(
        self,
        *,
        q_proj: GroupProjection,
        o_proj: GroupProjection,
        q_norm: RMSNorm,
        kv_params: KVCacheParams,
        scale: float,
        window: int | None,
    ) -> None:
        super().__init__()
        self.q_proj = q_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
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
        """Attends over the cache, in which each row has its own key; stores nothing.

        A row stands for the token after its key's: it sees the keys up to its own, and its position
        is one more. For the arguments and the result, see `Attention`.
        """
        head_dim = self.kv_params.head_dim
        q = _per_head(self.q_norm, self.q_proj(x), head_dim)
        one = ops.constant(1, kv.cache_lengths.dtype, device=kv.cache_lengths.device)
        q = rope_ragged(
            q.reshape((-1, int(q.shape[-1]) // head_dim, head_dim)),
            row_offsets,
            kv.cache_lengths + one,
            freqs_cis,
            interleaved=False,
        )
        return self.o_proj(
            _attended(
                self.kv_params,
                q,
                kv,
                row_offsets,
                cache_layer,
                scale=self.scale,
                window=self.window,
            )
        )


def unit_norm(x: TensorValue, *, eps: float) -> TensorValue:
    """`x / sqrt(mean(x^2) + eps)` over the last dimension: a root mean square norm without gain."""
    one = ops.constant(1.0, x.dtype, device=x.device)
    return ops.rms_norm(
        x, ops.broadcast_to(one, (x.shape[-1],)), eps, weight_offset=0.0, multiply_before_cast=True
    )


def _attended(
    kv_params: KVCacheParams,
    q: TensorValue,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    cache_layer: TensorValue,
    *,
    scale: float,
    window: int | None,
) -> TensorValue:
    """What queries `[tokens, heads, head_dim]`, or flat, see: `[tokens, heads * head_dim]`."""
    q = q.reshape((-1, math.prod(map(int, q.shape[1:])) // kv_params.head_dim, kv_params.head_dim))
    attended = flash_attention_ragged(
        kv_params,
        input=q,
        kv_collection=kv,
        layer_idx=cache_layer,
        input_row_offsets=row_offsets,
        mask_variant=(
            MHAMaskVariant.CAUSAL_MASK
            if window is None
            else MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        ),
        scale=scale,
        local_window_size=-1 if window is None else window,
    )
    return attended.reshape((-1, int(q.shape[1]) * kv_params.head_dim))


def _per_head(
    norm: Callable[[TensorValue], TensorValue], x: TensorValue, head_dim: int
) -> TensorValue:
    width = int(x.shape[-1])
    return norm(x.reshape((-1, width // head_dim, head_dim))).reshape((-1, width))
