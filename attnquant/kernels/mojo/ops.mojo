"""Registration: what a graph can call, and which implementation serves its device."""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from max.runtime.asyncrt import parallelism_level

from .bfloat16_matmul import bfloat16_matmul
from .codec import decode, encode, largest_magnitude, squared_error
from .cpu_attention import ATTENTION_STEPS, Plan, attention
from .cpu_layer import Norms, decoder_layer
from .cpu_matmul import MATMUL_STEPS, Scratch, matmul as cpu_matmul
from .crew import Crew, together
from .gpu_matmul import matmul as gpu_matmul
from .operands import Norm, PLAIN
from .packed_tiles import Packed
from .scale_search import BLOCK
from .stream import cores_of


@always_inline
def untracked[
    dtype: DType, //
](pointer: Pointer[Scalar[dtype], _]) -> Pointer[Scalar[dtype], ImmUntrackedOrigin]:
    """An input's memory, which outlives the operation."""
    return pointer.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()


@always_inline
def cache_strides(
    blocks: MutableInputTensor[dtype=DType.float32, rank=6, ...],
    page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
    token_width: Int,
) -> Tuple[Int, Int]:
    """Elements from a page of the cache to the next one, and from its keys to its values.

    Args:
        blocks: The cache, as `attention` has it.
        page_stride: What MAX says of the first of the two.
        token_width: Elements of a token's keys in one layer.
    """
    var values_at = blocks.dim_size(2) * blocks.dim_size(3) * token_width
    # MAX says -1 where pages follow each other.
    return Int(page_stride[0]) if page_stride[0] > 0 else 2 * values_at, values_at


@extensibility.register("attnquant_nvfp4_matmul")
struct NVFP4Matmul:
    """`x @ W.T` for a weight of one to three stacked parts.

    `columns` is the length of a row; `bound1` and `bound2` are the rows at which the second and
    the third part begin.
    """

    @staticmethod
    def execute[
        target: StaticString, columns: Int, bound1: Int, bound2: Int
    ](
        output: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=output.dtype, rank=2, ...],
        codes: InputTensor[dtype=DType.uint8, rank=2, ...],
        block_scales: InputTensor[dtype=DType.uint8, rank=2, ...],
        global_scales: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var vectors = x.dim_size(0)
        var rows = codes.dim_size(0)
        comptime if is_cpu[target]():
            var weight = Packed(
                untracked(codes.unsafe_ptr()),
                untracked(block_scales.unsafe_ptr()),
                untracked(global_scales.unsafe_ptr()),
                rows,
                columns,
                bound1,
                bound2,
            )
            var scratch = Scratch(vectors, columns)
            var packets, floats = scratch.packets.unsafe_ptr(), scratch.floats.unsafe_ptr()
            var y, given = output.unsafe_ptr(), x.unsafe_ptr()
            var none = Norm(untracked(global_scales.unsafe_ptr()), 0, 0)

            def body(mut crew: Crew) {imm}:
                cpu_matmul(crew, packets, floats, y, given, weight, vectors, PLAIN, none)

            together(cores_of(vectors * rows * columns), MATMUL_STEPS, body)
            _ = scratch^
        else:
            gpu_matmul[output.dtype, columns, bound1, bound2](
                output.unsafe_ptr(),
                x.unsafe_ptr(),
                codes.unsafe_ptr(),
                block_scales.unsafe_ptr(),
                global_scales.unsafe_ptr(),
                vectors,
                rows,
                ctx,
            )


@extensibility.register("attnquant_bfloat16_matmul")
struct BFloat16Matmul:
    """`x @ W.T` on the CPU for a weight that stays bfloat16."""

    @staticmethod
    def execute(
        output: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
        weight: InputTensor[dtype=DType.bfloat16, rank=2, ...],
    ):
        var y, given, w = output.unsafe_ptr(), x.unsafe_ptr(), weight.unsafe_ptr()
        var vectors, rows, columns = x.dim_size(0), weight.dim_size(0), weight.dim_size(1)

        def body(mut crew: Crew) {imm}:
            bfloat16_matmul(crew, y, given, w, vectors, rows, columns)

        together(cores_of(vectors * rows * columns), 1, body)


@extensibility.register("attnquant_attention")
struct Attention:
    """Norms, rotation, the cache's update and attention on the CPU; see `attention`.

    `numbers` are the scale of the scores, what is added to the mean squares of queries and keys
    and to that of values, and what is added to the gains.
    """

    @staticmethod
    def execute[
        head_dim: Int, kv_heads: Int, has_values: Int, norms_values: Int, window: Int
    ](
        output: OutputTensor[dtype=DType.float32, rank=2, ...],
        blocks: MutableInputTensor[dtype=DType.float32, rank=6, ...],
        projected: InputTensor[dtype=DType.float32, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=DType.uint32, rank=1, ...],
        pages: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        table: InputTensor[dtype=DType.float32, rank=2, ...],
        query_gain: InputTensor[dtype=DType.float32, rank=1, ...],
        key_gain: InputTensor[dtype=DType.float32, rank=1, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        layer: InputTensor[dtype=DType.uint32, rank=1, ...],
    ):
        var sequences = cache_lengths.dim_size(0)
        var heads = output.dim_size(1) // head_dim
        var offsets, lengths = row_offsets.unsafe_ptr(), cache_lengths.unsafe_ptr()
        var plan = Plan(offsets, lengths, sequences, heads, kv_heads, head_dim, window)
        var seen, given, cache = output.unsafe_ptr(), projected.unsafe_ptr(), blocks.unsafe_ptr()
        var page, angles = pages.unsafe_ptr(), table.unsafe_ptr()
        var query_norm = Norm(untracked(query_gain.unsafe_ptr()), numbers[3], numbers[1])
        var key_norm = Norm(untracked(key_gain.unsafe_ptr()), numbers[3], numbers[1])
        var tokens = Int(row_offsets[sequences])
        var stride, values_at = cache_strides(blocks, page_stride, kv_heads * head_dim)
        var page_size, pages_each = blocks.dim_size(3), pages.dim_size(1)
        var scale, value_eps, index = numbers[0], numbers[2], Int(layer[0])

        def body(mut crew: Crew) {imm}:
            attention[head_dim, kv_heads, has_values != 0, norms_values != 0, window](
                crew,
                plan,
                seen,
                given,
                offsets,
                cache,
                lengths,
                page,
                angles,
                query_norm,
                key_norm,
                tokens,
                heads,
                page_size,
                stride,
                pages_each,
                values_at,
                index,
                scale,
                value_eps,
            )

        # One token has little to prepare, and may have many keys to see.
        var cores = max(plan.tasks, cores_of(tokens * projected.dim_size(1) * 16))
        together(min(cores, parallelism_level(None)), ATTENTION_STEPS, body)
        _ = plan^


@extensibility.register("attnquant_layer")
struct Layer:
    """A decoder layer on the CPU with all projections packed; see `decoder_layer`.

    `numbers` are those of `attnquant_attention`; all norms of a layer share them.
    """

    @staticmethod
    def execute[
        head_dim: Int,
        kv_heads: Int,
        has_values: Int,
        norms_values: Int,
        window: Int,
        activation: Int,
        normed_after: Int,
    ](
        output: OutputTensor[dtype=DType.float32, rank=2, ...],
        blocks: MutableInputTensor[dtype=DType.float32, rank=6, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=DType.uint32, rank=1, ...],
        pages: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        table: InputTensor[dtype=DType.float32, rank=2, ...],
        query_gain: InputTensor[dtype=DType.float32, rank=1, ...],
        key_gain: InputTensor[dtype=DType.float32, rank=1, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        layer: InputTensor[dtype=DType.uint32, rank=1, ...],
        qkv_codes: InputTensor[dtype=DType.uint8, rank=2, ...],
        qkv_scales: InputTensor[dtype=DType.uint8, rank=2, ...],
        qkv_global: InputTensor[dtype=DType.float32, rank=1, ...],
        o_codes: InputTensor[dtype=DType.uint8, rank=2, ...],
        o_scales: InputTensor[dtype=DType.uint8, rank=2, ...],
        o_global: InputTensor[dtype=DType.float32, rank=1, ...],
        gate_up_codes: InputTensor[dtype=DType.uint8, rank=2, ...],
        gate_up_scales: InputTensor[dtype=DType.uint8, rank=2, ...],
        gate_up_global: InputTensor[dtype=DType.float32, rank=1, ...],
        down_codes: InputTensor[dtype=DType.uint8, rank=2, ...],
        down_scales: InputTensor[dtype=DType.uint8, rank=2, ...],
        down_global: InputTensor[dtype=DType.float32, rank=1, ...],
        before_attention: InputTensor[dtype=DType.float32, rank=1, ...],
        after_attention: InputTensor[dtype=DType.float32, rank=1, ...],
        before_mlp: InputTensor[dtype=DType.float32, rank=1, ...],
        after_mlp: InputTensor[dtype=DType.float32, rank=1, ...],
        factor: InputTensor[dtype=DType.float32, rank=1, ...],
    ):
        @always_inline
        def norm(gain: InputTensor[dtype=DType.float32, rank=1, ...]) {imm} -> Norm:
            return Norm(untracked(gain.unsafe_ptr()), numbers[3], numbers[1])

        @always_inline
        def packed(
            codes: InputTensor[dtype=DType.uint8, rank=2, ...],
            scales: InputTensor[dtype=DType.uint8, rank=2, ...],
            global_scales: InputTensor[dtype=DType.float32, rank=1, ...],
            bound1: Int,
            bound2: Int,
        ) {imm} -> Packed:
            return Packed(
                untracked(codes.unsafe_ptr()),
                untracked(scales.unsafe_ptr()),
                untracked(global_scales.unsafe_ptr()),
                codes.dim_size(0),
                2 * codes.dim_size(1),
                bound1,
                bound2,
            )

        var queries = 2 * o_codes.dim_size(1)
        var inner = 2 * down_codes.dim_size(1)
        var hidden = x.dim_size(1)
        var stride, values_at = cache_strides(blocks, page_stride, kv_heads * head_dim)
        decoder_layer[head_dim, kv_heads, has_values != 0, norms_values != 0, window](
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            row_offsets.unsafe_ptr(),
            blocks.unsafe_ptr(),
            cache_lengths.unsafe_ptr(),
            pages.unsafe_ptr(),
            table.unsafe_ptr(),
            packed(qkv_codes, qkv_scales, qkv_global, queries, queries + kv_heads * head_dim),
            packed(o_codes, o_scales, o_global, hidden, hidden),
            packed(gate_up_codes, gate_up_scales, gate_up_global, inner, 2 * inner),
            packed(down_codes, down_scales, down_global, hidden, hidden),
            Norms(
                norm(before_attention),
                norm(query_gain),
                norm(key_gain),
                norm(before_mlp),
                normed_after != 0,
                norm(after_attention),
                norm(after_mlp),
                numbers[2],
            ),
            activation,
            factor[0],
            cache_lengths.dim_size(0),
            blocks.dim_size(3),
            stride,
            pages.dim_size(1),
            values_at,
            Int(layer[0]),
            numbers[0],
        )


# What `attnquant_nvfp4_codec` is asked to do, and what it is given: as in codec.py.
comptime LARGEST = 0
comptime ABSMAX = 1
comptime MSE = 2
comptime DECODE = 3


@extensibility.register("attnquant_nvfp4_codec")
struct NVFP4Codec:
    """The host codec: one operation, so that a process compiles one graph for all of it.

    Each action reads and writes the buffers it needs; the others may be empty. `weight` holds the
    bytes of a float32, float16 or bfloat16 weight, by `request`: action, float format, blocks.
    `factor` is the fused group's largest magnitude to encode, the global scale to decode. The
    search counts squares by `importance`, one number a column, unless that is empty.
    """

    @staticmethod
    def execute(
        codes: MutableInputTensor[dtype=DType.uint8, rank=1, ...],
        scales: MutableInputTensor[dtype=DType.uint8, rank=1, ...],
        values: MutableInputTensor[dtype=DType.float32, rank=1, ...],
        statistics: MutableInputTensor[dtype=DType.float64, rank=1, ...],
        weight: InputTensor[dtype=DType.uint8, rank=1, ...],
        importance: InputTensor[dtype=DType.float32, rank=1, ...],
        factor: InputTensor[dtype=DType.float32, rank=1, ...],
        request: InputTensor[dtype=DType.int64, rank=1, ...],
    ):
        var action = Int(request[0])
        var blocks = Int(request[2])
        if action == DECODE:
            decode(
                codes.unsafe_ptr(),
                scales.unsafe_ptr(),
                blocks,
                factor[0],
                values.unsafe_ptr(),
            )
            return

        comptime for format in range(3):
            comptime dtype = [DType.float32, DType.float16, DType.bfloat16][format]
            if Int(request[1]) == format:
                var source = weight.unsafe_ptr().unsafe_bitcast[Scalar[dtype]]()
                if action == LARGEST or action == ABSMAX or action == MSE:
                    var own = largest_magnitude(source, blocks, statistics.unsafe_ptr())
                    # A negative amax asks for the weight's own.
                    var amax = own if factor[0] < 0 else factor[0]
                    var sound = statistics[1] < 0 and own <= amax

                    @always_inline
                    def quantize[search: Bool, weighted: Bool]() {imm}:
                        encode[dtype, search, weighted](
                            source,
                            blocks,
                            importance.unsafe_ptr(),
                            importance.dim_size(0) // BLOCK,
                            amax,
                            codes.unsafe_ptr(),
                            scales.unsafe_ptr(),
                        )

                    if action == ABSMAX and sound:
                        quantize[False, False]()
                    elif action == MSE and sound and importance.dim_size(0) == 0:
                        quantize[True, False]()
                    elif action == MSE and sound:
                        quantize[True, True]()
                else:
                    squared_error(
                        source,
                        codes.unsafe_ptr(),
                        scales.unsafe_ptr(),
                        blocks,
                        factor[0],
                        statistics.unsafe_ptr(),
                    )
