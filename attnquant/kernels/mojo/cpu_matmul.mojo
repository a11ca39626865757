"""`x @ W.T` on a CPU, straight from packed weights: no part of W is ever stored as a float matrix.

For a few rows of `x`, they are quantized first, once per call, to 15 bits per block of 16 (see
`int8_dot`): that is 2^-15 of the block's largest magnitude, well under what bfloat16 activations
cost, for half as many multiplications as float32 needs. They are laid out as packets, one for each
register of codes, with even and odd columns apart, so that the codes never have to be rearranged.

Each core then takes rows of W and streams them through registers, four at once for one vector of
activations (memory is what is waited for), two for four vectors (where arithmetic is). Every
output is summed by one core in one order: results do not depend on the number of cores, nor a row
of `x` on its neighbours. For many rows of `x`, on CPUs whose byte products are slower than float32's,
see `panels`.
"""

from std.math import ceildiv
from std.memory import bitcast
from max.algorithm import sync_parallelize

from .int8_dot import (
    BLOCK,
    BYTES,
    CHUNK,
    CHUNK_BLOCKS,
    Codes,
    Floats,
    HAS_DOTS,
    HIGH,
    LANES,
    MAX_ACTIVATION,
    OFFSET,
    Sums,
    dot,
    expand,
    scale_pairs,
)
from .panels import MANY, panel_matmul
from .scale_search import Values
from .stream import ahead_of, fetch, tasks_of

# A packet is what one register of codes meets: four planes of bytes (high even, high odd, low
# even, low odd), the starts of its sums, and the step of each sum's block.
comptime STARTS = 4 * BYTES
comptime STEPS = STARTS + 4 * LANES
comptime PACKET = STEPS + 4 * LANES

comptime GROUP_BYTES = 1 << 17
"""Packets that a core works on at once, so that they stay in its second-level cache."""


def matmul[
    dtype: DType
](
    output: Pointer[mut=True, Scalar[dtype], _],
    x: Pointer[Scalar[dtype], _],
    codes: Pointer[UInt8, _],
    scales: Pointer[UInt8, _],
    global_scales: Pointer[Float32, _],
    vectors: Int,
    rows: Int,
    columns: Int,
    bound1: Int,
    bound2: Int,
):
    """`output[i, j] = sum_k x[i, k] * W[j, k]`, all matrices contiguous and row-major.

    Parameters:
        dtype: Of `x` and of `output`: float32 or bfloat16.

    Args:
        output: `[vectors, rows]`.
        x: `[vectors, columns]`.
        codes: `[rows, columns / 2]`, low nibble first.
        scales: `[rows, columns / 16]`, E4M3 bytes.
        global_scales: One for each part.
        vectors: Rows of `x`.
        rows: Rows of W.
        columns: A multiple of 16.
        bound1: The row of W at which the second stacked part begins.
        bound2: The row at which the third begins.
    """
    if vectors >= MANY and not HAS_DOTS:

        @always_inline
        def block_of(row: Int, block: Int) {imm} -> Values:
            var part = Int(row >= bound1) + Int(row >= bound2)
            # As below: twice the codes' values, 2^-8 of the scale's.
            var at = row * (columns // BLOCK) + block
            var scale = bitcast[DType.float16](scales[unsafe_offset=at].cast[DType.uint16]() << 7)
            var factor = scale.cast[DType.float32]() * (global_scales[unsafe_offset=part] * 128)
            var packed = codes.unsafe_load[width = BLOCK // 2](at * (BLOCK // 2))
            var even, odd = expand(packed & 15), expand(packed >> 4)
            var doubled = rebind[SIMD[DType.uint8, BLOCK]](even.interleave(odd))
            return (doubled.cast[DType.int32]() - OFFSET).cast[DType.float32]() * factor

        panel_matmul(output, x, block_of, vectors, rows, columns)
        return

    var packet_row = ceildiv(columns, CHUNK) * PACKET
    var scratch = List[UInt8](length=vectors * packet_row, fill=0)
    var packets = scratch.unsafe_ptr()

    var quantizers = max(1, min(vectors, tasks_of(vectors * columns)))

    def quantize(task: Int) {imm}:
        for i in range(task, vectors, quantizers):
            for block in range(columns // BLOCK):
                var chunk, place = divmod(block, CHUNK_BLOCKS)
                _quantize_block(
                    x.unsafe_offset(i * columns + block * BLOCK),
                    packets.unsafe_offset(i * packet_row + chunk * PACKET),
                    place,
                )

    sync_parallelize(quantize, quantizers)

    @always_inline
    def tile[R: Int, T: Int](row: Int, vector: Int) {imm}:
        var sums = _tile[R, T](
            codes,
            scales,
            packets.unsafe_offset(vector * packet_row),
            row,
            rows,
            columns,
        )
        comptime for r in range(R):
            if row + r < rows:
                var part = Int(row + r >= bound1) + Int(row + r >= bound2)
                # The codes were taken twice their value, the block scales 2^-8 of theirs.
                var factor = global_scales[unsafe_offset=part] * 128
                comptime for t in range(T):
                    var y = sums[r * T + t].reduce_add() * factor
                    output[unsafe_offset=(vector + t) * rows + row + r] = y.cast[dtype]()

    var tasks = tasks_of(vectors * rows * columns)
    var share = ceildiv(ceildiv(rows, tasks), 4) * 4
    var group = max(4, GROUP_BYTES // max(packet_row, 1) // 4 * 4)

    def work(task: Int) {imm}:
        for first in range(0, vectors, group):
            var last = min(first + group, vectors)
            var fours = first + (last - first) // 4 * 4
            for row in range(task * share, min((task + 1) * share, rows), 4):
                for vector in range(first, fours, 4):
                    tile[2, 4](row, vector)
                    tile[2, 4](row + 2, vector)
                for vector in range(fours, last):
                    tile[4, 1](row, vector)

    sync_parallelize(work, tasks)
    _ = scratch^


@always_inline
def _quantize_block[
    dtype: DType
](x: Pointer[Scalar[dtype], _], packet: Pointer[mut=True, UInt8, _], place: Int):
    """Writes a block of activations into place `place` of its packet.

    A block with a NaN or an infinity gets a step of NaN, and so does every output it meets.
    """
    var values = x.unsafe_load[width=BLOCK]().cast[DType.float32]()
    var not_finite = (values - values).reduce_add()
    if not_finite != 0:
        values = 0
    # The floor keeps the factor finite; it takes precision from blocks below 1e-30 only.
    var largest = max(abs(values).reduce_max(), Float32(1e-30))
    var q = round(values * (Float32(MAX_ACTIVATION) / largest)).cast[DType.int32]()
    var high = (q + HIGH // 2) >> 7
    var low = q - (high << 7)

    var planes = packet.unsafe_bitcast[Int8]()
    var high_even, high_odd = high.cast[DType.int8]().deinterleave()
    var low_even, low_odd = low.cast[DType.int8]().deinterleave()
    planes.unsafe_store(8 * place, high_even)
    planes.unsafe_store(8 * place + BYTES, high_odd)
    planes.unsafe_store(8 * place + 2 * BYTES, low_even)
    planes.unsafe_store(8 * place + 3 * BYTES, low_odd)

    var starts = packet.unsafe_offset(STARTS).unsafe_bitcast[Int32]()
    starts[unsafe_offset=2 * place] = -OFFSET * q.slice[8]().reduce_add()
    starts[unsafe_offset=2 * place + 1] = -OFFSET * q.slice[8, offset=8]().reduce_add()
    var steps = packet.unsafe_offset(STEPS).unsafe_bitcast[Float32]()
    var step = largest / MAX_ACTIVATION + not_finite
    steps[unsafe_offset=2 * place] = step
    steps[unsafe_offset=2 * place + 1] = step


@always_inline
def _tile[
    R: Int, T: Int
](
    codes: Pointer[UInt8, _],
    scales: Pointer[UInt8, _],
    packets: Pointer[UInt8, _],
    row: Int,
    rows: Int,
    columns: Int,
) -> Array[Floats, R * T]:
    """Partial sums of rows `row ... row + R - 1` with `T` vectors, in LANES parts each.

    Rows past the end repeat the last one; their sums mean nothing.
    """
    var sums = Array[Floats, R * T](fill=0)
    var chunks, rest = divmod(columns, CHUNK)
    var packet_row = ceildiv(columns, CHUNK) * PACKET
    var ahead = ahead_of(R * columns // 2)

    @always_inline
    def step(
        row_codes: Pointer[UInt8, _], row_scales: Pointer[UInt8, _], chunk: Int, r: Int
    ) {mut sums, imm}:
        var packed = row_codes.unsafe_load[width=BYTES]()
        fetch(row_codes, ahead)
        var even = expand(packed & 15)
        var odd = expand(packed >> 4)
        var block_scales = scale_pairs(row_scales)
        comptime for t in range(T):
            var packet = packets.unsafe_offset(t * packet_row + chunk * PACKET)
            var planes = packet.unsafe_bitcast[Int8]()
            var start = packet.unsafe_offset(STARTS).unsafe_bitcast[Int32]()
            var steps = packet.unsafe_offset(STEPS).unsafe_bitcast[Float32]()
            var product = dot(
                even,
                odd,
                planes.unsafe_load[width=BYTES](0),
                planes.unsafe_load[width=BYTES](BYTES),
                planes.unsafe_load[width=BYTES](2 * BYTES),
                planes.unsafe_load[width=BYTES](3 * BYTES),
                start.unsafe_load[width=LANES](),
            )
            sums[r * T + t] = (product.cast[DType.float32]() * block_scales).fma(
                steps.unsafe_load[width=LANES](), sums[r * T + t]
            )

    for chunk in range(chunks):
        comptime for r in range(R):
            var at = min(row + r, rows - 1)
            step(
                codes.unsafe_offset(at * (columns // 2) + chunk * BYTES),
                scales.unsafe_offset(at * (columns // BLOCK) + chunk * CHUNK_BLOCKS),
                chunk,
                r,
            )
    if rest:
        # The last register is not full: codes and scales move to a buffer, the rest of it zero.
        comptime for r in range(R):
            var at = min(row + r, rows - 1)
            var last_codes = Array[UInt8, BYTES](fill=0)
            var last_scales = Array[UInt8, CHUNK_BLOCKS](fill=0)
            for i in range(rest // 2):
                last_codes[i] = codes[unsafe_offset=at * (columns // 2) + chunks * BYTES + i]
            for i in range(rest // BLOCK):
                last_scales[i] = scales[
                    unsafe_offset=at * (columns // BLOCK) + chunks * CHUNK_BLOCKS + i
                ]
            step(last_codes.unsafe_ptr(), last_scales.unsafe_ptr(), chunks, r)
    return sums^
