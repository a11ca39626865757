"""`x @ W.T` on a CPU for a weight that stays bfloat16, as stored, with float32 arithmetic.

Half the bytes of a float32 copy, which no one has to make: a bfloat16 is the upper half of a
float32. Few rows of `x` meet W as it streams through registers; for many, see `panels`. Every output
is summed by one core in one order: results do not depend on the number of cores.
"""

from std.math import ceildiv

from .codec import float32
from .crew import Crew
from .int8_dot import BLOCK, LANES
from .panels import MANY, panel_matmul
from .scale_search import Values
from .stream import ahead_of, fetch, tasks_of


def bfloat16_matmul(
    mut crew: Crew,
    output: Pointer[mut=True, Float32, _],
    x: Pointer[Float32, _],
    weight: Pointer[BFloat16, _],
    vectors: Int,
    rows: Int,
    columns: Int,
):
    """`output[i, j] = sum_k x[i, k] * W[j, k]`, contiguous and row-major, in one step.

    Args:
        crew: Who does it.
        output: `[vectors, rows]`.
        x: `[vectors, columns]`.
        weight: `[rows, columns]`.
        vectors: Rows of `x`.
        rows: Rows of W.
        columns: A multiple of 16.
    """

    @always_inline
    def block_of(row: Int, block: Int) {imm} -> Values:
        return float32(weight.unsafe_load[width=BLOCK](row * columns + block * BLOCK))

    if vectors >= MANY:
        panel_matmul(crew, output, x, block_of, vectors, rows, columns)
        return

    @always_inline
    def tile[R: Int, T: Int](row: Int, vector: Int) {imm}:
        """`R` rows of W with `T` rows of `x`; rows past the end repeat the last one."""
        comptime width = max(BLOCK // T, LANES)
        var sums = Array[SIMD[DType.float32, width], R * T](fill=0)
        var ahead = ahead_of(R * columns * 2)
        for k in range(0, columns, width):
            comptime for r in range(R):
                var at = min(row + r, rows - 1) * columns + k
                var values = float32(weight.unsafe_load[width=width](at))
                fetch(weight.unsafe_offset(at).unsafe_bitcast[UInt8](), ahead)
                comptime for t in range(T):
                    var y = x.unsafe_load[width=width]((vector + t) * columns + k)
                    sums[r * T + t] = values.fma(y, sums[r * T + t])
        comptime for r in range(R):
            if row + r < rows:
                comptime for t in range(T):
                    output[unsafe_offset=(vector + t) * rows + row + r] = sums[
                        r * T + t
                    ].reduce_add()

    var tasks = tasks_of(vectors * rows * columns)
    var share = ceildiv(ceildiv(rows, tasks), 4) * 4

    def work(task: Int) {imm}:
        var pairs = vectors // 2 * 2
        for row in range(task * share, min((task + 1) * share, rows), 4):
            for vector in range(0, pairs, 2):
                tile[4, 2](row, vector)
            if pairs < vectors:
                tile[4, 1](row, pairs)

    crew.share(tasks, work)
