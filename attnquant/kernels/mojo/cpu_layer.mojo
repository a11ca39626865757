"""A whole decoder layer on a CPU, where all its projections are packed: one operation.

A step of one token has little to do in each of a layer's parts, and handing over between them takes
about as long. Here the cores are called once for a layer (see `crew`).
"""

from .cpu_attention import ATTENTION_STEPS, Plan, attention
from .cpu_matmul import MATMUL_STEPS, Scratch, gated_matmul, matmul
from .crew import Crew, together
from .operands import NORMED, Norm, PLAIN, add
from .packed_tiles import Packed
from .panels import MANY
from max.runtime.asyncrt import parallelism_level

comptime STEPS = 4 * MATMUL_STEPS + ATTENTION_STEPS + 2


@fieldwise_init
struct Norms(Copyable, Movable, TrivialRegisterPassable):
    """A layer's norms."""

    var before_attention: Norm
    var query: Norm
    var key: Norm
    var before_mlp: Norm
    var normed_after: Bool
    """Whether a block's result goes through a norm before it is added."""
    var after_attention: Norm
    var after_mlp: Norm
    var value_eps: Float32
    """Added to the mean square of values, where they are normalised."""


def decoder_layer[
    head_dim: Int, kv_heads: Int, has_values: Bool, norms_values: Bool, window: Int
](
    output: Pointer[mut=True, Float32, _],
    x: Pointer[Float32, _],
    row_offsets: Pointer[UInt32, _],
    blocks: Pointer[mut=True, Float32, _],
    cache_lengths: Pointer[UInt32, _],
    pages: Pointer[UInt32, _],
    table: Pointer[Float32, _],
    qkv: Packed,
    o: Packed,
    gate_up: Packed,
    down: Packed,
    norms: Norms,
    activation: Int,
    factor: Float32,
    sequences: Int,
    page_size: Int,
    page_stride: Int,
    pages_each: Int,
    values_at: Int,
    layer: Int,
    scale: Float32,
):
    """`h = x + norm(o(attention(norm(x))))`, then `(h + norm(down(gated(norm(h))))) * factor`.

    Parameters are as in `attention`, and so are arguments that are not named here.

    Args:
        output: `[tokens, hidden]`.
        x: `[tokens, hidden]`.
        row_offsets: `[sequences + 1]`.
        blocks: The cache.
        cache_lengths: `[sequences]`.
        pages: `[sequences, pages_each]`.
        table: `[positions, head_dim]`.
        qkv: Queries, keys, and values if there are any.
        o: The output projection of attention.
        gate_up: Gates, and what they gate.
        down: The output projection of the feed-forward block.
        norms: The layer's.
        activation: `GELU` or `SILU`.
        factor: Of the result.
        sequences: In the batch.
        page_size: Tokens of a page.
        page_stride: Elements from one page to the next.
        pages_each: Width of `pages`.
        values_at: Elements from a page's keys to its values.
        layer: Which layer of the cache.
        scale: Factor on the scores.
    """
    var tokens = Int(row_offsets[unsafe_offset=sequences])
    var hidden = o.rows
    var heads = o.columns // head_dim
    var plan = Plan(
        row_offsets, cache_lengths, sequences, heads, kv_heads, head_dim, window
    )
    # Of many tokens, only norms are stored before a matmul, and of gates only what they let through.
    var many = tokens >= MANY
    var taken = hidden if many else max(max(hidden, o.columns), down.columns)
    var widest = max(qkv.rows, down.columns if many else gate_up.rows)
    var scratch = Scratch(tokens, taken)
    var packets, floats = scratch.packets.unsafe_ptr(), scratch.floats.unsafe_ptr()
    var wide = List[Float32](unsafe_uninit_length=tokens * widest)
    var seen_by = List[Float32](unsafe_uninit_length=tokens * o.columns)
    var narrow = List[Float32](unsafe_uninit_length=tokens * hidden)
    var projected, seen, y = wide.unsafe_ptr(), seen_by.unsafe_ptr(), narrow.unsafe_ptr()
    var h = output.unsafe_origin_cast[MutUntrackedOrigin]()

    def body(mut crew: Crew) {imm}:
        @always_inline
        def project(
            mut crew: Crew,
            target: Pointer[mut=True, Float32, _],
            source: Pointer[Float32, _],
            weight: Packed,
            operand: Int,
            norm: Norm,
        ) {imm}:
            matmul(crew, packets, floats, target, source, weight, tokens, operand, norm)

        project(crew, projected, x, qkv, NORMED, norms.before_attention)
        attention[head_dim, kv_heads, has_values, norms_values, window](
            crew,
            plan,
            seen,
            projected,
            row_offsets,
            blocks,
            cache_lengths,
            pages,
            table,
            norms.query,
            norms.key,
            tokens,
            heads,
            page_size,
            page_stride,
            pages_each,
            values_at,
            layer,
            scale,
            norms.value_eps,
        )
        var none = norms.after_attention
        project(crew, y, seen, o, PLAIN, none)
        add(crew, h, x, y, tokens, hidden, norms.normed_after, norms.after_attention, 1)
        if many:
            var norm = norms.before_mlp
            gated_matmul(crew, floats, projected, h, gate_up, tokens, activation, norm)
        else:
            project(crew, projected, h, gate_up, NORMED, norms.before_mlp)
        project(crew, y, projected, down, PLAIN if many else activation, none)
        add(crew, h, h, y, tokens, hidden, norms.normed_after, norms.after_mlp, factor)

    together(parallelism_level(None), STEPS, body)
    _ = plan^
    _ = scratch^
    _ = wide^
    _ = seen_by^
    _ = narrow^
