"""Bytes of a decoder's weights: how many one decoded token reads, and how many lie in memory.

What a token reads is what decode speed is bounded by. Every weight is read once. The embedding
counts once, as the head that it is tied to (an untied embedding is looked up one row at a time,
which is nothing beside the head). Unquantized weights, norms and layer scalars count as bfloat16,
whatever the file stores. Caches and activations are not weights and do not count.

Memory holds the same weights in the graph's dtype, and an embedding that is not the head besides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.format import BLOCK_SIZE, packed_bytes
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


@dataclass(frozen=True, kw_only=True)
class WeightBytes(TokenBytes):
    """Bytes of weights in memory, by part of the model.

    Attributes:
        embedding: the embedding where it is not the head: untied, or tied to a head whose packed
            copy is used.
    """

    embedding: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return super().total + self.embedding


def token_bytes(
    shapes: DecoderShapes,
    coverage: Coverage | None = None,
    element_bytes: int = BFLOAT16_BYTES,
    table_bytes: int | None = None,
) -> TokenBytes:
    """Bytes that one decoded token reads.

    Args:
        shapes: of the decoder.
        coverage: what is in NVFP4; nothing if None.
        element_bytes: of an unquantized weight.
        table_bytes: of an element of an unquantized embedding or head; `element_bytes` if None.
    """
    table = element_bytes if table_bytes is None else table_bytes
    of_block = {"self_attn": 0, "mlp": 0}
    for key, (out, columns) in shapes.projections.items():
        packed = coverage is not None and coverage.is_quantized(key)
        size = packed_bytes(out, columns) if packed else element_bytes * out * columns
        of_block[BLOCK_OF_ROLE[key.role]] += size
    packed_head = coverage is not None and coverage.lm_head
    norms = shapes.hidden + sum(sum(layer.vectors.values()) for layer in shapes.layers)
    return TokenBytes(
        attention=of_block["self_attn"],
        mlp=of_block["mlp"],
        head=packed_bytes(*shapes.head) if packed_head else _embedding(shapes, table),
        norms=element_bytes * norms,
    )


def weight_bytes(
    shapes: DecoderShapes,
    coverage: Coverage,
    element_bytes: int = BFLOAT16_BYTES,
    table_bytes: int | None = None,
) -> WeightBytes:
    """Bytes of the loaded weights; arguments as those of `token_bytes`."""
    table = element_bytes if table_bytes is None else table_bytes
    head_is_embedding = shapes.tied and not coverage.lm_head
    return WeightBytes(
        **asdict(token_bytes(shapes, coverage, element_bytes, table)),
        embedding=0 if head_is_embedding else _embedding(shapes, table),
    )


def stacked_bytes(
    shapes: DecoderShapes, coverage: Coverage, element_bytes: int = BFLOAT16_BYTES
) -> int:
    """Bytes of the unquantized fused groups: what stacking their members once more would take."""
    return sum(
        element_bytes * rows * columns
        for index, layer in enumerate(shapes.layers)
        for group in coverage.groups(index)
        if len(group.roles) > 1 and not group.quantized
        for rows, columns in (layer.projections[role] for role in group.roles)
    )


def scale_bytes(shapes: DecoderShapes, coverage: Coverage) -> int:
    """Bytes of the block scales of all that is packed."""
    packed = [shape for key, shape in shapes.projections.items() if coverage.is_quantized(key)]
    if coverage.lm_head:
        packed.append(shapes.head)
    return sum(rows * columns // BLOCK_SIZE for rows, columns in packed)


def _embedding(shapes: DecoderShapes, element_bytes: int) -> int:
    return element_bytes * shapes.vocab * shapes.hidden


def format_bytes(count: int) -> str:
    """Decimal units, as memory bandwidth has: `19.295 GB`, `150.3 MB`, `81.9 KB`."""
    if count >= 1e9:
        return f"{count / 1e9:.3f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 or count == 0 else f"{count / 1e3:.1f} KB"
