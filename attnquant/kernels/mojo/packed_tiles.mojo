"""Rows of packed weights with a few vectors of activations, as they stream through registers.

A vector becomes integers first: 24 bits per block of 16, as many as a float32 has (see `int8_dot`),
so that the codes meet them as bytes and never become floats. They are laid out as packets, one for
each register of codes, with even and odd columns apart, so that the codes never have to be
rearranged.
"""

from std.math import ceildiv
from std.memory import bitcast

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
from .scale_search import Values
from .stream import ahead_of, fetch

# A packet is what one register of codes meets: six planes of bytes (high even, high odd, middle
# even, ...), the starts of its sums, and the step of each sum's block.
comptime STARTS = 2 * DIGITS * BYTES
comptime STEPS = STARTS + 4 * LANES
comptime PACKET = STEPS + 4 * LANES

comptime ROWS = 2 if LANES == 8 else 4
"""Of W at once: AVX2 has 16 registers, other CPUs 32."""
comptime Rows = SIMD[DType.float32, ROWS]


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
        return self.global_scales[unsafe_offset=self.part(row)] * 128

    @always_inline
    def part(self, row: Int) -> Int:
        """The part that a row is of."""
        return Int(row >= self.bound1) + Int(row >= self.bound2)

    @always_inline
    def factors(self, row: Int) -> Rows:
        """`factor` of as many rows as a tile has; past the end, the last one's."""
        var result = Rows(self.factor(row))
        if self.part(row) != self.part(row + ROWS - 1):
            comptime for r in range(1, ROWS):
                result[r] = self.factor(min(row + r, self.rows - 1))
        return result

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


@always_inline
def packet_bytes(columns: Int) -> Int:
    """Of a vector's packets."""
    return ceildiv(columns, CHUNK) * PACKET


@always_inline
def quantize_block(
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


struct Shape(Copyable, Movable, TrivialRegisterPassable):
    """What a tile needs to know of W's shape, worked out once for all of them."""

    var last: Int
    """The last row."""
    var chunks: Int
    """Registers of codes that a row fills."""
    var rest: Int
    """Columns behind those."""
    var code_bytes: Int
    """Of a row."""
    var scale_bytes: Int
    """Of a row."""
    var packet_row: Int
    """Bytes of a vector's packets."""
    var ahead: Int
    """How far ahead to fetch codes, in bytes."""

    def __init__(out self, rows: Int, columns: Int):
        self.last = rows - 1
        self.chunks, self.rest = divmod(columns, CHUNK)
        self.code_bytes = columns // 2
        self.scale_bytes = columns // BLOCK
        self.packet_row = packet_bytes(columns)
        self.ahead = ahead_of(ROWS * columns // 2)


@always_inline
def tile[
    T: Int
](weight: Packed, shape: Shape, packets: Pointer[UInt8, _], row: Int) -> Array[Rows, T]:
    """Sums of rows `row ... row + ROWS - 1` with `T` vectors, before their `factors`.

    Rows past the end repeat the last one; their sums mean nothing.
    """
    var codes, scales = weight.codes, weight.scales
    var sums = Array[Floats, ROWS * T](fill=0)

    @always_inline
    def step(
        row_codes: Pointer[UInt8, _], row_scales: Pointer[UInt8, _], chunk: Int, r: Int
    ) {mut sums, imm}:
        var packed = row_codes.unsafe_load[width=BYTES]()
        fetch(row_codes, shape.ahead)
        var even = expand(packed & 15)
        var odd = expand(packed >> 4)
        var block_scales = scale_pairs(row_scales)
        comptime for t in range(T):
            var packet = packets.unsafe_offset(t * shape.packet_row + chunk * PACKET)
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

    for chunk in range(shape.chunks):
        comptime for r in range(ROWS):
            var at = min(row + r, shape.last)
            step(
                codes.unsafe_offset(at * shape.code_bytes + chunk * BYTES),
                scales.unsafe_offset(at * shape.scale_bytes + chunk * CHUNK_BLOCKS),
                chunk,
                r,
            )
    if shape.rest:
        # The last register is not full: codes and scales move to a buffer, the rest of it zero.
        comptime for r in range(ROWS):
            var at = min(row + r, shape.last)
            var own_codes = codes.unsafe_offset(at * shape.code_bytes + shape.chunks * BYTES)
            var own_scales = scales.unsafe_offset(
                at * shape.scale_bytes + shape.chunks * CHUNK_BLOCKS
            )
            var last_codes = Array[UInt8, BYTES](fill=0)
            var last_scales = Array[UInt8, CHUNK_BLOCKS](fill=0)
            for i in range(shape.rest // 2):
                last_codes[i] = own_codes[unsafe_offset=i]
            for i in range(shape.rest // BLOCK):
                last_scales[i] = own_scales[unsafe_offset=i]
            step(last_codes.unsafe_ptr(), last_scales.unsafe_ptr(), shape.chunks, r)

    var result = Array[Rows, T](fill=0)
    comptime for t in range(T):
        # Two rows' sums side by side take as many additions as one's.
        comptime for r in range(0, ROWS, 2):
            var first = sums[r * T + t].reduce_add[4]()
            var both = first.interleave(sums[(r + 1) * T + t].reduce_add[4]()).reduce_add[2]()
            result[t][r] = both[0]
            result[t][r + 1] = both[1]
    return result^
