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
from .operands import activated
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

    @always_inline
    def row_block(row: Int, block: Int) {imm} -> Values:
        # Rows past the end repeat the last one; their products are dropped.
        return block_of(min(row, rows - 1), block)

    @always_inline
    def keep(vector: Int, row: Int, sums: Column) {imm}:
        var y = sums.cast[dtype]()
        if row + PANEL_ROWS <= rows:
            output.unsafe_store(vector * rows + row, y)
        else:
            for r in range(rows - row):
                output[unsafe_offset=vector * rows + row + r] = y[r]

    panels(crew, x, row_block, keep, vectors, ceildiv(rows, PANEL_ROWS), columns)


def gated_panel_matmul[
    BlockOf: def(Int, Int) -> Values
](
    mut crew: Crew,
    output: Pointer[mut=True, Float32, _],
    x: Pointer[Float32, _],
    block_of: BlockOf,
    activation: Int,
    vectors: Int,
    rows: Int,
    columns: Int,
):
    """`output = activation(x @ G.T) * (x @ U.T)` of a weight that is G and U stacked, in one step.

    A panel is half of rows of G and half of the same rows of U, so that neither product is stored.

    Parameters:
        BlockOf: The type of `block_of`.

    Args:
        crew: Who does it.
        output: `[vectors, rows]`.
        x: `[vectors, columns]`.
        block_of: Given a row of the stacked weight and a block in it, the block's values.
        activation: `GELU` or `SILU`.
        vectors: Rows of `x`, `MANY` or more.
        rows: Rows of G, and of U, a multiple of 16.
        columns: A multiple of 16.
    """
    comptime half = PANEL_ROWS // 2

    @always_inline
    def row_block(row: Int, block: Int) {imm} -> Values:
        var pair, place = divmod(row, PANEL_ROWS)
        var part, member = divmod(place, half)
        return block_of(part * rows + pair * half + member, block)

    @always_inline
    def keep(vector: Int, row: Int, sums: Column) {imm}:
        var gate, up = sums.slice[half](), sums.slice[half, offset=half]()
        output.unsafe_store(vector * rows + row // 2, activated(gate, activation) * up)

    panels(crew, x, row_block, keep, vectors, rows // half, columns)


def panels[
    BlockOf: def(Int, Int) -> Values, Keep: def(Int, Int, Column) -> None
](
    mut crew: Crew,
    x: Pointer[Float32, _],
    block_of: BlockOf,
    keep: Keep,
    vectors: Int,
    count: Int,
    columns: Int,
):
    """Multiplies every panel with every row of `x`, in one step.

    Parameters:
        BlockOf: The type of `block_of`.
        Keep: The type of `keep`.

    Args:
        crew: Who does it.
        x: `[vectors, columns]`.
        block_of: Given a row, counted over the panels, and a block in it, the block's values.
        keep: Given a row of `x`, a panel's first row and their products, takes these. The products
            of some rows of `x` come twice, and are the same.
        vectors: Rows of `x`, `MANY` or more.
        count: How many panels.
        columns: A multiple of 16.
    """
    var tasks = min(count, 4 * parallelism_level(None))

    def work(task: Int) {imm}:
        var memory = List[Float32](unsafe_uninit_length=columns * PANEL_ROWS)
        var panel = memory.unsafe_ptr()
        for index in range(task, count, tasks):
            var row = index * PANEL_ROWS
            for block in range(columns // BLOCK):
                comptime for first in range(0, PANEL_ROWS, BLOCK):
                    var parts = Array[Values, BLOCK](fill=0)
                    comptime for r in range(BLOCK):
                        parts[r] = block_of(row + first + r, block)
                    _store_transposed(
                        parts, panel.unsafe_offset(block * BLOCK * PANEL_ROWS + first)
                    )
            for start in range(0, vectors, TALL):
                var vector = min(start, vectors - TALL)
                var sums = _tile(x.unsafe_offset(vector * columns), panel, columns)
                comptime for t in range(TALL):
                    keep(vector + t, row, sums[t])
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
