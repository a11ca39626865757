"""Graph operation: attention on a CPU, from a fused projection to what its queries see."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.experimental import functional as F
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.nn.kv_cache import KVCacheParams, PagedCacheValues

from attnquant.kernels import extensions

HEAD_MULTIPLE = 16
"""What the kernel asks of a head's size."""


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """Root mean square norms over single heads.

    Attributes:
        query_gain: float32 `[head_dim]`.
        key_gain: float32 `[head_dim]`.
        gain_offset: added to both gains.
        eps: added to the mean square of a query's or a key's head.
        value_eps: added to that of a value's; None leaves values as they are.
    """

    query_gain: TensorValue
    key_gain: TensorValue
    gain_offset: float
    eps: float
    value_eps: float | None


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What attention reads besides its projection, and what it is.

    Attributes:
        kv_params: of the cache.
        kv: the cache, float32.
        row_offsets: uint32 `[batch + 1]`, where each sequence begins among the tokens.
        freqs_cis: float32 `[positions, head_dim]` (`rotary_table`).
        cache_layer: uint32 scalar on the host, the layer's index within its cache.
        norms: of the heads.
        scale: factor on the attention scores.
        window: the keys that a query sees at most, its own included; None is all before it.
    """

    kv_params: KVCacheParams
    kv: PagedCacheValues
    row_offsets: TensorValue
    freqs_cis: TensorValue
    cache_layer: TensorValue
    norms: HeadNorms
    scale: float
    window: int | None

    def has_values(self, heads: int, width: int) -> bool:
        """Whether a projection of a width has values, or they are its keys.

        Raises:
            ValueError: its width belongs to neither, or the kernel cannot take these heads.
        """
        head_dim, kv_heads = self.kv_params.head_dim, self.kv_params.n_kv_heads
        parts = {(heads + 2 * kv_heads) * head_dim: True, (heads + kv_heads) * head_dim: False}
        dtypes = {self.kv.kv_blocks.dtype, self.freqs_cis.dtype}
        on_cpu = self.freqs_cis.device.is_cpu()
        if (
            width not in parts
            or heads % kv_heads
            or head_dim % HEAD_MULTIPLE
            or dtypes != {DType.float32}
            or not on_cpu
        ):
            raise ValueError(
                f"found {heads} heads over {kv_heads} of {head_dim}, a projection of {width} on "
                f"{self.freqs_cis.device}, dtypes {dtypes}; expected float32 on the CPU, a width "
                f"of one of {list(parts)}, a head's size a multiple of {HEAD_MULTIPLE}"
            )
        return parts[width]

    def operands(self, x: TensorValue) -> list[TensorValue]:
        """In the order of the Mojo operations, with what attention or the layer starts from."""
        norms = self.norms
        numbers = [self.scale, norms.eps, norms.value_eps or 0.0, norms.gain_offset]
        return [
            self.kv.kv_blocks,
            x,
            self.row_offsets,
            self.kv.cache_lengths,
            self.kv.lookup_table,
            self.kv.page_stride,
            self.freqs_cis,
            norms.query_gain,
            norms.key_gain,
            ops.constant(numbers, DType.float32, device=DeviceRef.CPU()),
            self.cache_layer,
        ]

    def parameters(self, heads: int, width: int) -> dict[str, int]:
        """The Mojo operations' own, by name; raises as `has_values`."""
        return {
            "head_dim": self.kv_params.head_dim,
            "kv_heads": self.kv_params.n_kv_heads,
            "has_values": int(self.has_values(heads, width)),
            "norms_values": int(self.norms.value_eps is not None),
            "window": self.window or 0,
        }


def cpu_attention(projected: TensorValue, inputs: AttentionInputs, heads: int) -> TensorValue:
    """Norms per head, rotation, the cache's update, and attention in one operation.

    Unlike MAX's CPU attention, it reads no key that no query may see: keys behind a sliding window,
    or after a query.

    Args:
        projected: float32 `[tokens, (heads + 2 kv_heads) * head_dim]`, queries, keys and values, or
            without values: then they are the keys, before their norm and rotation.
        inputs: what else it reads.
        heads: query heads.

    Returns:
        float32 `[tokens, heads * head_dim]`.

    Raises:
        ValueError: the shapes or dtypes do not belong together, or it is not the CPU.
    """
    seen = heads * inputs.kv_params.head_dim
    (result,) = F.inplace_custom(
        "attnquant_attention",
        device=projected.device,
        values=inputs.operands(projected),
        out_types=[TensorType(DType.float32, (projected.shape[0], seen), projected.device)],
        parameters=inputs.parameters(heads, int(projected.shape[-1])),
        custom_extensions=extensions(),
    )
    return TensorValue(result)
