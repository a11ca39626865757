"""Dot products of packed E2M1 codes with 15-bit activations, in the byte instructions of each CPU.

A code stands for `v / 2` with `v` in 0 1 2 3 4 6 8 12 and their negatives: a byte shuffle turns 16
or more codes at once into the bytes `v + 12`, which are never negative. An activation block is
scaled to integers `q = 128 * high + low` of 15 bits, kept as two signed bytes. Then

    sum(v * q) = 128 * sum((v + 12) * high) + sum((v + 12) * low) - 12 * sum(q)

where the last term does not depend on the weight and is made once per activation. Unsigned times
signed bytes is what x86 multiplies (`vpdpbusd`, or `vpmaddubsw` whose 16-bit sums cannot saturate
here: 4 * 24 * 127 < 32768), and bytes below 128 may as well be signed, as Arm's `sdot` wants.
"""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic, simd_width_of

comptime BLOCK = 16
comptime LANES = simd_width_of[DType.float32]()
"""Sums that one register holds; each is over 4 even and 4 odd columns, so two make a block."""
comptime BYTES = 4 * LANES
comptime CHUNK = 2 * BYTES
"""Columns whose codes fill one register."""
comptime CHUNK_BLOCKS = CHUNK // BLOCK

comptime HAS_DOTS = (CompilationTarget.has_vnni() and LANES >= 8) or (
    CompilationTarget.has_neon_int8_dotprod() and LANES == 4
)
"""Whether one instruction sums four products of bytes: these multiply faster than float32's."""

comptime Codes = SIMD[DType.uint8, BYTES]
comptime Activations = SIMD[DType.int8, BYTES]
comptime Sums = SIMD[DType.int32, LANES]
comptime Floats = SIMD[DType.float32, LANES]

comptime OFFSET = 12
comptime HIGH = 128
comptime MAX_ACTIVATION = 127 * HIGH


@always_inline
def expand[width: SIMDLength, //](codes: SIMD[DType.uint8, width]) -> SIMD[DType.uint8, width]:
    """The bytes `v + 12` of codes 0 ... 15."""
    comptime table = SIMD[DType.uint8, 16](
        12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
    )
    return table._dynamic_shuffle(codes)


@always_inline
def scale_pairs(bytes: Pointer[UInt8, _]) -> Floats:
    """Each of `CHUNK_BLOCKS` E4M3 bytes as float32 times 2^-8, twice: once per sum of its block.

    An E4M3 byte without sign, shifted to the top of a float16 mantissa, is the same number with an
    exponent bias of 15 for 7. Subnormals stay right, also where the process flushes float32 ones.
    """
    var single = bytes.unsafe_load[width=CHUNK_BLOCKS]()
    var pairs = rebind[SIMD[DType.uint8, LANES]](single.interleave(single))
    return bitcast[DType.float16, LANES](pairs.cast[DType.uint16]() << 7).cast[DType.float32]()


@always_inline
def dot(
    even: Codes,
    odd: Codes,
    high_even: Activations,
    high_odd: Activations,
    low_even: Activations,
    low_odd: Activations,
    start: Sums,
) -> Sums:
    """`start + sum(weight * (128 * high + low))` over the four byte pairs of each sum.

    Args:
        even: Weights `v + 12` of the even columns.
        odd: Of the odd columns.
        high_even: High bytes of the activations at the even columns.
        high_odd: At the odd columns.
        low_even: Low bytes at the even columns.
        low_odd: At the odd columns.
        start: `-12 * sum(q)` of each sum's eight columns.
    """
    comptime if CompilationTarget.has_avx2() and not CompilationTarget.has_vnni():
        # 16-bit sums first, so that the two slow widening steps serve even and odd at once.
        var high = _multiply_pairs(even, high_even) + _multiply_pairs(odd, high_odd)
        var low = _multiply_pairs(even, low_even) + _multiply_pairs(odd, low_odd)
        return start + _add_pairs(high, HIGH) + _add_pairs(low, 1)
    else:
        var high = _dot4(_dot4(Sums(0), even, high_even), odd, high_odd)
        return _dot4(_dot4(start + (high << 7), even, low_even), odd, low_odd)


@always_inline
def _multiply_pairs(
    weights: Codes, activations: Activations
) -> SIMD[DType.int16, 2 * LANES]:
    comptime name = (
        "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    )
    return llvm_intrinsic[name, SIMD[DType.int16, 2 * LANES]](weights, activations)


@always_inline
def _add_pairs(sums: SIMD[DType.int16, 2 * LANES], factor: Int16) -> Sums:
    comptime name = (
        "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    )
    return llvm_intrinsic[name, Sums](sums, SIMD[DType.int16, 2 * LANES](factor))


@always_inline
def _dot4(start: Sums, weights: Codes, activations: Activations) -> Sums:
    """`start` plus the products of each sum's four byte pairs."""
    comptime if CompilationTarget.has_vnni() and LANES >= 8:
        comptime name = (
            "llvm.x86.avx512.vpdpbusd.512" if LANES == 16 else "llvm.x86.avx512.vpdpbusd.256"
        )
        return llvm_intrinsic[name, Sums](start, weights, activations)
    elif CompilationTarget.has_neon_int8_dotprod() and LANES == 4:
        return llvm_intrinsic["llvm.aarch64.neon.sdot.v4i32.v16i8", Sums](
            start, bitcast[DType.int8, BYTES](weights), activations
        )
    else:
        var products = weights.cast[DType.int16]() * activations.cast[DType.int16]()
        var first, second = products.deinterleave()
        var third, fourth = (first + second).deinterleave()
        return start + rebind[SIMD[DType.int16, LANES]](third + fourth).cast[DType.int32]()
