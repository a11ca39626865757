"""A decoder layer: attention and a feed-forward block, each between norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.graph import TensorValue, Weight
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.nn.norm import RMSNorm

from attnquant.kernels.layer import LayerGains, PackedWeight, cpu_layer
from attnquant.nn.attention import Attention, QueryAttention
from attnquant.nn.mlp import GatedMLP
from attnquant.nn.projection import Projection
from attnquant.nn.theta import use_blocks


class DecoderLayer(Module):
    """`x + post(attention(pre(x)))`, then `x + post(mlp(pre(x)))`, then times `layer_scalar`.

    The attributes carry the names that the weights have in checkpoints. A layer without norms
    around the feed-forward block has none after attention either: what is called
    `post_attention_layernorm` there stands before the feed-forward block. `layer_scalar` is one
    number of the activations' dtype, `[1]`; None where a decoder has none.
    """

    def __init__(
        self,
        *,
        self_attn: Attention | QueryAttention,
        mlp: GatedMLP,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        pre_feedforward_layernorm: RMSNorm | None,
        post_feedforward_layernorm: RMSNorm | None,
        layer_scalar: Weight | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.post_feedforward_layernorm = post_feedforward_layernorm
        self.layer_scalar = layer_scalar

    def __call__(
        self,
        x: TensorValue,
        kv: PagedCacheValues,
        row_offsets: TensorValue,
        freqs_cis: TensorValue,
        cache_layer: TensorValue,
        blocks: Sequence[TensorValue] = (),
    ) -> TensorValue:
        """Maps `[tokens, hidden]` to `[tokens, hidden]`; see `Attention` for the others.

        `blocks` are the shared blocks of the layer's theta bundles, in `theta_projections`' order.
        """
        use_blocks(self, blocks)
        cache = (kv, row_offsets, freqs_cis, cache_layer)
        if x.device.is_cpu() and (packed := self._packed()) is not None:
            return self.in_one(x, packed, *cache)
        return self.in_parts(x, *cache)

    def in_parts(self, x: TensorValue, *cache: Any) -> TensorValue:
        """The layer, module by module; `cache` is what `Attention` takes behind `x`."""
        attended = self.self_attn(self.input_layernorm(x), *cache)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + attended
            x = x + self.mlp(self.post_attention_layernorm(x))
        else:
            x = x + self.post_attention_layernorm(attended)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x if self.layer_scalar is None else x * self.layer_scalar

    def in_one(self, x: TensorValue, packed: tuple[PackedWeight, ...], *cache: Any) -> TensorValue:
        """The same as one operation, on a CPU: `cpu_layer`."""
        assert isinstance(self.self_attn, Attention)
        after_attention, before_mlp = None, self.post_attention_layernorm
        if self.pre_feedforward_layernorm is not None:
            after_attention, before_mlp = before_mlp, self.pre_feedforward_layernorm
        norms = (self.input_layernorm, after_attention, before_mlp, self.post_feedforward_layernorm)
        return cpu_layer(
            x,
            self.self_attn.inputs(*cache),
            LayerGains(*(None if norm is None else norm.weight for norm in norms)),
            packed,
            self.mlp.activation,
            self.layer_scalar,
        )

    def _packed(self) -> tuple[PackedWeight, ...] | None:
        """The weights of all projections, where all are packed whole."""
        if not isinstance(self.self_attn, Attention):
            return None
        attention, mlp = self.self_attn, self.mlp
        projections = (attention.qkv, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        packed = [p.packed for p in projections if isinstance(p, Projection)]
        weights = tuple(weight for weight in packed if weight is not None)
        return weights if len(weights) == len(projections) else None
