"""How many bytes of weights one decoded token reads: what decode speed is bounded by.

Every weight is read once. The embedding counts once, as the head that it is tied to (an untied
embedding is looked up one row at a time, which is nothing beside the head). Unquantized weights,
norms and layer scalars count as bfloat16, whatever the file stores. Caches and activations are not
weights and do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.format import packed_bytes
from attnquant.projections import BLOCK_OF_ROLE

BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes read for one decoded token, by part of the model.

    Attributes:
        attention: `q_proj k_proj v_proj o_proj` of all layers.
        mlp: `gate_proj up_proj down_proj` of all layers.
        head: the output head.
        norms: norm weights and layer scalars.
    """

    attention: int
    mlp: int
    head: int
    norms: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.attention + self.mlp + self.head + self.norms


def token_bytes(shapes: DecoderShapes, coverage: Coverage | None = None) -> TokenBytes:
    """Bytes that one decoded token reads under a coverage; all bfloat16 if None."""
    of_block = {"self_attn": 0, "mlp": 0}
    for key, (out, columns) in shapes.projections.items():
        packed = coverage is not None and coverage.is_quantized(key)
        size = packed_bytes(out, columns) if packed else BFLOAT16_BYTES * out * columns
        of_block[BLOCK_OF_ROLE[key.role]] += size
    dense_head = BFLOAT16_BYTES * shapes.vocab * shapes.hidden
    packed_head = coverage is not None and coverage.lm_head
    norms = shapes.hidden + sum(sum(layer.vectors.values()) for layer in shapes.layers)
    return TokenBytes(
        attention=of_block["self_attn"],
        mlp=of_block["mlp"],
        head=packed_bytes(*shapes.head) if packed_head else dense_head,
        norms=BFLOAT16_BYTES * norms,
    )


def format_bytes(count: int) -> str:
    """Decimal units, as memory bandwidth has: `19.295 GB`, `150.3 MB`."""
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
