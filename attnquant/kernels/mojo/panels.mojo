"""`x @ W.T` on a CPU for many rows of `x`: W becomes float32, a panel of its rows at a time.

A panel is two registers' worth of rows of W, transposed, so that one step along the columns
multiplies them all by one number of `x`. It stays in a core's own cache while every row of `x`
passes by, and making it costs about what twenty such rows do. Arithmetic is float32's, and every
output is summed by one core in one order: results do not depend on the number of cores.
"""

from std.math import ceildiv
from max.runtime.asyncrt import parallelism_level

from .crew import Crew
from .int8_dot import BLOCK, LANES
from .scale_search import Values

comptime PANEL_ROWS = max(BLOCK, 2 * LANES)
comptime TALL = 12 if LANES == 16 else 6
"""Rows of `x` at once: of AVX2's 16 registers 12 hold sums, two W and one a number of `x`; AVX-512
has twice as many."""

comptime Column = SIMD[DType.float32, PANEL_ROWS]

comptime MANY = 32
"""Rows of `x` from which panels are faster than reading W packed."""


def panel_matmul[
    dtype: DType, BlockOf: def(Int, Int) -> Values
](
    mut crew: Crew,
    output: Pointer[mut=True, Scalar[dtype], _],
    x: Pointer[Float32, _],
    block_of: BlockOf,
    vectors: Int,
    rows: Int,
    columns: Int,
):
    """`output[i, j] = sum_k x[i, k] * W[j, k]`, contiguous and row-major, in one step.

    Parameters:
        dtype: Of `output`: float32 or bfloat16.
        BlockOf: The type of `block_of`.

    Args:
        crew: Who does it.
        output: `[vectors, rows]`.
        x: `[vectors, columns]`.
        block_of: Given a row of W and a block in it, the block's values.
        vectors: Rows of `x`, `MANY` or more.
        rows: Rows of W.
        columns: A multiple of 16.
    """
    var panels = ceildiv(rows, PANEL_ROWS)
    var tasks = min(panels, 4 * parallelism_level(None))

    def work(task: Int) {imm}:
        var memory = List[Float32](length=columns * PANEL_ROWS, fill=0)
        var panel = memory.unsafe_ptr()

        @always_inline
        def tile(row: Int, vector: Int) {imm}:
            var sums = _tile(x.unsafe_offset(vector * columns), panel, columns)
            comptime for t in range(TALL):
                var at = (vector + t) * rows + row
                var y = sums[t].cast[dtype]()
                if row + PANEL_ROWS <= rows:
                    output.unsafe_store(at, y)
                else:
                    for r in range(rows - row):
                        output[unsafe_offset=at + r] = y[r]

        for index in range(task, panels, tasks):
            var row = index * PANEL_ROWS
            for block in range(columns // BLOCK):
                comptime for first in range(0, PANEL_ROWS, BLOCK):
                    var parts = Array[Values, BLOCK](fill=0)
                    comptime for r in range(BLOCK):
                        # Rows past the end repeat the last one; their products are dropped.
                        parts[r] = block_of(min(row + first + r, rows - 1), block)
                    _store_transposed(
                        parts, panel.unsafe_offset(block * BLOCK * PANEL_ROWS + first)
                    )
            for vector in range(0, vectors, TALL):
                # The last tile may repeat rows of the one before it, to the same results.
                tile(row, min(vector, vectors - TALL))
        _ = memory^

    crew.share(tasks, work)


@always_inline
def _store_transposed(rows: Array[Values, BLOCK], panel: Pointer[mut=True, Float32, _]):
    """Writes one block of 16 rows into their place in a panel, a column after the other."""

    @always_inline
    def four[first: Int]() {imm} -> SIMD[DType.float32, 4 * BLOCK]:
        # Each step interleaves every second row with the ones between them.
        var even = rows[first].interleave(rows[first + 8])
        var odd = rows[first + 4].interleave(rows[first + 12])
        return rebind[SIMD[DType.float32, 4 * BLOCK]](even.interleave(odd))

    var even = four[0]().interleave(four[2]())
    var odd = four[1]().interleave(four[3]())
    var all = rebind[SIMD[DType.float32, BLOCK * BLOCK]](even.interleave(odd))
    comptime for k in range(BLOCK):
        panel.unsafe_store(k * PANEL_ROWS, all.slice[BLOCK, offset = k * BLOCK]())


@always_inline
def _tile(x: Pointer[Float32, _], panel: Pointer[Float32, _], columns: Int) -> Array[Column, TALL]:
    """The products of a panel with `TALL` rows of `x`."""
    var sums = Array[Column, TALL](fill=0)
    for k in range(columns):
        var weights = panel.unsafe_load[width=PANEL_ROWS](k * PANEL_ROWS)
        comptime for t in range(TALL):
            var y = Column(x[unsafe_offset=t * columns + k])
            sums[t] = weights.fma(y, sums[t])
    return sums^
