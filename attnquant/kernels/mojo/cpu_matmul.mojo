"""`x @ W.T` on a CPU, straight from packed weights: no part of W is ever stored as a float matrix.

For a few rows of `x`, they become packets first, once per call. Each core then takes rows of W and
streams them through registers, two or four at once, with up to four vectors of activations
(`packed_tiles`). Every output is summed by one core in one order: results do not depend on the
number of cores, nor a row of `x` on its neighbours. For many rows of `x` see `panels`; for what
rows go through before and after, `operands`.
"""

from std.math import ceildiv

from .crew import Crew
from .int8_dot import BLOCK, CHUNK, CHUNK_BLOCKS
from .operands import GELU, Norm, NORMED, PLAIN, take
from .packed_tiles import PACKET, ROWS, Packed, Shape, packet_bytes, quantize_block, tile
from .panels import MANY, gated_panel_matmul, panel_matmul
from .scale_search import Values
from .stream import tasks_of

comptime MATMUL_STEPS = 2
"""Of a crew."""
comptime GROUP_BYTES = 1 << 17
"""Packets that a core works on at once, so that they stay in its second-level cache."""


struct Scratch(Movable):
    """What matmuls work in, one after the other."""

    var packets: List[UInt8]
    var floats: List[Float32]

    def __init__(out self, vectors: Int, columns: Int):
        """Room for so many rows of `x`, of so many columns at most."""
        var many = vectors >= MANY
        var packets = 0 if many else vectors * packet_bytes(columns)
        self.packets = List[UInt8](unsafe_uninit_length=packets)
        self.floats = List[Float32](unsafe_uninit_length=vectors * columns)


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
    if vectors >= MANY:

        @always_inline
        def block_of(row: Int, block: Int) {imm} -> Values:
            return weight.block(row, block)

        comptime if dtype == DType.float32:
            if operand == PLAIN:
                var given = x.unsafe_bitcast[Float32]()
                panel_matmul(crew, output, given, block_of, vectors, rows, columns)
                return
        _take_all(crew, floats, x, vectors, columns, operand, norm)
        panel_matmul(crew, output, floats, block_of, vectors, rows, columns)
        return

    var shape = Shape(rows, columns)
    var packet_row = shape.packet_row
    var takers = _takers(vectors, columns)

    def prepare(task: Int) {imm}:
        for i in range(task, vectors, takers):
            var row = floats.unsafe_offset(i * columns)
            var width = columns if operand < GELU else 2 * columns
            take(row, x.unsafe_offset(i * width), columns, operand, norm)
            var own = packets.unsafe_offset(i * packet_row)
            if columns % CHUNK != 0:
                for at in range(packet_row - PACKET, packet_row):
                    own[unsafe_offset=at] = 0
            for block in range(columns // BLOCK):
                var chunk, place = divmod(block, CHUNK_BLOCKS)
                quantize_block(
                    row.unsafe_offset(block * BLOCK), own.unsafe_offset(chunk * PACKET), place
                )

    crew.share(takers, prepare)

    @always_inline
    def some[T: Int](row: Int, vector: Int) {imm}:
        var y = tile[T](weight, shape, packets.unsafe_offset(vector * packet_row), row)
        var factors = weight.factors(row)
        comptime for t in range(T):
            var own = (y[t] * factors).cast[dtype]()
            var target = output.unsafe_offset((vector + t) * rows + row)
            if row + ROWS <= rows:
                target.unsafe_store(own)
            else:
                for r in range(rows - row):
                    target[unsafe_offset=r] = own[r]

    var tasks = tasks_of(vectors * rows * columns)
    var share = ceildiv(ceildiv(rows, tasks), ROWS) * ROWS
    var group = max(4, GROUP_BYTES // max(packet_row, 1) // 4 * 4)

    def multiply(task: Int) {imm}:
        for first in range(0, vectors, group):
            var last = min(first + group, vectors)
            var fours = first + (last - first) // 4 * 4
            var twos = fours + (last - fours) // 2 * 2
            for row in range(task * share, min((task + 1) * share, rows), ROWS):
                for vector in range(first, fours, 4):
                    some[4](row, vector)
                for vector in range(fours, twos, 2):
                    some[2](row, vector)
                for vector in range(twos, last):
                    some[1](row, vector)

    crew.share(tasks, multiply)


def gated_matmul(
    mut crew: Crew,
    floats: Pointer[mut=True, Float32, _],
    output: Pointer[mut=True, Float32, _],
    x: Pointer[Float32, _],
    weight: Packed,
    vectors: Int,
    activation: Int,
    norm: Norm,
):
    """`output = activation(gate) * up` of `norm(x) @ W.T`, in `MATMUL_STEPS` steps.

    Args:
        crew: Who does it.
        floats: Of a `Scratch`.
        output: `[vectors, rows / 2]`.
        x: `[vectors, columns]`.
        weight: W: gates, and as many rows that they gate.
        vectors: Rows of `x`, `MANY` or more.
        activation: `GELU` or `SILU`.
        norm: What rows of `x` go through first.
    """

    @always_inline
    def block_of(row: Int, block: Int) {imm} -> Values:
        return weight.block(row, block)

    _take_all(crew, floats, x, vectors, weight.columns, NORMED, norm)
    gated_panel_matmul(
        crew, output, floats, block_of, activation, vectors, weight.rows // 2, weight.columns
    )


def _take_all[
    dtype: DType
](
    mut crew: Crew,
    floats: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[dtype], _],
    vectors: Int,
    columns: Int,
    operand: Int,
    norm: Norm,
):
    """Every row of `x` through what it goes through first (`take`), in one step."""
    var takers = _takers(vectors, columns)
    var width = columns if operand < GELU else 2 * columns

    def prepare(task: Int) {imm}:
        for i in range(task, vectors, takers):
            var row = floats.unsafe_offset(i * columns)
            take(row, x.unsafe_offset(i * width), columns, operand, norm)

    crew.share(takers, prepare)


def _takers(vectors: Int, columns: Int) -> Int:
    """The tasks that rows of `x` are taken in."""
    return max(1, min(vectors, tasks_of(vectors * columns * 8)))
