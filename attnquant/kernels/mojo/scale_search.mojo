"""The choice of block scales: from the largest magnitude, or by search; eight blocks at once.

A block is a lane. The search works in float32, in units of each candidate's own step, which saves
the multiplications that bring a residual back to the weight's. A residual there is off by some
2^-22 of the weight it belongs to, and so the root of a block's squared error by 2^-20 of the
block's norm at most, besides squares that underflow. Only candidates within 2^-18 of the least can
be the exact least: the float64 sum that decides is made for these alone, most often for none, there
being one.

Rounding to E2M1 is one addition and one subtraction of a number so large that float32 keeps
multiples of the step only: the step doubles with each power of two from 1 on, so the number is made
of the magnitude's own exponent. Ties go to even there as the format wants.
"""

from std.math import sqrt
from std.memory import bitcast

comptime BLOCK = 16
comptime Values = SIMD[DType.float32, BLOCK]

comptime LANES = 8
comptime Lanes = SIMD[DType.float32, LANES]
comptime ScaleBytes = SIMD[DType.int32, LANES]
comptime Columns = Array[Lanes, BLOCK]
"""The magnitudes of eight blocks: column k of all of them is `[k]`."""

comptime CODES_BELOW = 3
comptime WEIGHTED_CODES_BELOW = 8
comptime CODES_ABOVE = 7
comptime ONE_BITS = 0x3F80_0000
comptime SIX_BITS = 0x40C0_0000
comptime CLOSE = Float32(1.0 / (1 << 18))
comptime UNDERFLOWN = Float32(1.0 / (1 << 50))
"""In steps: more than what squares that underflow add up to, and a part in 2^49 of a code."""
comptime SMALLEST_NORMAL_STEP = Float32(1.0 / (1 << 62)) / (1 << 50)
"""Global scales below this (2^-112) have steps that float32 does not hold exactly."""
comptime LARGEST_SCALE = 126


struct ScaleTables(Copyable, Movable):
    """What follows from a fused group's largest magnitude: `ScaleTables` in scales.py."""

    var encode_scale: Float32
    var global_scale: Float32
    var unit: Float32
    var inverses: Array[Float32, LARGEST_SCALE + 1]

    def __init__(out self, amax: Float32):
        """Float32 divisions of normal and subnormal numbers: run it where these are IEEE's."""
        self.encode_scale = min(Float32(6 * 448) / amax, Float32.MAX_FINITE)
        self.global_scale = 1 / self.encode_scale
        var bits = bitcast[DType.uint32](self.global_scale)
        # The exponent of the scale as a number in [0.5, 1) times a power of two.
        var exponent = Int32(bits >> 23) - 126 if bits >= (1 << 22) else Int32(-127)
        self.unit = bitcast[DType.float32](((-exponent).clamp(-126, 127) + 127) << 23)
        self.inverses = Array[Float32, LARGEST_SCALE + 1](fill=Float32.MAX_FINITE)
        comptime for byte in range(1, LARGEST_SCALE + 1):
            var step = e4m3(SIMD[DType.int32, 1](byte)) * self.global_scale
            self.inverses[byte] = min(1 / step, Float32.MAX_FINITE)


@always_inline
def absmax_bytes(largest: Lanes, encode_scale: Float32) -> ScaleBytes:
    """The E4M3 bytes nearest to `largest / 6 * encode_scale`, at least 1 unless `largest` is 0."""
    var scaled = min(largest / 6 * encode_scale, Lanes(448))
    var bits = bitcast[DType.int32, LANES](scaled)
    var normal = ((bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, E4M3 is a grid of 2^-9.
    var subnormal = round(scaled * 512).cast[DType.int32]()
    var byte = max(scaled.lt(Lanes(0.015625)).select(subnormal, normal), ScaleBytes(1))
    return largest.gt(Lanes(0)).select(byte, ScaleBytes(0))


@always_inline
def nearest_magnitude[
    width: SIMDLength, //
](magnitudes: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """The nearest of 0 0.5 1 1.5 2 3 4 6, ties to the even code."""
    # Bits without sign are ordered as their numbers are, and integers have the cheaper min and max.
    var bits = min(bitcast[DType.int32, width](magnitudes), SIMD[DType.int32, width](SIX_BITS))
    var exponent = max(bits, SIMD[DType.int32, width](ONE_BITS)) & 0x7F80_0000
    # 1.5 * 2^22 times the power of two: what keeps multiples of half of that power.
    var large = bitcast[DType.float32, width](exponent + ((22 << 23) | 0x40_0000))
    return (bitcast[DType.float32, width](bits) + large) - large


@always_inline
def columns_of(rows: Array[Values, LANES]) -> Columns:
    """The magnitudes of eight blocks, transposed."""

    @always_inline
    def block[lane: Int]() {imm} -> Values:
        return abs(rows[lane])

    # Each step interleaves every second block with the ones between them.
    var even = block[0]().interleave(block[4]()).interleave(block[2]().interleave(block[6]()))
    var odd = block[1]().interleave(block[5]()).interleave(block[3]().interleave(block[7]()))
    var all = rebind[SIMD[DType.float32, BLOCK * LANES]](even.interleave(odd))
    var columns = Columns(fill=0)
    comptime for k in range(BLOCK):
        columns[k] = all.slice[LANES, offset=k * LANES]()
    return columns^


@always_inline
def least_error_bytes[
    weighted: Bool
](
    magnitudes: Columns, importance: Columns, absmax: ScaleBytes, tables: ScaleTables
) -> ScaleBytes:
    """The byte of least squared error, for each lane; the abs-max byte wins a tie.

    Parameters:
        weighted: Whether each square counts as often as its place's importance says.
    """
    comptime below = WEIGHTED_CODES_BELOW if weighted else CODES_BELOW
    comptime candidates = below + 1 + CODES_ABOVE
    var roots = Array[Lanes, candidates](fill=Lanes(Float32.MAX))
    var least = Lanes(Float32.MAX)
    var norm = Lanes(0)
    var slack = Lanes(0)
    comptime for candidate in range(candidates):
        var wanted = absmax + Int32(candidate - below)
        var byte = wanted.clamp(1, LARGEST_SCALE)
        var step = e4m3(byte)
        var inverse = min(1 / (step * tables.global_scale), Lanes(Float32.MAX_FINITE))
        # Two sums, so that an addition need not wait for the one before it.
        var even = Lanes(0)
        var odd = Lanes(0)
        comptime for k in range(0, BLOCK, 2):
            var first = magnitudes[k] * inverse
            var second = magnitudes[k + 1] * inverse
            var first_residual = first - nearest_magnitude(first)
            var second_residual = second - nearest_magnitude(second)
            comptime if weighted:
                even = (first_residual * importance[k]).fma(first_residual, even)
                odd = (second_residual * importance[k + 1]).fma(second_residual, odd)
            else:
                even = first_residual.fma(first_residual, even)
                odd = second_residual.fma(second_residual, odd)
        roots[candidate] = wanted.eq(byte).select(sqrt(even + odd) * step, Lanes(Float32.MAX))
        comptime if candidate == below:
            var square = Lanes(0)
            comptime for k in range(BLOCK):
                var scaled = magnitudes[k] * inverse
                comptime if weighted:
                    square = (scaled * importance[k]).fma(scaled, square)
                else:
                    square = scaled.fma(scaled, square)
            norm = sqrt(square) * step
            slack = step * UNDERFLOWN
        least = min(least, roots[candidate])

    var bound = least + norm * CLOSE + slack
    if tables.global_scale < SMALLEST_NORMAL_STEP:
        bound = Lanes(Float32.MAX)
    var best = absmax
    var close = ScaleBytes(0)
    comptime for candidate in range(candidates):
        var wanted = absmax + Int32(candidate - below)
        var inside = wanted.eq(wanted.clamp(1, LARGEST_SCALE)) & absmax.gt(ScaleBytes(0))
        var near = roots[candidate].le(bound) & inside
        best = near.select(wanted, best)
        close += near.select(ScaleBytes(1), ScaleBytes(0))
    if close.reduce_max() > 1:
        for lane in range(LANES):
            if close[lane] > 1:
                best[lane] = _exact_best[below, weighted](
                    magnitudes, importance, lane, absmax[lane], roots, bound[lane], tables
                )
    return best


def _exact_best[
    candidates: Int, //, below: Int, weighted: Bool
](
    magnitudes: Columns,
    importance: Columns,
    lane: Int,
    absmax: Int32,
    roots: Array[Lanes, candidates],
    bound: Float32,
    tables: ScaleTables,
) -> Int32:
    """The search among the close candidates of one lane, in the reference's arithmetic."""
    var block = Values(0)
    var counts = SIMD[DType.float64, BLOCK](1)
    comptime for k in range(BLOCK):
        block[k] = magnitudes[k][lane]
        comptime if weighted:
            counts[k] = importance[k][lane].cast[DType.float64]()
    var best = absmax
    var least = Float64.MAX
    if roots[below][lane] <= bound:
        least = _exact_error(block, counts, Int(absmax), tables)
    comptime for candidate in range(candidates):
        var byte = Int(absmax) + candidate - below
        var inside = 1 <= byte and byte <= LARGEST_SCALE
        if candidate != below and inside and roots[candidate][lane] <= bound:
            var error = _exact_error(block, counts, byte, tables)
            if error < least:
                best = Int32(byte)
                least = error
    return best


@no_inline
def _exact_error(
    magnitudes: Values, counts: SIMD[DType.float64, BLOCK], scale: Int, tables: ScaleTables
) -> Float64:
    """The squared error under a scale byte, in units of `unit` squared."""
    var nearest = nearest_magnitude(magnitudes * tables.inverses[scale])
    var decoded = nearest * e4m3(SIMD[DType.int32, 1](scale)) * tables.global_scale
    var unit = tables.unit
    var residuals = (magnitudes * unit - decoded * unit).cast[DType.float64]()
    var squares = residuals * residuals * counts
    var eight = squares.slice[8]() + squares.slice[8, offset=8]()
    var four = eight.slice[4]() + eight.slice[4, offset=4]()
    var two = four.slice[2]() + four.slice[2, offset=2]()
    return two[0] + two[1]


@always_inline
def e4m3[width: SIMDLength, //](byte: SIMD[DType.int32, width]) -> SIMD[DType.float32, width]:
    """The values of E4M3 bytes without sign."""
    var half = bitcast[DType.float16, width]((byte << 7).cast[DType.uint16]())
    return half.cast[DType.float32]() * 256
