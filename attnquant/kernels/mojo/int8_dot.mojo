"""Dot products of packed E2M1 codes with 24-bit activations, in the byte instructions of each CPU.

A code stands for `v / 2` with `v` in 0 1 2 3 4 6 8 12 and their negatives: a byte shuffle turns 16
or more codes at once into the bytes `v + 12`, which are never negative. Activations are scaled to
integers `q = 65536 * high + 256 * middle + low`, kept as three signed bytes. Then

    sum(v * q) = sum((v + 12) * q) - 12 * sum(q)

where the last term does not depend on the weight and is made once per activation, and the first is
one sum of byte products for each of the three. Over eight columns nothing leaves 32 bits:
24 * 8 * 2^23 < 2^31. Unsigned times signed bytes is what x86 multiplies (`vpdpbusd`, or
`vpmaddubsw` whose 16-bit sums cannot saturate here: 4 * 24 * 128 < 32768), and bytes below 128 may
as well be signed, as Arm's `sdot` wants.
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

comptime Codes = SIMD[DType.uint8, BYTES]
comptime Activations = SIMD[DType.int8, BYTES]
comptime Sums = SIMD[DType.int32, LANES]
comptime Floats = SIMD[DType.float32, LANES]

comptime OFFSET = 12
comptime DIGITS = 3
comptime MAX_ACTIVATION = 0x7F_7F00
"""Below the largest integer that three signed bytes hold by more than float32 rounds."""


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
def digit[index: Int](q: SIMD[DType.int32, BLOCK]) -> SIMD[DType.int8, BLOCK]:
    """A byte of integers up to `MAX_ACTIVATION` either way, the high one first."""
    # Adding the offsets makes every byte unsigned, and flipping their top bits signed again.
    var bytes = (q + 0x80_8080) ^ 0x80_8080
    return (bytes >> Int32(8 * (DIGITS - 1 - index))).cast[DType.int8]()


@always_inline
def dot(even: Codes, odd: Codes, planes: Pointer[Int8, _], start: Sums) -> Sums:
    """`start + sum((v + 12) * q)` over the eight columns of each sum.

    Args:
        even: Weights `v + 12` of the even columns.
        odd: Of the odd columns.
        planes: High bytes of the activations at the even columns, at the odd columns, then the
            middle bytes, then the low ones: `[DIGITS, 2, BYTES]`.
        start: `-12 * sum(q)` of each sum's columns.
    """

    @always_inline
    def plane[index: Int]() {imm} -> Activations:
        return planes.unsafe_load[width=BYTES](index * BYTES)

    comptime if CompilationTarget.has_avx2() and not CompilationTarget.has_vnni():
        # 16-bit sums first, so that the slow widening step serves even and odd at once.
        @always_inline
        def pairs[digit: Int]() {imm} -> SIMD[DType.int16, 2 * LANES]:
            return _multiply_pairs(even, plane[2 * digit]()) + _multiply_pairs(
                odd, plane[2 * digit + 1]()
            )

        var high = _add_pairs(pairs[0](), 1) << 16
        return start + high + _add_pairs(pairs[1](), 256) + _add_pairs(pairs[2](), 1)
    else:
        var high = _dot4(_dot4(Sums(0), even, plane[0]()), odd, plane[1]())
        var middle = _dot4(_dot4(high << 8, even, plane[2]()), odd, plane[3]())
        return _dot4(_dot4(start + (middle << 8), even, plane[4]()), odd, plane[5]())


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
