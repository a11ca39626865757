"""The host codec: largest magnitude, encoding, decoding and squared error of a weight, on all cores.

`attnquant/nvfp4/reference.py` defines every result to the last bit; this file says only how it is
reached faster. A weight is a run of blocks of 16, wherever its rows end.

Rounding to E2M1 is one addition and one subtraction of a number so large that float32 keeps
multiples of the step only: the step doubles with each power of two from 1 on, so the number is made
of the magnitude's own exponent. Ties go to even there as the format wants.

The search of scales sums squared errors in float32 first. That sum is within 2^-20 of the exact one
(sixteen squares and fifteen additions, each off by 2^-24 at most, and whatever underflows), so only
candidates within 2^-18 of the least can be the exact least: the float64 sum that decides is made
for these alone, most often for none, there being one.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic
from max.algorithm import sync_parallelize

comptime BLOCK = 16
comptime Values = SIMD[DType.float32, BLOCK]
comptime Bits = SIMD[DType.uint32, BLOCK]

comptime CODES_BELOW = 3
comptime CODES_ABOVE = 7
comptime LARGEST_SCALE = 126
comptime TASK_BLOCKS = 1 << 12
"""Blocks that make a task: some 100 us of encoding."""

# Places in the factors that describe a global scale.
comptime GLOBAL_SCALE = 0
comptime ENCODE_SCALE = 1
comptime UNIT = 2
comptime INVERSES = 3


def largest_magnitude[
    dtype: DType
](weight: Pointer[Scalar[dtype], _], blocks: Int, statistics: Pointer[mut=True, Float64, _]):
    """Writes the largest magnitude's bits, and the index of the first NaN or infinity or -1.

    As bits without sign, magnitudes are ordered as integers are, with infinity and NaN on top.
    """
    comptime word = DType.uint32 if dtype == DType.float32 else DType.uint16
    comptime infinity = Scalar[word](_infinity_bits[dtype]())
    comptime magnitude = Scalar[word](0x7FFF_FFFF if dtype == DType.float32 else 0x7FFF)
    var bits = weight.unsafe_bitcast[Scalar[word]]()
    var tasks = ceildiv(blocks, TASK_BLOCKS)
    var found = List[Scalar[word]](length=tasks, fill=0)
    var largest = found.unsafe_ptr()

    def work(task: Int) {imm}:
        var most = SIMD[word, 2 * BLOCK](0)
        var first = task * TASK_BLOCKS
        var last = min(first + TASK_BLOCKS, blocks)
        for block in range(first, last - 1, 2):
            most = max(most, bits.unsafe_load[width=2 * BLOCK](block * BLOCK) & magnitude)
        var end = bits.unsafe_load[width=BLOCK]((last - 1) * BLOCK) & magnitude
        largest[unsafe_offset=task] = max(most.reduce_max(), end.reduce_max())

    _parallel(work, tasks)
    var overall = Scalar[word](0)
    var place = -1
    for task in range(tasks):
        var most = found[task]
        overall = max(overall, most)
        if place < 0 and most >= infinity:
            place = task * TASK_BLOCKS * BLOCK
            while bits[unsafe_offset=place] & magnitude < infinity:
                place += 1
    statistics[unsafe_offset=0] = overall.cast[DType.float64]()
    statistics[unsafe_offset=1] = Float64(place)


def _infinity_bits[dtype: DType]() -> Int:
    comptime if dtype == DType.float32:
        return 0x7F80_0000
    elif dtype == DType.bfloat16:
        return 0x7F80
    else:
        return 0x7C00


def encode[
    dtype: DType
](
    weight: Pointer[Scalar[dtype], _],
    blocks: Int,
    factors: Pointer[Float32, _],
    search: Bool,
    codes: Pointer[mut=True, UInt8, _],
    scales: Pointer[mut=True, UInt8, _],
):
    """Writes 8 bytes of codes and a scale byte per block.

    Args:
        weight: Finite, 16 values a block.
        blocks: How many.
        factors: Of the global scale: itself, the encode scale, the unit, then an inverse per byte.
        search: Whether to look for the scale of least squared error.
        codes: 8 bytes a block.
        scales: One byte a block.
    """

    def work(task: Int) {imm}:
        for block in range(task * TASK_BLOCKS, min((task + 1) * TASK_BLOCKS, blocks)):
            var values = weight.unsafe_load[width=BLOCK](block * BLOCK).cast[DType.float32]()
            var magnitudes = abs(values)
            var largest = magnitudes.reduce_max()
            var scale = _absmax_byte(largest, factors[unsafe_offset=ENCODE_SCALE])
            if search and scale > 0:
                scale = _search(magnitudes, scale, factors)
            scales[unsafe_offset=block] = UInt8(scale)
            var scaled = values * factors[unsafe_offset=INVERSES + scale]
            codes.unsafe_store(block * BLOCK // 2, _pack(scaled))

    _parallel(work, ceildiv(blocks, TASK_BLOCKS))


def decode(
    codes: Pointer[UInt8, _],
    scales: Pointer[UInt8, _],
    blocks: Int,
    global_scale: Float32,
    values: Pointer[mut=True, Float32, _],
):
    """Writes the 16 values of each block."""

    def work(task: Int) {imm}:
        for block in range(task * TASK_BLOCKS, min((task + 1) * TASK_BLOCKS, blocks)):
            values.unsafe_store(block * BLOCK, _decode_block(codes, scales, block, global_scale))

    _parallel(work, ceildiv(blocks, TASK_BLOCKS))


def squared_error[
    dtype: DType
](
    weight: Pointer[Scalar[dtype], _],
    codes: Pointer[UInt8, _],
    scales: Pointer[UInt8, _],
    blocks: Int,
    global_scale: Float32,
    statistics: Pointer[mut=True, Float64, _],
):
    """Writes the sums of `(weight - decoded)^2` and of `weight^2`.

    Each task has its own sums, and they are added in order: the number of cores changes nothing.
    """
    var tasks = ceildiv(blocks, TASK_BLOCKS)
    var sums = List[Float64](length=2 * tasks, fill=0)
    var parts = sums.unsafe_ptr()

    def work(task: Int) {imm}:
        var error = SIMD[DType.float64, BLOCK](0)
        var total = SIMD[DType.float64, BLOCK](0)
        for block in range(task * TASK_BLOCKS, min((task + 1) * TASK_BLOCKS, blocks)):
            var exact = weight.unsafe_load[width=BLOCK](block * BLOCK).cast[DType.float32]()
            var wide = exact.cast[DType.float64]()
            var decoded = _decode_block(codes, scales, block, global_scale)
            var difference = wide - decoded.cast[DType.float64]()
            error += difference * difference
            total += wide * wide
        parts[unsafe_offset=2 * task] = error.reduce_add()
        parts[unsafe_offset=2 * task + 1] = total.reduce_add()

    _parallel(work, tasks)
    statistics[unsafe_offset=0] = 0
    statistics[unsafe_offset=1] = 0
    for task in range(tasks):
        statistics[unsafe_offset=0] += sums[2 * task]
        statistics[unsafe_offset=1] += sums[2 * task + 1]


@always_inline
def _absmax_byte(largest: Float32, encode_scale: Float32) -> Int:
    """The E4M3 byte nearest to `largest / 6 * encode_scale`, at least 1 unless `largest` is 0."""
    var scaled = min(largest / 6 * encode_scale, Float32(448))
    if scaled < 0.015625:
        # Below 2^-6, E4M3 is a grid of 2^-9.
        var byte = Int(round(scaled * 512))
        return max(byte, 1) if largest > 0 else 0
    var bits = bitcast[DType.uint32](scaled)
    bits += 0x7_FFFF + ((bits >> 20) & 1)
    return Int(bits >> 20) - (120 << 3)


@always_inline
def _nearest(magnitudes: Values) -> Values:
    """The nearest of 0 0.5 1 1.5 2 3 4 6, ties to the even code."""
    var capped = min(magnitudes, Values(6))
    var exponent = bitcast[DType.uint32, BLOCK](max(capped, Values(1))) & 0x7F80_0000
    # 1.5 * 2^22 times the power of two: what keeps multiples of half of that power.
    var large = bitcast[DType.float32, BLOCK](exponent + ((22 << 23) | 0x40_0000))
    return (capped + large) - large


@always_inline
def _pack(scaled: Values) -> SIMD[DType.uint8, BLOCK // 2]:
    var doubled = (_nearest(abs(scaled)) * 2).cast[DType.int32]()
    # 0 1 2 3 4 6 8 12 to 0 ... 7
    var index = min(doubled, min((doubled >> 1) + 2, (doubled >> 2) + 4))
    var sign = scaled.lt(Values(0)).select(SIMD[DType.int32, BLOCK](8), SIMD[DType.int32, BLOCK](0))
    var low, high = (index | sign).cast[DType.uint8]().deinterleave()
    return rebind[SIMD[DType.uint8, BLOCK // 2]](low | (high << 4))


@always_inline
def _residuals(
    magnitudes: Values, scale: Int, factors: Pointer[Float32, _]
) -> Values:
    """`|x| * unit - decoded * unit` under a scale byte."""
    var nearest = _nearest(magnitudes * factors[unsafe_offset=INVERSES + scale])
    var decoded = nearest * _e4m3(UInt8(scale)) * factors[unsafe_offset=GLOBAL_SCALE]
    var unit = factors[unsafe_offset=UNIT]
    return magnitudes * unit - decoded * unit


@always_inline
def _search(magnitudes: Values, absmax: Int, factors: Pointer[Float32, _]) -> Int:
    comptime candidates = CODES_BELOW + 1 + CODES_ABOVE
    var first = max(1, absmax - CODES_BELOW)
    var last = min(LARGEST_SCALE, absmax + CODES_ABOVE)
    var errors = SIMD[DType.float32, 16](Float32.MAX)
    for scale in range(first, last + 1):
        var residuals = _residuals(magnitudes, scale, factors)
        errors[scale - first] = (residuals * residuals).reduce_add()
    var bound = errors.reduce_min() * Float32(1 + 1.0 / (1 << 18)) + Float32(1e-36)
    var close = errors.le(SIMD[DType.float32, 16](bound))

    var best = absmax
    var least = Float64.MAX
    if close[absmax - first]:
        least = _exact_error(magnitudes, absmax, factors)
    for scale in range(first, last + 1):
        if close[scale - first] and scale != absmax:
            var error = _exact_error(magnitudes, scale, factors)
            if error < least:
                best = scale
                least = error
    return best


def _exact_error(magnitudes: Values, scale: Int, factors: Pointer[Float32, _]) -> Float64:
    var residuals = _residuals(magnitudes, scale, factors).cast[DType.float64]()
    var squares = residuals * residuals
    var eight = squares.slice[8]() + squares.slice[8, offset=8]()
    var four = eight.slice[4]() + eight.slice[4, offset=4]()
    var two = four.slice[2]() + four.slice[2, offset=2]()
    return two[0] + two[1]


@always_inline
def _e4m3(byte: UInt8) -> Float32:
    return bitcast[DType.float16](byte.cast[DType.uint16]() << 7).cast[DType.float32]() * 256


@always_inline
def _decode_block(
    codes: Pointer[UInt8, _], scales: Pointer[UInt8, _], block: Int, global_scale: Float32
) -> Values:
    var packed = codes.unsafe_load[width=BLOCK // 2](block * BLOCK // 2)
    var code = rebind[SIMD[DType.uint8, BLOCK]]((packed & 15).interleave(packed >> 4)).cast[
        DType.uint16
    ]()
    # The bits of a code, moved to the top of a float16's, are the same number times 2^-14.
    var half = bitcast[DType.float16, BLOCK](((code & 8) << 12) | ((code & 7) << 9))
    var value = half.cast[DType.float32]() * 16384
    return value * _e4m3(scales[unsafe_offset=block]) * global_scale


@always_inline
def _parallel[W: def(Int) -> None](work: W, tasks: Int):
    """Runs `work(0) ... work(tasks - 1)` on all cores, in IEEE arithmetic with subnormals.

    Threads that a runtime set to flush them (x86 `MXCSR`, bits 15 and 6) are set back afterwards.
    """

    def guarded(task: Int) {imm}:
        comptime if CompilationTarget.is_x86():
            var control = Array[UInt32, 2](fill=0x1F80)
            var found = control.unsafe_ptr()
            llvm_intrinsic["llvm.x86.sse.stmxcsr", NoneType](found)
            llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](found.unsafe_offset(1))
            work(task)
            llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](found)
        else:
            work(task)

    sync_parallelize(guarded, tasks)
