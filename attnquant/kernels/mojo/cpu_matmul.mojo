"""`x @ W.T` on a CPU, straight from packed weights: no part of W is ever stored as a float matrix.

For a few rows of `x`, they become integers first, once per call: 24 bits per block of 16, as many
as a float32 has (see `int8_dot`), so that the codes meet them as bytes and never become floats.
They are laid out as packets, one for each register of codes, with even and odd columns apart, so
that the codes never have to be rearranged.

Each core then takes rows of W and streams them through registers, four at once, with up to four
vectors of activations. Every output is summed by one core in one order: results do not depend on
the number of cores, nor a row of `x` on its neighbours. For many rows of `x` see `panels`; for what
rows go through before and after, `operands`.
"""

from std.math import ceildiv
from std.memory import bitcast

from .crew import Crew
from .int8_dot import (
    BLOCK,
    BYTES,
    CHUNK,
    CHUNK_BLOCKS,
    DIGITS,
    Floats,
    LANES,
    MAX_ACTIVATION,
    OFFSET,
    digit,
    dot,
    expand,
    scale_pairs,
)
from .operands import GELU, Norm, take
from .panels import MANY, panel_matmul
from .scale_search import Values
from .stream import ahead_of, fetch, tasks_of

# A packet is what one register of codes meets: six planes of bytes (high even, high odd, middle
# even, ...), the starts of its sums, and the step of each sum's block.
comptime STARTS = 2 * DIGITS * BYTES
comptime STEPS = STARTS + 4 * LANES
comptime PACKET = STEPS + 4 * LANES

comptime MATMUL_STEPS = 2
"""Of a crew."""
comptime GROUP_BYTES = 1 << 17
"""Packets that a core works on at once, so that they stay in its second-level cache."""


@fieldwise_init
struct Packed(Copyable, Movable, TrivialRegisterPassable):
    """A packed weight of one to three stacked parts, contiguous and row-major."""

    var codes: Pointer[UInt8, ImmUntrackedOrigin]
    """`[rows, columns / 2]`, low nibble first."""
    var scales: Pointer[UInt8, ImmUntrackedOrigin]
    """`[rows, columns / 16]`, E4M3 bytes."""
    var global_scales: Pointer[Float32, ImmUntrackedOrigin]
    """One for each part."""
    var rows: Int
    var columns: Int
    """A multiple of 16."""
    var bound1: Int
    """The row at which the second part begins."""
    var bound2: Int
    """The row at which the third begins."""

    @always_inline
    def factor(self, row: Int) -> Float32:
        """Of what is summed of a row: the codes count twice their value, scales 2^-8 of theirs."""
        var part = Int(row >= self.bound1) + Int(row >= self.bound2)
        return self.global_scales[unsafe_offset=part] * 128

    @always_inline
    def block(self, row: Int, block: Int) -> Values:
        """The values of a block of a row."""
        var at = row * (self.columns // BLOCK) + block
        var byte = self.scales[unsafe_offset=at].cast[DType.uint16]()
        var scale = bitcast[DType.float16](byte << 7).cast[DType.float32]() * self.factor(row)
        var packed = self.codes.unsafe_load[width = BLOCK // 2](at * (BLOCK // 2))
        var even, odd = expand(packed & 15), expand(packed >> 4)
        var doubled = rebind[SIMD[DType.uint8, BLOCK]](even.interleave(odd))
        return (doubled.cast[DType.int32]() - OFFSET).cast[DType.float32]() * scale


struct Scratch(Movable):
    """What matmuls work in, one after the other."""

    var packets: List[UInt8]
    var floats: List[Float32]

    def __init__(out self, vectors: Int, columns: Int):
        """Room for so many rows of `x`, of so many columns at most."""
        var many = vectors >= MANY
        var packet_row = ceildiv(columns, CHUNK) * PACKET
        self.packets = List[UInt8](length=0 if many else vectors * packet_row, fill=0)
        self.floats = List[Float32](length=vectors * columns, fill=0)


def matmul[
    dtype: DType
](
    mut crew: Crew,
    packets: Pointer[mut=True, UInt8, _],
    floats: Pointer[mut=True, Float32, _],
    output: Pointer[mut=True, Scalar[dtype], _],
    x: Pointer[Scalar[dtype], _],
    weight: Packed,
    vectors: Int,
    operand: Int,
    norm: Norm,
):
    """`output[i, j] = sum_k x[i, k] * W[j, k]`, in `MATMUL_STEPS` steps.

    Parameters:
        dtype: Of `x` and `output`: float32 or bfloat16.

    Args:
        crew: Who does it.
        packets: Of a `Scratch`.
        floats: Of the same.
        output: `[vectors, rows]`.
        x: `[vectors, columns]`, or twice as wide for an activation (`take`).
        weight: W.
        vectors: Rows of `x`.
        operand: What rows of `x` go through first (`take`).
        norm: In which, the norm.
    """
    var rows, columns = weight.rows, weight.columns
    var many = vectors >= MANY
    var packet_row = ceildiv(columns, CHUNK) * PACKET
    var takers = max(1, min(vectors, tasks_of(vectors * columns * 8)))

    def prepare(task: Int) {imm}:
        for i in range(task, vectors, takers):
            var row = floats.unsafe_offset(i * columns)
            var width = columns if operand < GELU else 2 * columns
            take(row, x.unsafe_offset(i * width), columns, operand, norm)
            if many:
                continue
            var own = packets.unsafe_offset(i * packet_row)
            if columns % CHUNK != 0:
                for at in range(packet_row - PACKET, packet_row):
                    own[unsafe_offset=at] = 0
            for block in range(columns // BLOCK):
                var chunk, place = divmod(block, CHUNK_BLOCKS)
                _quantize_block(
                    row.unsafe_offset(block * BLOCK), own.unsafe_offset(chunk * PACKET), place
                )

    crew.share(takers, prepare)

    if many:

        @always_inline
        def block_of(row: Int, block: Int) {imm} -> Values:
            return weight.block(row, block)

        panel_matmul(crew, output, floats, block_of, vectors, rows, columns)
        return

    @always_inline
    def tile[R: Int, T: Int](row: Int, vector: Int) {imm}:
        var sums = _tile[R, T](weight, packets.unsafe_offset(vector * packet_row), row)
        comptime for r in range(R):
            if row + r < rows:
                comptime for t in range(T):
                    var y = sums[r * T + t].reduce_add() * weight.factor(row + r)
                    output[unsafe_offset=(vector + t) * rows + row + r] = y.cast[dtype]()

    var tasks = tasks_of(vectors * rows * columns)
    var share = ceildiv(ceildiv(rows, tasks), 4) * 4
    var group = max(4, GROUP_BYTES // max(packet_row, 1) // 4 * 4)

    @always_inline
    def four_rows[T: Int](row: Int, vector: Int) {imm}:
        # AVX2 has 16 registers, other CPUs 32.
        comptime R = 2 if LANES == 8 else 4
        comptime for r in range(0, 4, R):
            tile[R, T](row + r, vector)

    def multiply(task: Int) {imm}:
        for first in range(0, vectors, group):
            var last = min(first + group, vectors)
            var fours = first + (last - first) // 4 * 4
            var twos = fours + (last - fours) // 2 * 2
            for row in range(task * share, min((task + 1) * share, rows), 4):
                for vector in range(first, fours, 4):
                    four_rows[4](row, vector)
                for vector in range(fours, twos, 2):
                    four_rows[2](row, vector)
                for vector in range(twos, last):
                    four_rows[1](row, vector)

    crew.share(tasks, multiply)


@always_inline
def _quantize_block(
    x: Pointer[Float32, _], packet: Pointer[mut=True, UInt8, _], place: Int
):
    """Writes a block of activations into place `place` of its packet.

    A block with a NaN or an infinity gets a step of NaN, and so does every output it meets.
    """
    var values = x.unsafe_load[width=BLOCK]()
    var not_finite = (values - values).reduce_add()
    if not_finite != 0:
        values = 0
    # The floor keeps the factor finite; it takes precision from blocks below 1e-30 only.
    var largest = max(abs(values).reduce_max(), Float32(1e-30))
    var q = round(values * (Float32(MAX_ACTIVATION) / largest)).cast[DType.int32]()

    var planes = packet.unsafe_bitcast[Int8]()
    comptime for i in range(DIGITS):
        var even, odd = digit[i](q).deinterleave()
        planes.unsafe_store(8 * place + 2 * i * BYTES, even)
        planes.unsafe_store(8 * place + (2 * i + 1) * BYTES, odd)

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
](weight: Packed, packets: Pointer[UInt8, _], row: Int) -> Array[Floats, R * T]:
    """Partial sums of rows `row ... row + R - 1` with `T` vectors, in LANES parts each.

    Rows past the end repeat the last one; their sums mean nothing.
    """
    var codes, scales = weight.codes, weight.scales
    var rows, columns = weight.rows, weight.columns
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
            var start = packet.unsafe_offset(STARTS).unsafe_bitcast[Int32]()
            var steps = packet.unsafe_offset(STEPS).unsafe_bitcast[Float32]()
            var product = dot(
                even,
                odd,
                packet.unsafe_bitcast[Int8](),
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
