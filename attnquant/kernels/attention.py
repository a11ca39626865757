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


def cpu_attention(
    projected: TensorValue,
    kv_params: KVCacheParams,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    freqs_cis: TensorValue,
    cache_layer: TensorValue,
    *,
    heads: int,
    norms: HeadNorms,
    scale: float,
    window: int | None,
) -> TensorValue:
    """Norms per head, rotation, the cache's update, and attention in one operation.

    Unlike MAX's CPU attention, it reads no key that no query may see: keys behind a sliding window,
    or after a query.

    Args:
        projected: float32 `[tokens, (heads + 2 kv_heads) * head_dim]`, queries, keys and values, or
            without values: then they are the keys, before their norm and rotation.
        kv_params: of the cache.
        kv: the cache, float32.
        row_offsets: uint32 `[batch + 1]`, where each sequence begins among the tokens.
        freqs_cis: float32 `[positions, head_dim]` (`rotary_table`).
        cache_layer: uint32 scalar on the host, the layer's index within its cache.
        heads: query heads.
        norms: of the heads.
        scale: factor on the attention scores.
        window: the keys that a query sees at most, its own included; None is all before it.

    Returns:
        float32 `[tokens, heads * head_dim]`.

    Raises:
        ValueError: the shapes or dtypes do not belong together, or it is not the CPU.
    """
    head_dim, kv_heads = kv_params.head_dim, kv_params.n_kv_heads
    width = int(projected.shape[-1])
    parts = {(heads + 2 * kv_heads) * head_dim: True, (heads + kv_heads) * head_dim: False}
    dtypes = {projected.dtype, kv.kv_blocks.dtype, freqs_cis.dtype}
    if (
        width not in parts
        or heads % kv_heads
        or head_dim % HEAD_MULTIPLE
        or dtypes != {DType.float32}
        or not projected.device.is_cpu()
    ):
        raise ValueError(
            f"found {heads} heads over {kv_heads} of {head_dim}, projected {projected.shape} on "
            f"{projected.device}, dtypes {dtypes}; expected float32 on the CPU, a width of one of "
            f"{list(parts)}, a head's size a multiple of {HEAD_MULTIPLE}"
        )
    numbers = [scale, norms.eps, norms.value_eps or 0.0, norms.gain_offset]
    (seen,) = F.inplace_custom(
        "attnquant_attention",
        device=projected.device,
        values=[
            kv.kv_blocks,
            projected,
            row_offsets,
            kv.cache_lengths,
            kv.lookup_table,
            kv.page_stride,
            freqs_cis,
            norms.query_gain,
            norms.key_gain,
            ops.constant(numbers, DType.float32, device=DeviceRef.CPU()),
            cache_layer,
        ],
        out_types=[
            TensorType(DType.float32, (projected.shape[0], heads * head_dim), projected.device)
        ],
        parameters={
            "head_dim": head_dim,
            "kv_heads": kv_heads,
            "has_values": int(parts[width]),
            "norms_values": int(norms.value_eps is not None),
            "window": window or 0,
        },
        custom_extensions=extensions(),
    )
    return TensorValue(seen)
