"""`x @ W.T` on a GPU without NVFP4 units, straight from packed weights, accumulated in float32.

Two kernels, and the number of vectors alone decides which one runs, so a captured launch replays.

`_stream` is for up to four vectors, and for float32: a warp takes up to four rows of W, each lane
reads 16 bytes of codes at a time, multiplies in float32, and the lanes' sums are added at the end.

`_tensor_core` is for more vectors, in bfloat16: a warp takes 16 rows of W as the left operand of
matrix instructions and up to 64 vectors as the right one. Products are summed over k in any order,
so each lane may call whatever columns it holds "its" k: 16 contiguous bytes of codes, and the 32
contiguous activations that belong to them. No shared memory, no barrier. A code times its block
scale has six significant bits, so that it is exact in bfloat16.

Neither kernel allocates, and neither reads anything but its arguments.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys.info import is_amd_gpu
from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp

comptime BLOCK = 16
comptime WARPS = 4
comptime TILE_ROWS = 16
comptime STREAMED_VECTORS = 4

comptime RESCALE = Float32(1 << 22)
"""What `_decode` and `_scale` together leave out."""


def matmul[
    dtype: DType, columns: Int, bound1: Int, bound2: Int
](
    output: Pointer[Scalar[dtype], MutAnyOrigin],
    x: Pointer[Scalar[dtype], MutAnyOrigin],
    codes: Pointer[UInt8, MutAnyOrigin],
    scales: Pointer[UInt8, MutAnyOrigin],
    global_scales: Pointer[Float32, MutAnyOrigin],
    vectors: Int,
    rows: Int,
    ctx: DeviceContext,
) raises:
    """`output[i, j] = sum_k x[i, k] * W[j, k]`: arguments as in `cpu_matmul.matmul`."""
    if vectors == 0 or rows == 0:
        return

    @always_inline
    def stream[V: Int]() raises {imm}:
        comptime row_group = 4 if V == 1 else 2
        ctx.enqueue_function[_stream[dtype, columns, bound1, bound2, row_group, V]](
            output,
            x,
            codes,
            scales,
            global_scales,
            Int32(vectors),
            Int32(rows),
            grid_dim=(ceildiv(rows, row_group * WARPS), ceildiv(vectors, V)),
            block_dim=WARPS * WARP_SIZE,
        )

    @always_inline
    def tensor_core[V: Int]() raises {imm}:
        ctx.enqueue_function[_tensor_core[columns, bound1, bound2, V]](
            output.unsafe_bitcast[BFloat16](),
            x.unsafe_bitcast[BFloat16](),
            codes,
            scales,
            global_scales,
            Int32(vectors),
            Int32(rows),
            grid_dim=(ceildiv(rows, TILE_ROWS * WARPS), ceildiv(vectors, V)),
            block_dim=WARPS * WARP_SIZE,
        )

    if vectors == 1:
        stream[1]()
        return
    comptime if dtype == DType.bfloat16:
        if vectors > 16:
            tensor_core[64]()
            return
        if vectors > STREAMED_VECTORS:
            tensor_core[16]()
            return
    stream[STREAMED_VECTORS]()


@always_inline
def _decode(word: UInt32) -> SIMD[DType.float32, 8]:
    """The values of eight codes, times 2^-14, in the order of columns 0 4 1 5 2 6 3 7.

    The bits of a code, moved to the top of a float16's, are the same number with an exponent bias
    of 15 for 1. Two codes at a time, four bits by four: hence the order.
    """
    var halves = SIMD[DType.uint32, 4](
        ((word << 12) & 0x8000_8000) | ((word << 9) & 0x0E00_0E00),
        ((word << 8) & 0x8000_8000) | ((word << 5) & 0x0E00_0E00),
        ((word << 4) & 0x8000_8000) | ((word << 1) & 0x0E00_0E00),
        (word & 0x8000_8000) | ((word >> 3) & 0x0E00_0E00),
    )
    return bitcast[DType.float16, 8](halves).cast[DType.float32]()


@always_inline
def _decode_order[dtype: DType](values: SIMD[dtype, 8]) -> SIMD[dtype, 8]:
    return values.shuffle[0, 4, 1, 5, 2, 6, 3, 7]()


@always_inline
def _scale(byte: UInt8) -> Float32:
    """The value of an E4M3 byte without sign, times 2^-8."""
    return bitcast[DType.float16](byte.cast[DType.uint16]() << 7).cast[DType.float32]()


@always_inline
def _lane_blocks[columns: Int]() -> Int:
    """Blocks that a lane reads at once: two if every row then starts at a multiple of 16 bytes."""
    return 2 if columns % (2 * BLOCK) == 0 else 1


@always_inline
def _factor[
    bound1: Int, bound2: Int
](global_scales: Pointer[Float32, MutAnyOrigin], row: Int) -> Float32:
    return global_scales[unsafe_offset=Int(row >= bound1) + Int(row >= bound2)] * RESCALE


def _stream[
    dtype: DType, columns: Int, bound1: Int, bound2: Int, R: Int, V: Int
](
    output: Pointer[Scalar[dtype], MutAnyOrigin],
    x: Pointer[Scalar[dtype], MutAnyOrigin],
    codes: Pointer[UInt8, MutAnyOrigin],
    scales: Pointer[UInt8, MutAnyOrigin],
    global_scales: Pointer[Float32, MutAnyOrigin],
    vector_count: Int32,
    row_count: Int32,
):
    """A warp's R rows of W times V vectors. Rows and vectors past the end repeat the last one."""
    comptime lane_blocks = _lane_blocks[columns]()
    comptime lane_columns = lane_blocks * BLOCK
    var vectors = Int(vector_count)
    var rows = Int(row_count)
    var lane = Int(lane_id())
    var row = (Int(block_idx.x) * WARPS + Int(thread_idx.x) // WARP_SIZE) * R
    var vector = Int(block_idx.y) * V
    if row >= rows:
        return

    var sums = SIMD[DType.float32, R * V](0)
    for column in range(lane * lane_columns, columns, WARP_SIZE * lane_columns):
        var packed = Array[SIMD[DType.uint32, 2 * lane_blocks], R](fill=0)
        comptime for r in range(R):
            var at = min(row + r, rows - 1) * (columns // 2) + column // 2
            packed[r] = (
                codes.unsafe_offset(at)
                .unsafe_bitcast[UInt32]()
                .unsafe_load[width=2 * lane_blocks, alignment=8 * lane_blocks]()
            )
        comptime for block in range(lane_blocks):
            comptime for v in range(V):
                var at = min(vector + v, vectors - 1) * columns + column + block * BLOCK
                var values = x.unsafe_load[width=BLOCK, alignment=16](at).cast[DType.float32]()
                var first = _decode_order(values.slice[8]())
                var second = _decode_order(values.slice[8, offset=8]())
                comptime for r in range(R):
                    var scale_at = (
                        min(row + r, rows - 1) * (columns // BLOCK) + column // BLOCK + block
                    )
                    var weights = _decode(packed[r][2 * block])
                    var more_weights = _decode(packed[r][2 * block + 1])
                    var sum = Float32(0)
                    comptime for i in range(8):
                        sum = weights[i].fma(first[i], sum)
                    comptime for i in range(8):
                        sum = more_weights[i].fma(second[i], sum)
                    sums[r * V + v] = sum.fma(
                        _scale(scales[unsafe_offset=scale_at]), sums[r * V + v]
                    )

    comptime for r in range(R):
        comptime for v in range(V):
            var sum = warp.sum(sums[r * V + v])
            if lane == 0 and row + r < rows and vector + v < vectors:
                output[unsafe_offset=(vector + v) * rows + row + r] = (
                    sum * _factor[bound1, bound2](global_scales, row + r)
                ).cast[dtype]()


def _tensor_core[
    columns: Int, bound1: Int, bound2: Int, V: Int
](
    output: Pointer[BFloat16, MutAnyOrigin],
    x: Pointer[BFloat16, MutAnyOrigin],
    codes: Pointer[UInt8, MutAnyOrigin],
    scales: Pointer[UInt8, MutAnyOrigin],
    global_scales: Pointer[Float32, MutAnyOrigin],
    vector_count: Int32,
    row_count: Int32,
):
    """A warp's 16 rows of W times V vectors. Rows and vectors past the end repeat the last one.

    What lane l holds of each matrix, k in fours (NVIDIA mma.m16n8k16, AMD mfma 16x16x16):

        NVIDIA  W: rows l / 4 and l / 4 + 8, fours l % 4     x: vector l / 4, four l % 4
                out: rows l / 4 and l / 4 + 8, vectors 2 (l % 4) and the next
        AMD     W: row l % 16, four l / 16                   x: vector l % 16, four l / 16
                out: rows 4 (l / 16) and the next three, vector l % 16
    """
    comptime lane_blocks = _lane_blocks[columns]()
    comptime lane_columns = lane_blocks * BLOCK
    comptime mma_vectors = 16 if is_amd_gpu() else 8
    comptime groups = V // mma_vectors
    comptime lane_rows = 1 if is_amd_gpu() else 2
    var vectors = Int(vector_count)
    var rows = Int(row_count)
    var lane = Int(lane_id())
    var row = (Int(block_idx.x) * WARPS + Int(thread_idx.x) // WARP_SIZE) * TILE_ROWS
    var vector = Int(block_idx.y) * V
    if row >= rows:
        return
    var place = lane % 16 if is_amd_gpu() else lane // 4
    var four = lane // 16 if is_amd_gpu() else lane % 4

    var sums = Array[SIMD[DType.float32, 4], groups](fill=0)
    for start in range(0, columns, 4 * lane_columns):
        # Lanes past the last column take part with zeros: the instruction needs the whole warp.
        var column = start + four * lane_columns
        var inside = column < columns
        comptime for block in range(lane_blocks):
            var at = column + block * BLOCK if inside else 0
            var weights = Array[SIMD[DType.bfloat16, BLOCK], lane_rows](fill=0)
            comptime for r in range(lane_rows):
                var lane_row = min(row + place + 8 * r, rows - 1)
                var words = (
                    codes.unsafe_offset(lane_row * (columns // 2) + at // 2)
                    .unsafe_bitcast[UInt32]()
                    .unsafe_load[width=2, alignment=8]()
                )
                var scale = _scale(
                    scales[unsafe_offset=lane_row * (columns // BLOCK) + at // BLOCK]
                )
                weights[r] = (
                    (_decode(words[0]) * scale)
                    .join(_decode(words[1]) * scale)
                    .cast[DType.bfloat16]()
                )
            comptime for group in range(groups):
                var lane_vector = min(vector + group * mma_vectors + place, vectors - 1)
                var values = SIMD[DType.bfloat16, BLOCK](0)
                if inside:
                    values = x.unsafe_load[width=BLOCK, alignment=16](lane_vector * columns + at)
                comptime for word in range(2):
                    var right = _decode_order(values.slice[8, offset=8 * word]())
                    comptime for half in range(2):
                        comptime k = 8 * word + 4 * half
                        var sum = sums[group]
                        comptime if is_amd_gpu():
                            mma(
                                sum,
                                weights[0].slice[4, offset=k](),
                                right.slice[4, offset=4 * half](),
                                sums[group],
                            )
                        else:
                            var upper = weights[0].slice[4, offset=k]()
                            var lower = weights[lane_rows - 1].slice[4, offset=k]()
                            # Registers hold pairs: k 0 1 of both rows, then k 2 3 of both.
                            var left = upper.join(lower).shuffle[0, 1, 4, 5, 2, 3, 6, 7]()
                            mma(sum, left, right.slice[4, offset=4 * half](), sums[group])
                        sums[group] = sum

    comptime for group in range(groups):
        comptime for i in range(4):
            var out_row = row + (4 * four + i if is_amd_gpu() else place + 8 * (i // 2))
            var out_vector = (
                vector
                + group * mma_vectors
                + (place if is_amd_gpu() else 2 * four + i % 2)
            )
            if out_row < rows and out_vector < vectors:
                output[unsafe_offset=out_vector * rows + out_row] = (
                    sums[group][i] * _factor[bound1, bound2](global_scales, out_row)
                ).cast[DType.bfloat16]()
