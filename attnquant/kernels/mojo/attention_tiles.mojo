"""The arithmetic of attention on a CPU: heads that are normalised and turned, and tiles of scores."""

from std.math import exp
from std.utils.numerics import neg_inf

from .int8_dot import Floats, LANES
from .operands import Norm

comptime KEYS = 64
"""Keys whose scores are held at once."""
comptime WIDE = 4 if LANES == 16 else 2
"""Registers of keys, or of columns of values, beside four rows: as many sums as a CPU has room for."""


@always_inline
def rotate[
    head_dim: Int
](
    x: Pointer[Float32, _],
    norm: Norm,
    scale: Float32,
    angles: Pointer[Float32, _],
    target: Pointer[mut=True, Float32, _],
):
    """Writes a head, normalised, each element of its first half turned with one of its second."""
    comptime half = head_dim // 2
    comptime lanes = min(LANES, half)
    var inverse = norm.inverse(x, head_dim)
    for d in range(0, half, lanes):
        var first = x.unsafe_load[width=lanes](d) * inverse
        first *= norm.gains[lanes](d)
        var second = x.unsafe_load[width=lanes](half + d) * inverse
        second *= norm.gains[lanes](half + d)
        var pairs = angles.unsafe_load[width=2 * lanes](2 * d).deinterleave()
        var cosine = rebind[SIMD[DType.float32, lanes]](pairs[0])
        var sine = rebind[SIMD[DType.float32, lanes]](pairs[1])
        target.unsafe_store(d, (first * cosine - second * sine) * scale)
        target.unsafe_store(half + d, (second * cosine + first * sine) * scale)


@always_inline
def scores[
    head_dim: Int, stride: Int
](
    rows: Int,
    q: Pointer[Float32, _],
    keys: Pointer[Float32, _],
    count: Int,
    s: Pointer[mut=True, Float32, _],
):
    """`s[row, key]` of `count` keys, each `stride` elements after the one before."""

    @always_inline
    def tile[R: Int](row: Int) {imm}:
        for first in range(0, count, WIDE):
            var sums = Array[Floats, R * WIDE](fill=0)
            for d in range(0, head_dim, LANES):
                comptime for k in range(WIDE):
                    # Past the end, the last key again; nothing looks at its scores.
                    var at = min(first + k, count - 1) * stride + d
                    var key = keys.unsafe_load[width=LANES](at)
                    comptime for r in range(R):
                        var query = q.unsafe_load[width=LANES]((row + r) * head_dim + d)
                        sums[r * WIDE + k] = query.fma(key, sums[r * WIDE + k])
            comptime for r in range(R):
                comptime for k in range(WIDE):
                    s[unsafe_offset=(row + r) * KEYS + first + k] = sums[
                        r * WIDE + k
                    ].reduce_add()

    var fours = rows // 4 * 4
    for row in range(0, fours, 4):
        tile[4](row)
    for row in range(fours, rows):
        tile[1](row)


@always_inline
def softmax[
    head_dim: Int
](
    s: Pointer[mut=True, Float32, _],
    o: Pointer[mut=True, Float32, _],
    state: Pointer[mut=True, Float32, _],
    first: Int,
    last: Int,
):
    """Turns a row's scores into weights, under the largest of them that it has met so far.

    Scores before `first` and from `last` on become weights of zero. What the row has gathered, and
    the sum of its weights, are brought to the new maximum. `state` is that maximum, and that sum.
    """
    if first >= last:
        for k in range(0, KEYS, LANES):
            s.unsafe_store(k, Floats(0))
        return
    var places = SIMD[DType.int32, LANES](0)
    comptime for lane in range(LANES):
        places[lane] = Int32(lane)
    var before = state[unsafe_offset=0]
    var largest = Floats(before)
    for k in range(0, KEYS, LANES):
        var at = places + Int32(k)
        var seen = at.ge(Int32(first)) & at.lt(Int32(last))
        var scores = seen.select(s.unsafe_load[width=LANES](k), Floats(neg_inf[DType.float32]()))
        s.unsafe_store(k, scores)
        largest = max(largest, scores)
    var maximum = largest.reduce_max()
    var total = Floats(0)
    for k in range(0, KEYS, LANES):
        var weights = exp(s.unsafe_load[width=LANES](k) - maximum)
        s.unsafe_store(k, weights)
        total += weights
    var sum = state[unsafe_offset=1]
    if maximum != before:
        var factor = exp(before - maximum)
        sum *= factor
        state[unsafe_offset=0] = maximum
        comptime for d in range(0, head_dim, LANES):
            o.unsafe_store(d, o.unsafe_load[width=LANES](d) * factor)
    state[unsafe_offset=1] = sum + total.reduce_add()


@always_inline
def gather[
    head_dim: Int, stride: Int
](
    rows: Int,
    o: Pointer[mut=True, Float32, _],
    values: Pointer[Float32, _],
    count: Int,
    s: Pointer[Float32, _],
):
    """Adds `count` values, times their weights in `s[row, key]`, to `o[row]`."""
    comptime wide = WIDE if head_dim % (WIDE * LANES) == 0 else 1

    @always_inline
    def tile[R: Int](row: Int) {imm}:
        for d in range(0, head_dim, wide * LANES):
            var sums = Array[Floats, R * wide](fill=0)
            comptime for r in range(R):
                comptime for c in range(wide):
                    sums[r * wide + c] = o.unsafe_load[width=LANES](
                        (row + r) * head_dim + d + c * LANES
                    )
            for k in range(count):
                comptime for c in range(wide):
                    var value = values.unsafe_load[width=LANES](k * stride + d + c * LANES)
                    comptime for r in range(R):
                        var weight = Floats(s[unsafe_offset=(row + r) * KEYS + k])
                        sums[r * wide + c] = weight.fma(value, sums[r * wide + c])
            comptime for r in range(R):
                comptime for c in range(wide):
                    o.unsafe_store((row + r) * head_dim + d + c * LANES, sums[r * wide + c])

    var fours = rows // 4 * 4
    for row in range(0, fours, 4):
        tile[4](row)
    for row in range(fours, rows):
        tile[1](row)


@always_inline
def merge[
    head_dim: Int
](
    parts: Pointer[Float32, _],
    count: Int,
    stride: Int,
    target: Pointer[mut=True, Float32, _],
):
    """Puts a row's `count` parts together: gathered values, then their maximum and their sum."""
    var most = neg_inf[DType.float32]()
    for i in range(count):
        most = max(most, parts[unsafe_offset=i * stride + head_dim])
    var total = Float32(0)
    comptime for d in range(0, head_dim, LANES):
        target.unsafe_store(d, Floats(0))
    for i in range(count):
        var own = parts.unsafe_offset(i * stride)
        var factor = exp(own[unsafe_offset=head_dim] - most)
        total += own[unsafe_offset=head_dim + 1] * factor
        for d in range(0, head_dim, LANES):
            var x = own.unsafe_load[width=LANES](d)
            target.unsafe_store(d, target.unsafe_load[width=LANES](d) + x * factor)
    for d in range(0, head_dim, LANES):
        target.unsafe_store(d, target.unsafe_load[width=LANES](d) / total)
