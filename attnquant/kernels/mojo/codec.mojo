"""The host codec: largest magnitude, encoding, decoding and squared error of a weight, on all cores.

`attnquant/nvfp4/reference.py` defines every result to the last bit; this file says only how it is
reached faster. A weight is a run of blocks of 16, wherever its rows end.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic
from max.algorithm import sync_parallelize

from .scale_search import (
    BLOCK,
    LANES,
    Lanes,
    ScaleTables,
    Values,
    absmax_bytes,
    columns_of,
    e4m3,
    least_error_bytes,
    nearest_magnitude,
)

comptime TASK_BLOCKS = 1 << 12
"""Blocks that make a task: some 100 us of encoding."""


def largest_magnitude[
    dtype: DType
](
    weight: Pointer[Scalar[dtype], _], blocks: Int, statistics: Pointer[mut=True, Float64, _]
) -> Float32:
    """The largest magnitude; writes its bits, and the index of the first NaN or infinity or -1.

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
    return bitcast[dtype](overall).cast[DType.float32]()


def _infinity_bits[dtype: DType]() -> Int:
    comptime if dtype == DType.float32:
        return 0x7F80_0000
    elif dtype == DType.bfloat16:
        return 0x7F80
    else:
        return 0x7C00


def encode[
    dtype: DType, search: Bool, weighted: Bool
](
    weight: Pointer[Scalar[dtype], _],
    blocks: Int,
    importance: Pointer[Float32, _],
    row_blocks: Int,
    amax: Float32,
    codes: Pointer[mut=True, UInt8, _],
    scales: Pointer[mut=True, UInt8, _],
):
    """Writes 8 bytes of codes and a scale byte per block.

    Parameters:
        dtype: The weight's.
        search: Whether to look for the scale of least squared error.
        weighted: Whether squares count by their columns' importance there.

    Args:
        weight: Finite, 16 values a block.
        blocks: How many.
        importance: 16 values a block of a row, the same for all rows; read if `weighted`.
        row_blocks: Blocks of a row.
        amax: The fused group's largest magnitude, no less than the weight's own.
        codes: 8 bytes a block.
        scales: One byte a block.
    """

    def work(task: Int) {imm}:
        var tables = ScaleTables(amax)
        var end = min((task + 1) * TASK_BLOCKS, blocks)
        for first in range(task * TASK_BLOCKS, end, LANES):
            # Past the end, the last block again.
            var rows = Array[Values, LANES](fill=0)
            comptime for lane in range(LANES):
                var at = min(first + lane, end - 1) * BLOCK
                rows[lane] = float32(weight.unsafe_load[width=BLOCK](at))
            var magnitudes = columns_of(rows)
            var largest = Lanes(0)
            comptime for k in range(BLOCK):
                largest = max(largest, magnitudes[k])
            var chosen = absmax_bytes(largest, tables.encode_scale)
            comptime if search:
                var counts = Array[Values, LANES](fill=1)
                comptime if weighted:
                    comptime for lane in range(LANES):
                        var at = min(first + lane, end - 1) % row_blocks * BLOCK
                        counts[lane] = importance.unsafe_load[width=BLOCK](at)
                chosen = least_error_bytes[weighted](
                    magnitudes, columns_of(counts), chosen, tables
                )
            comptime for lane in range(LANES):
                var block = first + lane
                if block < end:
                    var scale = Int(chosen[lane])
                    var scaled = rows[lane] * tables.inverses[scale]
                    scales[unsafe_offset=block] = UInt8(scale)
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
            var exact = float32(weight.unsafe_load[width=BLOCK](block * BLOCK))
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
def float32[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """Exact; a bfloat16 is the upper half of a float32."""
    comptime if dtype == DType.bfloat16:
        var bits = bitcast[DType.uint16, width](values).cast[DType.uint32]()
        return bitcast[DType.float32, width](bits << 16)
    else:
        return values.cast[DType.float32]()


@always_inline
def _pack(scaled: Values) -> SIMD[DType.uint8, BLOCK // 2]:
    var doubled = (nearest_magnitude(abs(scaled)) * 2).cast[DType.int32]()
    # 0 1 2 3 4 6 8 12 to 0 ... 7
    var index = min(doubled, min((doubled >> 1) + 2, (doubled >> 2) + 4))
    var sign = scaled.lt(Values(0)).select(SIMD[DType.int32, BLOCK](8), SIMD[DType.int32, BLOCK](0))
    var low, high = (index | sign).cast[DType.uint8]().deinterleave()
    return rebind[SIMD[DType.uint8, BLOCK // 2]](low | (high << 4))


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
    return value * e4m3(scales[unsafe_offset=block].cast[DType.int32]()) * global_scale


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
